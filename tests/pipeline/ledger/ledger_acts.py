"""What is done to a ledger under fuzz: by whom, to which requests, with which arguments."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pipeline.ledger.admission import AdmissionLimits
from pipeline.protocol.request import JobTerms, Priority, Request
from pipeline.protocol.sampling import SamplingParams

MODELS = ("m", "n")
# name -> (role, queues, places)
WORKERS: dict[str, tuple[str, list[str], int]] = {
    "p": ("prefill", ["prefill.m"], 2),
    "d": ("decode", ["decode.m.a"], 2),
    "b": ("both", ["prefill.m", "decode.m.b"], 9),
    "n": ("both", ["prefill.n", "decode.n.a"], 2),
}
LIMITS = AdmissionLimits(
    max_waiting=8, max_waiting_tokens=60, max_open_per_tenant=7, max_open_per_model=11
)
STRANGE = ["", "r1", "unknown", "r1 ", "request:r1", "é\n\x00", "x" * 300]
# A number is one of those in the state where the call makes sense, if there are any.
ids = st.sampled_from([*range(4)] * 8 + STRANGE)
workers = st.sampled_from([*WORKERS, *WORKERS, "ghost"])
QUEUES = ["prefill.m", "decode.m.a", "decode.m.b"]
# Of model m; `of_model` names another one's.
queues = st.sampled_from([*QUEUES, *QUEUES, "unplaced.m", "decode.m.nobody"])
usually = st.sampled_from([True, True, True, False])
written = st.tuples(
    ids,
    st.sampled_from([0, 0, 0, 0, 0, -1, 1]),  # beside the request's attempt
    st.sampled_from([0, 0, 0, 0, -4, -8, 4, -1_000]),  # beside the end of its log, in bytes
    st.integers(0, 3),  # tokens
    st.sampled_from(["", "", "", "", "stop", "length", "cancelled", "error:internal_error"]),
)
acts = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["", "", "", "", "stop", "on"])),
    min_size=4,
    max_size=12,
)


def of_model(model: str, queue: str) -> str:
    """The same queue of a model; of m if it is none."""
    kind, _, *node = queue.split(".")
    return ".".join([kind, model or "m", *node])


def request_of(
    name: str, limit_s: float, num_prompt: int, max_tokens: int, model: str = "m", **more: Any
) -> Request:
    """A request whose deadlines are one limit, and twice it."""
    return Request(
        name,
        model,
        [1] * num_prompt,
        SamplingParams(max_tokens=max_tokens),
        queue_deadline_s=limit_s,
        total_deadline_s=2 * limit_s,
        **more,
    )


terms = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["m", "m", "n"]),
        "limit_s": st.sampled_from([60.0, 60.0, 60.0, 0.001]),
        "num_prompt": st.integers(1, 12),
        "max_tokens": st.sampled_from([0, 1, 8, 1_000]),
        "tenant": st.sampled_from(["t1", "t2"]),
        "priority": st.sampled_from(list(Priority)),
        "job": st.sampled_from([None, JobTerms("digest", is_listed=True)]),
    }
)
