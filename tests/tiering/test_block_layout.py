"""The line that names a block layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.block_layout import BlockLayout, KvDtype

counts = st.integers(1, 10_000)
dtypes: st.SearchStrategy[KvDtype] = st.sampled_from(["float32", "bfloat16", "float16", "uint8"])


@given(st.builds(BlockLayout, counts, counts, counts, counts, dtypes), st.sampled_from(["", ".ab"]))
def test_a_layout_is_read_back_from_the_line_that_describes_it(
    layout: BlockLayout, more: str
) -> None:
    assert BlockLayout.described(layout.describe() + more) == layout


@pytest.mark.parametrize(
    "line",
    [
        "",
        "a-model",
        "L0.T16.H2.D64.float32.v1",
        "L1.T16.H2.D64.float64.v1",
        "L1.T16.H2.D64.float32.v2",
        "L1.T16.H2.D64.float32.v11",
        " L1.T16.H2.D64.float32.v1",
    ],
)
def test_no_layout_is_made_up_from_another_line(line: str) -> None:
    assert BlockLayout.described(line) is None
