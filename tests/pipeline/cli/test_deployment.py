"""The processes of one machine: what each is told."""

from __future__ import annotations

import threading
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.cli.data_directory import DataDirectory
from pipeline.cli.deployment import Deployment, get_status
from pipeline.cli.model_store import ModelPlan
from pipeline.cli.serve_options import EngineName, ServeOptions
from tests.flow.tls import Certificates, TlsFront

PLANS = (ModelPlan("first", Path("/models/first")), ModelPlan("org.b", Path("/models/org.b")))


def deployment(*plans: ModelPlan) -> Deployment:
    options = ServeOptions(
        host="127.0.0.1",
        port=8000,
        models=tuple(str(plan.path) for plan in plans),
        engine=EngineName.TORCH,
        workers={"prefill": 1, "decode": 2},
        redis_url=None,
        flower_port=None,
        keys_file=None,
        kv_dram_bytes=2**20,
        kv_nvme_bytes=0,
        drain_s=30.0,
    )
    return Deployment(options, DataDirectory(Path("/data")), "redis://x", Path("/k"), plans, "")


def test_one_model_has_workers_that_are_called_by_their_role() -> None:
    parts = deployment(PLANS[0]).workers_of(PLANS[0])
    assert [part.name for part in parts] == ["prefill-0", "decode-0", "decode-1"]
    assert {part.env["POINTSMAN_MODEL_NAME"] for part in parts} == {"first"}


def test_each_model_has_all_workers_and_they_share_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POINTSMAN_MODEL_ALIASES", "small")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(12))
    parts = [part for plan in PLANS for part in deployment(*PLANS).workers_of(plan)]

    assert len(parts) == len({part.name for part in parts}) == 6
    told = {
        name: {part.env[name] for part in parts if "first" in part.name}
        for name in ("POINTSMAN_MODEL", "POINTSMAN_MODEL_NAME", "POINTSMAN_MODEL_ALIASES")
    }
    assert list(told.values()) == [{"/models/first"}, {"first"}, {"small"}]
    others = [part for part in parts if "first" not in part.name]
    assert {part.env["POINTSMAN_MODEL_NAME"] for part in others} == {"org.b"}
    assert {part.env["POINTSMAN_MODEL_ALIASES"] for part in others} == {""}
    assert {part.env["POINTSMAN_WORKER_THREADS"] for part in parts} == {"2"}


def test_cores_are_shared_among_the_models_that_can_be_resident_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(12))
    (part, *_) = replace(deployment(*PLANS), num_resident=1).workers_of(PLANS[1])
    assert part.env["POINTSMAN_WORKER_THREADS"] == "4"


def test_a_gpu_is_shared_by_all_workers_unless_it_is_said_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = deployment(PLANS[0]).workers_of(PLANS[0])
    shares = [float(part.env["POINTSMAN_WORKER_HBM_SHARE"]) for part in parts]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(0.9)
    monkeypatch.setenv("POINTSMAN_WORKER_HBM_SHARE", "0.7")
    told = deployment(PLANS[0])
    assert {p.env["POINTSMAN_WORKER_HBM_SHARE"] for p in told.workers_of(PLANS[0])} == {"0.7"}
    assert told.passed_over() == []


def test_the_gateway_knows_all_models_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_GATEWAY_MODELS", "c=/models/c")
    env = deployment(*PLANS).gateway().env
    assert env["POINTSMAN_MODEL"] == "/models/first"
    assert env["POINTSMAN_GATEWAY_MODELS"] == "c=/models/c,org.b=/models/org.b"


def test_settings_that_serve_decides_itself_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_KVD_DRAM_BYTES", "5")
    monkeypatch.setenv("POINTSMAN_MODEL", "models/first")  # an option, given to all as it was meant
    monkeypatch.setenv("POINTSMAN_GATEWAY_MODELS", "c=/models/c")
    monkeypatch.setenv("POINTSMAN_WORKER_HBM_BYTES", "1000000")
    monkeypatch.setenv("POINTSMAN_API_KEY", "secret")
    assert deployment(*PLANS).passed_over() == ["POINTSMAN_KVD_DRAM_BYTES"]


def test_a_gateway_with_a_certificate_is_asked_by_https(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificates = Certificates.make(tmp_path / "tls")
    monkeypatch.setenv("POINTSMAN_GATEWAY_TLS_CERT_FILE", str(certificates.chain))
    assert deployment(PLANS[0]).base_url == "https://127.0.0.1:8000"

    page = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=page.serve_forever, daemon=True).start()
    try:
        with TlsFront(certificates, page.server_port) as front:
            assert get_status(f"https://127.0.0.1:{front.port}/none", limit_s=5.0) == 404
    finally:
        page.shutdown()
        page.server_close()
