"""Where the bytes of files lie: a folder, or anything else that fsspec knows, such as S3."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

import fsspec

COPY_BYTES = 1 << 20


class FileStorage:
    """Named runs of bytes. Names are made by the server; no client's text becomes a path.

    Methods wait for the disk or the network and raise `OSError`.
    """

    def __init__(self, url: str) -> None:
        """`url` as fsspec reads it, e.g. `file:///data/files`, `s3://bucket/folder`."""
        self._fs, self._root = fsspec.core.url_to_fs(url)
        if "file" in self._fs.protocol:
            os.makedirs(self._root, mode=0o700, exist_ok=True)  # noqa: PTH103 (fsspec's own path)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """A new run of bytes; on the disk when the block ends, gone when it raises."""
        path = self._path(name)
        try:
            with self._fs.open(path, "wb") as file:
                yield cast("BinaryIO", file)
                file.flush()
                if "file" in self._fs.protocol:
                    os.fsync(file.fileno())
        except BaseException:
            self.remove(name)
            raise

    def open(self, name: str) -> BinaryIO:
        """The bytes, for reading and seeking."""
        return cast("BinaryIO", self._fs.open(self._path(name), "rb"))

    def copy_in(self, name: str, source: BinaryIO) -> int:
        """Keep all of `source` under a name; returns how many bytes that were."""
        source.seek(0)
        with self.writing(name) as file:
            shutil.copyfileobj(source, file, COPY_BYTES)
            return file.tell()

    def remove(self, name: str) -> None:
        """Forget the bytes, if they are there."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
