"""Load for the crash test, run as a process that may be killed: `crash_load.py ROLE SOCKET SEED`.

The bytes of a block follow from its key, so that every reader can tell right from wrong.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiering.errors import KvdUnavailable
from tiering.kvd.client import KvdClient

BLOCK_BYTES = 10_000
NUM_CHAINS = 400
CHAIN_BLOCKS = 8


def chain_of(number: int) -> list[bytes]:
    """Keys of one prompt."""
    first = number * CHAIN_BLOCKS
    return [key.to_bytes(16, "big") for key in range(first, first + CHAIN_BLOCKS)]


def payload_of(key: bytes) -> npt.NDArray[np.uint8]:
    """The only right bytes of a block."""
    rng = np.random.default_rng(int.from_bytes(key, "big"))
    return rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def write_chain(client: KvdClient, keys: list[bytes], rng: random.Random) -> int:
    """Store what is missing of a prompt; now and then give up half-way."""
    reserved = [r for r in client.reserve(keys, ttl_s=5) if r is not None]
    for reservation in reserved:
        client.write(reservation, payload_of(reservation.key), 16)
    if rng.random() < 0.1:
        client.abort(reserved)
        return 0
    return client.commit(reserved)


def read_chain(client: KvdClient, keys: list[bytes]) -> int:
    """Load what there is of a prompt and compare it; returns the number of right blocks.

    Raises:
        ValueError: a block was given out with wrong bytes.
    """
    lease = client.acquire(keys, ttl_s=5)
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    num_right = 0
    for index, block in enumerate(lease.blocks):
        if not client.load(lease, index, into):
            break
        if not (into == payload_of(block.key)).all():
            raise ValueError(f"wrong bytes for {block.key.hex()} from {block.tier}")
        num_right += 1
    client.release(lease)
    return num_right


def run(role: str, socket_path: Path, seed: int) -> None:
    """Work until killed, or until kvd is gone."""
    rng = random.Random(seed)  # noqa: S311  # no secrets
    client = KvdClient(socket_path, BLOCK_BYTES, f"{role}-{seed}")
    client.connect()
    sys.stdout.write("working\n")
    sys.stdout.flush()
    while True:
        keys = chain_of(rng.randrange(NUM_CHAINS))
        if role == "writer":
            write_chain(client, keys, rng)
        else:
            read_chain(client, keys)


def main() -> int:
    """Exit status 0 when kvd went away, 3 on wrong bytes."""
    role, socket_path, seed = sys.argv[1:]
    try:
        run(role, Path(socket_path), int(seed))
    except KvdUnavailable:
        return 0
    except ValueError as error:
        sys.stdout.write(f"{error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
