"""The contract of the operator port, on every form, against the float32 reference.

Tolerances: 1e-5 in float32, where only the order of sums differs; in bfloat16 what rounding the
results and, inside attention, the weights costs: 2 parts in 256 of the largest value.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.kernels.paged_case import Case, Lane, PagedRun, PagedStep, cases
from workers.kernels.native import NativeOperators
from workers.kernels.operators import AttentionShape, Operators
from workers.kernels.reference import ReferenceOperators

RANDOM_SHAPES = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


@pytest.fixture(scope="module")
def exact() -> Operators:
    return ReferenceOperators(torch.float32)


def assert_near(result: torch.Tensor, expected: torch.Tensor, num_roundings: int = 2) -> None:
    """Within the tolerance of the result's type, see the module."""
    tolerance = 1e-5 if result.dtype == torch.float32 else num_roundings / 256
    difference = (result.float() - expected.float()).abs().max().item() if len(result) else 0.0
    assert difference <= tolerance * max(1.0, expected.abs().max().item() if len(result) else 0.0)


def given_to(operators: Operators, tensor: torch.Tensor) -> torch.Tensor:
    """In the form's type, where it computes."""
    return tensor.to(operators.device, operators.dtype)


def filled(operators: Operators, *shape: int, value: float = torch.nan) -> torch.Tensor:
    """float32 where the form computes."""
    return torch.full(shape, value, device=operators.device)


def random(*shape: int) -> torch.Tensor:
    """bfloat16 values in float32."""
    return torch.randn(*shape).bfloat16().float()


@given(case=cases())
@RANDOM_SHAPES
def test_attention_is_that_of_the_reference(
    case: Case, operators: Operators, exact: Operators
) -> None:
    step = PagedStep(case.fitted(operators))

    result = PagedRun(step, operators).run_case()

    assert_near(result, PagedRun(step, exact).run_case())


@pytest.mark.parametrize("window", [0, 1500])
def test_native_attention_over_thousands_of_tokens_is_that_of_the_reference(
    window: int, native: NativeOperators, exact: Operators
) -> None:
    shape = AttentionShape(6, 2, 64, 64**-0.5, num_rotated=64, window=window)
    lanes = (Lane(2500, 1, 100), Lane(2000, 70, 9999), Lane(2047, 2, 7))
    step = PagedStep(Case(shape, 16, lanes, seed=1))

    assert_near(PagedRun(step, native).run_case(), PagedRun(step, exact).run_case())


@given(case=cases())
@RANDOM_SHAPES
def test_keys_and_values_stand_in_their_slots_and_nowhere_else(
    case: Case, operators: Operators, exact: Operators
) -> None:
    step = PagedStep(case.fitted(operators))
    run, expected = PagedRun(step, operators), PagedRun(step, exact)

    run.run_case()
    expected.run_case()

    assert torch.equal(run.pool.isnan(), expected.pool.isnan())
    assert_near(run.pool.nan_to_num(0.0), expected.pool.nan_to_num(0.0))


@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 12, 13, 31, 64, 100]),
    num_inputs=st.sampled_from([2, 48, 64, 130]),
    num_outputs=st.sampled_from([1, 16, 31, 64, 200]),
    has_bias=st.booleans(),
)
@RANDOM_SHAPES
def test_a_linear_layer_writes_or_adds_its_products(
    operators: Operators, *, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    torch.manual_seed(num_rows * num_inputs * num_outputs)
    weight, inputs = random(num_outputs, num_inputs), random(num_rows, num_inputs)
    bias = random(num_outputs) if has_bias else None
    own_bias = None if bias is None else bias.to(operators.dtype)
    linear = operators.linear(weight.to(operators.dtype), own_bias)
    out = filled(operators, num_rows, num_outputs)
    stream = filled(operators, num_rows, num_outputs, value=3.0)

    linear(given_to(operators, inputs), out)
    linear.add_to(given_to(operators, inputs), stream)

    expected = torch.nn.functional.linear(inputs, weight, bias)
    scale = max(1.0, expected.abs().max().item()) if num_rows else 1.0
    tolerance = 1e-5 if operators.dtype == torch.float32 or operators.batch_invariant else 1 / 128
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance * scale, rtol=0)
    torch.testing.assert_close(stream.cpu(), expected + 3.0, atol=tolerance * scale + 1e-6, rtol=0)


@given(
    num_rows=st.sampled_from([0, 1, 7, 12, 30]),
    num_inputs=st.sampled_from([2, 48, 130]),
    num_middle=st.sampled_from([1, 16, 40, 80]),
    has_bias=st.booleans(),
)
@RANDOM_SHAPES
def test_a_gated_layer_multiplies_silu_of_the_gates_with_the_ups(
    operators: Operators, *, num_rows: int, num_inputs: int, num_middle: int, has_bias: bool
) -> None:
    torch.manual_seed(num_rows * num_inputs * num_middle)
    weight, inputs = random(2 * num_middle, num_inputs), random(num_rows, num_inputs)
    bias = random(2 * num_middle) if has_bias else None
    own_bias = None if bias is None else bias.to(operators.dtype)
    gated = operators.gated_linear(weight.to(operators.dtype), own_bias)
    out = given_to(operators, torch.empty(num_rows, num_middle))

    gated(given_to(operators, inputs), out)

    gates, ups = torch.nn.functional.linear(inputs, weight, bias).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gates) * ups
    assert_near(out.cpu(), expected, num_roundings=4)  # gates and ups with biases, silu, products


@pytest.mark.parametrize("width", [8, 48, 576, 1000])
@pytest.mark.parametrize("num_rows", [0, 1, 9, 40])
def test_a_norm_divides_by_the_root_mean_square(
    num_rows: int, width: int, operators: Operators
) -> None:
    torch.manual_seed(num_rows * width)
    stream, weight = torch.randn(num_rows, width) * 7, torch.randn(width)
    out = given_to(operators, torch.empty(num_rows, width))

    operators.rms_norm(weight, 1e-5)(stream.to(operators.device), out)

    assert_near(out.cpu(), torch.nn.functional.rms_norm(stream, (width,), weight, 1e-5))


def test_an_embedding_gives_rows_of_its_table(operators: Operators) -> None:
    table, ids = random(50, 40), torch.tensor([3, 49, 0, 3])
    out = filled(operators, 4, 40)

    operators.embedding(table.to(operators.dtype))(ids.to(operators.device), out)

    assert torch.equal(out.cpu(), table[ids])
