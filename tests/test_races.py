"""
Races around a COMMIT: whose answer is lost, whose process is dead, or that comes between two statements of ours.

A deferred trigger makes the COMMIT wait at a gate, so that what others do meanwhile is certain to be meanwhile.
"""

import os
import signal
from contextlib import contextmanager

import pytest
from django.db import OperationalError, connection, transaction

from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import Claim, ErrorRecord, Failed, Released, Retried, Snoozed, Succeeded
from django_pgqueue.statements import claim as claiming
from django_pgqueue.statements import leases
from django_pgqueue.statements.settle import settle

from .app.tasks import nothing
from .helpers import (
    InThread,
    actor,
    claim_jobs,
    claim_of,
    claim_one,
    enqueue,
    enqueue_jobs,
    here,
    job_trigger,
    pid_of,
    row,
    second_connection,
    sql,
    wait_for_waiter,
    wait_until,
    worker_session,
)

pytestmark = pytest.mark.django_db(transaction=True)

ERROR = ErrorRecord.plain(ValueError, "no")
GATE = 4712


class Gate:
    """Who comes to it waits until it is opened."""

    PASS = (
        "PERFORM set_config('lock_timeout', '0', true);"  # a round's own limit would end the wait
        f" PERFORM pg_advisory_lock_shared({GATE}); PERFORM pg_advisory_unlock_shared({GATE});"
    )

    def __init__(self, holder):
        self._holder = holder
        sql(holder, "SELECT pg_advisory_lock(%s)", [GATE])

    def wait_for_arrival(self):
        wait_for_waiter(pid_of(self._holder))

    def open(self):
        sql(self._holder, "SELECT pg_advisory_unlock_all()")


@contextmanager
def gate_at_commit(status):
    """A gate before the COMMIT of whatever makes a job *status*."""
    with (
        job_trigger(f"IF NEW.status = '{status}' THEN {Gate.PASS} END IF;", at_commit=True),
        second_connection() as holder,
    ):
        gate = Gate(holder)
        try:
            yield gate
        finally:
            gate.open()


def send_commit(connection):
    connection.pgconn.send_query(b"COMMIT")
    connection.pgconn.flush()


@pytest.mark.parametrize(
    ("outcome_of", "status"),
    [
        (lambda claim: Succeeded(claim, "42"), "done"),
        (lambda claim: Failed(claim, ERROR), "failed"),
        (lambda claim: Retried(claim, 60, ERROR), "pending"),
        (lambda claim: Snoozed(claim, 60), "pending"),
    ],
)
def test_an_ending_that_meets_its_own_unanswered_commit_waits_for_it_and_is_settled_once(outcome_of, status):
    """R16: while the old backend is committing, a plain look still sees a running job; the fenced statement decides."""
    enqueue()
    claim = claim_of(claim_one())
    with gate_at_commit(status) as gate, actor() as lost, actor() as again:
        lost_pid = pid_of(lost)
        sql(lost, "BEGIN")
        settle(lost, [outcome_of(claim)])
        send_commit(lost)
        gate.wait_for_arrival()
        lost.pgconn.finish()

        plain_look = row(claim.job_id, "status")
        settling = InThread(lambda: settle(again, [outcome_of(claim)]))
        wait_for_waiter(lost_pid)
        gate.open()
        settlement = settling.result()

    assert plain_look == ("running",)
    assert (settlement.settled, settlement.busy, settlement.lost) == ([outcome_of(claim)], [], [])
    assert row(claim.job_id, "status", "claim_version") == (status, 1)
    assert JobAttempt.objects.count() == isinstance(outcome_of(claim), Failed | Retried)


def test_a_release_that_meets_its_own_unanswered_commit_takes_nothing_from_the_next_owner():
    """R16, R21: the version has risen with the first, so that the second finds its claim gone."""
    enqueue()
    claim = claim_of(claim_one("A"))
    with gate_at_commit("pending") as gate, actor() as lost, actor() as again:
        lost_pid = pid_of(lost)
        sql(lost, "BEGIN")
        settle(lost, [Released(claim)])
        send_commit(lost)
        gate.wait_for_arrival()
        lost.pgconn.finish()
        releasing = InThread(lambda: settle(again, [Released(claim)]))
        wait_for_waiter(lost_pid)
        gate.open()
        settlement = releasing.result()
    new = claim_one("B")

    assert settlement.lost == [Released(claim)]
    assert Job.objects.settle([Released(claim)]).lost == [Released(claim)]
    assert row(new.id, "status", "claim_version", "attempts", "claimed_by") == ("running", 3, 1, "B")


