"""KV blocks and where their bytes live; knows no request, no Celery, no HTTP."""
