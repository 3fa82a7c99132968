"""The engines behind the model port: torch, and the digest and script test engines."""
