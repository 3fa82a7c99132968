"""Which models the lines of a batch may ask for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """One column; NULL, as batches have that are there already, means all models."""
    op.add_column("batches", sa.Column("models_json", sa.Text))


def downgrade() -> None:
    """Take it away."""
    op.drop_column("batches", "models_json")
