"""The vocabulary that all processes share: requests, sampling, tokens, failures. Pure Python."""
