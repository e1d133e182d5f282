"""Leases are renewed for the exact claim, and jobs are taken back only from claims that nobody holds any more."""

from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.utils import timezone

from django_pgqueue import backoff
from django_pgqueue.exceptions import ClaimExpired, WorkerCrashed
from django_pgqueue.managers import EXPIRED_TEXT, recover_lost
from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import Claim, Succeeded, class_path_of
from django_pgqueue.statements import leases
from django_pgqueue.statements.settle import settle
from django_pgqueue.states import AttemptOutcome
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

MINUTE = timedelta(minutes=1)


def running_jobs(count, owner="worker", **changes):
    enqueue_jobs(count, **changes)
    return claim_jobs(count, owner)


def expired_job(owner="worker", **changes):
    [claim] = running_jobs(1, owner, **changes)
    expire_lease(claim.job_id)
    return claim


def lease_of(claim):
    return row(claim.job_id, "lease_until")[0]


# ---- renewal


@pytest.mark.django_db
def test_a_renewal_moves_the_end_of_the_lease_and_nothing_else():
    """R18."""
    claim, untouched = running_jobs(2)
    before = Job.objects.values().get(pk=claim.job_id)
    other_lease = lease_of(untouched)
    began = timezone.now()

    renewed = Job.objects.renew([claim], lease_seconds=600)

    after = Job.objects.values().get(pk=claim.job_id)
    assert renewed == {claim.job_id}
    assert began + 10 * MINUTE <= after.pop("lease_until") <= timezone.now() + 10 * MINUTE
    assert before.pop("lease_until") < began + 2 * MINUTE
    assert after == before
    assert lease_of(untouched) == other_lease


@pytest.mark.django_db
def test_a_renewal_of_many_claims_is_one_statement(django_assert_num_queries):
    """R18, B135."""
    claims = running_jobs(250)

    with django_assert_num_queries(1):
        renewed = Job.objects.renew(claims)

    assert renewed == {claim.job_id for claim in claims}
    assert Job.objects.renew([]) == set()


@pytest.mark.django_db
def test_only_the_exact_version_of_a_claim_is_renewed():
    """R18, R21: whoever holds another version has lost the job, and learns it from the answer."""
    old = expired_job("A")
    Job.objects.recover()
    make_due(old.job_id)
    new = claim_of(claim_one("B"))
    lease = lease_of(new)
    others = [old, Claim(new.job_id, new.version + 1), Claim(0, 0)]

    renewed = Job.objects.renew(others, lease_seconds=600)

    assert renewed == set()
    assert lease_of(new) == lease
    assert leases.standing(connections["default"], others) == set()
    assert leases.standing(connections["default"], [new]) == {new.job_id}
    assert Job.objects.renew([new]) == {new.job_id}


@pytest.mark.django_db
@pytest.mark.parametrize("status", ["pending", "held", "blocked", "done", "failed", "cancelled"])
def test_a_claim_that_has_ended_is_not_renewed(status):
    """R18: whatever its version says, a row that does not run has no lease."""
    [claim] = running_jobs(1)
    finished_at = timezone.now() if status in ("done", "failed", "cancelled") else None
    Job.objects.filter(pk=claim.job_id).update(status=status, lease_until=None, finished_at=finished_at)

    assert Job.objects.renew([claim]) == set()
    assert row(claim.job_id, "lease_until") == (None,)


@pytest.mark.django_db
def test_a_lease_that_has_ended_is_renewed_as_long_as_nobody_took_the_job():
    """R18, R19: a worker that was late but not replaced keeps its job."""
    claim = expired_job()

    assert Job.objects.renew([claim]) == {claim.job_id}
    assert Job.objects.recover() == []
    assert row(claim.job_id, "attempts", "claim_version") == (1, claim.version)


