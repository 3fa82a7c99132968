"""What packing blocks for the disk costs and saves: bytes, and GB/s of unpacked blocks.

    python tests/bench/compression.py [--rounds 30] [--model-shape 30,16,3,64]

One thread, blocks of the given shape (layers, tokens, KV heads, head dim) in turn from a working
set that no cache holds. "none" is a copy with checksum. The ways alternate; medians count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import numpy.typing as npt

from tiering.block_codec import Compression, codec_of
from tiering.block_layout import BlockLayout, KvDtype
from tiering.stores.block_store import copy_with_checksum

WORKING_SET_BYTES = 64 << 20
DTYPES: tuple[KvDtype, ...] = ("bfloat16", "float16", "float32")
ByteArray = npt.NDArray[np.uint8]


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def random_blocks(layout: BlockLayout) -> list[ByteArray]:
    """Normal numbers, as keys and values nearly are."""
    num_blocks = max(WORKING_SET_BYTES // layout.block_bytes, 2)
    numbers = np.random.default_rng(1).normal(size=layout.block_bytes // 4 * 2)
    if layout.dtype == "bfloat16":
        wide = numbers.astype(np.float32).view(np.uint32)
        block = (wide >> 16).astype(np.uint16).view(np.uint8)
    else:
        block = numbers.astype(layout.dtype).view(np.uint8)
    return [block[: layout.block_bytes].copy() for _ in range(num_blocks)]


def timed(move: Callable[[ByteArray], object], blocks: list[ByteArray]) -> float:
    """Bytes of unpacked blocks a second."""
    began_s = time.perf_counter()
    for block in blocks:
        move(block)
    return sum(block.nbytes for block in blocks) / (time.perf_counter() - began_s)


def compare(layout: BlockLayout, num_rounds: int) -> None:
    """Print a line for each way."""
    blocks = random_blocks(layout)
    into = np.zeros(layout.block_bytes, dtype=np.uint8)
    ways: dict[str, Callable[[ByteArray], object]] = {
        "none": lambda block: copy_with_checksum(block, into)
    }
    sizes = {"none": layout.block_bytes}
    for compression in (Compression.INT8, Compression.FP8):
        codec = codec_of(layout, compression)
        if codec is None:
            continue
        packed = np.zeros(codec.packed_bytes, dtype=np.uint8)
        codec.pack(blocks[0], packed)
        sizes[compression] = codec.packed_bytes
        ways[f"{compression} pack"] = partial(codec.pack, into=packed)
        ways[f"{compression} unpack"] = partial(codec.unpack, packed)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_rounds):
        order = list(ways.items())
        for name, way in order if number % 2 else reversed(order):
            rates[name].append(timed(way, blocks))
    for name, taken in rates.items():
        size = sizes[name.split()[0]]
        say(
            f"{layout.dtype:<9} {name:<12} {size:>9,} bytes ({size / layout.block_bytes:.3f})  "
            f"{statistics.median(taken) / 1e9:6.2f} GB/s"
        )


def main() -> None:
    """Compare for each type of number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--model-shape", default="30,16,3,64")
    options = parser.parse_args()
    layers, tokens, heads, head_dim = map(int, options.model_shape.split(","))
    for dtype in DTYPES:
        compare(BlockLayout(layers, tokens, heads, head_dim, dtype), options.rounds)


if __name__ == "__main__":
    main()