def test_a_claim_whose_commit_is_still_going_on_is_found_by_its_old_name_only_afterwards():
    """R20, R22: so one look for the rows of an abandoned name is not enough."""
    enqueue()
    with gate_at_commit("running") as gate, actor() as lost, worker_session() as again:
        sql(lost, "BEGIN")
        claiming.claim(lost, claiming.due(claiming.sweep(lost)), "child/1", 1, 60)
        send_commit(lost)
        gate.wait_for_arrival()
        lost.pgconn.finish()

        def look():
            with again.round() as connection:
                return leases.lock_owned(connection, "child/1", [])

        meanwhile = look()
        with again.round() as connection:
            claimed_meanwhile = claiming.claim(connection, claiming.due(claiming.sweep(connection)), "child/2", 1, 60)
        gate.open()
        [found] = wait_until(look)

    assert (meanwhile, claimed_meanwhile) == ([], [])
    assert (found.claim_version, found.attempts) == (1, 1)


def test_the_claim_of_a_killed_child_that_commits_after_its_death_is_given_back(start_worker):
    """R20, R22: the burial is repeated while a backend of the dead child is left; its job is not burnt an attempt."""
    with gate_at_commit("running") as gate:
        worker = start_worker("--processes", "1", LEASE_SECONDS="600").wait_ready()
        dead = worker.child_pid
        job_id = int(nothing.enqueue().id)
        gate.wait_for_arrival()
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: worker.child_pid != dead, "another child")  # the first look at what is left is over
        status_meanwhile = row(job_id, "status")
        gate.open()

        wait_until(lambda: row(job_id, "status") == ("done",), "the job to be done")

    assert status_meanwhile == ("pending",)
    assert row(job_id, "attempts", "claim_version") == (1, 3)
    assert worker.stop() == 0


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_a_row_that_was_renewed_since_a_round_began_is_no_error_at_any_default_isolation(level):
    """R09, R18: above Read Committed the ending would fail with 40001, again and again."""
    enqueue_jobs(3)
    ended, renewed, released = claim_jobs(3)
    with worker_session() as session:
        sql(session.connection, f"SET default_transaction_isolation = '{level}'")
        with session.round() as connection:
            sql(connection, "SELECT count(*) FROM django_pgqueue_job")
            assert len(Job.objects.renew([ended, renewed, released])) == 3
            settlement = settle(connection, [Succeeded(ended), Released(released)])
            kept = leases.renew(connection, [renewed], 60)

    assert settlement.settled == [Succeeded(ended), Released(released)]
    assert kept == {renewed.job_id}


# ---- keys


def test_a_key_whose_holder_ends_between_the_insert_and_the_look_for_it_is_taken():
    """R04: the insert has met a live holder, and the next statement finds none; so it is tried once more."""
    first = nothing.using(job_key="k").enqueue()
    claim = Claim(claim_one().id, 1)
    here(
        "CREATE FUNCTION pgqueue_gate() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN IF current_setting('application_name') = 'at the gate' THEN {Gate.PASS} END IF; RETURN NULL; END$$"
    )
    here(
        "CREATE TRIGGER pgqueue_gate AFTER INSERT ON django_pgqueue_job"
        " FOR EACH STATEMENT EXECUTE FUNCTION pgqueue_gate()"
    )

    def enqueue_at_the_gate():
        here("SET application_name = 'at the gate'")
        return nothing.using(job_key="k").enqueue()

    try:
        with second_connection() as holder:
            gate = Gate(holder)
            enqueuing = InThread(enqueue_at_the_gate)
            gate.wait_for_arrival()
            Job.objects.settle([Succeeded(claim)])
            gate.open()
            second = enqueuing.result()
    finally:
        here("DROP TRIGGER pgqueue_gate ON django_pgqueue_job")
        here("DROP FUNCTION pgqueue_gate()")

    assert second.created and second.id != first.id
    assert row(int(second.id), "status", "job_key") == ("pending", "k")


def test_above_read_committed_a_key_that_was_taken_since_the_snapshot_is_an_error():
    """R04, R09: 40001, to be tried again; never a second job."""
    with transaction.atomic():
        here("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        here("SELECT count(*) FROM django_pgqueue_job")
        InThread(lambda: nothing.using(job_key="k").enqueue()).result()

        with pytest.raises(OperationalError) as refused, transaction.atomic():
            nothing.using(job_key="k").enqueue()

    assert refused.value.__cause__.sqlstate == "40001"
    assert connection.connection is not None and Job.objects.count() == 1
