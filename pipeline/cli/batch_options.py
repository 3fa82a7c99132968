"""The options of `pointsman batch`.

`run` works through the plain routes, or without a gateway; the others by /v1/batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from pipeline.batch.api_client import BatchApi
from pipeline.batch.line_client import LineClient, OnWait
from pipeline.batch.runner import BatchJob
from pipeline.cli import batch_remote
from pipeline.cli.batch_command import run_batch
from pipeline.cli.operate_options import find_redis_url
from pipeline.errors import UnknownSettings
from pipeline.logs import configure_logs
from pipeline.settings import load_pipeline_settings

DEFAULT_URL = "http://127.0.0.1:8000"
NO_GATEWAY = "redis"

batch_app = typer.Typer(
    help="Offline batches. The API key is read from POINTSMAN_API_KEY, so that no process list shows it.",
    no_args_is_help=True,
)

Input = Annotated[Path, typer.Argument(metavar="IN.jsonl", exists=True, dir_okay=False)]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl")]
Errors = Annotated[
    Path | None, typer.Option("--errors", help="Refused requests go here, not into OUT.")
]
Url = Annotated[str, typer.Option(help="The gateway.")]
BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="The id that `submit` printed.")]
Patience = Annotated[
    float, typer.Option("--patience-s", help="How long an absent gateway is waited for.", min=0)
]


@batch_app.command("run")
def run_command(
    *,
    input_path: Input,
    output_path: Output,
    errors_path: Errors = None,
    url: Annotated[
        str,
        typer.Option(
            help="The gateway; or `redis`: none, straight to the workers through the Redis of "
            "POINTSMAN_REDIS_URL or of `serve`."
        ),
    ] = DEFAULT_URL,
    window: Annotated[int, typer.Option(help="Requests in flight.", min=1, max=4096)] = 32,
    patience_s: Patience = 600.0,
) -> None:
    """Run a file request by request at low priority. Run it again to go on after a stop."""
    paths = [path.resolve() for path in (input_path, output_path, errors_path) if path is not None]
    if len(set(paths)) < len(paths):
        raise _refusal("input, output and errors must be different files")
    job = BatchJob(
        input_path=input_path,
        output_path=output_path,
        errors_path=errors_path,
        url=url,
        window=window,
        api_key=_api_key(),
        patience_s=patience_s,
    )
    make_client = _direct_client(patience_s) if url == NO_GATEWAY else None
    raise typer.Exit(run_batch(job, Console(), make_client))


@batch_app.command("submit")
def submit_command(
    *,
    input_path: Input,
    url: Url = DEFAULT_URL,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="May be given several times.")
    ] = None,
    watch: Annotated[bool, typer.Option(help="Stay until the batch is over.")] = False,
    patience_s: Patience = 600.0,
) -> None:
    """Hand a file to the gateway, which runs it by itself; prints the batch's id."""
    pairs = [text.partition("=") for text in metadata or ()]
    if not all(key and equals for key, equals, _ in pairs):
        raise _refusal("--metadata must be KEY=VALUE")
    fields = {key: value for key, _, value in pairs}
    with _api(url, patience_s) as api:
        code = batch_remote.submit(api, input_path, fields, Console(), watches=watch)
    raise typer.Exit(code)


@batch_app.command("status")
def status_command(
    batch_id: Annotated[str | None, typer.Argument(metavar="[BATCH]")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Say how a batch stands, or list the newest ones."""
    with _api(url, 0.0) as api:
        raise typer.Exit(batch_remote.status(api, batch_id, Console()))


@batch_app.command("watch")
def watch_command(batch_id: BatchId, url: Url = DEFAULT_URL, patience_s: Patience = 600.0) -> None:
    """Follow a batch to its end. Exit code 0 when it was completed."""
    with _api(url, patience_s) as api:
        raise typer.Exit(batch_remote.watch(api, batch_id, Console()))


@batch_app.command("cancel")
def cancel_command(batch_id: BatchId, url: Url = DEFAULT_URL, patience_s: Patience = 60.0) -> None:
    """Cancel a batch; what is done already can be fetched."""
    with _api(url, patience_s) as api:
        raise typer.Exit(batch_remote.cancel(api, batch_id, Console()))


@batch_app.command("fetch")
def fetch_command(
    *,
    batch_id: BatchId,
    output_path: Output,
    errors_path: Errors = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Download the results of a batch that is over."""
    with _api(url, 0.0) as api:
        code = batch_remote.fetch(api, batch_id, output_path, errors_path, Console())
    raise typer.Exit(code)


def _direct_client(patience_s: float) -> Callable[[OnWait], LineClient]:
    from pipeline.batch.direct_client import DirectClient  # noqa: PLC0415  # loads Celery and tokenizers

    url = find_redis_url(None, None)
    try:
        settings = load_pipeline_settings().model_copy(update={"redis_url": url})
    except (UnknownSettings, ValidationError) as error:
        raise _refusal(str(error)) from error
    configure_logs("error", settings.log_format)  # the screen is the batch's
    return partial(DirectClient, settings, patience_s)


def _api(url: str, patience_s: float) -> BatchApi:
    return BatchApi(url, _api_key(), patience_s)


def _api_key() -> str | None:
    return os.environ.get("POINTSMAN_API_KEY") or None


def _refusal(sentence: str) -> typer.Exit:
    Console(stderr=True).print(Text(f"pointsman: {sentence}"), soft_wrap=True)
    return typer.Exit(1)
