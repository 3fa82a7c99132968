"""Files: kept whole or not at all, seen by their tenant only, gone when their time is over."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, BinaryIO

import pytest

from pipeline.batch.batch_store import BatchEnd
from pipeline.batch.file_store import DEFAULT_LIFETIME_S
from pipeline.batch.records import BatchStatus, PageQuery
from pipeline.batch.refusals import FileInUse, ObjectUnknown

NOW_S = 1_000_000


def create(shelf: Any, name: str = "n", lifetime_s: int | None = None, tenant: str = "t1") -> Any:
    return shelf.files.create(tenant, name, io.BytesIO(b"data"), lifetime_s, NOW_S)


@pytest.mark.parametrize(
    "name", ["plain.jsonl", "", "../../etc/x", "a\0b", "é👩\u2028", "n" * 9999]
)
def test_a_name_is_given_back_as_it_came_and_used_for_nothing(shelf: Any, name: str) -> None:
    file = create(shelf, name)
    found = shelf.files.find("t1", file.id, NOW_S)
    assert found.name == name
    assert found.expires_s == NOW_S + DEFAULT_LIFETIME_S
    with shelf.storage.open(file.id) as content:
        assert content.read() == b"data"


def test_another_tenants_file_is_unknown(shelf: Any) -> None:
    file = create(shelf)
    for do in (shelf.files.find, shelf.files.delete):
        with pytest.raises(ObjectUnknown):
            do("t2", file.id, NOW_S)
    assert shelf.files.page("t2", PageQuery(10), None, NOW_S).records == []
    with pytest.raises(ObjectUnknown):
        shelf.files.page("t2", PageQuery(10, after=file.id), None, NOW_S)


@pytest.mark.parametrize("file_id", ["", "nothing", "file-../x", "\0", "é"])
def test_ids_that_are_none_are_unknown(shelf: Any, file_id: str) -> None:
    with pytest.raises(ObjectUnknown):
        shelf.files.find("t1", file_id, NOW_S)


def test_pages_cover_the_list_once_in_both_orders(shelf: Any) -> None:
    ids = [create(shelf).id for _ in range(7)]
    for ascending in (True, False):
        seen: list[str] = []
        page = shelf.files.page("t1", PageQuery(3, ascending=ascending), "batch", NOW_S)
        while True:
            seen += [record.id for record in page.records]
            if not page.has_more:
                break
            query = PageQuery(3, after=seen[-1], ascending=ascending)
            page = shelf.files.page("t1", query, "batch", NOW_S)
        assert seen == (ids if ascending else ids[::-1])
    assert shelf.files.page("t1", PageQuery(3), "batch_output", NOW_S).records == []


def test_a_file_whose_time_is_over_is_gone_with_its_bytes(shelf: Any) -> None:
    file, kept = create(shelf, lifetime_s=3600), create(shelf)
    late_s = NOW_S + 3600
    with pytest.raises(ObjectUnknown):
        shelf.files.find("t1", file.id, late_s)
    assert shelf.files.purge_expired(late_s) == 1
    with pytest.raises(FileNotFoundError):
        shelf.storage.open(file.id)
    assert shelf.files.find("t1", kept.id, late_s)
    assert shelf.files.purge_expired(late_s) == 0


def test_the_input_of_an_unfinished_batch_stays(
    shelf: Any, make_input: Callable[[int], bytes]
) -> None:
    batch = shelf.order(make_input(1))
    with pytest.raises(FileInUse):
        shelf.files.delete("t1", batch.input_file_id, NOW_S)
    assert shelf.files.purge_expired(NOW_S + 10 * DEFAULT_LIFETIME_S) == 0
    shelf.batches.cancel("t1", batch.id, NOW_S)
    cancelling = shelf.batches.load(batch.number)
    assert shelf.batches.finish(cancelling, BatchEnd(BatchStatus.CANCELLED, 0, 0), NOW_S)
    shelf.files.delete("t1", batch.input_file_id, NOW_S)


class BrokenSource(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError("the disk is gone")


def test_an_upload_that_breaks_leaves_nothing(shelf: Any, tmp_path: Any) -> None:
    source: BinaryIO = BrokenSource()
    with pytest.raises(OSError, match="gone"):
        shelf.files.create("t1", "n", source, None, NOW_S)
    assert list((tmp_path / "files").iterdir()) == []
    assert shelf.files.page("t1", PageQuery(10), None, NOW_S).records == []
