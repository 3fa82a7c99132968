"""The gateway as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *code.split(" ", 1)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_importing_the_app_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, gateway.app, gateway.server; "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = run(f"-c {code}")
    assert done.stdout.strip() == "[]", done.stderr


def test_a_misspelt_setting_is_refused_by_name() -> None:
    done = run("-m gateway", POINTSMAN_GATEWAY_PROT="8001")
    assert done.returncode == 2
    assert "POINTSMAN_GATEWAY_PROT" in done.stderr


def test_a_setting_that_makes_no_sense_is_refused_by_name() -> None:
    done = run("-m gateway", POINTSMAN_GATEWAY_PORT="70000")
    assert done.returncode == 2
    assert "POINTSMAN_GATEWAY_PORT: Input should be less than" in done.stderr


def test_a_certificate_without_its_key_is_refused() -> None:
    done = run("-m gateway", POINTSMAN_GATEWAY_TLS_CERT_FILE="chain.pem")
    assert done.returncode == 2
    assert "tls_key_file" in done.stderr


def test_a_database_of_no_known_kind_is_refused_in_one_line() -> None:
    done = run(
        "-m gateway", POINTSMAN_DATABASE_URL="nonsense://u:secret@host/x", POINTSMAN_ENGINE="digest"
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("gateway: ")]
    assert line == "gateway: POINTSMAN_DATABASE_URL: nonsense is no database that is known"
    assert "secret" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
