"""The worker process: a Celery worker whose pool is the inference engine."""
