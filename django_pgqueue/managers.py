"""
The verbs of jobs, each one call, on any database alias and in the caller's transaction.

    enqueue, enqueue_many       insert
    claim, settle               begin and end the right to run a job
    renew, recover              keep claims alive, take back dead ones
    requeue, prune              set-wise, on any queryset

The worker runs the same statements on a connection of its own; these calls serve tests, tools and the admin.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from django.db import connections, models, router, transaction
from django.db.utils import OperationalError

from . import backoff
from .exceptions import ClaimExpired, JobBusy
from .outcomes import Claim, Outcome, Released, class_path_of
from .statements import claim as claiming
from .statements import enqueue as enqueueing
from .statements import leases, upkeep
from .statements.database import ERRORS, PLANNER_SETTINGS_SQL, execute, is_lock_conflict, is_refusal
from .statements.settle import Settlement, settle, settle_carefully
from .states import REQUEUABLE, AttemptOutcome, Status

BATCH_ROWS = 1_000  # rows of one transaction of a set-wise verb
EXPIRED_TEXT = "The lease ran out: the worker was killed, stalled, or cut off from the database."


class Requeued(NamedTuple):
    """How many jobs a requeue put back, met locked, and met no longer failed or cancelled."""

    requeued: int
    busy: int
    skipped: int


class JobQuerySet(models.QuerySet):
    def requeue(self, each_batch: Callable[[set[int]], object] | None = None) -> Requeued:
        """
        Give the failed and cancelled jobs of this queryset fresh attempts, available now.

        Works in batches, each in a transaction of its own unless the caller holds one, and waits for
        nobody: rows that another transaction holds are counted as busy. Rows enter by the ids that the
        queryset finds at the start of each batch. *each_batch* is called with the ids that a batch has
        requeued, inside its transaction, so that what it writes is committed with them.
        """
        using = self._write_alias
        requeued = busy = total = 0
        for ids in self.using(using)._batches_of_ids(Status.values):
            total += len(ids)
            with transaction.atomic(using=using, savepoint=False):
                done = upkeep.requeue(connections[using], ids)
                remaining = [job_id for job_id in ids if job_id not in done]
                busy += upkeep.count_requeuable(connections[using], remaining) if remaining else 0
                if each_batch is not None and done:
                    each_batch(done)
            requeued += len(done)
        return Requeued(requeued, busy, total - requeued - busy)

    def prune(self, older_than_seconds: float) -> int:
        """
        Delete the done jobs of this queryset that finished that long ago, and return how many.

        Works in batches, each in a transaction of its own unless the caller holds one; rows that
        someone else holds stay.
        """
        using = self._write_alias
        age = models.Func(
            models.Value(older_than_seconds),
            template="clock_timestamp() - make_interval(secs => %(expressions)s)",
            output_field=models.DateTimeField(),
        )
        deleted = 0
        for ids in self.using(using).filter(finished_at__lt=age)._batches_of_ids([Status.DONE]):
            with transaction.atomic(using=using, savepoint=False):
                deleted += upkeep.delete_done(connections[using], ids)
        return deleted

    @property
    def _write_alias(self) -> str:
        # Unlike ``db``, which may be a replica as long as the queryset only reads.
        return self._db or router.db_for_write(self.model)  # type: ignore[attr-defined]

    def _batches_of_ids(self, statuses: Sequence[str]) -> Iterable[list[int]]:
        """Yield the ids of this queryset's rows in *statuses*, in ascending batches."""
        if self.query.is_sliced:
            yield from _chunks(sorted(set(self.values_list("pk", flat=True))))
            return
        last = 0
        rows = self.filter(status__in=statuses).order_by("pk").values_list("pk", flat=True)
        # A queryset that joins attempts has a row for each of them.
        while ids := sorted(set(rows.filter(pk__gt=last)[:BATCH_ROWS])):
            yield ids
            last = ids[-1]


