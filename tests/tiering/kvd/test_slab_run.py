"""Blocks on their way between DRAM and a slab file, packed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np

from tiering.block_codec import BlockCodec, Compression
from tiering.block_layout import BlockLayout
from tiering.block_stamp import BlockStamp
from tiering.kvd.slab_run import SlabRuns
from tiering.stores.block_store import ByteArray, payload_checksum
from tiering.stores.nvme_slab import NvmeSlab

LAYOUT = BlockLayout(num_layers=2, block_tokens=16, num_kv_heads=1, head_dim=16, dtype="float32")
PAUSE_S = 0.2


class SlowCodec(BlockCodec):
    """A codec that takes its time."""

    def pack(self, block: ByteArray, into: ByteArray) -> bool:
        threading.Event().wait(PAUSE_S)
        return super().pack(block, into)

    def unpack(self, packed: ByteArray, into: ByteArray) -> None:
        threading.Event().wait(PAUSE_S)
        super().unpack(packed, into)


def test_the_disk_is_not_charged_with_the_time_of_packing(tmp_path: Path) -> None:
    runs = SlabRuns(SlowCodec(LAYOUT, Compression.INT8))
    slab = NvmeSlab(tmp_path / "slab", 1 << 20)
    slab.lay_out(runs.stored_bytes(LAYOUT.block_bytes), runs.form)
    payload = np.ones(LAYOUT.block_bytes // 4, np.float32).view(np.uint8)
    stamp = BlockStamp(bytes(16), 1, 16, payload.nbytes, payload_checksum(payload))
    into = np.empty_like(payload)

    began_s = time.monotonic()
    (stored,), write_s = runs.write(slab, 0, [stamp], [payload])
    written_s = time.monotonic()
    assert isinstance(stored, BlockStamp)
    (found,), read_s = runs.read(slab, 0, [stored], [into])
    read_at_s = time.monotonic()
    slab.close()

    assert found == stamp
    assert 0 < write_s <= written_s - began_s - 0.9 * PAUSE_S
    assert 0 < read_s <= read_at_s - written_s - 0.9 * PAUSE_S
