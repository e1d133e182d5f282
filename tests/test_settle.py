"""How claims end: every kind of ending, what is lost, busy or written already, and what the database refuses."""

import json
import random
from datetime import timedelta

import psycopg
import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_pgqueue.exceptions import Interrupted, UnstorableResult
from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import Claim, ErrorRecord, Failed, Released, Retried, Snoozed, Succeeded, class_path_of
from django_pgqueue.statements import settle as settling
from django_pgqueue.statements.settle import (
    INTERRUPTED_TEXT,
    MAX_LAST_ERROR_CHARS,
    MAX_REFUNDS,
    REFUSED_TEXT,
    settle,
    settle_carefully,
)
from tests.helpers import (
    InThread,
    actor,
    claim_jobs,
    claim_of,
    claim_one,
    enqueue,
    enqueue_jobs,
    expire_lease,
    here,
    job_trigger,
    make_due,
    pausing,
    pid_of,
    row,
    second_connection,
    sql,
    wait_for_waiter,
    wait_until,
    worker_session,
)

two_connections = pytest.mark.django_db(transaction=True)

ERROR = ErrorRecord("builtins.ValueError", "no such order", "Traceback…\nValueError: no such order\n", "f1n9e2")


def a_claim(owner="worker", **changes):
    enqueue(**changes)
    return claim_of(claim_one(owner))


def snapshot(job_id):
    """Everything that a row says, and its attempts."""
    return (*here("SELECT job.* FROM django_pgqueue_job AS job WHERE id = %s", [job_id]), *attempts_of(job_id))


def attempts_of(job_id):
    return here("SELECT a.* FROM django_pgqueue_jobattempt AS a WHERE job_id = %s ORDER BY id", [job_id])


def settle_as_a_worker(session, outcomes):
    """A worker's round: all at once, and carefully after an error."""
    return _settle_at_once_or_carefully(session.connection, outcomes, session.round)


def _settle_at_once_or_carefully(connection, outcomes, transaction):
    try:
        with transaction():
            return settle(connection, outcomes)
    except (psycopg.Error, UnicodeEncodeError):
        return settle_carefully(connection, outcomes, transaction)


class ServerBound:
    """The test's connection, with parameters bound by the server as a worker's are, not by the client as Django's."""

    def __init__(self, connection):
        self.connection = connection

    def cursor(self):
        return psycopg.Cursor(self.connection)


@pytest.fixture(params=["manager", "worker"])
def settle_somehow(request, db):
    """``settle`` as the manager's callers and as workers meet it, in the transaction of the test."""
    if request.param == "manager":
        return Job.objects.settle
    raw = connections["default"].connection
    return lambda outcomes: _settle_at_once_or_carefully(ServerBound(raw), outcomes, raw.transaction)


# ---- every kind of ending


def test_a_success_ends_the_job(settle_somehow):
    """R14."""
    claim = a_claim()

    settlement = settle_somehow([Succeeded(claim)])

    assert settlement.settled == [Succeeded(claim)]
    assert (settlement.busy, settlement.lost, settlement.refused) == ([], [], [])
    job = Job.objects.get(pk=claim.job_id)
    assert (job.status, job.claim_version, job.attempts, job.lease_until) == ("done", 1, 1, None)
    assert job.claimed_at <= job.finished_at
    assert (job.return_value, job.last_error) == (None, None)
    assert attempts_of(claim.job_id) == []


@pytest.mark.parametrize("value", [0, "", "ü\u2028'\"\\{},NULL", [], {"a": [None, True, 1.5]}, 10**400, None])
def test_a_result_comes_back_as_it_was(settle_somehow, value):
    """R14, R16: any JSON text, the text ``null`` included."""
    claim = a_claim()

    settlement = settle_somehow([Succeeded(claim, json.dumps(value))])

    assert settlement.settled == [Succeeded(claim, json.dumps(value))]
    [(stored,)] = here("SELECT return_value::text FROM django_pgqueue_job")
    assert json.loads(stored) == value


def test_a_retry_puts_the_job_back_after_its_delay_and_records_the_attempt(settle_somehow):
    """R03, R23: the same column that delays a scheduled job; message and traceback are kept."""
    claim = a_claim("host:7")
    began = timezone.now()

    settlement = settle_somehow([Retried(claim, 600, ERROR)])

    assert settlement.settled == [Retried(claim, 600, ERROR)]
    job = Job.objects.get(pk=claim.job_id)
    assert (job.status, job.attempts, job.claim_version, job.lease_until) == ("pending", 1, 1, None)
    assert (job.finished_at, job.last_error) == (None, "ValueError: no such order")
    assert began + timedelta(seconds=599) < job.available_at < timezone.now() + timedelta(seconds=601)
    attempt = JobAttempt.objects.get()
    assert (attempt.job_id, attempt.claim_version, attempt.attempt) == (claim.job_id, 1, 1)
    assert (attempt.outcome, attempt.counted, attempt.worker) == ("error", True, "host:7")
    assert (attempt.error_class, attempt.message) == (ERROR.class_path, ERROR.message)
    assert (attempt.traceback, attempt.fingerprint) == (ERROR.traceback, ERROR.fingerprint)
    assert (attempt.started_at, attempt.started_at <= attempt.ended_at) == (job.claimed_at, True)


def test_a_snooze_puts_the_job_back_after_its_delay_and_uses_no_attempt(settle_somehow):
    """R03: it is counted, not recorded; the claim version stays, as at every ending by its owner."""
    claim = a_claim(max_attempts=1)
    began = timezone.now()

    settlement = settle_somehow([Snoozed(claim, 600)])

    assert settlement.settled == [Snoozed(claim, 600)]
    job = Job.objects.get(pk=claim.job_id)
    assert (job.status, job.attempts, job.snoozes, job.claim_version) == ("pending", 0, 1, 1)
    assert (job.lease_until, job.finished_at, job.last_error) == (None, None, None)
    assert began + timedelta(seconds=599) < job.available_at < timezone.now() + timedelta(seconds=601)
    assert attempts_of(claim.job_id) == []


