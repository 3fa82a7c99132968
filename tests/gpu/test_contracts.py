"""The contract suites of the operator port and of the pool, on the device."""

from __future__ import annotations

import pytest

from tests.contracts.test_hbm_pool import (
    test_a_new_pool_is_as_large_as_asked_for_and_zero,
    test_a_write_that_was_given_up_changes_no_other_block,
    test_more_blocks_than_any_staging_holds_come_out_as_they_went_in,
    test_no_blocks_are_read_from_no_ids,
)
from tests.workers.kernels.test_operators import (
    exact,
    test_a_gated_layer_multiplies_silu_of_the_gates_with_the_ups,
    test_a_linear_layer_writes_or_adds_its_products,
    test_a_norm_divides_by_the_root_mean_square,
    test_an_embedding_gives_rows_of_its_table,
    test_attention_is_that_of_the_reference,
    test_keys_and_values_stand_in_their_slots_and_nowhere_else,
)

__all__ = [
    "exact",
    "test_a_gated_layer_multiplies_silu_of_the_gates_with_the_ups",
    "test_a_linear_layer_writes_or_adds_its_products",
    "test_a_new_pool_is_as_large_as_asked_for_and_zero",
    "test_a_norm_divides_by_the_root_mean_square",
    "test_a_write_that_was_given_up_changes_no_other_block",
    "test_an_embedding_gives_rows_of_its_table",
    "test_attention_is_that_of_the_reference",
    "test_keys_and_values_stand_in_their_slots_and_nowhere_else",
    "test_more_blocks_than_any_staging_holds_come_out_as_they_went_in",
    "test_no_blocks_are_read_from_no_ids",
]

pytestmark = pytest.mark.gpu
