"""
Every verb against rows and tables that others hold, and against every other verb: one locked row costs only that
row, nobody waits in a circle, and what fails for a lock works when the lock is gone.

What single verbs do in single races stands in the tests of those verbs; here none is left out.
"""

import random
import re
import threading
from collections.abc import Callable
from contextlib import contextmanager
from inspect import getmembers
from types import SimpleNamespace
from typing import NamedTuple

import psycopg
import pytest
from django.db import OperationalError, transaction

from django_pgqueue import JobBusy
from django_pgqueue.managers import recover_lost
from django_pgqueue.models import Job
from django_pgqueue.outcomes import Claim, ErrorRecord, Failed, Released, Retried, Snoozed, Succeeded
from django_pgqueue.statements import claim as claiming
from django_pgqueue.statements import enqueue as enqueueing
from django_pgqueue.statements import leases, people, upkeep
from django_pgqueue.statements import settle as settling
from django_pgqueue.statements.database import fetch, is_lock_conflict, is_refusal
from django_pgqueue.statements.settle import settle, settle_carefully
from django_pgqueue.worker.upkeep import LEFT_SQL

from .helpers import (
    InThread,
    actor,
    claim_jobs,
    enqueue_jobs,
    expire_lease,
    here,
    job_trigger,
    new_job,
    pid_of,
    row,
    second_connection,
    sql,
    wait_for_waiter,
    worker_session,
)

pytestmark = pytest.mark.django_db(transaction=True)

ERROR = ErrorRecord.plain(ValueError, "no")


# ---- the verbs


class Verb(NamedTuple):
    """*change* takes jobs in one of *statuses*, and returns the ids of those that it changed."""

    statuses: tuple[str, ...]
    change: Callable[[psycopg.Connection, list[Claim]], set[int]]
    outcome_of: Callable[[Claim], object] | None = None


def ending(outcome_of):
    def change(connection, claims):
        settlement = settle(connection, [outcome_of(claim) for claim in claims])
        return {outcome.claim.job_id for outcome in settlement.settled}

    return Verb(("running",), change, outcome_of)


def by_person(verb):
    statuses = tuple(status.value for status in verb.takes)
    return Verb(statuses, lambda connection, claims: set(verb.change(connection, ids_of(claims))))


def claim_due(connection, claims):
    bands = claiming.due(claiming.sweep(connection))
    return {job.id for job in claiming.claim(connection, bands, "worker/2", 100, 60)}


def recover(connection, claims):
    return {job.id for job in recover_lost(connection, leases.lock_expired(connection, 100))}


def bury(connection, claims):
    return {job.id for job in recover_lost(connection, leases.lock_owned(connection, "worker", []))}


VERBS = {
    "claim": Verb(("pending",), claim_due),
    "succeed": ending(Succeeded),
    "succeed with a result": ending(lambda claim: Succeeded(claim, "1")),
    "retry": ending(lambda claim: Retried(claim, 0, ERROR)),
    "snooze": ending(lambda claim: Snoozed(claim, 0)),
    "fail": ending(lambda claim: Failed(claim, ERROR)),
    "release": ending(Released),
    "interrupt": ending(lambda claim: Released(claim, started=True)),
    "renew": Verb(("running",), lambda connection, claims: leases.renew(connection, claims, 60)),
    "recover": Verb(("running",), recover),
    "bury": Verb(("running",), bury),
    "hold": by_person(people.HOLD),
    "unhold": by_person(people.UNHOLD),
    "cancel": by_person(people.CANCEL),
    "requeue": by_person(people.REQUEUE),
    "prune": Verb(("done",), lambda connection, claims: set(range(upkeep.prune(connection, 0, 0.0, 100).deleted))),
    "delete done": Verb(
        ("done",), lambda connection, claims: set(range(upkeep.delete_done(connection, ids_of(claims))))
    ),
}
every_verb = pytest.mark.parametrize("name", VERBS)


def ids_of(claims):
    return [claim.job_id for claim in claims]