def test_a_failure_is_a_dead_letter_whatever_attempts_are_left(settle_somehow):
    """R24."""
    claim = a_claim("host:7", max_attempts=9)

    settlement = settle_somehow([Failed(claim, ERROR)])

    assert settlement.settled == [Failed(claim, ERROR)]
    job = Job.objects.get(pk=claim.job_id)
    assert (job.status, job.attempts, job.claim_version, job.lease_until) == ("failed", 1, 1, None)
    assert (job.claimed_at <= job.finished_at, job.last_error) == (True, "ValueError: no such order")
    attempt = JobAttempt.objects.get()
    assert (attempt.job_id, attempt.claim_version, attempt.attempt) == (claim.job_id, 1, 1)
    assert (attempt.outcome, attempt.counted, attempt.worker) == ("error", True, "host:7")
    assert (attempt.error_class, attempt.message) == (ERROR.class_path, ERROR.message)
    assert (attempt.traceback, attempt.fingerprint) == (ERROR.traceback, ERROR.fingerprint)


def test_a_release_refunds_the_attempt_and_leaves_no_trace_but_the_version(settle_somehow):
    """R12, R21: what never started goes back as it came, and the old claim is void."""
    claim = a_claim()

    settlement = settle_somehow([Released(claim)])

    assert settlement.settled == [Released(claim)]
    job = Job.objects.get(pk=claim.job_id)
    assert (job.status, job.attempts, job.claim_version, job.lease_until) == ("pending", 0, 2, None)
    assert (job.started_at, job.finished_at, job.last_error) == (None, None, None)
    assert attempts_of(claim.job_id) == []
    assert claim_one().claim_version == 3


def test_a_release_may_ask_for_a_pause(settle_somehow):
    """R12: a task that this worker does not know, perhaps another does."""
    claim = a_claim()

    settle_somehow([Released(claim, delay_seconds=600)])

    assert Job.objects.claim("worker") == []
    assert timedelta(seconds=590) < row(claim.job_id, "available_at")[0] - timezone.now() < timedelta(seconds=600)


def test_a_release_may_say_why_the_job_waits_and_otherwise_leaves_what_was_said_before(settle_somehow):
    claims = [a_claim() for _ in range(4)]
    Job.objects.update(last_error="before")
    reasons = ["", "not deployed here", "renamed", ""]

    settlement = settle_somehow([Released(claim, 30.0, reason=why) for claim, why in zip(claims, reasons, strict=True)])

    assert len(settlement.settled) == 4
    said = [row(claim.job_id, "last_error")[0] for claim in claims]
    assert said == ["before", "not deployed here", "renamed", "before"]
    assert not JobAttempt.objects.exists()


def test_a_release_lands_among_the_jobs_that_are_available_now(settle_somehow):
    """R25: behind what has waited meanwhile, not at the head again."""
    claim = a_claim()
    other = enqueue()

    settle_somehow([Released(claim)])

    assert claim_one().id == other


def test_an_interruption_is_recorded_and_refunded(settle_somehow):
    """R12, R23: a worker that stops takes no attempt from the job that it interrupts."""
    claim = a_claim("host:7", max_attempts=1)

    settlement = settle_somehow([Released(claim, started=True)])

    assert settlement.settled == [Released(claim, started=True)]
    job = Job.objects.get(pk=claim.job_id)
    assert (job.status, job.attempts, job.claim_version, job.lease_until) == ("pending", 0, 2, None)
    assert (job.started_at, job.finished_at, job.last_error) == (job.claimed_at, None, INTERRUPTED_TEXT)
    attempt = JobAttempt.objects.get()
    assert (attempt.job_id, attempt.claim_version, attempt.attempt) == (claim.job_id, 1, 1)
    assert (attempt.outcome, attempt.counted, attempt.worker) == ("released", False, "host:7")
    assert (attempt.error_class, attempt.message) == (class_path_of(Interrupted), INTERRUPTED_TEXT)
    assert (attempt.started_at, attempt.started_at <= attempt.ended_at) == (job.claimed_at, True)


@pytest.mark.django_db
def test_a_job_that_retries_at_once_waits_behind_what_is_available():
    """R25, B71: a poison job does not come back to the head of its queue."""
    poison, *others = enqueue_jobs(21)
    Job.objects.settle([Retried(claim_of(claim_one()), 0, ERROR)])

    one_by_one = [claim_one().id for _ in range(21)]

    assert one_by_one == [*others, poison]


@pytest.mark.django_db
def test_interruptions_are_refunded_only_so_often_then_count_and_then_fail_the_job():
    """R23, R25: a job that outlasts every grace period comes to an end, too."""
    job_id = enqueue(max_attempts=3)

    seen = []
    for _ in range(MAX_REFUNDS + 3):
        Job.objects.settle([Released(claim_of(claim_one()), started=True)])
        seen.append(row(job_id, "status", "attempts"))

    assert seen == [("pending", 0)] * MAX_REFUNDS + [("pending", 1), ("pending", 2), ("failed", 3)]
    counted = JobAttempt.objects.order_by("claim_version").values_list("attempt", "counted")
    assert list(counted) == [(1, False)] * MAX_REFUNDS + [(1, True), (2, True), (3, True)]
    assert row(job_id, "finished_at", "lease_until")[0] is not None


