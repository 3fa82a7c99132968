"""The native library is built once, and where it cannot be the reason is said."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from workers.kernels import native_build
from workers.kernels.native_build import NativeKernelsMissing, native_library


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory of its own, and a process that has loaded nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_library.cache_clear()
    yield tmp_path / "pointsman"
    native_library.cache_clear()


@pytest.mark.usefixtures("native")
def test_a_missing_compiler_is_named_with_the_remedy(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CXX", raising=False)

    with pytest.raises(NativeKernelsMissing, match=r"no C\+\+ compiler .*apt install g"):
        native_library()


@pytest.mark.usefixtures("native", "empty_cache")
def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")

    with pytest.raises(NativeKernelsMissing, match="false failed: it said nothing"):
        native_library()


@pytest.mark.usefixtures("empty_cache")
def test_a_cpu_without_the_instructions_is_told_which_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_build, "_cpu_flags", lambda: {"fma", "avx512f"})

    with pytest.raises(NativeKernelsMissing, match="lacks avx512_bf16, avx512_vnni"):
        native_library()


@pytest.mark.usefixtures("native")
def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    with pytest.raises(NativeKernelsMissing, match=r"not usable .*XDG_CACHE_HOME"):
        native_library()
    assert not empty_cache.exists()


@pytest.mark.usefixtures("native")
def test_a_library_that_cannot_be_loaded_is_no_end(empty_cache: Path) -> None:
    empty_cache.mkdir()
    (empty_cache / f"kernels-{native_build._source_digest()}.so").write_bytes(b"no library")

    with pytest.raises(NativeKernelsMissing, match="not usable"):
        native_library()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.usefixtures("native")
def test_several_at_once_build_one_library(empty_cache: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        libraries = list(threads.map(lambda _: native_library(), range(3)))

    assert len(list(empty_cache.glob("*.so"))) == 1
    assert all(library.pm_run for library in libraries)