def jobs_in(status, count):
    """Make *count* jobs that stand in *status*; a running one's lease has ended. Return their claims."""
    ids = enqueue_jobs(count, queue_name=status)
    if status in ("running", "done", "failed"):
        claims = claim_jobs(count, queue_names=[status])
        for claim in claims:
            expire_lease(claim.job_id)
        if status != "running":
            Job.objects.settle([Succeeded(claim) if status == "done" else Failed(claim, ERROR) for claim in claims])
        return claims
    if status == "held":
        Job.objects.filter(pk__in=ids).hold()
    elif status == "cancelled":
        Job.objects.filter(pk__in=ids).cancel()
    return [Claim(job_id, 0) for job_id in ids]


def as_a_worker(session, verb, claims):
    """Do *verb* in a round; what a settle could not write at once is settled carefully, as in a child."""
    try:
        with session.round() as connection:
            return verb.change(connection, claims)
    except psycopg.Error as error:
        if verb.outcome_of is None or not is_lock_conflict(error):
            raise
    settlement = settle_carefully(session.connection, [verb.outcome_of(claim) for claim in claims], session.round)
    assert settlement.lost == []
    return {outcome.claim.job_id for outcome in settlement.settled}


@contextmanager
def short_patience(session):
    """Let the rounds of *session* wait for a lock no longer than 20 ms, and look for a deadlock at once."""
    usual = session.round

    @contextmanager
    def round_():
        with usual() as connection:
            sql(connection, "SET LOCAL lock_timeout = '20ms'; SET LOCAL deadlock_timeout = '1ms'")
            yield connection

    session.round = round_
    yield


# ---- one row


def holders_of(status):
    """Who may hold a row in *status* for a while: strangers, and every verb that takes such rows."""
    for lock in ("FOR UPDATE", "FOR NO KEY UPDATE", "FOR SHARE"):
        yield (
            lock,
            lambda connection, claims, lock=lock: sql(
                connection, f"SELECT id FROM django_pgqueue_job WHERE id = ANY(%s) {lock}", [ids_of(claims)]
            ),
        )
    for name, verb in VERBS.items():
        if status in verb.statuses:
            yield name, verb.change


@every_verb
def test_whoever_holds_one_row_costs_every_verb_that_row_and_no_other(name):
    """R14, R18, R19, R24, R32, B136: a stranger's lock, or another verb whose transaction is still open."""
    verb = VERBS[name]
    with worker_session() as holder, worker_session() as worker, short_patience(worker):
        for status in verb.statuses:
            for holder_name, hold_it in holders_of(status):
                here("DELETE FROM django_pgqueue_jobattempt; DELETE FROM django_pgqueue_job")
                held = jobs_in(status, 1)
                sql(holder.connection, "BEGIN")
                assert len(hold_it(holder.connection, held)) == 1, holder_name
                free = jobs_in(status, 3)

                meanwhile = as_a_worker(worker, verb, held + free)
                sql(holder.connection, "ROLLBACK")
                afterwards = as_a_worker(worker, verb, held)

                assert (len(meanwhile), len(afterwards)) == (3, 1), (status, holder_name)


def test_no_statement_that_locks_or_changes_jobs_is_missing_here():
    """Whoever writes another verb is told to add it above."""
    texts = {
        f"{module.__name__}.{name}": text
        for module in (claiming, settling, leases, people, upkeep)
        for name, text in getmembers(module)
        if name.endswith("_SQL") and re.search(r"UPDATE django_pgqueue_job\b|FOR (NO KEY )?UPDATE", text)
    }
    used = set()

    class NotingCursor(psycopg.Cursor):
        def execute(self, query, *args, **options):
            used.add(query)
            return super().execute(query, *args, **options)

    with worker_session() as worker:
        worker.connection.cursor_factory = NotingCursor
        for verb in VERBS.values():
            with worker.round() as connection:
                verb.change(connection, jobs_in(verb.statuses[0], 1))
        settle_carefully(worker.connection, [Succeeded(Claim(0, 0))], worker.round)
        people.lock_one(worker.connection, 0)

    assert [name for name, text in texts.items() if text not in used] == []


# ---- in a circle