@two_connections
def test_a_renewal_passes_over_a_locked_row_and_renews_the_others():
    """R18: one locked row of ten must not stall the leases of nine jobs."""
    claims = running_jobs(10)
    locked = claims[4]
    lease = lease_of(locked)
    with second_connection() as admin, actor() as worker:
        sql(admin, "BEGIN")
        sql(admin, "SELECT 1 FROM django_pgqueue_job WHERE id = %s FOR UPDATE", [locked.job_id])
        sql(worker, "SET lock_timeout = '1ms'")

        renewed = leases.renew(worker, claims, 600)
        standing = leases.standing(worker, claims)

    assert renewed == {claim.job_id for claim in claims} - {locked.job_id}
    assert standing == {claim.job_id for claim in claims}
    assert lease_of(locked) == lease


@two_connections
def test_what_a_renewal_missed_is_told_apart_into_standing_and_lost():
    """R18: a locked row is tried again, a lost claim must stop."""
    locked, lost, done = running_jobs(3)
    Job.objects.release([lost])
    Job.objects.settle([Succeeded(done)])
    with second_connection() as admin, worker_session() as session:
        sql(admin, "BEGIN")
        sql(admin, "SELECT 1 FROM django_pgqueue_job WHERE id = %s FOR UPDATE", [locked.job_id])

        with session.round() as connection:
            renewed = leases.renew(connection, [locked, lost, done], 60)
            standing = leases.standing(connection, [locked, lost, done])

    assert (renewed, standing) == (set(), {locked.job_id})


@two_connections
def test_a_renewal_and_a_settle_never_wait_for_each_other_in_a_circle():
    """R18: the renewal holds job 1 and meets job 2, which the settle holds while it waits for job 1."""
    first, second = running_jobs(2)
    with actor() as settler, actor() as renewer:
        sql(settler, "BEGIN")
        settle(settler, [Succeeded(second)])
        sql(renewer, "BEGIN")
        renewed = leases.renew(renewer, [first, second], 60)
        settling = InThread(lambda: settle(settler, [Succeeded(first)]))
        wait_for_waiter(pid_of(renewer))
        sql(renewer, "COMMIT")
        settlement = settling.result()
        sql(settler, "COMMIT")

    assert renewed == {first.job_id}
    assert settlement.settled == [Succeeded(first)]
    assert row(first.job_id, "status") == row(second.job_id, "status") == ("done",)


@two_connections
def test_a_claim_that_ends_after_the_snapshot_of_a_renewal_is_not_renewed():
    """R14, R18: a done row gets no lease back."""
    ended, running = running_jobs(2)
    with pausing() as pause, actor() as renewer:
        pause.stop(renewer)
        renewing = InThread(lambda: leases.renew(renewer, [ended, running], 600))
        pause.wait_for_arrival()
        Job.objects.settle([Succeeded(ended)])
        pause.go_on()
        renewed = renewing.result()

    assert renewed == {running.job_id}
    assert row(ended.job_id, "status", "lease_until") == ("done", None)


# ---- recovery


@pytest.mark.django_db
def test_an_expired_job_goes_back_after_the_default_backoff_and_its_attempt_counts():
    """R19, R23: recorded as lost, with the class that a TaskResult imports."""
    claim = expired_job("host:9", max_attempts=2)
    claimed_at = row(claim.job_id, "claimed_at")[0]
    began = timezone.now()

    recovered = Job.objects.recover()

    assert recovered == [(claim.job_id, "pending")]
    job = Job.objects.get(pk=claim.job_id)
    assert (job.status, job.attempts, job.claim_version) == ("pending", 1, claim.version + 1)
    assert (job.lease_until, job.finished_at, job.last_error) == (None, None, EXPIRED_TEXT)
    longest = backoff.FIRST_DELAY_SECONDS * (1 + backoff.JITTER)
    assert began + timedelta(seconds=backoff.FIRST_DELAY_SECONDS) <= job.available_at
    assert job.available_at <= timezone.now() + timedelta(seconds=longest)
    attempt = JobAttempt.objects.get()
    assert (attempt.job_id, attempt.claim_version, attempt.attempt) == (claim.job_id, claim.version, 1)
    assert (attempt.outcome, attempt.counted, attempt.worker) == ("lost", True, "host:9")
    assert (attempt.error_class, attempt.message) == (class_path_of(ClaimExpired), EXPIRED_TEXT)
    assert (attempt.started_at, attempt.started_at <= attempt.ended_at) == (claimed_at, True)


