"""From the token logs to the readers: one subscription per gateway process, replay, follow."""
