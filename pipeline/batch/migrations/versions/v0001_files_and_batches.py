"""Files, batches, their lines and results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the four tables."""
    op.create_table(
        "files",
        sa.Column("number", SERIAL, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("tenant", sa.String(256), nullable=False),
        sa.Column("name_json", sa.Text, nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_s", sa.BigInteger, nullable=False),
        sa.Column("expires_s", sa.BigInteger),
        sqlite_autoincrement=True,
    )
    op.create_index("files_of_tenant", "files", ["tenant", "number"])
    op.create_index("files_by_expiry", "files", ["expires_s"])
    _create_batches()
    op.create_table(
        "batch_lines",
        sa.Column("batch", SERIAL, primary_key=True, autoincrement=False),
        sa.Column("line", sa.Integer, primary_key=True),
        sa.Column("custom_id_json", sa.Text, nullable=False),
        sa.Column("start_byte", sa.BigInteger, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "batch_results",
        sa.Column("batch", SERIAL, primary_key=True, autoincrement=False),
        sa.Column("line", sa.Integer, primary_key=True),
        sa.Column("is_success", sa.Boolean, nullable=False),
        sa.Column("output", sa.LargeBinary, nullable=False),
    )


def _create_batches() -> None:
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
    counts = ("num_lines", "num_completed", "num_failed")
    tokens = ("input_tokens", "cached_tokens", "output_tokens")
    op.create_table(
        "batches",
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
        sa.Column("created_s", sa.BigInteger, nullable=False),
        sa.Column("expires_s", sa.BigInteger, nullable=False),
        *(sa.Column(f"{name}_s", sa.BigInteger) for name in (*times, "cancelled")),
        *(
            sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
            for name in (*counts, *tokens)
        ),
        sa.Column("has_rows", sa.Boolean, nullable=False, server_default=sa.true()),
        sqlite_autoincrement=True,
    )
    op.create_index("batches_of_tenant", "batches", ["tenant", "number"])
    op.create_index("batches_by_status", "batches", ["status"])


def downgrade() -> None:
    """Take all of them away, with what they hold."""
    for table in ("batch_results", "batch_lines", "batches", "files"):
        op.drop_table(table)
