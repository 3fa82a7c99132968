"""Celery: the app, its queues, its tasks. The only room of this package that knows Celery."""
