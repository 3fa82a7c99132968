"""The data directory: one owner, private files, socket paths that fit."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.data_directory import DataDirectory, default_path, kept_secret
from pipeline.cli.errors import DataDirectoryBusy
from pipeline.settings import PipelineSettings


def test_a_second_owner_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.create()
    refused = pytest.raises(DataDirectoryBusy, match=f"process {os.getpid()}")
    with directory.locked(), refused, DataDirectory(tmp_path).locked():
        pass


def test_the_directory_is_free_again_after_its_owner(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.create()
    for _ in range(2):
        with directory.locked():
            pass
        assert not (tmp_path / "serve.lock").exists()


KILLED_OWNER = """
import os, signal, subprocess, sys
from pathlib import Path
from pipeline.cli.data_directory import DataDirectory

with DataDirectory(Path(sys.argv[1])).locked() as fd:
    print(subprocess.Popen(["sleep", "60"], pass_fds=(fd,), stdout=2).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_outlived_its_supervisor_is_waited_for(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.create()
    owner = subprocess.run(
        [sys.executable, "-c", KILLED_OWNER, tmp_path],
        cwd=Path(__file__).resolve().parents[3],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    child_pid = int(owner.stdout)
    try:
        with pytest.raises(DataDirectoryBusy), directory.locked(patience_s=0.3):
            pass
    finally:
        os.kill(child_pid, signal.SIGKILL)
    with directory.locked(patience_s=5.0):
        pass


def test_files_can_be_read_by_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        directory = DataDirectory(tmp_path / "data")
        directory.create()
        secret = kept_secret(directory.flower_auth, "operator")
    finally:
        os.umask(former)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.flower_auth.stat().st_mode) == 0o600
    assert secret.startswith("operator:")
    assert kept_secret(directory.flower_auth, "operator") == secret


def test_rights_of_directories_that_were_there_are_not_touched(tmp_path: Path) -> None:
    shared = tmp_path / "home"
    for directory in (shared, shared / "models"):
        directory.mkdir()
        directory.chmod(0o755)
    DataDirectory(shared).create()
    modes = [stat.S_IMODE((shared / name).stat().st_mode) for name in (".", "models", "logs")]
    assert modes == [0o755, 0o755, 0o700]


def test_the_environment_says_where_the_data_directory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/state")
    assert default_path() == Path("/state/pointsman") == PipelineSettings().data_dir
    monkeypatch.setenv("POINTSMAN_DATA_DIR", "/here")
    assert default_path() == Path("/here") == PipelineSettings().data_dir


def test_a_deep_data_directory_gets_sockets_elsewhere(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / ("d" * 120))
    directory.create()
    with directory.socket_directory() as sockets:
        assert len(os.fsencode(sockets / "kvd.sock")) <= 107
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        assert directory.kvd_socket == sockets / "kvd.sock"
    assert not sockets.exists()
    with directory.socket_directory() as again:  # the way to the first one is in nobody's way
        assert directory.kvd_socket == again / "kvd.sock"


def test_the_cache_daemon_is_found_in_the_data_directory(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    directory.create()
    with directory.socket_directory() as sockets:
        assert directory.kvd_socket == sockets / "kvd.sock"
