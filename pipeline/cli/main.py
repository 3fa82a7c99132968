"""The `pointsman` command line. It only reads options; each command lives in a module of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.text import Text

from pipeline.cli.batch_options import batch_app
from pipeline.cli.data_directory import DataDirectory, default_path
from pipeline.cli.doctor import State, as_table, examine
from pipeline.cli.errors import CommandRefused, PathUnusable
from pipeline.cli.interpreter import module_command
from pipeline.cli.kv_options import kv_app
from pipeline.cli.model_store import convert_once
from pipeline.cli.operate_options import (
    dlq_app,
    drain_command,
    link_test_command,
    redis_acl_command,
    status_command,
)
from pipeline.cli.screen import Screen
from pipeline.cli.serve import serve
from pipeline.cli.serve_options import EngineName, ServeOptions, parse_bytes, parse_workers
from pipeline.cli.single_parts import become, become_flower

DEFAULT_PORT = 8000
DEFAULT_FLOWER_PORT = 5555
_MODEL_MEMORY = "--model-memory"

app = typer.Typer(
    help="Queue-based LLM inference: prefill and decode workers on Celery, tiered KV blocks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(batch_app, name="batch")
app.add_typer(dlq_app, name="dlq")
app.add_typer(kv_app, name="kv")
app.command("status")(status_command)
app.command("drain")(drain_command)
app.command("link-test")(link_test_command)
app.command("redis-acl")(redis_acl_command)

RedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help="Redis 7 or later, or Valkey; a URL.")
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Where state and logs live.", show_default=str(default_path())),
]
Engine = Annotated[EngineName | None, typer.Option("--engine", help="digest, script: for tests.")]
ModelName = Annotated[str | None, typer.Option("--model-name", help="The name that clients use.")]
KvdSocket = Annotated[Path | None, typer.Option("--kvd-socket", help="The node's cache daemon.")]
Models = Annotated[
    list[str] | None,
    typer.Option(
        help="Hugging Face directory or GGUF file (script engine: script file); once or more.",
        show_default="SmolLM2-135M-Instruct",
    ),
]
ModelMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for the workers of all models; one that is asked for makes one not used go.",
        show_default="all models stay",
    ),
]
KeepWarm = Annotated[
    list[str] | None, typer.Option(help="A model that always stays; once or more.")
]
# Of `serve`; the other parts read these variables themselves.
ServeHost = Annotated[
    str,
    typer.Option(help="Address of the API.", envvar="POINTSMAN_GATEWAY_HOST", show_envvar=False),
]
ServePort = Annotated[
    int,
    typer.Option(
        help="Port of the API.",
        min=1,
        max=65535,
        envvar="POINTSMAN_GATEWAY_PORT",
        show_envvar=False,
    ),
]
ServeEngine = Annotated[
    EngineName,
    typer.Option(
        help="digest and script are test engines.", envvar="POINTSMAN_ENGINE", show_envvar=False
    ),
]
ServeRedis = Annotated[
    str | None,
    typer.Option(
        help="A running Redis.",
        show_default="one of our own",
        envvar="POINTSMAN_REDIS_URL",
        show_envvar=False,
    ),
]
KeysFile = Annotated[
    Path | None,
    typer.Option(
        help="API keys; without one, every caller is let in.",
        envvar="POINTSMAN_GATEWAY_KEYS_FILE",
        show_envvar=False,
    ),
]
Node = Annotated[str | None, typer.Option("--node", help="This machine's name in the pipeline.")]


@app.command("serve")
def serve_command(  # noqa: PLR0913 (one parameter per option)
    *,
    host: ServeHost = "127.0.0.1",
    port: ServePort = DEFAULT_PORT,
    data_dir: DataDir = None,
    model: Models = None,
    engine: ServeEngine = EngineName.TORCH,
    workers: Annotated[
        str, typer.Option(help="How many of which role, for each model: prefill, decode, both.")
    ] = "prefill=1,decode=1",
    model_memory: ModelMemory = None,
    keep_warm: KeepWarm = None,
    redis_url: ServeRedis = None,
    flower: Annotated[bool, typer.Option(help="The task view.")] = True,
    flower_port: Annotated[
        int, typer.Option(help="Port of Flower, on loopback.", min=1, max=65535)
    ] = DEFAULT_FLOWER_PORT,
    keys_file: KeysFile = None,
    kv_dram: Annotated[
        str | None,
        typer.Option(help="KV blocks in memory.", show_default="1GiB, at most 1/8 of what is free"),
    ] = None,
    kv_nvme: Annotated[
        str | None,
        typer.Option(help="KV blocks on disk.", show_default="4GiB, at most 1/10 of what is free"),
    ] = None,
    drain_s: Annotated[
        float, typer.Option(help="How long running requests get at the end.", min=0)
    ] = 30.0,
) -> None:
    """Start everything on this machine and look after it until Ctrl-C.

    An option that is not given is taken from the environment, as docs/settings.md has it.
    """
    directory = DataDirectory(data_dir or default_path())
    try:
        options = ServeOptions(
            host=host,
            port=port,
            models=tuple(model or _model_of_environment()),
            engine=engine,
            workers=parse_workers(workers),
            redis_url=redis_url,
            flower_port=flower_port if flower else None,
            keys_file=keys_file.absolute() if keys_file is not None else None,
            kv_dram_bytes=_dram_bytes(kv_dram),
            kv_nvme_bytes=_nvme_bytes(kv_nvme, directory.path),
            drain_s=drain_s,
            model_bytes=None if model_memory is None else parse_bytes(model_memory, _MODEL_MEMORY),
            keep_warm=tuple(keep_warm or ()),
        )
        serve(options, directory, Screen(Console()))
    except CommandRefused as error:
        raise _refusal(error) from error
    except OSError as error:
        raise _refusal(PathUnusable(error, "--data-dir")) from error


@app.command("gateway")
def gateway_command(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", min=1, max=65535)] = None,
    redis_url: RedisUrl = None,
    engine: Engine = None,
    model: Annotated[Path | None, typer.Option(help="Model directory, for its tokenizer.")] = None,
    model_name: ModelName = None,
) -> None:
    """Start one gateway: HTTP in, tasks out, tokens back."""
    become(
        module_command("gateway"),
        {
            "POINTSMAN_GATEWAY_HOST": host,
            "POINTSMAN_GATEWAY_PORT": port,
            "POINTSMAN_REDIS_URL": redis_url,
            "POINTSMAN_ENGINE": engine,
            "POINTSMAN_MODEL": model,
            "POINTSMAN_MODEL_NAME": model_name,
        },
    )


@app.command("worker")
def worker_command(  # noqa: PLR0913 (one parameter per option)
    *,
    role: Annotated[str | None, typer.Option(help="prefill, decode or both.")] = None,
    name: Annotated[str | None, typer.Option(help="Unique in the pipeline.")] = None,
    node: Node = None,
    redis_url: RedisUrl = None,
    engine: Engine = None,
    model: Annotated[Path | None, typer.Option(help="Model directory, or script file.")] = None,
    model_name: ModelName = None,
    kvd_socket: KvdSocket = None,
    threads: Annotated[int | None, typer.Option(help="Cores that it may use.", min=1)] = None,
) -> None:
    """Start one worker: a Celery worker whose pool is the engine."""
    become(
        module_command("workers"),
        {
            "POINTSMAN_WORKER_ROLE": role,
            "POINTSMAN_WORKER_NAME": name,
            "POINTSMAN_NODE": node,
            "POINTSMAN_REDIS_URL": redis_url,
            "POINTSMAN_ENGINE": engine,
            "POINTSMAN_MODEL": model,
            "POINTSMAN_MODEL_NAME": model_name,
            "POINTSMAN_KVD_SOCKET": kvd_socket,
            "POINTSMAN_WORKER_THREADS": threads,
            "OMP_NUM_THREADS": threads,
        },
    )


@app.command("kvd")
def kvd_command(
    socket: Annotated[Path | None, typer.Option(help="Unix socket to listen on.")] = None,
    dram: Annotated[str | None, typer.Option(help="Size of the memory tier.")] = None,
    nvme: Annotated[str | None, typer.Option(help="Size of the disk tier; 0: none.")] = None,
    nvme_path: Annotated[Path | None, typer.Option(help="The disk tier's file.")] = None,
    peer_host: Annotated[
        str | None, typer.Option(help="Where other nodes may pull blocks.", show_default="loopback")
    ] = None,
    peer_port: Annotated[
        int | None, typer.Option(help="Its port; 0: any.", show_default="none", min=0, max=65535)
    ] = None,
) -> None:
    """Start this machine's cache daemon for KV blocks.

    Nodes that lend to each other share the secret in POINTSMAN_KVD_PEER_SECRET.
    """
    try:
        settings = {
            "POINTSMAN_KVD_SOCKET": socket,
            "POINTSMAN_KVD_DRAM_BYTES": None if dram is None else parse_bytes(dram, "--dram"),
            "POINTSMAN_KVD_NVME_BYTES": None if nvme is None else parse_bytes(nvme, "--nvme"),
            "POINTSMAN_KVD_NVME_PATH": nvme_path,
            "POINTSMAN_KVD_PEER_HOST": peer_host,
            "POINTSMAN_KVD_PEER_PORT": peer_port,
        }
    except CommandRefused as error:
        raise _refusal(error) from error
    become(module_command("tiering.kvd"), settings)


@app.command("flower")
def flower_command(
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = DEFAULT_FLOWER_PORT,
    redis_url: RedisUrl = None,
    auth_file: Annotated[
        Path | None,
        typer.Option(
            help="Holds user:password, made when missing. FLOWER_BASIC_AUTH goes before it.",
            show_default="flower.auth in the data directory",
        ),
    ] = None,
    db: Annotated[Path | None, typer.Option(help="Keeps the task view over restarts.")] = None,
) -> None:
    """Start Flower on the pipeline's tasks, read-only and behind a password."""
    try:
        become_flower(redis_url, address, port, db, auth_file or default_path() / "flower.auth")
    except OSError as error:
        raise _refusal(PathUnusable(error, "--auth-file or --db")) from error


