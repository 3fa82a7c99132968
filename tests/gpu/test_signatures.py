"""The installed flash-attn has the signatures that our calls are tested against."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from tests.gpu.machine import IS_REHEARSAL
from tests.workers.kernels.flash_stand_in import FLASH_2, FLASH_3, SIGNATURES, signature_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("version", "module_name"), [(FLASH_2, "flash_attn"), (FLASH_3, "flash_attn_interface")]
)
def test_the_recorded_signatures_are_those_of_the_library(version: str, module_name: str) -> None:
    if IS_REHEARSAL:
        pytest.skip("a rehearsal has no library")
    module = pytest.importorskip(module_name)

    for name in SIGNATURES[version]:
        installed = inspect.signature(getattr(import_module(module.__name__), name)).parameters
        recorded = signature_of(version, name).parameters
        own = {each: installed[each].default for each in recorded if each in installed}
        assert own == {each: parameter.default for each, parameter in recorded.items()}
