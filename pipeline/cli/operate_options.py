"""The options of `status`, `drain`, `dlq`, `link-test`, `redis-acl`: asked by an operator."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from pipeline.cli import dlq
from pipeline.cli.data_directory import DataDirectory, default_path, write_private
from pipeline.cli.drain import drain_node
from pipeline.cli.embedded_redis import url_of_running
from pipeline.cli.errors import CommandRefused
from pipeline.cli.link_test import (
    LinkTest,
    kept_links,
    links_json,
    links_screen,
    measure_links,
)
from pipeline.cli.redis_acl import AclUser, acl_file, setuser_line
from pipeline.cli.status import as_screen, read_status
from pipeline.errors import PipelineError, StoreUnavailable
from pipeline.ledger.drain_orders import DrainOrder

_T = TypeVar("_T")
_WIDE = 200  # columns where there is no terminal

dlq_app = typer.Typer(
    help="Dead letters: requests that lost too many workers.", no_args_is_help=True
)

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        help="The pipeline's Redis. POINTSMAN_REDIS_URL goes before the data directory.",
        show_default="that of `pointsman serve` in the data directory",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", show_default=str(default_path()), help="Of `serve`.")
]
RequestId = Annotated[str, typer.Argument(metavar="REQUEST", help="An id that `dlq ls` shows.")]


def status_command(redis_url: RedisUrl = None, data_dir: DataDir = None) -> None:
    """One screen: workers and leases, queues, tiers, counts, the last faults."""
    url = find_redis_url(redis_url, data_dir)
    console = Console()
    width = None if console.is_terminal else _WIDE
    Console(width=width).print(_asked(lambda: as_screen(read_status(url))))


def drain_command(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node that `status` shows.")],
    *,
    limit_s: Annotated[
        float, typer.Option(help="How long sequences may run on there before they move.", min=0)
    ] = 0.0,
    force: Annotated[
        bool, typer.Option("--force", help="Even if no other node could go on with them.")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="`pointsman serve` there starts others in their place."),
    ] = False,
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Move what runs on a node to others and let its workers end; no stream breaks.

    `pointsman serve` leaves them ended until it is started again, or starts others with --restart.
    Workers that are started there later serve as usual.
    """
    url = find_redis_url(redis_url, data_dir)
    order = DrainOrder(limit_s, comes_back=restart)
    count = _asked(lambda: drain_node(url, node, order, is_forced=force, say=typer.echo))
    typer.echo(f"{node} is drained: {count} workers left")


def link_test_command(
    *,
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE NODE]", show_default="all pairs")
    ] = None,
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="For a program.")] = False,
    seconds: Annotated[
        float, typer.Option(help="For each direction of each pair.", min=0.1, max=20)
    ] = 2.0,
    kept: Annotated[
        bool, typer.Option("--kept", help="Show what was measured last; measure nothing.")
    ] = False,
) -> None:
    """Measure round trip and bandwidth between nodes and keep the result for the scheduler.

    The nodes' daemons measure, over TCP whatever transport their blocks take; they are asked with the
    secret in POINTSMAN_KVD_PEER_SECRET. Workers go by the result for a day. Exit code 1 when a link
    could not be measured or is slower than its kind should be.
    """
    url = find_redis_url(redis_url, data_dir)
    if kept:
        measured = _asked(lambda: kept_links(url))
    else:
        secret = os.environ.get("POINTSMAN_KVD_PEER_SECRET", "").encode()
        test = LinkTest(url, secret, tuple(nodes or ()), seconds)
        errors = Console(stderr=True)
        measured = _asked(lambda: measure_links(test, lambda link: errors.print(f"testing {link}")))
    if as_json:
        typer.echo(links_json(measured))
    else:
        Console(width=None if Console().is_terminal else _WIDE).print(links_screen(measured))
    if any(link.report is None or link.report.is_slow for link in measured):
        raise typer.Exit(1)


@dlq_app.command("ls")
def ls_command(redis_url: RedisUrl = None, data_dir: DataDir = None) -> None:
    """List them, the newest first."""
    url = find_redis_url(redis_url, data_dir)
    console = Console()
    width = None if console.is_terminal else _WIDE
    Console(width=width).print(_asked(lambda: dlq.list_letters(url)))


@dlq_app.command("show")
def show_command(
    request_id: RequestId, redis_url: RedisUrl = None, data_dir: DataDir = None
) -> None:
    """Show one; never its prompt."""
    url = find_redis_url(redis_url, data_dir)
    typer.echo(_asked(lambda: dlq.show_letter(url, request_id)))


@dlq_app.command("retry")
def retry_command(
    request_id: RequestId, redis_url: RedisUrl = None, data_dir: DataDir = None
) -> None:
    """Queue one again; it goes on after the tokens that it has."""
    url = find_redis_url(redis_url, data_dir)
    queue = _asked(lambda: dlq.retry_letter(url, request_id))
    typer.echo(f"{request_id} waits in {queue}")


@dlq_app.command("drop")
def drop_command(
    request_id: RequestId, redis_url: RedisUrl = None, data_dir: DataDir = None
) -> None:
    """Forget one and its prompt."""
    url = find_redis_url(redis_url, data_dir)
    _asked(lambda: dlq.drop_letter(url, request_id))
    typer.echo(f"{request_id} is dropped")


def redis_acl_command(
    out: Annotated[
        Path | None, typer.Option(help="Write a file for `redis-server --aclfile` instead.")
    ] = None,
    owner: Annotated[
        int | None, typer.Option(help="User id that may read the file.", show_default="you")
    ] = None,
) -> None:
    """Print the Redis users of gateway, worker and Flower, as ACL SETUSER lines.

    Passwords come from REDIS_GATEWAY_PASSWORD, REDIS_WORKER_PASSWORD, REDIS_FLOWER_PASSWORD, and for
    a file REDIS_PASSWORD (the administrator); what is printed holds their SHA-256 only.
    """
    passwords = {user: _secret(f"REDIS_{user.name}_PASSWORD") for user in AclUser}
    if out is None:
        for user, password in passwords.items():
            typer.echo(setuser_line(user, password))
        return
    write_private(out, acl_file(passwords, _secret("REDIS_PASSWORD")))
    if owner is not None:
        os.chown(out, owner, -1)


def _secret(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise _refusal(f"{name} is not set")
    return value


def find_redis_url(redis_url: str | None, data_dir: Path | None) -> str:
    """The one that is given, that of the environment, or that of a `serve` that runs here; ends the command else."""
    directory = DataDirectory(data_dir or default_path())
    url = redis_url or os.environ.get("POINTSMAN_REDIS_URL") or url_of_running(directory.redis)
    if url is None:
        raise _refusal(
            f"nothing was started from {directory.path} yet; --data-dir or --redis-url names another"
        )
    return url


def _asked(question: Callable[[], _T]) -> _T:
    try:
        return question()
    except StoreUnavailable as error:
        hint = "does `pointsman serve` run? --data-dir or --redis-url names another"
        raise _refusal(f"{error} {hint}") from error
    except (CommandRefused, PipelineError) as error:
        raise _refusal(str(error)) from error


def _refusal(message: str) -> typer.Exit:
    Console(stderr=True).print(Text(f"pointsman: {message}"), soft_wrap=True)
    return typer.Exit(1)