@app.command("convert")
def convert_command(
    out: Annotated[Path, typer.Option(help="The Hugging Face directory to make.")],
    gguf: Annotated[
        Path | None,
        typer.Option(help="What to convert.", show_default="the packaged SmolLM2-135M-Instruct"),
    ] = None,
) -> None:
    """Convert a GGUF file into a model directory; nothing to do when that is there already."""
    try:
        convert_once(out.absolute(), gguf, Screen(Console()))
    except CommandRefused as error:
        raise _refusal(error) from error


@app.command("doctor")
def doctor_command(
    data_dir: DataDir = None,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API.")] = DEFAULT_PORT,
) -> None:
    """Say what this machine has and lacks. Exit code 1 when something needed is missing."""
    findings = examine((data_dir or default_path()).expanduser().absolute(), host, port)
    Console().print(as_table(findings))
    if any(finding.state is State.MISSING for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the `pointsman` script."""
    app()


def _model_of_environment() -> tuple[str, ...]:
    """By hand: an option that may be given several times would cut a path at its spaces."""
    given = os.environ.get("POINTSMAN_MODEL")
    return (given,) if given else ()


def _dram_bytes(text: str | None) -> int:
    if text is not None:
        return parse_bytes(text, "--kv-dram")
    return int(min(2**30, psutil.virtual_memory().available // 8))


def _nvme_bytes(text: str | None, path: Path) -> int:
    if text is not None:
        return parse_bytes(text, "--kv-nvme")
    place = next(parent for parent in (path, *path.parents) if parent.is_dir())
    return int(min(4 * 2**30, shutil.disk_usage(place).free // 10))


def _refusal(error: CommandRefused) -> typer.Exit:
    Console(stderr=True).print(Text(f"pointsman: {error}"), soft_wrap=True)
    return typer.Exit(1)


if __name__ == "__main__":
    main()
