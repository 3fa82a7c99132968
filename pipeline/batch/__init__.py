"""Offline batches: OpenAI's batch line format in, one result line per request out."""