def test_a_settle_that_is_the_victim_of_a_deadlock_settles_what_it_can():
    """R14, B136: 40P01. A person changes jobs one by one, the newest first; the round has met the oldest first."""
    first, second, third = jobs_in("running", 3)
    touch = "UPDATE django_pgqueue_job SET last_error = 'seen' WHERE id = %s"
    wait = (
        f"IF NEW.id = {first.job_id} AND NEW.status = 'done' THEN"
        " PERFORM pg_advisory_lock_shared(99); PERFORM pg_advisory_unlock_shared(99); END IF;"
    )
    with job_trigger(wait), second_connection() as gate, actor() as person, worker_session() as worker:
        sql(gate, "SELECT pg_advisory_lock(99)")
        sql(person, "SET deadlock_timeout = '60s'")
        sql(worker.connection, "SET deadlock_timeout = '10ms'")
        sql(person, "BEGIN")
        sql(person, touch, [second.job_id])
        worker_pid, errors = pid_of(worker.connection), []

        def work():
            outcomes = [Succeeded(claim) for claim in (first, second, third)]
            try:
                with worker.round() as connection:
                    sql(connection, "SET LOCAL lock_timeout = '60s'; SET LOCAL statement_timeout = '60s'")
                    return settle(connection, outcomes)
            except psycopg.Error as error:
                errors.append(error)
                return settle_carefully(worker.connection, outcomes, worker.round)

        working = InThread(work)
        wait_for_waiter(pid_of(gate))  # the round has the first row
        touching = InThread(lambda: sql(person, touch, [first.job_id]))
        wait_for_waiter(worker_pid)
        sql(gate, "SELECT pg_advisory_unlock(99)")  # the round goes on to the second row, and closes the circle
        touching.result()
        settlement = working.result()
        sql(person, "COMMIT")
        afterwards = Job.objects.settle(settlement.busy)

    assert [type(error) for error in errors] == [psycopg.errors.DeadlockDetected]
    assert is_lock_conflict(errors[0]) and not is_refusal(errors[0])
    assert Succeeded(third) in settlement.settled and Succeeded(second) in settlement.busy
    assert (settlement.lost, afterwards.lost, afterwards.busy) == ([], [], [])
    assert {row(claim.job_id, "status", "last_error") for claim in (first, second)} == {("done", "seen")}


def test_workers_go_on_beside_people_who_lock_many_rows_in_any_order():
    """R14, R18, R24, B136: nothing but what is_lock_conflict knows reaches a worker's loop, and every job gets done."""
    ids = enqueue_jobs(24)
    rounds, failed = range(12), threading.Event()
    touch = "UPDATE django_pgqueue_job SET last_error = 'seen' WHERE id = %s"
    touch_many = (
        "UPDATE django_pgqueue_job SET last_error = 'seen' WHERE id = ANY(ARRAY("
        " SELECT id FROM django_pgqueue_job ORDER BY id DESC FOR UPDATE))"
    )

    def be_a_person():
        with second_connection() as connection:
            sql(connection, "SET deadlock_timeout = '60s'")  # it is the workers that give way
            for number in rounds:
                sql(connection, "BEGIN")
                for job_id in ids[::-1] if number % 2 else ():
                    sql(connection, touch, [job_id])
                if not number % 2:
                    sql(connection, touch_many)
                sql(connection, "COMMIT")

    def be_a_worker(seed):
        try:
            work(seed)
        except BaseException:
            failed.set()  # or the others would wait for its jobs
            raise

    def work(seed):
        choose = random.Random(seed).choice
        with worker_session() as session, short_patience(session):
            held, outcomes = set(), []
            while not failed.is_set() and Job.objects.exclude(status="done").exists():
                try:
                    with session.round() as connection:
                        settlement = settle(connection, outcomes)
                        jobs = claiming.claim(connection, claiming.due(claiming.sweep(connection)), f"w{seed}", 5, 60)
                except psycopg.Error as error:
                    assert is_lock_conflict(error), error
                    settlement, jobs = settle_carefully(session.connection, outcomes, session.round), []
                assert settlement.lost == []
                held -= {outcome.claim for outcome in settlement.settled}
                held |= {Claim(job.id, job.claim_version) for job in jobs}
                with session.round() as connection:
                    leases.renew(connection, list(held), 60)
                    assert leases.standing(connection, list(held)) == set(ids_of(held))
                endings = [Succeeded, lambda claim: Snoozed(claim, 0), Released]
                outcomes = settlement.busy + [
                    choose(endings)(claim) for claim in sorted(held - {one.claim for one in settlement.busy})
                ]

    person, *workers = [InThread(be_a_person), *(InThread(lambda seed=seed: be_a_worker(seed)) for seed in range(2))]
    for each in (person, *workers):
        each.result()

    assert set(Job.objects.values_list("status", flat=True)) == {"done"}