@pytest.mark.django_db
def test_an_expired_job_without_attempts_left_is_a_dead_letter():
    """R19, R24, R25: a job that kills its worker every time comes to an end."""
    job_id = enqueue(max_attempts=3)

    seen = []
    for _ in range(3):
        claim_one()
        expire_lease(job_id)
        seen += [status for _, status in Job.objects.recover()]
        if seen[-1] == "pending":
            make_due(job_id)

    assert seen == ["pending", "pending", "failed"]
    assert row(job_id, "status", "attempts", "claim_version") == ("failed", 3, 6)
    assert row(job_id, "finished_at")[0] is not None
    assert list(JobAttempt.objects.order_by("id").values_list("attempt", "outcome", "counted")) == [
        (1, "lost", True),
        (2, "lost", True),
        (3, "lost", True),
    ]
    assert Job.objects.claim("worker") == []


@pytest.mark.django_db
def test_recovery_touches_only_running_jobs_whose_lease_has_ended():
    """R19."""
    running = running_jobs(3)
    enqueue_jobs(3)
    expired = [expired_job(), expired_job()]

    recovered = Job.objects.recover()

    assert {job.id for job in recovered} == {claim.job_id for claim in expired}
    assert Job.objects.filter(pk__in=[claim.job_id for claim in running], status="running").count() == 3
    assert Job.objects.recover() == []


@pytest.mark.django_db
def test_recovery_takes_the_longest_ended_leases_first_up_to_its_limit():
    """R19: in batches; what is left is met again."""
    claims = running_jobs(5)
    for n, claim in enumerate(claims):
        lease_until = timezone.now() - MINUTE * (n * 3 % 5 + 1)
        Job.objects.filter(pk=claim.job_id).update(lease_until=lease_until)
    by_lease = list(Job.objects.order_by("lease_until").values_list("pk", flat=True))

    batches = [{job.id for job in Job.objects.recover(limit=2)} for _ in range(4)]

    assert batches == [set(by_lease[:2]), set(by_lease[2:4]), set(by_lease[4:]), set()]


@pytest.mark.django_db
def test_jobs_that_were_lost_together_do_not_come_back_together():
    """R23, B68: jitter, and a wait that grows with each attempt of a job."""
    claims = running_jobs(100)
    old = claims[0].job_id
    Job.objects.filter(pk=old).update(attempts=3)
    Job.objects.update(lease_until=timezone.now() - MINUTE)

    Job.objects.recover()

    moments = list(Job.objects.exclude(pk=old).values_list("available_at", flat=True))
    assert len(set(moments)) > 50
    assert row(old, "available_at")[0] > max(moments) + MINUTE


@pytest.mark.django_db
def test_the_jobs_of_one_owner_are_taken_back_but_for_those_still_held():
    """R19, R22: what a dead or renamed child claimed, by the beginning of its names."""
    held, *others = running_jobs(3, "host:1:x/1")
    also = running_jobs(1, "host:1:x/2")
    running_jobs(2, "host:1:y/1")
    running_jobs(1, "HOST:1:x/1")
    connection = connections["default"]

    jobs = leases.lock_owned(connection, "host:1:x", [held.job_id])

    assert {job.claim for job in jobs} == {*others, *also}
    assert leases.lock_owned(connection, "host%", []) == []
    assert leases.lock_owned(connection, "host_1:x", []) == []
    assert len(leases.lock_owned(connection, "host:1:x/1", [])) == 3


@pytest.mark.django_db
def test_the_cause_that_ended_the_attempts_is_recorded():
    """R23, B72: a dead process is told from a lease that ran out."""
    claim, last = running_jobs(2, "host:1:x/1", max_attempts=1)
    Job.objects.filter(pk=claim.job_id).update(max_attempts=2)
    connection = connections["default"]
    jobs = leases.lock_owned(connection, "host:1:x", [])

    ended = leases.recover(
        connection, jobs, [5.0] * 2, AttemptOutcome.CRASHED, class_path_of(WorkerCrashed), "SIGKILL " * 100
    )

    assert dict(ended) == {claim.job_id: "pending", last.job_id: "failed"}
    for attempt in JobAttempt.objects.all():
        assert (attempt.outcome, attempt.counted) == ("crashed", True)
        assert (attempt.error_class, attempt.message) == (class_path_of(WorkerCrashed), "SIGKILL " * 100)
    assert len(row(last.job_id, "last_error")[0]) == 500


