"""Section BATCH of the cases: files and batches as openai-python uses them, on real processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest

from tests.flow.batches import (
    ENDPOINT,
    batch_line,
    ids_of,
    order,
    result_lines,
    run,
    sdk,
    upload,
    wait_over,
)
from tests.flow.rig import Rig, wait_until
from tests.flow.wire import assert_error, num_tokens_run, script, write_book

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
KEYS = {"t1": "sk-one", "t2": "sk-two"}
SLOW_STEP_MS = 40
LONG_PIECE_CHARS = 5 * 2**20
BOOK = {
    "slow": script(*[f"{number} " for number in range(100)], token_delay_ms=SLOW_STEP_MS),
    "strange": script("👩‍👩‍👧 ", "line\u2028separator", "\u0085", " ok\n", "é"),
    "long": script("y" * LONG_PIECE_CHARS),
}


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("batch")
    lines = [f"{name} {hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()]
    (folder / "keys").write_text("\n".join(lines))
    env = {"POINTSMAN_GATEWAY_KEYS_FILE": str(folder / "keys")}
    return make_rig(engine="script", model=write_book(folder, BOOK), env=env)


@pytest.fixture(scope="module")
def client(rig: Rig) -> openai.OpenAI:
    return sdk(rig, KEYS["t1"])


@pytest.fixture(scope="module")
def stranger(rig: Rig) -> openai.OpenAI:
    return sdk(rig, KEYS["t2"])


def plain(client: openai.OpenAI) -> httpx.Client:
    """HTTP without the SDK, with the same key."""
    headers = {"Authorization": f"Bearer {client.api_key}"}
    return httpx.Client(base_url=str(client.base_url), headers=headers, timeout=60)


def test_c091_byte_order_mark_crlf_blank_lines_and_no_last_newline(client: openai.OpenAI) -> None:
    lines = [batch_line("a"), batch_line("b"), "", "  ", batch_line("c")]
    batch = run(client, b"\xef\xbb\xbf" + "\r\n".join(lines).encode())

    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.total == 3
    output = result_lines(client, batch.output_file_id)
    assert sorted(ids_of(output)) == ["a", "b", "c"]
    assert {line["response"]["status_code"] for line in output} == {200}
    texts = {line["response"]["body"]["choices"][0]["text"] for line in output}
    assert texts == {"Hello, world!"}
    assert batch.error_file_id is None


def test_c092_a_broken_line_fails_the_whole_batch_before_anything_runs(
    rig: Rig, client: openai.OpenAI
) -> None:
    before = num_tokens_run(rig)
    good = [batch_line(name) for name in "acde"]
    cut = '{"custom_id":"b","method":"POST"'
    batch = run(client, [good[0], cut, *good[1:]])

    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    (error,) = batch.errors.data
    assert (error.line, error.code) == (2, "invalid_json_line")
    assert error.message
    assert batch.output_file_id is None
    assert num_tokens_run(rig) == before


@pytest.mark.parametrize(
    ("second", "code"),
    [("a", "duplicate_custom_id"), (1, "invalid_custom_id"), ("", "invalid_custom_id")],
)
def test_c094_custom_ids_must_be_strings_that_differ(
    client: openai.OpenAI, second: object, code: str
) -> None:
    batch = run(client, [batch_line("a"), "", batch_line(second)])

    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(item.line, item.code) for item in batch.errors.data] == [(3, code)]


def test_c094_a_missing_custom_id_is_named_with_its_line(client: openai.OpenAI) -> None:
    entry = json.loads(batch_line("a"))
    del entry["custom_id"]
    batch = run(client, [json.dumps(entry)])

    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(item.line, item.code, item.param) for item in batch.errors.data] == [
        (1, "invalid_custom_id", "custom_id")
    ]


def test_c094_two_batches_may_use_the_same_ids(
    client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    ids = [f"r{number}" for number in range(8)]
    first = order(client, [batch_line(name) for name in ids])
    second = order(stranger, [batch_line(name, "[[strange]]") for name in ids])
    for owner, batch, text in (
        (client, first, "Hello, world!"),
        (stranger, second, "👩‍👩‍👧 line\u2028separator\u0085 ok\né"),
    ):
        ended = wait_over(owner, batch.id)
        output = result_lines(owner, ended.output_file_id)
        assert sorted(ids_of(output)) == ids
        assert {line["response"]["body"]["choices"][0]["text"] for line in output} == {text}


def test_c096_a_line_that_the_model_refuses_has_its_own_error(client: openai.OpenAI) -> None:
    lines = [batch_line("a"), batch_line("b", max_tokens=-1), batch_line("c", stream=True)]
    batch = run(client, lines)

    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (3, 1, 2)
    (good,) = result_lines(client, batch.output_file_id)
    assert (good["custom_id"], good["response"]["status_code"]) == ("a", 200)
    refused = {line["custom_id"]: line for line in result_lines(client, batch.error_file_id)}
    assert set(refused) == {"b", "c"}
    for line in refused.values():
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        assert line["id"].startswith("batch_req_")
        assert line["response"]["status_code"] == 400
        assert line["response"]["request_id"]
    assert refused["c"]["response"]["body"]["error"]["param"] == "stream"
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="m", prompt="x", max_tokens=-1)
    assert refused["b"]["response"]["body"]["error"] == refusal.value.body


def test_a_chat_line_is_answered_as_the_route_answers_it_with_all_its_choices(
    client: openai.OpenAI,
) -> None:
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "[[strange]]"}],
        "n": 2,
        "logprobs": True,
    }
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    batch = client.batches.create(
        input_file_id=upload(client, [json.dumps(line)]), endpoint=CHAT, completion_window="24h"
    )
    ended = wait_over(client, batch.id)

    (output,) = result_lines(client, ended.output_file_id)
    direct = client.chat.completions.create(**body).to_dict()
    assert output["response"]["body"]["choices"] == direct["choices"]
    assert set(output["response"]["body"]) == set(direct)
    assert output["response"]["body"]["id"].startswith("chatcmpl-")
    assert ended.usage is not None
    assert ended.usage.output_tokens == direct["usage"]["completion_tokens"]


def test_c097_a_cancelled_batch_counts_every_line_once(client: openai.OpenAI) -> None:
    lines = [batch_line(f"fast{number}") for number in range(5)]
    lines += [batch_line(f"slow{number}", "[[slow]]", max_tokens=100) for number in range(20)]
    batch = order(client, lines)

    def is_half_done() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed == 5

    wait_until(is_half_done, 20)
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = wait_over(client, batch.id)

    assert ended.status == "cancelled"
    assert ended.cancelled_at is not None
    output = result_lines(client, ended.output_file_id)
    errors = result_lines(client, ended.error_file_id)
    assert sorted(ids_of(output)) == [f"fast{number}" for number in range(5)]
    assert sorted(ids_of(output) + ids_of(errors)) == sorted(
        json.loads(line)["custom_id"] for line in lines
    )
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert {line["response"] for line in errors} == {None}
    counts = ended.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (25, 5, 20)


def test_c101_cancelling_early_twice_late_and_by_a_stranger(
    rig: Rig, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    slow = [batch_line(f"s{number}", "[[slow]]", max_tokens=100) for number in range(3)]
    batch = order(client, slow)
    assert batch.status == "validating"
    with pytest.raises(openai.NotFoundError):
        stranger.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError):
        stranger.batches.retrieve(batch.id)
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    again = client.batches.cancel(batch.id)
    assert again.status in ("cancelling", "cancelled")
    assert again.cancelling_at == cancelled.cancelling_at
    ended = wait_over(client, batch.id)
    assert ended.status == "cancelled"
    assert client.batches.cancel(batch.id) == ended
    assert ended.output_file_id is None

    done = run(client, [batch_line("a")])
    with pytest.raises(openai.BadRequestError) as late:
        client.batches.cancel(done.id)
    assert late.value.code == "batch_not_cancellable"
    assert client.batches.retrieve(done.id) == done
    assert len(result_lines(client, done.output_file_id)) == 1
    with pytest.raises(openai.NotFoundError):
        stranger.files.content(done.output_file_id or "")
    rig.wait_at_rest(5)


STRANGE_NAMES = ["../../etc/x", "é b.jsonl", "n" * 300, 'quo"te', "semi;colon", "/abs/olute", ".."]


def test_c103_files_lie_under_names_of_the_servers_making(rig: Rig, client: openai.OpenAI) -> None:
    folder = rig.folder / "batches" / "files"
    data = batch_line("a").encode()
    for name in STRANGE_NAMES:
        file_id = upload(client, data, name)
        shown = client.files.retrieve(file_id)
        assert shown.filename == name.replace('"', "%22")  # as browsers and the SDK spell it
        assert (shown.bytes, shown.purpose, shown.status) == (len(data), "batch", "processed")
        assert (folder / file_id).read_bytes() == data
        assert client.files.delete(file_id).deleted
        assert not (folder / file_id).exists()
    names = {path.name for path in folder.iterdir()}
    assert all(name.startswith("file-") and len(name) == 37 for name in names)
    everything = {Path(place) for place, _, _ in os.walk(rig.folder)}
    assert not [path for path in everything if path.name in ("etc", "abs")]


def multipart(fields: dict[str, str], filename: bytes | None) -> tuple[bytes, str]:
    """A form with an empty file, its filename byte by byte."""
    parts = [
        f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if filename is not None:
        head = b'--B\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n\r\n'
        parts.append(head % filename)
    return b"".join(parts) + b"--B--\r\n", "multipart/form-data; boundary=B"


@pytest.mark.parametrize(
    ("fields", "filename", "param"),
    [
        ({}, b"a", "purpose"),
        ({"purpose": "assistants"}, b"a", "purpose"),
        ({"purpose": "nonsense"}, b"a", "purpose"),
        ({"purpose": "batch"}, None, "file"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at"},
            b"a",
            "expires_after.seconds",
        ),
    ],
)
def test_c103_an_upload_that_lacks_something_is_400(
    client: openai.OpenAI, fields: dict[str, str], filename: bytes | None, param: str
) -> None:
    content, media_type = multipart(fields, filename)
    with plain(client) as http:
        answer = http.post("files", content=content, headers={"content-type": media_type})
    assert_error(answer, 400, param=param)


def test_c103_a_name_with_a_nul_and_an_empty_file(client: openai.OpenAI) -> None:
    content, media_type = multipart({"purpose": "batch"}, b"a\0.jsonl")
    with plain(client) as http:
        answer = http.post("files", content=content, headers={"content-type": media_type})
        if answer.status_code != 200:
            assert_error(answer, 400)
        else:
            assert answer.json()["filename"] == "a\0.jsonl"
        for path in ("file-%2e%2e/%2e%2e", "file-%2e%2e%2f%2e%2e", "file-%00", "file-" + "a" * 400):
            for answer in (http.get(f"files/{path}"), http.delete(f"files/{path}")):
                assert answer.status_code == 404
                assert answer.json()["error"]["code"] == "not_found"
    empty = upload(client, b"")
    with pytest.raises(openai.BadRequestError) as refusal:
        client.batches.create(input_file_id=empty, endpoint=ENDPOINT, completion_window="24h")
    assert refusal.value.code == "empty_file"
    assert run(client, b"\n\n").status == "failed"


def test_an_input_file_cannot_be_deleted_under_its_batch(client: openai.OpenAI) -> None:
    batch = order(client, [batch_line("a", "[[slow]]", max_tokens=100)])
    with pytest.raises(openai.BadRequestError) as refusal:
        client.files.delete(batch.input_file_id)
    assert refusal.value.code == "file_in_use"
    client.batches.cancel(batch.id)
    wait_over(client, batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_c106_a_download_is_exact_in_whole_in_part_and_in_its_head(
    rig: Rig, client: openai.OpenAI
) -> None:
    prompts = ["[[strange]]", "[[long]]", "x"]
    batch = run(client, [batch_line(f"é{n}", prompt) for n, prompt in enumerate(prompts)])
    assert batch.output_file_id is not None
    stored = (rig.folder / "batches" / "files" / batch.output_file_id).read_bytes()

    data = client.files.content(batch.output_file_id).content
    assert hashlib.sha256(data).digest() == hashlib.sha256(stored).digest()
    lines = data.decode("utf-8", "strict")[:-1].split("\n")
    assert not data.startswith(b"\xef\xbb\xbf")
    assert [json.loads(line)["custom_id"] for line in lines] == ["é0", "é1", "é2"]
    assert max(map(len, lines)) > LONG_PIECE_CHARS
    with plain(client) as http:
        url = f"files/{batch.output_file_id}/content"
        head = http.head(url)
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) == len(data)
        assert head.headers["x-content-type-options"] == "nosniff"
        part = http.get(url, headers={"range": "bytes=100-1099"})
        assert (part.status_code, part.content) == (206, data[100:1100])
        assert part.headers["content-range"] == f"bytes 100-1099/{len(data)}"
        tail = http.get(url, headers={"range": "bytes=-7"})
        assert (tail.status_code, tail.content) == (206, data[-7:])
        assert_error(http.get(url, headers={"range": f"bytes={len(data)}-"}), 416)


def listing(client: openai.OpenAI, path: str, **params: Any) -> httpx.Response:
    with plain(client) as http:
        return http.get(path, params=params)


def test_c105_lists_come_in_pages_each_object_once(rig: Rig) -> None:
    client = sdk(rig, KEYS["t2"])
    old_files = {file.id for file in client.files.list(purpose="batch")}
    old_batches = {batch.id for batch in client.batches.list()}
    files = [upload(client, [batch_line("a")]) for _ in range(45)]
    batches = [
        client.batches.create(input_file_id=name, endpoint=ENDPOINT, completion_window="24h").id
        for name in files
    ]

    listed = [batch.id for batch in client.batches.list(limit=10)]
    assert [name for name in listed if name not in old_batches] == batches[::-1]
    assert len(set(listed)) == len(listed)
    ascending = [file.id for file in client.files.list(purpose="batch", order="asc")]
    assert [name for name in ascending if name not in old_files] == files
    by_ten = [file.id for file in client.files.list(purpose="batch", limit=10)]
    assert by_ten == ascending[::-1]
    page = listing(client, "batches", limit=10).json()
    assert set(page) == {"object", "data", "first_id", "last_id", "has_more"}
    assert (page["object"], page["has_more"]) == ("list", True)
    assert (page["first_id"], page["last_id"]) == (batches[-1], batches[-10])
    for limit in ("0", "101", "abc", "-1", "1.5"):
        assert_error(listing(client, "batches", limit=limit), 400, param="limit")
    for path in ("batches", "files"):
        assert_error(listing(client, path, after="nobody"), 404, param="after")
    for name in batches:
        assert wait_over(client, name).status == "completed"