# ---- a whole table


READERS = {
    "sweep": lambda connection: claiming.sweep(connection),
    "sweep of queues": lambda connection: claiming.sweep(connection, ["default"]),
    "earlier attempts": lambda connection: claiming.earlier_attempts(connection, [SimpleNamespace(id=1, attempts=2)]),
    "standing": lambda connection: leases.standing(connection, [Claim(1, 1)]),
    "cancelled": lambda connection: leases.cancelled(connection, [Claim(1, 1)]),
    "left of an owner": lambda connection: fetch(connection, LEFT_SQL, {"owner": "worker"}),
    "left out": lambda connection: people.left_out(connection, [1], people.HOLD.takes),
    "lock one": lambda connection: people.lock_one(connection, 1),
    "report worker": lambda connection: upkeep.report_worker(
        connection, upkeep.WorkerReport("w", "host", 1, "default", "*", "{}", 1, 0.0)
    ),
    "forget workers": lambda connection: upkeep.forget_workers(connection, "w", 60.0),
    "enqueue": lambda connection: enqueueing.insert_job(connection, new_job()),
}


def test_nothing_waits_for_a_locked_table_longer_than_a_round_may_and_all_works_afterwards():
    """R13, R18: as while a migration runs. Each fails as a lock conflict; only a settle answers, with "busy"."""
    tables = "django_pgqueue_job, django_pgqueue_jobattempt, django_pgqueue_worker"
    jobs = {name: jobs_in(verb.statuses[0], 1) for name, verb in VERBS.items()}

    def try_in_a_round(call):
        with worker_session() as session:
            return call(session)

    def in_a_round(read):
        def call(session):
            with session.round() as connection:
                return read(connection)

        return call

    calls = {name: in_a_round(read) for name, read in READERS.items()} | {
        name: lambda session, name=name: as_a_worker(session, VERBS[name], jobs[name]) for name in VERBS
    }
    with second_connection() as migration:
        sql(migration, "BEGIN")
        sql(migration, f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE")
        trying = {name: InThread(lambda call=call: try_in_a_round(call)) for name, call in calls.items()}
        answers = {name: answer_of(attempt) for name, attempt in trying.items()}
        sql(migration, "ROLLBACK")

    endings = {name for name, verb in VERBS.items() if verb.outcome_of is not None}
    assert {name for name, answer in answers.items() if answer == set()} == endings
    assert all(is_lock_conflict(answer) for name, answer in answers.items() if name not in endings)
    with worker_session() as session:
        for name in READERS:
            calls[name](session)
        for name in sorted(VERBS, key=lambda name: name in ("claim", "recover", "bury", "prune")):
            assert calls[name](session), name


def test_a_person_who_changes_one_job_is_told_that_it_is_busy_while_its_table_is_locked():
    """R13: NOWAIT is about rows alone; the caller's own limit, here of 45 s, comes back afterwards."""
    job = Job.objects.get(pk=jobs_in("pending", 1)[0].job_id)
    with second_connection() as migration, transaction.atomic():
        limit = here("SHOW lock_timeout")
        sql(migration, "BEGIN")
        sql(migration, "LOCK TABLE django_pgqueue_job IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(JobBusy):
            job.hold()
        still_locked = here("SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted")
        sql(migration, "ROLLBACK")

        assert job.hold()
        assert not job.hold()
        assert here("SHOW lock_timeout") == limit
    assert still_locked != [(0,)]


def answer_of(attempt):
    try:
        return attempt.result()
    except (psycopg.Error, OperationalError) as error:
        return error
