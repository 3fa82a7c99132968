"""`python -m gateway`: the gateway process, configured by POINTSMAN_GATEWAY_* and POINTSMAN_*."""

from __future__ import annotations

import sys

from gateway.app import create_app
from gateway.auth import KeysFileBroken
from gateway.server import make_server
from gateway.settings import load_gateway_settings
from pipeline.errors import DatabaseUnusable, SettingsInvalid, StoreLossy, UnknownSettings
from pipeline.intake.errors import ModelFilesUnusable
from pipeline.ledger.store_check import refuse_lossy_store
from pipeline.logs import configure_logs
from pipeline.settings import load_pipeline_settings

_REFUSALS = (DatabaseUnusable, UnknownSettings, SettingsInvalid, StoreLossy)
# How long a thread that encodes may keep the event loop waiting: five times less than by default.
_SWITCH_INTERVAL_S = 0.001
_BROKEN_FILES = (ModelFilesUnusable, KeysFileBroken, OSError)


def main() -> int:
    """Run until a signal; 0 after a drained stop, 2 for settings or files that make no sense."""
    try:
        gateway, pipeline = load_gateway_settings(), load_pipeline_settings()
        configure_logs(pipeline.log_level, pipeline.log_format)
        refuse_lossy_store(pipeline.redis_url)
        app = create_app(gateway, pipeline)
    except (*_REFUSALS, *_BROKEN_FILES) as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    make_server(app, gateway).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
