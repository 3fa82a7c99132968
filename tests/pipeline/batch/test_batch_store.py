"""Batches go from status to status on the given ways only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.batch.batch_store import BatchEnd, BatchOrder
from pipeline.batch.records import BatchStatus, FilePurpose, FileRecord, PageQuery
from pipeline.batch.refusals import FileEmpty, ObjectUnknown, PurposeWrong, TooLateToCancel

NOW_S = 1_000_000
ENDPOINT = "/v1/completions"


@pytest.fixture
def batch(shelf: Any, make_input: Callable[[int], bytes]) -> Any:
    return shelf.order(make_input(3))


def test_a_new_batch_validates_and_expires_in_a_day(batch: Any) -> None:
    shown = batch.as_object()
    assert shown["status"] == "validating"
    assert shown["expires_at"] - shown["created_at"] == 86_400
    assert shown["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert shown["completed_at"] is None
    assert "validating_at" not in shown


def test_the_way_to_completed(shelf: Any, batch: Any) -> None:
    assert shelf.batches.accept(batch.number, 3, "m", NOW_S + 1)
    assert not shelf.batches.accept(batch.number, 3, "m", NOW_S + 2)
    assert not shelf.batches.fail(batch.number, [], NOW_S + 2)
    assert shelf.batches.begin_finalizing(batch.number, NOW_S + 3)
    with pytest.raises(TooLateToCancel):
        shelf.batches.cancel("t1", batch.id, NOW_S)
    output = FileRecord(0, "file-o", "o.jsonl", FilePurpose.BATCH_OUTPUT, 9, NOW_S, NOW_S + 9)
    end = BatchEnd(BatchStatus.COMPLETED, num_completed=3, num_failed=0, output=output)
    finalizing = shelf.batches.load(batch.number)
    assert shelf.batches.finish(finalizing, end, NOW_S + 4)
    assert not shelf.batches.finish(finalizing, end, NOW_S + 5)
    shown = shelf.batches.find("t1", batch.id).as_object()
    assert shown["status"] == "completed"
    assert shown["in_progress_at"] == NOW_S + 1
    assert shown["finalizing_at"] == NOW_S + 3
    assert shown["completed_at"] == NOW_S + 4
    assert (shown["output_file_id"], shown["error_file_id"]) == ("file-o", None)
    assert shelf.files.find("t1", "file-o", NOW_S).purpose == "batch_output"
    assert shelf.batches.unfinished(10) == []


def test_a_cancelled_batch_is_neither_accepted_nor_failed(shelf: Any, batch: Any) -> None:
    assert shelf.batches.cancel("t1", batch.id, NOW_S).status == "cancelling"
    assert shelf.batches.cancel("t1", batch.id, NOW_S + 9).times["cancelling"] == NOW_S
    assert not shelf.batches.accept(batch.number, 3, "m", NOW_S)
    assert not shelf.batches.fail(batch.number, [], NOW_S)
    assert [item.id for item in shelf.batches.unfinished(10)] == [batch.id]


def test_a_batch_keeps_the_models_that_it_was_ordered_with(shelf: Any, batch: Any) -> None:
    assert batch.models is None
    wanted = BatchOrder(batch.input_file_id, ENDPOINT, models=frozenset({"a", "b"}))
    ordered = shelf.batches.create("t1", wanted, NOW_S)
    assert shelf.batches.load(ordered.number).models == {"a", "b"}


def test_another_tenants_batch_is_unknown(shelf: Any, batch: Any) -> None:
    with pytest.raises(ObjectUnknown):
        shelf.batches.find("t2", batch.id)
    with pytest.raises(ObjectUnknown):
        shelf.batches.cancel("t2", batch.id, NOW_S)
    with pytest.raises(ObjectUnknown):
        shelf.batches.page("t2", PageQuery(9, after=batch.id))
    with pytest.raises(ObjectUnknown):
        shelf.batches.create("t2", BatchOrder(batch.input_file_id, ENDPOINT), NOW_S)
    assert shelf.batches.page("t2", PageQuery(9)).records == []


def test_an_input_must_have_the_right_purpose_and_bytes(shelf: Any, batch: Any) -> None:
    with pytest.raises(FileEmpty):
        shelf.order(b"")
    shelf.batches.accept(batch.number, 3, "m", NOW_S)
    output = FileRecord(0, "file-o", "o.jsonl", FilePurpose.BATCH_OUTPUT, 9, NOW_S, None)
    end = BatchEnd(BatchStatus.EXPIRED, num_completed=0, num_failed=3, errors=output)
    assert shelf.batches.finish(shelf.batches.load(batch.number), end, NOW_S)
    with pytest.raises(PurposeWrong):
        shelf.batches.create("t1", BatchOrder("file-o", ENDPOINT), NOW_S)


def test_however_many_batches_of_one_tenant_or_model_hide_no_other(
    shelf: Any, make_input: Callable[[int], bytes]
) -> None:
    for number in range(5):
        crowd = shelf.order(make_input(1))
        if number:
            assert shelf.batches.accept(crowd.number, 1, "jammed", NOW_S)
    other_tenant = shelf.order(make_input(1), tenant="t2")
    other_model = shelf.order(make_input(1))
    assert shelf.batches.accept(other_model.number, 1, "free", NOW_S)

    def numbers(limit: int, *active: int) -> list[int]:
        return [batch.number for batch in shelf.batches.unfinished(limit, active)]

    everything = numbers(9)
    first, *crowd_numbers = everything[:5]
    assert numbers(4) == [first, crowd_numbers[0], other_tenant.number, other_model.number]
    assert numbers(5) == [first, *crowd_numbers[:2], other_tenant.number, other_model.number]
    # One that runs is always looked at, or nobody would tell its drive of a cancellation.
    assert numbers(1, crowd_numbers[-1]) == [first, crowd_numbers[-1]]


def test_metadata_comes_back_as_it_was(shelf: Any, batch: Any) -> None:
    metadata = {"a": "b\0", "é": "👩"}
    made = shelf.batches.create("t1", BatchOrder(batch.input_file_id, ENDPOINT, metadata), NOW_S)
    assert shelf.batches.find("t1", made.id).as_object()["metadata"] == metadata
