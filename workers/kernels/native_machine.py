"""Calling the native kernels: their C structures, single calls, and recorded runs of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from enum import IntEnum
from functools import cache

import torch

from workers.kernels.native_build import native_library
from workers.kernels.operators import StepPlan

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_float


class Kind(IntEnum):
    """`Kind` of cpp/kernels.cpp."""

    EMBED = 0
    LINEAR = 1
    LINEAR_ADD = 2
    GATED_LINEAR = 3
    RMS_NORM = 4
    ROTATE_AND_STORE = 5
    ATTEND_PREFILL = 6
    ATTEND_DECODE = 7


class Table(ctypes.Structure):
    """`Table` of cpp/linear.h."""

    _fields_ = (("width", _INT), ("rows", _POINTER))


class Weight(ctypes.Structure):
    """`Weight` of cpp/linear.h."""

    _fields_ = (
        ("num_inputs", _INT),
        ("num_columns", _INT),
        ("panels", _POINTER),
        ("bias", _POINTER),
        ("scales", _POINTER),
    )


class Norm(ctypes.Structure):
    """`Norm` of cpp/linear.h."""

    _fields_ = (("width", _INT), ("weight", _POINTER), ("epsilon", _FLOAT))


class Layer(ctypes.Structure):
    """`Layer` of cpp/attention.h."""

    _fields_ = (
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("block_tokens", _INT),
        ("block_stride", _INT),
        ("token_stride", _INT),
        ("window", _INT),
        ("num_rotated", _INT),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("norm_epsilon", _FLOAT),
        ("scale", _FLOAT),
    )


class _Step(ctypes.Structure):
    """`Step` of cpp/attention.h."""

    _fields_ = (
        ("num_rows", _INT),
        ("table_width", _INT),
        ("num_prefill_spans", _INT),
        ("num_decode_rows", _INT),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("block_tables", _POINTER),
        ("prefill_spans", _POINTER),
        ("decode_rows", _POINTER),
        ("rope", _POINTER),
    )


class _Instruction(ctypes.Structure):
    """`Instruction` of cpp/kernels.cpp."""

    _fields_ = (("kind", _INT), ("object", _POINTER), ("input", _POINTER), ("output", _POINTER))


def address(tensor: torch.Tensor, dtype: torch.dtype, num_elements: int) -> int:
    """Where a tensor's values begin.

    Raises:
        ValueError: it is not what the kernel reads or writes.
    """
    if tensor.dtype != dtype or tensor.numel() < num_elements or not tensor.is_contiguous():
        raise ValueError(
            f"a kernel needs {num_elements} contiguous {dtype}, not {tuple(tensor.shape)}"
            f" {tensor.dtype}"
        )
    return tensor.data_ptr()


@cache
def _run_function() -> ctypes._NamedFuncPointer:
    """`pm_run`. A call of it lets other Python threads run."""
    function = native_library().pm_run
    function.argtypes = (_POINTER, _INT, _POINTER, _INT)
    function.restype = None
    return function


class Machine:
    """Runs instructions one by one, or records them and runs them all in one call.

    Not thread-safe: one engine has one machine.
    """

    def __init__(self) -> None:
        """Builds and loads the library where that was not done.

        Raises:
            NativeKernelsMissing: this machine cannot run it.
        """
        self._run = _run_function()
        self._single = _Instruction()
        self._rows_only = _Step()
        self._step = _Step()
        self._plan: StepPlan | None = None
        self._recording: list[_Instruction] | None = None
        self._memory: Hashable = None
        self._programs: dict[str, ctypes.Array[_Instruction]] = {}

    def run(
        self, kind: Kind, fields: ctypes.Structure, num_rows: int, source: int, target: int
    ) -> None:
        """An operator that knows no step. Addresses stay good while the call, or a record, lives."""
        self._rows_only.num_rows = num_rows
        self._do(kind, fields, self._rows_only, source, target)

    def run_step(
        self, kind: Kind, fields: ctypes.Structure, plan: StepPlan, source: int, target: int
    ) -> None:
        """An operator on a step's rows."""
        self._prepare(plan)
        self._do(kind, fields, self._step, source, target)

    def replay(self, memory: Hashable, name: str, plan: StepPlan, body: Callable[[], None]) -> None:
        """Record `body` the first time, then run what was recorded on the rows of `plan`."""
        self._prepare(plan)
        if memory != self._memory:
            self._memory = memory
            self._programs.clear()  # they name memory that is gone
        program = self._programs.get(name)
        if program is None:
            program = self._programs[name] = self._record(body)
        self._run(
            ctypes.addressof(program),
            len(program),
            ctypes.addressof(self._step),
            torch.get_num_threads(),
        )

    def _record(self, body: Callable[[], None]) -> ctypes.Array[_Instruction]:
        self._recording = []
        try:
            body()
            return (_Instruction * len(self._recording))(*self._recording)
        finally:
            self._recording = None

    def _do(
        self, kind: Kind, fields: ctypes.Structure, step: _Step, source: int, target: int
    ) -> None:
        if self._recording is not None:
            self._recording.append(_Instruction(kind, ctypes.addressof(fields), source, target))
            return
        single = self._single
        single.kind, single.object = kind, ctypes.addressof(fields)
        single.input, single.output = source, target
        self._run(ctypes.addressof(single), 1, ctypes.addressof(step), torch.get_num_threads())

    def _prepare(self, plan: StepPlan) -> None:
        """Lay the plan out for the kernels, once for all layers."""
        if plan is self._plan:
            return
        step = self._step
        step.num_rows = len(plan.positions)
        step.table_width = plan.block_tables.shape[1]
        step.num_prefill_spans = len(plan.prefill_spans)
        step.num_decode_rows = len(plan.decode_rows)
        step.positions = address(plan.positions, torch.int64, step.num_rows)
        step.slots = address(plan.slots, torch.int64, step.num_rows)
        step.block_tables = address(plan.block_tables, torch.int32, 1)
        step.prefill_spans = address(plan.prefill_spans, torch.int32, 0)
        step.decode_rows = address(plan.decode_rows, torch.int32, 0)
        step.rope = address(plan.rope, torch.float32, 0)
        self._plan = plan
