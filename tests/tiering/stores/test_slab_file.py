"""The file under the slab: with direct I/O where the file system takes it, else without."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tiering.stores.block_store import PAGE_BYTES, ByteArray
from tiering.stores.slab_file import SlabFile, aligned_array


class FileOnOtherDisk(SlabFile):
    """A file whose system refuses what is read past the page cache."""

    error_number = errno.EINVAL

    def read(self, parts: Sequence[ByteArray], offset: int) -> int:
        if fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(self.error_number, "no direct I/O")
        return super().read(parts, offset)


class FileOnBrokenDisk(FileOnOtherDisk):
    error_number = errno.EIO


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(tmp_path: Path) -> None:
    file = FileOnOtherDisk(tmp_path / "slab", 4 * PAGE_BYTES)
    assert not file.is_direct
    odd = np.arange(PAGE_BYTES, dtype=np.uint16).view(np.uint8)[1:][:PAGE_BYTES]
    file.write([odd], PAGE_BYTES)
    into = aligned_array(PAGE_BYTES)
    assert file.read([into], PAGE_BYTES) == PAGE_BYTES
    assert (into == odd).all()
    file.close()


def test_a_disk_that_cannot_be_read_is_not_taken_for_one_without_direct_io(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no direct I/O"):
        FileOnBrokenDisk(tmp_path / "slab", 4 * PAGE_BYTES)
    SlabFile(tmp_path / "slab", 4 * PAGE_BYTES).close()  # it holds no lock any more
