"""Case C101 (an admin), and what the rights of a key come to where work runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import httpx
import openai
import pytest

from tests.flow.batches import batch_line, order, result_lines, run, sdk, wait_over
from tests.flow.rig import Rig
from tests.flow.talk import JobReading, submit_job
from tests.flow.wire import assert_error, script, write_book

ALIAS = "small"
KEYS = {"t1": "", "t2": "", "narrow": f"models={ALIAS}", "ops": "rights=admin"}
BOOK = {"endless": script("on ", ends=False, token_delay_ms=20)}


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """The key of tenant `t` is `sk-t`."""
    folder = tmp_path_factory.mktemp("rights")
    lines = [
        f"{tenant} {hashlib.sha256(f'sk-{tenant}'.encode()).hexdigest()} {fields}\n"
        for tenant, fields in KEYS.items()
    ]
    (folder / "keys").write_text("".join(lines))
    env = {
        "POINTSMAN_GATEWAY_KEYS_FILE": str(folder / "keys"),
        "POINTSMAN_MODEL_ALIASES": ALIAS,
    }
    return make_rig(engine="script", model=write_book(folder, BOOK), env=env)


def caller(rig: Rig, tenant: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer sk-{tenant}"}
    return httpx.AsyncClient(base_url=rig.base_url, headers=headers, timeout=30)


def test_c101_an_admin_cancels_a_batch_that_a_stranger_cannot_see(rig: Rig) -> None:
    owner, stranger, admin = (sdk(rig, f"sk-{tenant}") for tenant in ("t1", "t2", "ops"))
    batch = order(owner, [batch_line("a", "[[endless]]", max_tokens=400)])
    with pytest.raises(openai.NotFoundError):
        stranger.batches.cancel(batch.id)
    assert admin.batches.retrieve(batch.id).id == batch.id
    assert admin.batches.list().data == []

    assert admin.batches.cancel(batch.id).status in ("cancelling", "cancelled")

    assert wait_over(owner, batch.id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        admin.files.retrieve(batch.input_file_id)
    rig.wait_at_rest(5)


async def test_an_admin_reads_and_cancels_the_job_of_another_tenant(rig: Rig) -> None:
    async with caller(rig, "t1") as owner, caller(rig, "t2") as other, caller(rig, "ops") as admin:
        job_id = await submit_job(owner, "[[endless]]", max_tokens=400)
        url = f"/v1/jobs/{job_id}"
        assert_error(await other.delete(url), 404, code="not_found")
        assert (await admin.get(url)).json()["id"] == job_id
        assert (await admin.get("/v1/jobs")).json()["data"] == []

        assert (await admin.delete(url)).status_code == 200

        await JobReading(job_id).read_through(owner)
        assert (await owner.get(url)).json()["status"] == "cancelled"
    rig.wait_at_rest(5)


def test_a_line_for_a_model_that_the_key_may_not_use_is_refused_alone(rig: Rig) -> None:
    client = sdk(rig, "sk-narrow")
    lines = [batch_line("may", model=ALIAS), batch_line("may not", model="m")]

    batch = run(client, lines)

    assert batch.status == "completed"
    (good,) = result_lines(client, batch.output_file_id)
    assert good["custom_id"] == "may"
    (refused,) = result_lines(client, batch.error_file_id)
    with pytest.raises(openai.NotFoundError) as refusal:
        client.completions.create(model="m", prompt="x")
    assert refused["response"]["status_code"] == 404
    assert refused["response"]["body"]["error"] == refusal.value.body
    assert [model.id for model in client.models.list()] == [ALIAS]