@pytest.mark.django_db
def test_refunds_are_counted_for_each_job_alone():
    """R25: in one statement, one job has used its refunds up and another has not."""
    worn = enqueue(max_attempts=1)
    for _ in range(MAX_REFUNDS):
        Job.objects.settle([Released(claim_of(claim_one()), started=True)])
    Job.objects.filter(pk=worn).hold()
    fresh = enqueue(max_attempts=1)
    Job.objects.settle([Released(claim_of(claim_one()), started=True)])
    Job.objects.filter(pk=worn).unhold()
    claims = claim_jobs(2)

    settlement = Job.objects.settle([Released(claim, started=True) for claim in claims])

    assert {outcome.claim for outcome in settlement.settled} == set(claims)
    assert row(worn, "status", "attempts") == ("failed", 1)
    assert row(fresh, "status", "attempts") == ("pending", 0)
    assert JobAttempt.objects.filter(job=fresh).latest("id").counted is False
    assert JobAttempt.objects.filter(job=worn).latest("id").counted is True


@pytest.mark.django_db
def test_a_refund_after_a_counted_attempt_keeps_the_count_and_the_first_start():
    """R23."""
    job_id = enqueue()
    first = claim_one()
    Job.objects.settle([Retried(claim_of(first), 0, ERROR)])

    Job.objects.settle([Released(claim_of(claim_one()))])

    assert row(job_id, "attempts") == (1,)
    assert row(job_id, "started_at")[0].timestamp() == first.started_at


@pytest.mark.django_db
def test_the_claim_version_only_rises():
    """R21: at claim, release, recovery and requeue; never down, and never twice the same for two claims."""
    job_id = enqueue(max_attempts=100)
    endings = [
        lambda claim: Job.objects.settle([Retried(claim, 0, ERROR)]),
        lambda claim: Job.objects.release([claim]),
        lambda claim: Job.objects.settle([Released(claim, started=True)]),
        lambda claim: Job.objects.settle([Snoozed(claim, 0)]),
        lambda claim: (expire_lease(job_id), Job.objects.recover()),
        lambda claim: (Job.objects.settle([Failed(claim, ERROR)]), Job.objects.filter(pk=job_id).requeue()),
        lambda claim: (Job.objects.settle([Failed(claim, ERROR)]), Job.objects.get(pk=job_id).requeue()),
    ]
    versions, claimed_at = [], []

    for end in endings * 2:
        claim = claim_of(claim_one())
        claimed_at.append(claim.version)
        versions.append(claim.version)
        end(claim)
        make_due(job_id)
        versions += row(job_id, "claim_version")

    assert versions == sorted(versions)
    assert len(set(claimed_at)) == len(claimed_at)


@pytest.mark.django_db
def test_a_long_error_is_cut_in_the_job_and_kept_in_the_attempt():
    """R23."""
    claim = a_claim()
    error = ErrorRecord("a.B", "m" * 1_900, "t" * 60_000, "f")

    Job.objects.settle([Failed(claim, error)])

    assert len(row(claim.job_id, "last_error")[0]) == MAX_LAST_ERROR_CHARS
    attempt = JobAttempt.objects.get()
    assert (len(attempt.message), len(attempt.traceback)) == (1_900, 60_000)


# ---- many at once


def every_kind(claim):
    return [
        Succeeded(claim),
        Succeeded(claim, str(claim.job_id)),
        Retried(claim, 0, ERROR),
        Failed(claim, ERROR),
        Released(claim),
        Released(claim, started=True),
        Snoozed(claim, 0),
    ]


KINDS = ["plain", "result", "retry", "fail", "release", "interrupt", "snooze"]
of_every_kind = pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)


def outcomes_of_all_kinds(claims):
    """A different ending with different values for each claim, in no order."""
    outcomes = []
    for n, claim in enumerate(claims):
        error = ErrorRecord(f"class {n}", f"message {n}", f"traceback {n}", f"finger {n}")
        outcomes.append(
            [
                Succeeded(claim),
                Succeeded(claim, json.dumps({"n": n})),
                Retried(claim, 1000 + n, error),
                Failed(claim, error),
                Released(claim, n),
                Released(claim, 0.0, started=True),
                Snoozed(claim, 1000 + n),
            ][n % 7]
        )
    random.Random(7).shuffle(outcomes)
    return outcomes


@pytest.mark.parametrize("count", [0, 1, 50, 200, 201, 1000])
def test_each_of_many_jobs_gets_its_own_ending(settle_somehow, count):
    """R14: values travel beside their ids, in slices, and none is mixed up."""
    enqueue_jobs(count)
    claims = claim_jobs(count)
    began = timezone.now()

    settlement = settle_somehow(outcomes_of_all_kinds(claims))

    assert {outcome.claim for outcome in settlement.settled} == set(claims)
    assert (len(settlement.settled), settlement.busy, settlement.lost) == (count, [], [])
    jobs, attempts = Job.objects.in_bulk(), {attempt.job_id: attempt for attempt in JobAttempt.objects.all()}
    for n, claim in enumerate(claims):
        job, attempt = jobs[claim.job_id], attempts.get(claim.job_id)
        kind = KINDS[n % 7]
        expected = {"plain": "done", "result": "done", "fail": "failed"}.get(kind, "pending")
        assert (job.status, job.claim_version) == (expected, 2 if kind in ("release", "interrupt") else 1)
        assert job.attempts == (0 if kind in ("release", "interrupt", "snooze") else 1)
        assert job.snoozes == (kind == "snooze")
        assert job.return_value == ({"n": n} if kind == "result" else None)
        if kind in ("retry", "snooze"):
            assert timedelta(seconds=999 + n) < job.available_at - began < timedelta(seconds=1100 + n)
        if kind in ("retry", "fail"):
            assert job.last_error == f"class {n}: message {n}"
            written = (attempt.error_class, attempt.message, attempt.traceback, attempt.fingerprint)
            assert written == (f"class {n}", f"message {n}", f"traceback {n}", f"finger {n}")
        assert (attempt is None) == (kind not in ("retry", "fail", "interrupt"))


