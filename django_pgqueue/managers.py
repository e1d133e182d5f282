"""
The verbs of jobs, each one call, on any database alias and in the caller's transaction.

    enqueue, enqueue_many       insert
    claim, settle               begin and end the right to run a job
    renew, recover              keep claims alive, take back dead ones
    hold, unhold, cancel,
    requeue, prune              set-wise, on any queryset

The worker runs the same statements on a connection of its own; these calls serve tests, tools and the admin.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from django.db import connections, models, router, transaction
from django.db.utils import IntegrityError, OperationalError

from . import backoff
from .conf import Notify
from .exceptions import ClaimExpired, JobBusy, JobKeyHeld
from .outcomes import Claim, Outcome, Released, class_path_of
from .statements import claim as claiming
from .statements import enqueue as enqueueing
from .statements import leases, people, upkeep
from .statements.database import ERRORS, PLANNER_SETTINGS_SQL, execute, is_lock_conflict, is_refusal
from .statements.settle import Settlement, settle, settle_carefully
from .states import AttemptOutcome, Status

BATCH_ROWS = 1_000  # rows of one transaction of a set-wise verb
EXPIRED_TEXT = "The lease ran out: the worker was killed, stalled, or cut off from the database."


class Changed(NamedTuple):
    """
    What a verb did: how many jobs it changed, met locked, and met in a status that it does not take.

    *key_held* counts the jobs left out of a requeue because a live job has their key, *running* those of
    the changed that a worker was running: their tasks are being stopped. True if any job was changed.
    """

    changed: int
    busy: int
    skipped: int
    key_held: int = 0
    running: int = 0

    def __bool__(self) -> bool:
        return self.changed > 0


EachBatch = Callable[[set[int]], object]


class JobQuerySet(models.QuerySet):
    """
    The verbs that take many jobs work in batches, each in a transaction of its own unless the caller holds
    one, and wait for nobody: rows that another transaction holds are counted as busy. A batch takes the
    ids that the queryset finds when it begins. *each_batch* is called with the ids that a batch has
    changed, inside its transaction, so that what it writes is committed with them.
    """

    def hold(self, each_batch: EachBatch | None = None) -> Changed:
        """Set the pending jobs of this queryset aside: they do not run until `unhold`."""
        return self._change(people.HOLD, each_batch)

    def unhold(self, each_batch: EachBatch | None = None) -> Changed:
        """Put the held jobs of this queryset back, to run when they are due."""
        return self._change(people.UNHOLD, each_batch)

    def cancel(self, each_batch: EachBatch | None = None) -> Changed:
        """
        End the pending and held jobs of this queryset without running them, and stop the running ones.

        From then on nothing that the task of a running one does is recorded: the worker that runs it hears of
        it at once, or at its next renewal, and interrupts the task. What it has done by then is not undone.
        """
        return self._change(people.CANCEL, each_batch)

    def requeue(self, each_batch: EachBatch | None = None) -> Changed:
        """
        Give the failed and cancelled jobs of this queryset fresh attempts, available now.

        A job whose key a live job holds is left out, and so are all but the first of several with one key.
        A key that another transaction is about to take is waited for, half a second at most; then its job
        counts as busy.
        """
        return self._change(people.REQUEUE, each_batch)

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

    def _change(self, verb: people.Verb, each_batch: EachBatch | None) -> Changed:
        using = self._write_alias
        connection = connections[using]
        changed = busy = key_held = total = running = 0
        for ids in self.using(using)._batches_of_ids(Status.values):
            total += len(ids)
            with transaction.atomic(using=using, savepoint=False):
                done = _change_some(verb, using, ids)
                if left := [job_id for job_id in ids if job_id not in done]:
                    more_busy, more_held = people.left_out(connection, left, verb.takes)
                    busy += more_busy
                    key_held += more_held
                if each_batch is not None and done:
                    each_batch(set(done))
            changed += len(done)
            running += sum(done.values())
        return Changed(changed, busy, total - changed - busy - key_held, key_held, running)

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

    def enqueue(self, job: enqueueing.NewJob, notify: Notify = "asleep") -> enqueueing.Inserted:
        """
        Insert *job* as pending, in the caller's transaction. Tasks call this through their backend.

        If it has a key that a live job of its task holds, insert nothing and return that one; wait for a
        transaction that is about to take the key. Above Read Committed that may raise
        ``OperationalError`` (40001).
        """
        return enqueueing.insert_job(self._connection, job, notify)

    def enqueue_many(
        self,
        template: enqueueing.NewJob,
        calls: Sequence[tuple[str, str]],
        job_keys: Sequence[str | None] | None = None,
        notify: Notify = "asleep",
    ) -> list[int]:
        """
        Insert a pending job like *template* for each (args, kwargs) of *calls*, all or none; return their ids.

        *job_keys* gives each call its key or ``None``. For a key that is held, or that an earlier call
        has, the id is that of the job which holds it.
        """
        with transaction.atomic(using=self._alias, savepoint=False):
            if job_keys is None:
                return enqueueing.insert_jobs(self._connection, template, calls, notify)
            pairs = list(zip(job_keys, calls, strict=True))
            keyed = {key: call for key, call in reversed(pairs) if key is not None}
            held = enqueueing.insert_jobs_with_keys(self._connection, template, keyed, notify) if keyed else {}
            plain = [call for key, call in pairs if key is None]
            ids = iter(enqueueing.insert_jobs(self._connection, template, plain, notify))
            return [next(ids) if key is None else held[key] for key in job_keys]

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

    def change_one(self, verb: people.Verb, job_id: int) -> Changed:
        """
        Do *verb* to one exact job; it is skipped if its status is not one that the verb takes.

        Raises `JobBusy` at once when another transaction holds the row, or after half a second when one holds
        the table, and `JobKeyHeld` when a live job has the key of a job to be requeued. The caller's transaction
        stays usable.
        """
        try:
            # NOWAIT is about rows: a table that is locked, as by a migration, would be waited for.
            with self._atomic(), _bounded_waits(self._connection):
                if people.lock_one(self._connection, job_id) not in verb.takes:
                    return Changed(changed=0, busy=0, skipped=1)
                if done := verb.change(self._connection, [job_id]):
                    return Changed(changed=1, busy=0, skipped=0, running=sum(done.values()))
        except OperationalError as error:
            if is_lock_conflict(error):
                raise JobBusy(f"Job {job_id} is held by another transaction at this moment. Try again.") from error
            raise
        except IntegrityError:
            pass  # the key was taken meanwhile
        raise JobKeyHeld(f"Job {job_id} cannot be requeued while another job has its key.")

    @property
    def _alias(self) -> str:
        return self._db or router.db_for_write(self.model)

    @property
    def _connection(self) -> Any:
        return connections[self._alias]

    @property
    def _atomic(self) -> Callable[[], AbstractContextManager[Any]]:
        return partial(transaction.atomic, using=self._alias)


@contextmanager
def _bounded_waits(connection: Any) -> Iterator[None]:
    """Wait no longer than half a second for a lock in this block, and leave the caller's own limit as it was."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('lock_timeout'), set_config('lock_timeout', '500ms', true)")
        before, _ = cursor.fetchone()
    yield  # after an error the savepoint that is rolled back restores it
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [before])


def _change_some(verb: people.Verb, using: str, ids: Sequence[int]) -> people.Done:
    """Do *verb* to the jobs with *ids*; one whose key is taken at this moment is found by halving and left out."""
    try:
        with transaction.atomic(using=using), _bounded_waits(connections[using]):
            return verb.change(connections[using], ids)
    except (IntegrityError, OperationalError) as error:
        if isinstance(error, OperationalError) and not is_lock_conflict(error):
            raise
        if len(ids) == 1:
            return {}
    half = len(ids) // 2
    return _change_some(verb, using, ids[:half]) | _change_some(verb, using, ids[half:])


def recover_lost(
    connection: Any, jobs: Sequence[leases.Running], constant_delay: float | None = None
) -> list[leases.Recovered]:
    """Take back *jobs*, locked in this transaction because their lease has ended."""
    delays = [backoff.delay_after_loss(constant_delay, job.attempts) for job in jobs]
    return leases.recover(connection, jobs, delays, AttemptOutcome.LOST, class_path_of(ClaimExpired), EXPIRED_TEXT)


def _chunks(ids: list[int]) -> Iterable[list[int]]:
    return (ids[start : start + BATCH_ROWS] for start in range(0, len(ids), BATCH_ROWS))
