"""The tables of files and batches. A change here needs a migration in `migrations/versions`.

Times are Unix seconds of the gateway that wrote them. `number` counts up and gives lists their order.
Texts that clients send are kept as JSON, because PostgreSQL takes no NUL character.
"""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()
SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")

FILES = sa.Table(
    "files",
    METADATA,
    sa.Column("number", SERIAL, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("tenant", sa.String(256), nullable=False),
    sa.Column("name_json", sa.Text, nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_s", sa.BigInteger, nullable=False),
    sa.Column("expires_s", sa.BigInteger),
    sa.Index("files_of_tenant", "tenant", "number"),
    sa.Index("files_by_expiry", "expires_s"),
    sqlite_autoincrement=True,  # a deleted row's number must not come again
)

BATCHES = sa.Table(
    "batches",
    METADATA,
    sa.Column("number", SERIAL, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("tenant", sa.String(256), nullable=False),
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    sa.Column("output_lifetime_s", sa.BigInteger),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("errors_json", sa.Text),
    sa.Column("metadata_json", sa.Text),
    sa.Column("model", sa.Text),
    sa.Column("models_json", sa.Text),
    sa.Column("created_s", sa.BigInteger, nullable=False),
    sa.Column("expires_s", sa.BigInteger, nullable=False),
    sa.Column("in_progress_s", sa.BigInteger),
    sa.Column("finalizing_s", sa.BigInteger),
    sa.Column("completed_s", sa.BigInteger),
    sa.Column("failed_s", sa.BigInteger),
    sa.Column("expired_s", sa.BigInteger),
    sa.Column("cancelling_s", sa.BigInteger),
    sa.Column("cancelled_s", sa.BigInteger),
    sa.Column("num_lines", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("num_completed", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("num_failed", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("input_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("output_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("has_rows", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.Index("batches_of_tenant", "tenant", "number"),
    sa.Index("batches_by_status", "status"),
    sqlite_autoincrement=True,
)

# One row per request of the input: where it lies in the file.
LINES = sa.Table(
    "batch_lines",
    METADATA,
    sa.Column("batch", SERIAL, primary_key=True, autoincrement=False),
    sa.Column("line", sa.Integer, primary_key=True),
    sa.Column("custom_id_json", sa.Text, nullable=False),
    sa.Column("start_byte", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

# One row per request that has its answer; `output` is the whole line of the output or error file.
RESULTS = sa.Table(
    "batch_results",
    METADATA,
    sa.Column("batch", SERIAL, primary_key=True, autoincrement=False),
    sa.Column("line", sa.Integer, primary_key=True),
    sa.Column("is_success", sa.Boolean, nullable=False),
    sa.Column("output", sa.LargeBinary, nullable=False),
)