@pytest.mark.django_db
@pytest.mark.parametrize("count", [1, 50, 200, 1000])
@of_every_kind
def test_many_endings_of_one_kind_are_all_written(kind, count):
    """R14."""
    enqueue_jobs(count)
    claims = claim_jobs(count)

    settlement = Job.objects.settle([every_kind(claim)[kind] for claim in claims])

    assert len(settlement.settled) == count
    status = {"plain": "done", "result": "done", "fail": "failed"}.get(KINDS[kind], "pending")
    assert Job.objects.filter(status=status).count() == count
    assert JobAttempt.objects.count() == (count if KINDS[kind] in ("retry", "fail", "interrupt") else 0)
    if KINDS[kind] == "result":
        assert here("SELECT count(*) FROM django_pgqueue_job WHERE return_value = to_jsonb(id)") == [(count,)]


# ---- lost


def test_a_stale_completion_changes_no_row(settle_somehow):
    """R14, R15, R21: A stalls past its lease, B claims; A's completion changes nothing, B's one row."""
    a = a_claim("A")
    expire_lease(a.job_id)
    Job.objects.recover()
    make_due(a.job_id)
    b = claim_of(claim_one("B"))
    before = snapshot(b.job_id)

    for stale in every_kind(a):
        settlement = settle_somehow([stale])
        assert (settlement.settled, settlement.busy, settlement.lost) == ([], [], [stale])
    assert snapshot(b.job_id) == before

    settlement = settle_somehow([Succeeded(b, "2")])

    assert (settlement.settled, settlement.lost) == ([Succeeded(b, "2")], [])
    assert row(b.job_id, "status", "claimed_by", "return_value") == ("done", "B", 2)


LOSSES = {
    "recovered": lambda claim: (expire_lease(claim.job_id), Job.objects.recover()),
    "recovered for good": lambda claim: (
        Job.objects.filter(pk=claim.job_id).update(max_attempts=1),
        expire_lease(claim.job_id),
        Job.objects.recover(),
    ),
    "released": lambda claim: Job.objects.release([claim]),
    "deleted": lambda claim: Job.objects.filter(pk=claim.job_id).delete(),
    "cancelled": lambda claim: Job.objects.filter(pk=claim.job_id).update(
        status="cancelled", claim_version=claim.version + 1, lease_until=None, finished_at=timezone.now()
    ),
}


@pytest.mark.parametrize("how", LOSSES)
def test_an_ending_of_a_lost_claim_writes_nothing_and_is_called_lost(settle_somehow, how):
    """R14: zero rows mean that the claim was lost; the others of the batch are written."""
    enqueue_jobs(3)
    first, lost, last = claim_jobs(3)
    LOSSES[how](lost)
    before = snapshot(lost.job_id)

    for kind, stale in enumerate(every_kind(lost)):
        around = [Succeeded(first), Succeeded(last)] if kind == len(KINDS) - 1 else []
        settlement = settle_somehow([*around[:1], stale, *around[1:]])
        assert (settlement.settled, settlement.busy, settlement.lost) == (around, [], [stale])

    assert snapshot(lost.job_id) == before
    assert row(first.job_id, "status") == row(last.job_id, "status") == ("done",)


@pytest.mark.django_db
def test_a_claim_that_never_was_is_lost():
    """R14."""
    job_id = enqueue()

    settlement = Job.objects.settle([Succeeded(Claim(job_id, 0)), Failed(Claim(2**62, 1), ERROR)])

    assert (settlement.settled, len(settlement.lost)) == ([], 2)
    assert row(job_id, "status") == ("pending",)


@pytest.mark.parametrize("with_values", [False, True])
def test_an_old_and_a_new_claim_of_one_job_are_told_apart_in_one_batch(settle_somehow, with_values):
    """R15, R21: a worker that stalled may hold both; the old ending is lost, the new one written with its value."""
    old = a_claim("A")
    expire_lease(old.job_id)
    Job.objects.recover()
    make_due(old.job_id)
    new = claim_of(claim_one("A"))
    other = a_claim()
    stale = Succeeded(old, '"old"' if with_values else None)
    fresh = Succeeded(new, '"new"' if with_values else None)

    settlement = settle_somehow([stale, Succeeded(other), fresh])

    assert settlement.lost == [stale]
    assert sorted(settlement.settled, key=lambda outcome: outcome.claim) == [fresh, Succeeded(other)]
    assert row(new.job_id, "status", "return_value") == ("done", "new" if with_values else None)


def test_of_two_endings_of_one_claim_the_first_is_written(settle_somehow):
    """R14."""
    claim = a_claim()

    settlement = settle_somehow([Failed(claim, ERROR), Succeeded(claim, "1")])

    assert (settlement.settled, settlement.lost) == ([Failed(claim, ERROR)], [Succeeded(claim, "1")])
    assert row(claim.job_id, "status", "return_value") == ("failed", None)


# ---- written already


@pytest.mark.parametrize("make", [Succeeded, lambda c: Succeeded(c, "5")])
def test_a_success_that_is_settled_again_is_settled(settle_somehow, make):
    """R16: its first COMMIT may have lost its answer."""
    claim = a_claim()
    settle_somehow([make(claim)])
    before = snapshot(claim.job_id)

    settlement = settle_somehow([make(claim)])

    assert (settlement.settled, settlement.busy, settlement.lost) == ([make(claim)], [], [])
    assert snapshot(claim.job_id) == before


