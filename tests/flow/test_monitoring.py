"""What deploy/ asks of the metrics, and what a gateway shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import body, client, complete

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/pointsman.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])),
    *(rule["expr"] for rule in RULES),
]

FEWER = {
    "exp_labels": {"severity": "warn"},
    "exp_annotations": {
        "summary": "Only 1 workers are left of those of the last 15 minutes. "
        "Their requests went to others."
    },
}


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


async def sample_names(http: httpx.AsyncClient) -> set[str]:
    lines = (await http.get("/metrics")).text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


async def test_dashboard_and_alerts_ask_only_for_what_a_gateway_shows(rig: Rig) -> None:
    async with client(rig) as http:
        await complete(http, "seen by the metrics", max_tokens=3)
        names = await sample_names(http)
    asked = {name for text in EXPRESSIONS for name in re.findall(r"pointsman_\w+", text)}
    assert len(asked) > 15
    assert asked <= names


async def test_a_finished_request_is_counted_in_the_ledger_and_timed(rig: Rig) -> None:
    finished = 'pointsman_ledger_requests_total{event="finished"}'
    tpot = "pointsman_gateway_time_per_output_token_seconds_count"
    async with client(rig) as http:
        await complete(http, "once", max_tokens=3)
        before = rig.metric(finished), rig.metric(tpot)
        await complete(http, "twice", max_tokens=3)
        await complete(http, "has no second token", max_tokens=1)
        assert (rig.metric(finished), rig.metric(tpot)) == (before[0] + 2, before[1] + 1)


async def test_what_waits_is_shown_and_gone_when_it_runs(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    waiting = "pointsman_queue_requests_waiting"
    async with client(rig) as http:
        await complete(http, "warm", max_tokens=2)
        assert rig.terminate("decode-0") == 0
        for number in range(3):
            answer = await http.post("/v1/jobs", json=body(f"waits {number}", max_tokens=2))
            assert answer.status_code == 202
        wait_until(lambda: rig.metric(waiting) == 3, 20, "three wait")
        rig.start_worker("decode-0", "decode")
        wait_until(lambda: rig.metric(waiting) == 0, 60, "none waits")
    rig.wait_at_rest(30)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_its_configuration_and_the_rules() -> None:
    path = DEPLOY / "prometheus/prometheus.yml"
    subprocess.run(["promtool", "check", "config", str(path)], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_a_worker_that_is_struck_off_the_list_is_missed(tmp_path: Path) -> None:
    age = "pointsman_worker_heartbeat_age_seconds"
    case = {
        "interval": "15s",
        "input_series": [
            {"series": f'{age}{{worker="decode-0@a", role="decode"}}', "values": "0x120"},
            {"series": f'{age}{{worker="decode-1@b", role="decode"}}', "values": "0x20 stale"},
        ],
        "alert_rule_test": [
            {"eval_time": time, "alertname": "FewerWorkers", "exp_alerts": alerts}
            for time, alerts in (("5m", []), ("8m", [FEWER]), ("22m", []))
        ],
    }
    told = {"rule_files": [str(DEPLOY / "prometheus/alerts.yml")], "tests": [case]}
    (tmp_path / "case.yml").write_text(yaml.safe_dump(told))
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "case.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    cells = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))
        assert panel["type"] == "row" or panel["description"]
