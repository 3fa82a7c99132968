"""The `pointsman` command: starts the processes, looks after them, and runs batches."""