@pytest.mark.parametrize(
    "make",
    [lambda c: Retried(c, 60, ERROR), lambda c: Failed(c, ERROR), lambda c: Snoozed(c, 60)],
    ids=["retry", "fail", "snooze"],
)
def test_an_ending_that_is_settled_again_is_settled_and_recorded_once(settle_somehow, make):
    """R16, R23."""
    claim = a_claim()
    settle_somehow([make(claim)])
    before = snapshot(claim.job_id)

    settlement = settle_somehow([make(claim)])

    assert (settlement.settled, settlement.busy, settlement.lost) == ([make(claim)], [], [])
    assert snapshot(claim.job_id) == before
    assert len(attempts_of(claim.job_id)) == (0 if isinstance(make(claim), Snoozed) else 1)


@pytest.mark.django_db
@pytest.mark.parametrize("make", [lambda c: Retried(c, 0, ERROR), lambda c: Snoozed(c, 0)], ids=["retry", "snooze"])
@pytest.mark.parametrize("set_aside", ["hold", "cancel"])
def test_a_delay_stands_as_written_when_a_person_has_set_the_job_aside_since(make, set_aside):
    """R16, R26."""
    claim = a_claim()
    Job.objects.settle([make(claim)])
    assert getattr(Job.objects.all(), set_aside)().changed == 1

    settlement = Job.objects.settle([make(claim)])

    assert (settlement.settled, settlement.lost) == ([make(claim)], [])


@pytest.mark.django_db
def test_an_ending_other_than_the_one_that_stands_is_lost():
    """R16: only what was written as we wrote it is ours. Of "done", see `test_atomic`."""
    failed, retried = [a_claim() for _ in range(2)]
    Job.objects.settle([Failed(failed, ERROR), Retried(retried, 60, ERROR)])
    wrong = [Succeeded(failed), Succeeded(retried)]

    settlement = Job.objects.settle(wrong)

    assert (settlement.settled, settlement.lost) == ([], wrong)


@two_connections
def test_a_result_survives_the_loss_of_its_answer():
    """R16, R22: COMMIT was sent and the connection closed before its answer; the job is done, and stays done."""
    claim = a_claim()
    with worker_session() as lost, worker_session() as again:
        sql(lost.connection, "BEGIN")
        settle(lost.connection, [Succeeded(claim, "42")])
        lost.connection.pgconn.send_query(b"COMMIT")
        lost.connection.pgconn.flush()
        lost.connection.pgconn.finish()

        def settle_again():
            settlement = settle_as_a_worker(again, [Succeeded(claim, "42")])
            assert settlement.lost == []
            return settlement.settled

        settled = wait_until(settle_again)

    assert settled == [Succeeded(claim, "42")]
    assert row(claim.job_id, "status", "return_value", "attempts") == ("done", 42, 1)
    assert Job.objects.claim("worker") == []


@two_connections
def test_a_result_whose_commit_is_still_going_on_is_busy_and_then_settled():
    """R16: a plain look would see it running; only its lock tells that someone is at it."""
    claim = a_claim()
    slow = (
        "IF NEW.status = 'done' THEN"
        " PERFORM pg_advisory_lock_shared(99); PERFORM pg_advisory_unlock_shared(99); END IF;"
    )
    with (
        job_trigger(slow, at_commit=True),
        second_connection() as barrier,
        actor() as lost,
        worker_session() as again,
    ):
        sql(barrier, "SELECT pg_advisory_lock(99)")
        sql(lost, "BEGIN")
        settle(lost, [Succeeded(claim)])
        lost.pgconn.send_query(b"COMMIT")
        lost.pgconn.flush()
        wait_for_waiter(pid_of(barrier))
        lost.pgconn.finish()

        meanwhile = settle_as_a_worker(again, [Succeeded(claim)])
        sql(barrier, "SELECT pg_advisory_unlock(99)")
        wait_until(lambda: row(claim.job_id, "status") == ("done",))
        afterwards = settle_as_a_worker(again, [Succeeded(claim)])

    assert (meanwhile.settled, meanwhile.busy, meanwhile.lost) == ([], [Succeeded(claim)], [])
    assert (afterwards.settled, afterwards.busy, afterwards.lost) == ([Succeeded(claim)], [], [])


# ---- busy


@two_connections
@pytest.mark.parametrize("lock", ["FOR UPDATE", "FOR NO KEY UPDATE", "FOR SHARE"])
def test_a_row_that_someone_holds_is_busy_and_keeps_nobody_else(lock):
    """R14: an administrator's open transaction costs its own job a delay, and no other job anything."""
    enqueue_jobs(5)
    claims = claim_jobs(5)
    outcomes = outcomes_of_all_kinds(claims)
    with second_connection() as admin, worker_session() as session:
        sql(admin, "BEGIN")
        sql(admin, f"SELECT 1 FROM django_pgqueue_job WHERE id = %s {lock}", [claims[2].job_id])

        meanwhile = settle_as_a_worker(session, outcomes)
        sql(admin, "COMMIT")
        afterwards = settle_as_a_worker(session, meanwhile.busy)

    assert [outcome.claim for outcome in meanwhile.busy] == [claims[2]]
    assert {outcome.claim for outcome in meanwhile.settled} == {*claims} - {claims[2]}
    assert afterwards.settled == meanwhile.busy
    assert (meanwhile.lost, afterwards.lost, afterwards.busy) == ([], [], [])


@two_connections
def test_a_row_that_is_locked_by_a_foreign_key_alone_is_not_busy():
    """R14: no ending changes a key."""
    claims = [a_claim() for _ in KINDS]
    with second_connection() as other, actor() as connection:
        sql(other, "BEGIN")
        sql(other, "SELECT 1 FROM django_pgqueue_job FOR KEY SHARE")
        sql(connection, "SET lock_timeout = '1ms'")

        settlement = settle(connection, [every_kind(claim)[n] for n, claim in enumerate(claims)])

    assert len(settlement.settled) == len(KINDS)


