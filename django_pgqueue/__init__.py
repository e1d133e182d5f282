"""Background tasks for Django that live in the same PostgreSQL, and the same transaction, as their data."""

from .backend import PgQueueBackend
from .exceptions import Fail, JobBusy, JobKeyHeld, PgQueueError, Retry
from .tasks import Context, Task, task

__all__ = ["Context", "Fail", "JobBusy", "JobKeyHeld", "PgQueueBackend", "PgQueueError", "Retry", "Task", "task"]
