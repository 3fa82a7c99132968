"""Bytes by name: on a folder, and on a store that is no folder (fsspec's memory stands for S3)."""

from __future__ import annotations

import io
import uuid
from pathlib import Path

import pytest

from pipeline.batch.file_storage import COPY_BYTES, FileStorage


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> FileStorage:
    folder = (tmp_path / "deep" / "files").as_uri()
    return FileStorage(folder if request.param == "file" else f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("size", [0, 1, COPY_BYTES, 3 * COPY_BYTES + 7])
def test_bytes_come_back_as_they_went_in(storage: FileStorage, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    source = io.BytesIO(data[:size])
    source.seek(size)
    assert storage.copy_in("file-a", source) == size
    with storage.open("file-a") as file:
        assert file.read() == data[:size]
        file.seek(size // 2)
        assert file.read(10) == data[:size][size // 2 :][:10]


def test_what_was_not_written_whole_is_not_there(storage: FileStorage) -> None:
    def write_and_fail() -> None:
        with storage.writing("file-a") as file:
            file.write(b"half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_and_fail()
    with pytest.raises(FileNotFoundError):
        storage.open("file-a")


def test_removing_what_is_not_there_is_no_fault(storage: FileStorage) -> None:
    storage.copy_in("file-a", io.BytesIO(b"x"))
    storage.remove("file-a")
    storage.remove("file-a")
    with pytest.raises(FileNotFoundError):
        storage.open("file-a")


def test_the_folder_belongs_to_its_owner_alone(tmp_path: Path) -> None:
    FileStorage((tmp_path / "files").as_uri())
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
