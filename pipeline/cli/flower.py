"""How Flower is called: read-only, bounded, and with no secret among its arguments."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.interpreter import module_command

FLOWER_USER = "pointsman"


def flower_command(
    address: str, port: int, db: Path | None, url_prefix: str = ""
) -> tuple[str, ...]:
    """The command line of Flower.

    The password comes in the environment (`FLOWER_BASIC_AUTH`), the broker through the Celery
    application. Flower keeps 6.5 KB per task, so 10,000 tasks are about 65 MB.
    """
    persistence = () if db is None else ("--persistent=True", f"--db={db}")
    return module_command(
        "celery",
        *("-A", "pipeline.tasks.app", "flower"),
        f"--address={address}",
        f"--port={port}",
        "--read_only",
        "--max_tasks=10000",
        "--purge_offline_workers=60",
        "--state_save_interval=10000",
        *persistence,
        *((f"--url_prefix={url_prefix}",) if url_prefix else ()),
    )
