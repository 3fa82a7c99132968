"""The database's history, for Alembic; run by `pipeline.batch.database` at every start."""
