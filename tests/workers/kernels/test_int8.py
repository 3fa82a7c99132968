"""Products of int8 weights are those of the rounding they promise, and a row's bytes are its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.kernels.native import NativeOperators

GROUP = 64  # inputs of a row that share a scale


@pytest.fixture(scope="module")
def int8(native: NativeOperators) -> NativeOperators:
    """The native form with int8 weights, where this machine can run it."""
    assert native.name == "native-2"
    return NativeOperators(int8_weights=True)


def rounded(values: torch.Tensor, group: int) -> torch.Tensor:
    """Each `group` neighbours of a row rounded to 127 steps of their largest."""
    width = values.shape[1]
    parts = torch.nn.functional.pad(values, (0, -width % group)).unflatten(1, (-1, group))
    largest = parts.abs().amax(dim=2, keepdim=True)
    # The kernel multiplies by the inverse: where that decides a tie, it decides it here too.
    inverse = torch.where(largest > 0, torch.full_like(largest, 127).div(largest), 0.0)
    whole = (parts * inverse).round()
    return (whole * (largest / 127)).flatten(1)[:, :width].double()


def products(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a layer of rounded inputs and weights gives, in float64."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    own = (weight / scales).round().double() * scales.double()
    return rounded(inputs, GROUP) @ own.T


def random(*shape: int) -> torch.Tensor:
    """bfloat16 values in float32, some columns of them far larger than the rest."""
    values = torch.randn(*shape)
    values[:, ::37] *= 20
    return values.bfloat16().float()


@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 12, 13, 31, 100]),
    num_inputs=st.sampled_from([2, 48, 64, 130, 576]),
    num_outputs=st.sampled_from([1, 16, 31, 64, 200]),
    has_bias=st.booleans(),
)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_layer_rounds_weights_by_output_and_inputs_by_group(
    int8: NativeOperators, *, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    torch.manual_seed(num_rows * num_inputs * num_outputs)
    weight, inputs = random(num_outputs, num_inputs), random(num_rows, num_inputs)
    bias = random(num_outputs, 1)[:, 0] if has_bias else torch.zeros(num_outputs)
    linear = int8.linear(weight.bfloat16(), bias if has_bias else None)
    out = torch.full((num_rows, num_outputs), torch.nan)

    linear(inputs.bfloat16(), out)

    expected = products(inputs, weight) + bias
    scale = max(1.0, expected.abs().max().item()) if num_rows else 1.0
    torch.testing.assert_close(out.double(), expected, atol=2e-6 * scale, rtol=1e-5)


def test_a_gated_layer_multiplies_silu_of_rounded_gates_with_rounded_ups(
    int8: NativeOperators,
) -> None:
    torch.manual_seed(3)
    weight, inputs = random(80, 130) / 20, random(30, 130)
    out = torch.empty(30, 40, dtype=torch.bfloat16)

    int8.gated_linear(weight.bfloat16())(inputs.bfloat16(), out)

    gates, ups = products(inputs, weight.bfloat16().float()).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gates) * ups
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=2 / 256)


@pytest.mark.parametrize("num_inputs", [48, 576, 1536])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_a_row_do_not_depend_on_the_other_rows(
    num_inputs: int, threads: int, int8: NativeOperators
) -> None:
    torch.manual_seed(num_inputs)
    inputs = random(70, num_inputs).bfloat16()
    linear = int8.linear(random(100, num_inputs).bfloat16())
    whole = torch.empty(70, 100)
    torch.set_num_threads(threads)
    try:
        linear(inputs, whole)
    finally:
        torch.set_num_threads(1)

    for first, end in [(0, 1), (3, 5), (0, 12), (7, 20), (1, 70)]:
        part = torch.empty(end - first, 100)
        linear(inputs[first:end], part)
        assert torch.equal(part, whole[first:end])


def test_a_row_of_zeros_stays_one(int8: NativeOperators) -> None:
    weight = torch.randn(32, 64).bfloat16()
    weight[3] = 0
    out = torch.full((2, 32), torch.nan)

    int8.linear(weight)(torch.stack((torch.zeros(64), torch.ones(64))).bfloat16(), out)

    assert not out[0].any()
    assert out[1, 3] == 0
    assert out[1].count_nonzero() == 31


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 17, 63, 64, 129])
def test_a_row_with_what_is_no_number_gives_none(
    value: float, place: int, int8: NativeOperators
) -> None:
    inputs = torch.randn(3, 130).bfloat16()
    inputs[1, place] = value
    weight = torch.randn(64, 130).bfloat16()
    out, gated = torch.zeros(3, 64), torch.zeros(3, 32, dtype=torch.bfloat16)

    int8.linear(weight)(inputs, out)
    int8.gated_linear(weight)(inputs, gated)

    for results in (out, gated):
        assert not results[1].isfinite().any()
        assert results[[0, 2]].isfinite().all()
