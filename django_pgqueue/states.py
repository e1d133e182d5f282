"""The states of a job, how an attempt can end, and what Django's Tasks framework calls them."""

from django.db import models
from django.utils.translation import pgettext_lazy

from .compat import TaskResultStatus


class Status(models.TextChoices):
    """Where a job stands. *Live* jobs will still run, or run now; the others only by a requeue."""

    PENDING = "pending", pgettext_lazy("job status", "pending")
    BLOCKED = "blocked", pgettext_lazy("job status", "blocked")
    HELD = "held", pgettext_lazy("job status", "held")
    RUNNING = "running", pgettext_lazy("job status", "running")
    DONE = "done", pgettext_lazy("job status", "done")
    FAILED = "failed", pgettext_lazy("job status", "failed")
    CANCELLED = "cancelled", pgettext_lazy("job status", "cancelled")


class AttemptOutcome(models.TextChoices):
    """How an attempt that did not succeed has ended."""

    ERROR = "error", pgettext_lazy("attempt outcome", "error")  # the task raised, or its result was refused
    TIMEOUT = "timeout", pgettext_lazy("attempt outcome", "timeout")
    CRASHED = "crashed", pgettext_lazy("attempt outcome", "crashed")  # its process died
    LOST = "lost", pgettext_lazy("attempt outcome", "lost")  # its lease ran out
    RELEASED = "released", pgettext_lazy("attempt outcome", "released")  # handed back by a worker that stopped
    CANCELLED = "cancelled", pgettext_lazy("attempt outcome", "cancelled")


LIVE = (Status.PENDING, Status.BLOCKED, Status.HELD, Status.RUNNING)
FINISHED = (Status.DONE, Status.FAILED, Status.CANCELLED)
REQUEUABLE = (Status.FAILED, Status.CANCELLED)

RESULT_STATUS = {
    Status.PENDING: TaskResultStatus.READY,
    Status.BLOCKED: TaskResultStatus.READY,
    Status.HELD: TaskResultStatus.READY,
    Status.RUNNING: TaskResultStatus.RUNNING,
    Status.DONE: TaskResultStatus.SUCCESSFUL,
    Status.FAILED: TaskResultStatus.FAILED,
    Status.CANCELLED: TaskResultStatus.FAILED,
}