@pytest.mark.django_db
def test_each_recovered_job_gets_its_own_delay():
    """R23: values are found by id, whatever order the rows come in."""
    claims = running_jobs(50)
    Job.objects.update(lease_until=timezone.now() - MINUTE)
    connection = connections["default"]
    jobs = leases.lock_expired(connection, 500)[::-1]
    began = timezone.now()

    leases.recover(connection, jobs, [1000.0 + job.id for job in jobs], AttemptOutcome.LOST, "a.B", "m")

    for claim in claims:
        wait = (row(claim.job_id, "available_at")[0] - began).total_seconds() - claim.job_id
        assert 1000 <= wait < 1030


@pytest.mark.django_db
def test_recovering_nothing_is_no_statement(django_assert_num_queries):
    with django_assert_num_queries(0):
        assert leases.recover(connections["default"], [], [], AttemptOutcome.LOST, "a.B", "m") == []


@pytest.mark.django_db
def test_a_job_that_was_not_locked_but_claimed_anew_is_not_recovered():
    """R19: even the writing of a recovery is fenced."""
    claim = expired_job()
    connection = connections["default"]
    jobs = leases.lock_expired(connection, 500)
    Job.objects.filter(pk=claim.job_id).update(claim_version=9)

    assert recover_lost(connection, jobs) == []
    assert row(claim.job_id, "status", "claim_version") == ("running", 9)
    assert JobAttempt.objects.count() == 0


@pytest.mark.django_db
def test_recovery_inside_a_caller_s_transaction_goes_with_it():
    """R01."""
    claim = expired_job()

    with transaction.atomic():
        assert len(Job.objects.recover()) == 1
        transaction.set_rollback(True)

    assert row(claim.job_id, "status", "claim_version") == ("running", claim.version)


# ---- a renewal against a recovery


@two_connections
def test_a_renewal_that_commits_first_wins_over_a_recovery_that_saw_the_old_lease():
    """R18, R19: the recovery has read its snapshot; the condition is checked again under the row's lock."""
    kept, expired = expired_job("A"), expired_job("A")
    with pausing() as pause, actor() as recoverer:
        pause.stop(recoverer)
        locking = InThread(lambda: leases.lock_expired(recoverer, 500))
        pause.wait_for_arrival()
        assert Job.objects.renew([kept]) == {kept.job_id}
        pause.go_on()
        locked = locking.result()

    assert [job.claim for job in locked] == [expired]
    assert row(kept.job_id, "status", "claim_version") == ("running", kept.version)


@two_connections
def test_a_recovery_passes_over_a_row_that_is_being_renewed():
    """R19: it does not wait for the renewal, and afterwards the lease is good."""
    claim = expired_job()
    with actor() as renewer:
        sql(renewer, "BEGIN")
        renewed = leases.renew(renewer, [claim], 60)
        during = Job.objects.recover()
        sql(renewer, "COMMIT")
    after = Job.objects.recover()

    assert (renewed, during, after) == ({claim.job_id}, [], [])


@two_connections
def test_a_recovery_that_holds_the_row_first_wins_over_a_renewal():
    """R18, R19: the renewal does not wait; after the recovery's COMMIT it renews nothing, and nothing stands."""
    claim = expired_job()
    with actor() as recoverer, actor() as renewer:
        sql(recoverer, "BEGIN")
        recovered = recover_lost(recoverer, leases.lock_expired(recoverer, 500))
        during = leases.renew(renewer, [claim], 60)
        standing_during = leases.standing(renewer, [claim])
        sql(recoverer, "COMMIT")
        after = leases.renew(renewer, [claim], 60)
        standing_after = leases.standing(renewer, [claim])

    assert recovered == [(claim.job_id, "pending")]
    assert (during, standing_during) == (set(), {claim.job_id})
    assert (after, standing_after) == (set(), set())
    assert row(claim.job_id, "status", "lease_until") == ("pending", None)


