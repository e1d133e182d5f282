"""
Everything that this package raises or records under a name of its own.

    PgQueueError
    ├── JobBusy           a person's action met a row that someone else holds
    ├── JobKeyHeld        a dead letter cannot be requeued: a live job has its key
    ├── WorkerCrashed     recorded: the process that ran the attempt died
    ├── ClaimExpired      recorded: the lease ran out and nobody renewed it
    ├── UnstorableResult  recorded: the task returned what the database cannot keep
    └── TransactionEnded  recorded: an atomic task has ended its own transaction

    Interruption          raised in a running task that has to end; a BaseException
    ├── TaskTimeout       it has run for longer than its timeout
    ├── TaskCancelled     a person has cancelled the job
    ├── ClaimLost         the claim is someone else's by now
    └── Interrupted       the worker stops

    Retry, Snooze, Fail   raised by tasks to say how an attempt ends; not errors of ours

The recorded ones are never raised at a caller. All are importable so that
``TaskResult.errors[n].exception_class`` works. Wrong options raise Django's ``ImproperlyConfigured``,
wrong tasks its ``InvalidTask``, wrong arguments ``TypeError`` or ``ValueError``.
"""

from datetime import timedelta


class PgQueueError(Exception):
    """The base of this package's errors."""


class JobBusy(PgQueueError):
    """Another transaction holds the job's row at this moment. Nothing was changed; try again."""


class JobKeyHeld(PgQueueError):
    """The job cannot be requeued: a live job of the same task has its key."""


class WorkerCrashed(PgQueueError):
    """The worker process died while it ran this attempt."""


class ClaimExpired(PgQueueError):
    """The lease of this attempt ran out: its worker was killed, stalled, or cut off from the database."""


class UnstorableResult(PgQueueError):
    """The task returned a value that cannot be stored as JSON."""


class TransactionEnded(PgQueueError):
    """An atomic task has ended the transaction that it runs in, so that its effects and its end cannot be one."""


class Interruption(BaseException):
    """
    The base of what is raised in a running task from outside, so that it ends.

    Not an ``Exception``, so that a task's ``except Exception`` does not take it for an error of its own. A
    task may clean up in ``finally``. One that catches it and goes on is interrupted once more; after the
    grace period the process is replaced. In an async task it is a ``CancelledError``.
    """

    text = "The task was interrupted."

    def __init__(self, *args: object) -> None:
        super().__init__(*(args or (self.text,)))


class TaskTimeout(Interruption):
    """The task ran for longer than its timeout."""

    text = "The task ran for longer than its timeout."


class TaskCancelled(Interruption):
    """Someone cancelled the job while its task was running."""

    text = "The job was cancelled while its task was running."


class ClaimLost(Interruption):
    """The claim of this attempt is not this worker's any more; what the task does is not recorded."""

    text = "The claim of this attempt was lost."


class Interrupted(Interruption):
    """The worker stopped before the task had finished; the job went back to the queue."""

    text = "The worker stopped before the task had finished."


class Retry(Exception):
    """
    Raise in a task to end the attempt and run the job again later.

    *delay* is in seconds, or a ``timedelta``; without it the task's backoff decides. The attempt
    counts: when it was the last one, the job becomes a dead letter.
    """

    def __init__(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        super().__init__(reason or "the task asked to be retried")
        self.delay = delay


class Snooze(Exception):
    """
    Raise in a task to run the job again later without using up an attempt: it was too early.

    *delay* is in seconds, or a ``timedelta``. A job may be snoozed a thousand times; then it is failed.
    """

    def __init__(self, delay: float | timedelta, reason: str = "") -> None:
        super().__init__(reason or "the task asked to be run later")
        self.delay = delay


class Fail(Exception):
    """Raise in a task to make the job a dead letter at once, whatever attempts it has left."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the task gave up")
