"""Options of `pointsman serve` that are more than a word."""

from __future__ import annotations

import socket

import pytest

from pipeline.cli.embedded_redis import free_port
from pipeline.cli.errors import CommandRefused, OptionInvalid, PortTaken
from pipeline.cli.serve import check_redis, require_free_port
from pipeline.cli.serve_options import parse_bytes, parse_workers


def test_workers_are_roles_with_counts() -> None:
    assert parse_workers("prefill=1, decode=2") == {"prefill": 1, "decode": 2}
    assert parse_workers("both=1") == {"both": 1}


@pytest.mark.parametrize(
    "text",
    ["", "prefill=1", "decode", "decode=x", "decode=1,decode=2", "cook=1", "decode=0", "both=99"],
)
def test_workers_that_could_not_finish_a_request_are_refused(text: str) -> None:
    with pytest.raises(OptionInvalid, match="--workers"):
        parse_workers(text)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("2GiB", 2**31),
        ("1.5g", 3 * 2**29),
        ("64 MiB", 2**26),
        ("1TB", 2**40),
    ],
)
def test_sizes_are_read_with_units_of_1024(text: str, num_bytes: int) -> None:
    assert parse_bytes(text, "--kv-dram") == num_bytes


@pytest.mark.parametrize("text", ["", "many", "-1", "1.2.3", "5 apples"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(OptionInvalid, match="--kv-dram"):
        parse_bytes(text, "--kv-dram")


def test_a_taken_port_is_named_with_the_option_that_helps() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port} is taken.*--port"):
            require_free_port("127.0.0.1", port, "--port")
    require_free_port("127.0.0.1", port, "--port")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CommandRefused, match="--host"):
        require_free_port("192.0.2.1", 8000, "--port")


def test_a_redis_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(CommandRefused, match=r"127\.0\.0\.1") as refused:
        check_redis(f"redis://:secret@127.0.0.1:{free_port()}/0")
    assert "secret" not in str(refused.value)