@two_connections
def test_a_held_row_that_is_visibly_someone_else_s_is_lost_not_busy():
    """R14: what a committed version already says needs no lock."""
    claim, other = a_claim(), a_claim()
    LOSSES["recovered"](claim)
    with second_connection() as admin, worker_session() as session:
        sql(admin, "BEGIN")
        sql(admin, "SELECT 1 FROM django_pgqueue_job FOR UPDATE")

        settlement = settle_as_a_worker(session, [Succeeded(claim), Succeeded(other)])

    assert (settlement.settled, settlement.busy, settlement.lost) == ([], [Succeeded(other)], [Succeeded(claim)])


@two_connections
def test_the_manager_waits_for_a_held_row_as_any_update_would_and_reports_a_lock_timeout_as_busy():
    """R13: lock_timeout is the bounded variant, and it is the caller's to choose."""
    claim, other = a_claim(), a_claim()
    with second_connection() as admin, transaction.atomic():
        sql(admin, "BEGIN")
        sql(admin, "SELECT 1 FROM django_pgqueue_job WHERE id = %s FOR UPDATE", [claim.job_id])
        here("SET LOCAL lock_timeout = '1ms'")

        settlement = Job.objects.settle([Succeeded(claim), Succeeded(other)])

        assert here("SELECT 1") == [(1,)]
    assert (settlement.settled, settlement.busy, settlement.lost) == ([Succeeded(other)], [Succeeded(claim)], [])
    assert row(other.job_id, "status") == ("done",)


# ---- the fence while others change the row


@two_connections
@pytest.mark.parametrize("count", [3, 20, 1000])
@of_every_kind
def test_a_claim_lost_while_its_ending_waits_for_the_row_stays_untouched(kind, count):
    """R14, R19, R21: the fence is checked again under the row's lock, for arrays that are scanned or hashed."""
    enqueue_jobs(count)
    claims = claim_jobs(count)
    lost = claims[1]
    with actor() as thief, actor() as connection:
        sql(thief, "BEGIN")
        sql(
            thief,
            "UPDATE django_pgqueue_job SET claim_version = claim_version + 1, claimed_by = 'B' WHERE id = %s",
            [lost.job_id],
        )
        ending = InThread(lambda: settle(connection, [every_kind(claim)[kind] for claim in claims]))
        wait_for_waiter(pid_of(thief))
        sql(thief, "COMMIT")
        settlement = ending.result()

    assert settlement.lost == [every_kind(lost)[kind]]
    assert (len(settlement.settled), settlement.busy) == (count - 1, [])
    assert row(lost.job_id, "status", "claim_version", "claimed_by") == ("running", 2, "B")
    assert attempts_of(lost.job_id) == []


@two_connections
@of_every_kind
def test_a_job_cancelled_by_hand_without_a_new_version_is_not_brought_back(kind):
    """R14: the status is part of the fence."""
    claim = a_claim()
    with actor() as admin, actor() as connection:
        sql(admin, "BEGIN")
        sql(
            admin,
            "UPDATE django_pgqueue_job SET status = 'cancelled', lease_until = NULL, finished_at = clock_timestamp()",
        )
        ending = InThread(lambda: settle(connection, [every_kind(claim)[kind]]))
        wait_for_waiter(pid_of(admin))
        sql(admin, "COMMIT")
        ending.result()

    assert row(claim.job_id, "status", "claim_version") == ("cancelled", 1)
    assert attempts_of(claim.job_id) == []


@two_connections
@of_every_kind
def test_a_renewal_that_an_ending_waits_for_is_no_loss(kind):
    """R14, R18: the row has changed, the claim has not."""
    claim = a_claim()
    with actor() as renewer, actor() as connection:
        sql(renewer, "BEGIN")
        sql(renewer, "UPDATE django_pgqueue_job SET lease_until = lease_until + interval '1 min'")
        ending = InThread(lambda: settle(connection, [every_kind(claim)[kind]]))
        wait_for_waiter(pid_of(renewer))
        sql(renewer, "COMMIT")
        settlement = ending.result()

    assert settlement.settled == [every_kind(claim)[kind]]
    assert len(attempts_of(claim.job_id)) == (1 if kind in (2, 3, 5) else 0)
    assert row(claim.job_id, "lease_until") == (None,)


@two_connections
@of_every_kind
def test_a_claim_lost_after_the_snapshot_of_its_ending_stays_untouched(kind):
    """R14, R21: recovered and claimed again by another worker between the ending's snapshot and its first row."""
    enqueue_jobs(2)
    mine, lost = claim_jobs(2, "A")
    with pausing() as pause, actor() as connection:
        pause.stop(connection)
        ending = InThread(lambda: settle(connection, [every_kind(mine)[kind], every_kind(lost)[kind]]))
        pause.wait_for_arrival()
        expire_lease(lost.job_id)
        Job.objects.recover()
        make_due(lost.job_id)
        claim_one("B")
        before = snapshot(lost.job_id)
        pause.go_on()
        settlement = ending.result()

    assert (settlement.settled, settlement.lost) == ([every_kind(mine)[kind]], [every_kind(lost)[kind]])
    assert snapshot(lost.job_id) == before


