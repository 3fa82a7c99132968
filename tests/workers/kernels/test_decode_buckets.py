"""Which batch size a decode step is padded to."""

from __future__ import annotations

import pytest

from workers.kernels.decode_buckets import BUCKETS, bucket_of


def test_a_bucket_holds_its_rows_and_the_one_before_does_not() -> None:
    for num_rows in range(1, BUCKETS[-1] + 1):
        bucket = bucket_of(num_rows)
        assert bucket is not None
        assert bucket >= num_rows
        assert all(other < num_rows for other in BUCKETS if other < bucket)


def test_a_bucket_is_its_own_and_small_batches_are_padded_by_less_than_their_size() -> None:
    assert [bucket_of(bucket) for bucket in BUCKETS] == list(BUCKETS)
    for num_rows in range(1, BUCKETS[-1] + 1):
        assert (bucket_of(num_rows) or 0) < 2 * num_rows


def test_more_rows_than_any_bucket_run_as_they_are() -> None:
    assert bucket_of(BUCKETS[-1] + 1) is None


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="not 0"):
        bucket_of(0)