@two_connections
def test_a_renewal_that_saw_the_claim_before_it_was_recovered_renews_nothing():
    """R18, R21: its snapshot is old, its lock is not."""
    claim = expired_job("A")
    with pausing() as pause, actor() as renewer:
        pause.stop(renewer)
        renewing = InThread(lambda: leases.renew(renewer, [claim], 600))
        pause.wait_for_arrival()
        Job.objects.recover()
        make_due(claim.job_id)
        new = claim_of(claim_one("B"))
        lease = lease_of(new)
        pause.go_on()
        renewed = renewing.result()

    assert renewed == set()
    assert lease_of(new) == lease


@two_connections
def test_a_settle_that_commits_first_wins_over_a_recovery_that_saw_the_old_lease():
    """R16, R19: a late worker that was still in time is not undone."""
    claim = expired_job()
    with pausing() as pause, actor() as recoverer:
        pause.stop(recoverer)
        locking = InThread(lambda: leases.lock_expired(recoverer, 500))
        pause.wait_for_arrival()
        Job.objects.settle([Succeeded(claim)])
        pause.go_on()
        locked = locking.result()

    assert locked == []
    assert row(claim.job_id, "status", "attempts") == ("done", 1)


@two_connections
def test_a_job_recovered_and_claimed_again_meanwhile_is_left_to_its_new_owner():
    """R19, R21: the row that the snapshot saw has expired, the one under the lock has a lease of its own."""
    claim = expired_job("A")
    with pausing() as pause, actor() as recoverer:
        pause.stop(recoverer)
        locking = InThread(lambda: leases.lock_expired(recoverer, 500))
        pause.wait_for_arrival()
        Job.objects.recover()
        make_due(claim.job_id)
        new = claim_of(claim_one("B"))
        pause.go_on()
        locked = locking.result()

    assert locked == []
    assert row(claim.job_id, "status", "claim_version", "claimed_by") == ("running", new.version, "B")


@two_connections
def test_the_burial_of_an_owner_leaves_alone_what_was_claimed_by_another_meanwhile():
    """R19, R21: the name is checked again under the row's lock, too."""
    lost, kept = running_jobs(2, "dead")
    with pausing() as pause, actor() as undertaker:
        here(
            "CREATE FUNCTION pgqueue_test.starts_with(text, text) RETURNS boolean LANGUAGE plpgsql VOLATILE AS"
            " $$BEGIN PERFORM pgqueue_test.pause(); RETURN pg_catalog.starts_with($1, $2); END$$"
        )
        pause.stop(undertaker)
        locking = InThread(lambda: leases.lock_owned(undertaker, "dead", []))
        pause.wait_for_arrival()
        Job.objects.release([lost])
        claim_one("B")
        pause.go_on()
        locked = locking.result()

    assert [job.claim for job in locked] == [kept]


@two_connections
def test_two_recoveries_share_the_expired_jobs():
    """R19: each job is taken back once, and counted once."""
    claims = [expired_job() for _ in range(4)]
    with actor() as a, actor() as b:
        for connection in (a, b):
            sql(connection, "BEGIN")
        first = recover_lost(a, leases.lock_expired(a, 2))
        second = recover_lost(b, leases.lock_expired(b, 500))
        for connection in (a, b):
            sql(connection, "COMMIT")

    assert {job.id for job in first} | {job.id for job in second} == {claim.job_id for claim in claims}
    assert (len(first), len(second)) == (2, 2)
    assert JobAttempt.objects.count() == 4


@two_connections
def test_a_backend_of_a_dead_process_still_holds_its_rows_until_it_is_gone():
    """R20, R22: what it had locked is passed over, and found at the next look."""
    [claim] = running_jobs(1, "dead")
    with actor() as dead, actor() as undertaker:
        sql(dead, "BEGIN")
        settle(dead, [Succeeded(claim)])
        during = leases.lock_owned(undertaker, "dead", [])
        dead.close()
        after = wait_until(lambda: leases.lock_owned(undertaker, "dead", []))

    assert during == []
    assert [job.claim for job in after] == [claim]
