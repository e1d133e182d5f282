"""``manage.py pgqueue_worker``: `runworker` under a name that no other app has."""

from .runworker import Command

__all__ = ["Command"]
