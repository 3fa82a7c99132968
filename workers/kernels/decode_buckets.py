"""Batch sizes that a decode step is rounded up to, so that few CUDA graphs serve all of them."""

from __future__ import annotations

from bisect import bisect_left

# Padding costs little where a step is bound by reading weights, and more the larger the batch.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def bucket_of(num_rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None if none does, and the step runs as it is.

    Raises:
        ValueError: there are no rows.
    """
    if num_rows < 1:
        raise ValueError(f"a decode step has rows, not {num_rows}")
    place = bisect_left(BUCKETS, num_rows)
    return BUCKETS[place] if place < len(BUCKETS) else None
