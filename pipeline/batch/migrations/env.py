"""What Alembic runs: the migrations on the connection, and in the transaction, that it was given."""

from __future__ import annotations

from alembic import context

from pipeline.batch.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