@two_connections
def test_a_settle_that_meets_an_administrator_crosswise_gives_way_and_settles_what_it_can():
    """R14: the administrator holds job 2 and asks for job 1, which the round has; the round lets go (B136)."""
    enqueue_jobs(3)
    claims = claim_jobs(3)
    cancel = (
        "UPDATE django_pgqueue_job SET status = 'cancelled', lease_until = NULL, finished_at = clock_timestamp(),"
        " claim_version = claim_version + 1 WHERE id = %s AND status = 'running'"
    )
    with actor() as admin, worker_session() as session:
        sql(admin, "SET deadlock_timeout = '60s'")
        sql(admin, "BEGIN")
        sql(admin, cancel, [claims[1].job_id])
        round_ = InThread(lambda: settle_as_a_worker(session, [Succeeded(claim) for claim in claims]))
        wait_for_waiter(pid_of(admin))
        sql(admin, cancel, [claims[0].job_id])
        sql(admin, "COMMIT")
        settlement = round_.result()

    settled = {outcome.claim for outcome in settlement.settled}
    others = {outcome.claim for outcome in (*settlement.lost, *settlement.busy)}
    # Job 1 is free between the round's rollback and the administrator's awakening: either may have it.
    assert claims[2] in settled and claims[1] in others and settled | others == set(claims)
    assert row(claims[0].job_id, "status") == ("done" if claims[0] in settled else "cancelled",)
    assert row(claims[1].job_id, "status") == ("cancelled",)
    assert row(claims[2].job_id, "status") == ("done",)


# ---- refused

ERRCODES = [
    "22023",  # invalid parameter value
    "23514",  # check violation
    "23505",  # unique violation
    "54000",  # program limit exceeded
    "P0001",  # what RAISE gives by default
    "P0004",  # ASSERT
    "21000",  # cardinality violation
    "27000",  # triggered data change violation
    "38000",  # an error in PL/Python
    "44000",  # WITH CHECK OPTION
    "45000",  # what other databases call unhandled user-defined exception
    "U0001",  # a class that someone made up
]


def raises_for(job_id, errcode="P0001", only=""):
    condition = f"NEW.id = {job_id} AND NEW.status <> 'running'" + (f" AND {only}" if only else "")
    return f"IF {condition} THEN RAISE EXCEPTION 'not this one' USING ERRCODE = '{errcode}'; END IF;"


@pytest.mark.parametrize("errcode", ERRCODES)
def test_an_ending_that_the_database_refuses_fails_its_job_alone(settle_somehow, errcode):
    """R14, R24: the batch is halved until the culprit is found; it becomes a dead letter, the others are written."""
    enqueue_jobs(7)
    claims = claim_jobs(7)
    bad = Succeeded(claims[3])
    outcomes = [bad if n == 3 else every_kind(claim)[n] for n, claim in enumerate(claims)]
    with job_trigger(raises_for(bad.claim.job_id, errcode, only="NEW.status = 'done'")):
        settlement = settle_somehow(outcomes)

    replacement = Failed(bad.claim, ErrorRecord.plain(UnstorableResult, REFUSED_TEXT))
    assert [outcome for outcome, _ in settlement.refused] == [bad]
    assert "not this one" in str(settlement.refused[0][1])
    assert replacement in settlement.settled
    assert [o for o in settlement.settled if o != replacement] == [o for o in outcomes if o != bad]
    assert (settlement.busy, settlement.lost) == ([], [])
    assert row(bad.claim.job_id, "status", "last_error") == ("failed", f"UnstorableResult: {REFUSED_TEXT}")
    assert Job.objects.filter(status="running").count() == 0
    assert JobAttempt.objects.get(job=bad.claim.job_id).error_class == class_path_of(UnstorableResult)


RAW = {
    "NUL in a message": lambda claim: Failed(claim, ErrorRecord("a.B", "a\x00b", "", "f")),
    "NUL in a result": lambda claim: Succeeded(claim, "\x00"),
    "an escaped NUL in a result": lambda claim: Succeeded(claim, '"a\\u0000b"'),
    "a surrogate in a traceback": lambda claim: Retried(claim, 1, ErrorRecord("a.B", "", "\udc80", "f")),
    "a surrogate in a result": lambda claim: Succeeded(claim, '"\ud800"'),
    "an escaped surrogate in a result": lambda claim: Succeeded(claim, '"\\ud800"'),
    "no JSON": lambda claim: Succeeded(claim, "{'a': 1}"),
    "NaN": lambda claim: Succeeded(claim, "NaN"),
    "no text": lambda claim: Succeeded(claim, ""),
    "a number too large": lambda claim: Succeeded(claim, "1e200000"),
    "a class too long": lambda claim: Failed(claim, ErrorRecord("a" * 256, "", "", "f")),
    "a fingerprint too long": lambda claim: Retried(claim, 1, ErrorRecord("a.B", "", "", "f" * 33)),
    "an endless delay": lambda claim: Retried(claim, 1e300, ERROR),
    "a delay that is no number": lambda claim: Retried(claim, float("nan"), ERROR),
    "an endless snooze": lambda claim: Snoozed(claim, 1e300),
    "an endless pause": lambda claim: Released(claim, 1e300),
}


@pytest.mark.parametrize("what", RAW)
def test_a_value_that_cannot_be_stored_costs_its_own_job_only(settle_somehow, what):
    """R14, R24: whatever slipped through the checks before."""
    enqueue_jobs(4)
    claims = claim_jobs(4)
    bad = RAW[what](claims[1])
    outcomes = [Succeeded(claims[0], "0"), bad, Retried(claims[2], 9, ERROR), Failed(claims[3], ERROR)]

    settlement = settle_somehow(outcomes)

    assert [outcome for outcome, _ in settlement.refused] == [bad]
    assert len(settlement.settled) == 4
    assert (settlement.busy, settlement.lost) == ([], [])
    statuses = [row(claim.job_id, "status")[0] for claim in claims]
    assert statuses == ["done", "failed", "pending", "failed"]
    assert row(claims[1].job_id, "last_error") == (f"UnstorableResult: {REFUSED_TEXT}",)


