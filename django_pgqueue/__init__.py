"""Background tasks for Django that live in the same PostgreSQL, and the same transaction, as their data."""

from .backend import PgQueueBackend
from .exceptions import Fail, JobBusy, JobKeyHeld, PgQueueError, Retry, Snooze
from .tasks import Context, JobResult, Task, task

__all__ = [
    "Context",
    "Fail",
    "JobBusy",
    "JobKeyHeld",
    "JobResult",
    "PgQueueBackend",
    "PgQueueError",
    "Retry",
    "Snooze",
    "Task",
    "task",
]
