"""A random step over a random pool, for every form of the operators."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from workers.kernels.operators import AttentionShape, Operators, StepPlan
from workers.kernels.step_plan import plan_step
from workers.model import StepBatch


@dataclass(frozen=True)
class Lane:
    """One sequence's share: tokens [start, start + count) of which the first `prompt` are prompt."""

    start: int
    count: int
    prompt: int


@dataclass(frozen=True)
class Case:
    """A shape and the lanes of one step."""

    shape: AttentionShape
    block_tokens: int
    lanes: tuple[Lane, ...]
    seed: int

    def fitted(self, operators: Operators) -> Case:
        """With blocks that the form can read."""
        multiple = operators.block_multiple
        return replace(self, block_tokens=-(-self.block_tokens // multiple) * multiple)


@st.composite
def lanes(draw: st.DrawFn) -> Lane:
    """Whole prompts, chunks after a prefix, single decode tokens, and chunks over the prompt's end."""
    start = draw(st.one_of(st.just(0), st.integers(0, 400)))
    count = draw(st.one_of(st.just(1), st.integers(1, 150)))
    prompt = draw(st.sampled_from([start + count, start, start + count // 2, start + count + 9]))
    return Lane(start, count, prompt)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """GQA 1 to 16, head_dim 16 to 128, blocks of 16 to 256, with and without a window."""
    num_kv_heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([16, 64, 80, 96, 128]))
    normed = draw(st.booleans())
    weights = torch.linspace(0.5, 1.5, head_dim) if normed else None
    shape = AttentionShape(
        num_heads=num_kv_heads * draw(st.integers(1, 16)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        num_rotated=draw(st.sampled_from([head_dim, head_dim // 2, 0])),
        window=draw(st.sampled_from([0, 0, 1, 37, 300])),
        query_norm=weights,
        key_norm=weights,
        norm_eps=1e-6,
    )
    return Case(
        shape,
        draw(st.sampled_from([16, 32, 48, 256])),
        tuple(draw(st.lists(lanes(), min_size=1, max_size=4))),
        draw(st.integers(0, 2**16)),
    )


class PagedStep:
    """A case laid out: random queries, keys and values for all positions of all sequences."""

    def __init__(self, case: Case) -> None:
        self.case = case
        shape = case.shape
        torch.manual_seed(case.seed)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.num_blocks = 1 + sum(self._blocks_of(lane) for lane in case.lanes)
        order = np.random.default_rng(case.seed).permutation(self.num_blocks).tolist()
        self.tables = [[order.pop() for _ in range(self._blocks_of(lane))] for lane in case.lanes]
        self.tokens = [  # bfloat16 values, so that rounding inputs costs nothing in either form
            torch.randn(lane.start + lane.count, heads, shape.head_dim).bfloat16().float()
            for lane in case.lanes
        ]
        longest = max(lane.start + lane.count for lane in case.lanes)
        angles = torch.outer(
            torch.arange(longest).float(), 0.7 ** torch.arange(shape.num_rotated // 2)
        )
        self.rope = torch.cat((angles.cos(), angles.sin()), dim=1).contiguous()

    def _blocks_of(self, lane: Lane) -> int:
        return -(-(lane.start + lane.count) // self.case.block_tokens)

    def plan(self, spans: list[tuple[int, int, int]], device: torch.device) -> StepPlan:
        """A step over (lane, start, count) each."""
        block_tokens = self.case.block_tokens
        tables = np.zeros((len(spans), max(len(table) for table in self.tables)), np.int32)
        positions, slots = [], []
        for row, (lane, start, count) in enumerate(spans):
            tables[row, : len(self.tables[lane])] = self.tables[lane]
            places = np.arange(start, start + count)
            positions.append(places)
            slots.append(tables[row, places // block_tokens] * block_tokens + places % block_tokens)
        bounds = np.concatenate(([0], np.cumsum([count for *_, count in spans])))
        return plan_step(
            StepBatch(
                token_ids=np.zeros(int(bounds[-1]), np.int64),
                positions=np.concatenate(positions).astype(np.int64),
                slot_mapping=np.concatenate(slots).astype(np.int64),
                cu_query_lens=bounds.astype(np.int32),
                context_lens=np.array([start + count for _, start, count in spans], np.int32),
                block_tables=tables,
                logit_rows=np.empty(0, np.int64),
                histories=[[]] * len(spans),
                num_prompt_tokens=[self.case.lanes[lane].prompt for lane, *_ in spans],
            ),
            self.rope.to(device),
        )


class PagedRun:
    """A case on one form, with a pool of its own: two layers, of which the second is used."""

    def __init__(self, step: PagedStep, operators: Operators) -> None:
        self.step = step
        self.operators = operators
        shape = step.case.shape
        num_blocks = step.num_blocks + operators.num_spare_blocks
        self.whole_pool = torch.full(
            (num_blocks, 2, 2, step.case.block_tokens, shape.num_kv_heads, shape.head_dim),
            torch.nan,  # what nobody wrote must not be read
            dtype=operators.dtype,
            device=operators.device,
        )
        pool = self.whole_pool
        self.attention = operators.attention(shape, pool[:, 1, 0], pool[:, 1, 1])

    @property
    def pool(self) -> torch.Tensor:
        """The blocks that belong to the caller, on the host."""
        return self.whole_pool[: self.step.num_blocks].cpu()

    def run(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        """Attention of a step over (lane, start, count) each, (T, heads, head_dim)."""
        operators, shape = self.operators, self.step.case.shape
        plan = operators.stage(self.step.plan(spans, operators.device))
        tokens = self.step.tokens
        given = torch.cat([tokens[lane][start : start + count] for lane, start, count in spans])
        qkv = given.new_full((len(plan.positions), *given.shape[1:]), 7.0)
        qkv[: len(given)] = given
        qkv = qkv.to(operators.device)
        heads = (len(qkv), shape.num_heads, shape.head_dim)
        queries = torch.empty(heads, dtype=operators.dtype, device=operators.device)
        out = torch.full_like(queries, torch.nan)

        def body() -> None:
            self.attention.rotate_and_store(plan, qkv, queries)
            self.attention.attend_prefill(plan, queries, out)
            self.attention.attend_decode(plan, queries, out)

        operators.replay(object(), "body", plan, body)
        return out[: len(given)].cpu()

    def run_case(self) -> torch.Tensor:
        """The case's step, after its prefixes were stored in a step of their own."""
        lanes = list(enumerate(self.step.case.lanes))
        prefixes = [(number, 0, lane.start) for number, lane in lanes if lane.start]
        if prefixes:
            self.run(prefixes)
        return self.run([(number, lane.start, lane.count) for number, lane in lanes])