@pytest.mark.django_db
def test_several_refused_endings_of_a_large_batch_are_all_found():
    """R14."""
    enqueue_jobs(300)
    claims = claim_jobs(300)
    bad = {claims[n] for n in (0, 1, 150, 299)}

    settlement = Job.objects.settle([Succeeded(claim, "NaN" if claim in bad else "1") for claim in claims])

    assert {outcome.claim for outcome, _ in settlement.refused} == bad
    assert Job.objects.filter(status="failed").count() == 4
    assert Job.objects.filter(status="done").count() == 296


@pytest.mark.django_db
def test_a_caller_s_transaction_survives_a_refusal_and_takes_everything_with_it():
    """R01, R14."""
    claim, bad = a_claim(), a_claim()

    with transaction.atomic():
        Job.objects.settle([Succeeded(claim), Succeeded(bad, "NaN")])
        inside = row(claim.job_id, "status"), row(bad.job_id, "status")
        transaction.set_rollback(True)

    assert inside == (("done",), ("failed",))
    assert row(claim.job_id, "status") == row(bad.job_id, "status") == ("running",)


def test_an_ending_that_cannot_even_fail_is_left_to_its_lease(settle_somehow):
    """R19: nothing that can be written would end this job; it is reported, and the others are written."""
    claim, bad = a_claim(), a_claim()
    with job_trigger(raises_for(bad.job_id)):
        settlement = settle_somehow([Succeeded(claim), Succeeded(bad)])

    assert settlement.settled == [Succeeded(claim)]
    assert [outcome.claim for outcome in settlement.lost] == [bad]
    assert [outcome.claim for outcome, _ in settlement.refused] == [bad, bad]
    assert row(bad.job_id, "status", "claim_version") == ("running", 1)


@two_connections
@pytest.mark.parametrize("through", ["manager", "worker"])
def test_an_ending_that_is_refused_at_commit_is_found_too(through):
    """R14: a deferred constraint speaks only then."""
    claim, bad = a_claim(), a_claim()
    with job_trigger(raises_for(bad.job_id, "23514", "NEW.status = 'done'"), at_commit=True):
        outcomes = [Succeeded(claim, "1"), Succeeded(bad, "1")]
        if through == "manager":
            settlement = Job.objects.settle(outcomes)
        else:
            with worker_session() as session:
                settlement = settle_as_a_worker(session, outcomes)

    assert [outcome for outcome, _ in settlement.refused] == [outcomes[1]]
    assert row(claim.job_id, "status", "return_value") == ("done", 1)
    assert row(bad.job_id, "status") == ("failed",)


@two_connections
def test_a_refused_ending_beside_a_held_row_costs_neither_the_others_nor_the_held_one():
    """R14: halving passes over what is locked."""
    enqueue_jobs(6)
    claims = claim_jobs(6)
    outcomes = [Succeeded(claim, "NaN" if n == 1 else "1") for n, claim in enumerate(claims)]
    with second_connection() as admin, worker_session() as session:
        sql(admin, "BEGIN")
        sql(admin, "SELECT 1 FROM django_pgqueue_job WHERE id = %s FOR UPDATE", [claims[4].job_id])

        settlement = settle_as_a_worker(session, outcomes)

    assert settlement.busy == [outcomes[4]]
    assert [outcome for outcome, _ in settlement.refused] == [outcomes[1]]
    assert [row(claim.job_id, "status")[0] for claim in claims] == ["done", "failed", "done", "done", "running", "done"]


# What says nothing about a row: every ending would be answered so. It is raised and nothing is given up.
GENERAL = ["53100", "53200", "58030", "XX000", "25006", "42501", "42P01", "40001", "57P01", "08006"]


@pytest.mark.parametrize("errcode", GENERAL)
def test_an_error_that_is_not_about_the_row_fails_no_job(settle_somehow, errcode):
    """R14, R16: a full disk, a server that goes away, a table that is missing."""
    claim, other = a_claim(), a_claim()
    with (
        job_trigger(raises_for(other.job_id, errcode)),
        pytest.raises((psycopg.Error, connections["default"].Database.Error, Exception)) as raised,
    ):
        settle_somehow([Succeeded(claim), Succeeded(other)])

    assert "not this one" in str(raised.value)
    assert row(claim.job_id, "status") == row(other.job_id, "status") == ("running",)


def test_a_deadlock_or_a_timeout_in_a_trigger_makes_an_ending_busy(settle_somehow):
    """R14."""
    claim = a_claim()
    for errcode in ("40P01", "55P03", "57014"):
        with job_trigger(raises_for(claim.job_id, errcode)):
            settlement = settle_somehow([Succeeded(claim)])
        assert (settlement.settled, settlement.busy, settlement.lost) == ([], [Succeeded(claim)], [])
    assert settle_somehow([Succeeded(claim)]).settled == [Succeeded(claim)]


@pytest.mark.django_db
def test_large_results_are_written_in_several_statements_of_one_transaction(monkeypatch):
    """Two hundred results of a megabyte took longer than a statement may, again and again."""
    monkeypatch.setattr(settling, "SLICE_CHARS", 10)
    enqueue_jobs(5)
    claims = claim_jobs(5)
    results = ['"12"', '"12"', '"1234567890123"', '"12"', '"12"']

    with CaptureQueriesContext(connections["default"]) as queries:
        settlement = Job.objects.settle([Succeeded(*pair) for pair in zip(claims, results, strict=True)])

    assert len(settlement.settled) == 5
    assert sum("return_value" in query["sql"] for query in queries) == 3
    assert [f'"{value}"' for value in Job.objects.order_by("pk").values_list("return_value", flat=True)] == results
