"""The options of `pointsman kv`: what an operator asks of one node's cache daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from pipeline.cli import kv
from pipeline.cli.batch_options import DEFAULT_URL
from pipeline.cli.data_directory import DataDirectory, default_path
from pipeline.cli.errors import CommandRefused
from pipeline.cli.kv_warm import WarmJob, warm
from tiering.errors import KvdUnavailable, TieringError
from tiering.kvd.operator import KvdOperator
from tiering.tier import Tier

_WIDE = 200  # columns where there is no terminal

kv_app = typer.Typer(help="The KV blocks of this machine's cache daemon.", no_args_is_help=True)


class ShownTier(StrEnum):
    """A tier that kvd keeps."""

    DRAM = "dram"
    NVME = "nvme"


Socket = Annotated[
    Path | None,
    typer.Option(
        "--kvd-socket",
        help="POINTSMAN_KVD_SOCKET goes before the data directory.",
        show_default="that of `pointsman serve` in the data directory",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", show_default=str(default_path()), help="Of `serve`.")
]
Tenant = Annotated[str | None, typer.Option(help="As the keys file names it.")]


@kv_app.command("stats")
def stats_command(
    *,
    socket: Socket = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="All counters.")] = False,
) -> None:
    """Say what the tiers hold and what they did since kvd started."""
    with _operator(socket, data_dir) as operator:
        if as_json:
            typer.echo(kv.stats_json(operator))
        else:
            _console().print(kv.stats_screen(operator))


@kv_app.command("ls")
def ls_command(
    *,
    socket: Socket = None,
    data_dir: DataDir = None,
    tier: Annotated[ShownTier, typer.Option(help="Which tier.")] = ShownTier.DRAM,
    tenant: Tenant = None,
    limit: Annotated[int, typer.Option(help="Blocks shown.", min=1)] = 50,
) -> None:
    """List blocks, the oldest first. A block's key says nothing about its tokens."""
    with _operator(socket, data_dir) as operator:
        _console().print(kv.list_screen(operator, Tier(tier.value), tenant, limit))


@kv_app.command("purge")
def purge_command(
    *,
    tenant: Annotated[str, typer.Option(help="As the keys file names it.")],
    socket: Socket = None,
    data_dir: DataDir = None,
) -> None:
    """Drop a tenant's blocks from DRAM and NVMe, but for those in use at this moment.

    Callers without a key are the tenant `default`.

    Within seconds the workers of this machine forget what they keep in HBM for reuse, of all tenants.
    """
    with _operator(socket, data_dir) as operator:
        num_blocks = kv.purge(operator, tenant)
    typer.echo(f"{num_blocks} blocks of {tenant} dropped")


@kv_app.command("warm")
def warm_command(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False)],
    url: Annotated[str, typer.Option(help="The gateway.")] = DEFAULT_URL,
    model: Annotated[
        str | None,
        typer.Option(help="Whose cache, where a line names none.", show_default="the first served"),
    ] = None,
    window: Annotated[int, typer.Option(help="Prompts in flight.", min=1, max=256)] = 4,
) -> None:
    """Fill the cache with the prompts of a file: one a line, plain text or JSON.

    JSON lines hold `prompt` (text or token ids) or `messages`, and what else shapes a prompt: `model`,
    `tools`, `cache_salt` and so on. Each is asked for one token; its
    blocks then lie in the tiers of the node that computed it, for the tenant of POINTSMAN_API_KEY.
    """
    job = WarmJob(file, url, os.environ.get("POINTSMAN_API_KEY") or None, window, model)
    raise typer.Exit(_asked(lambda: warm(job, Console())))


@contextmanager
def _operator(socket: Path | None, data_dir: Path | None) -> Iterator[KvdOperator]:
    named = socket or os.environ.get("POINTSMAN_KVD_SOCKET")
    path = Path(named) if named else DataDirectory(data_dir or default_path()).kvd_socket
    try:
        with KvdOperator(path, f"operator-{os.getpid()}") as operator:
            yield operator
    except KvdUnavailable as error:
        hint = "does a cache daemon run there? --data-dir or --kvd-socket names another"
        raise _refusal(f"{error}; {hint}") from error
    except TieringError as error:
        raise _refusal(str(error)) from error


def _console() -> Console:
    return Console(width=None if Console().is_terminal else _WIDE)


def _asked(question: Callable[[], int]) -> int:
    try:
        return question()
    except CommandRefused as error:
        raise _refusal(str(error)) from error


def _refusal(message: str) -> typer.Exit:
    Console(stderr=True).print(Text(f"pointsman: {message}"), soft_wrap=True)
    return typer.Exit(1)
