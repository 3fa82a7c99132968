"""The HTTP process: OpenAI routes, submit-and-stream jobs, health and metrics."""