class JobManager(models.Manager.from_queryset(JobQuerySet)):  # type: ignore[misc]
    """
    The queue. Like every manager it asks the router, or ``using()``, for its database; unlike others it
    always reads from the one that is written to.
    """

    def enqueue(self, job: enqueueing.NewJob) -> enqueueing.Inserted:
        """Insert *job* as pending, in the caller's transaction. Tasks call this through their backend."""
        return enqueueing.insert_job(self._connection, job)

    def enqueue_many(self, template: enqueueing.NewJob, calls: Sequence[tuple[str, str]]) -> list[int]:
        """Insert a pending job like *template* for each (args, kwargs) of *calls*, all or none; return their ids."""
        with transaction.atomic(using=self._alias, savepoint=False):
            return enqueueing.insert_jobs(self._connection, template, calls)

    def claim(
        self, owner: str, limit: int = 1, *, queue_names: Sequence[str] | None = None, lease_seconds: float = 60
    ) -> list[claiming.ClaimedJob]:
        """
        Claim up to *limit* due jobs, of all queues or of *queue_names*, for *owner*.

        Higher priority first, then the longest available. An empty list means "nothing available now":
        jobs may be locked by others, or not due. Outside a transaction the claim commits at once. At
        isolation levels above Read Committed a concurrent claim raises ``OperationalError`` (40001).
        """
        connection = self._connection
        ours = not connection.in_atomic_block  # then settings for the planner disturb nobody
        with transaction.atomic(using=self._alias, savepoint=False):
            if ours:
                execute(connection, PLANNER_SETTINGS_SQL)
            bands = claiming.due(claiming.sweep(connection, queue_names))
            return claiming.claim(connection, bands, owner, limit, lease_seconds)

    def settle(self, outcomes: Sequence[Outcome]) -> Settlement:
        """
        Write how claims have ended, at most one outcome for each job; never disturbs the caller's transaction.

        What the returned `Settlement` lists as lost belongs to someone else by now and was not touched.
        """
        try:
            with self._atomic():
                return settle(self._connection, outcomes)
        except (*ERRORS, UnicodeEncodeError) as error:
            if not is_lock_conflict(error) and not is_refusal(error):
                raise
            return settle_carefully(self._connection, outcomes, self._atomic)

    def renew(self, claims: Sequence[Claim], lease_seconds: float = 60) -> set[int]:
        """
        Let the leases of *claims* end *lease_seconds* from now, by the database's clock.

        Return the ids of the jobs still held. One that is missing was claimed by another worker or has
        ended, or its row is locked at this moment: then the lease runs on as it was.
        """
        return leases.renew(self._connection, claims, lease_seconds)

    def release(self, claims: Sequence[Claim]) -> Settlement:
        """Give *claims* back before their tasks have started: pending again, attempts refunded."""
        return self.settle([Released(claim) for claim in claims])

    def recover(self, limit: int = 500) -> list[leases.Recovered]:
        """
        Take back up to *limit* running jobs whose lease has ended, by the database's clock.

        Each goes back to pending after the default backoff, or to failed when its attempts are used up;
        the attempt counts and is recorded as lost. A renewal that commits first wins.
        """
        with self._atomic():
            jobs = leases.lock_expired(self._connection, limit)
            return recover_lost(self._connection, jobs)

    def requeue_one(self, job_id: int) -> bool:
        """See `Job.requeue`."""
        try:
            with self._atomic():
                if upkeep.lock_one(self._connection, job_id) not in REQUEUABLE:
                    return False
                return job_id in upkeep.requeue(self._connection, [job_id])
        except OperationalError as error:
            if is_lock_conflict(error):
                raise JobBusy(f"Job {job_id} is held by another transaction at this moment. Try again.") from error
            raise

    @property
    def _alias(self) -> str:
        return self._db or router.db_for_write(self.model)

    @property
    def _connection(self) -> Any:
        return connections[self._alias]

    @property
    def _atomic(self) -> Callable[[], AbstractContextManager[Any]]:
        return partial(transaction.atomic, using=self._alias)


def recover_lost(connection: Any, jobs: Sequence[leases.Running]) -> list[leases.Recovered]:
    """Take back *jobs*, locked in this transaction because their lease has ended."""
    delays = [backoff.default_delay(job.attempts) for job in jobs]
    return leases.recover(connection, jobs, delays, AttemptOutcome.LOST, class_path_of(ClaimExpired), EXPIRED_TEXT)


def _chunks(ids: list[int]) -> Iterable[list[int]]:
    return (ids[start : start + BATCH_ROWS] for start in range(0, len(ids), BATCH_ROWS))
