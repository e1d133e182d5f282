"""What people do to jobs: hold, unhold, cancel, and requeue where keys are concerned (R26)."""

import threading
from collections import Counter
from contextlib import contextmanager

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_pgqueue import JobBusy, JobKeyHeld
from django_pgqueue.exceptions import TaskCancelled
from django_pgqueue.managers import Changed
from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import (
    Claim,
    ErrorRecord,
    Failed,
    Released,
    Retried,
    Snoozed,
    Succeeded,
    class_path_of,
)
from django_pgqueue.statements import people
from django_pgqueue.statements.database import CANCEL_CHANNEL
from django_pgqueue.testing import run_jobs

from .app.models import Mark
from .app.tasks import nothing
from .app.worker_tasks import leave_mark
from .helpers import (
    PATIENCE_SECONDS,
    InThread,
    actor,
    claim_of,
    claim_one,
    enqueue,
    pausing,
    row,
    second_connection,
    sql,
    wait_until,
)

ERROR = ErrorRecord.plain(ValueError, "no")
ENDINGS = {
    "succeeded": lambda claim: Succeeded(claim, "42"),
    "retried": lambda claim: Retried(claim, 0.0, ERROR),
    "snoozed": lambda claim: Snoozed(claim, 0.0),
    "failed": lambda claim: Failed(claim, ERROR),
    "released": lambda claim: Released(claim),
    "interrupted": lambda claim: Released(claim, started=True),
}


def dead_letter(key=None):
    """A failed job of `nothing`, with *key*; return it."""
    task = nothing.using(job_key=key) if key else nothing
    job_id = int(task.enqueue().id)
    Job.objects.settle([Failed(claim_of(claim_one()), ErrorRecord.plain(ValueError, "no"))])
    return Job.objects.get(pk=job_id)


@pytest.mark.django_db
class TestHolding:
    def test_a_held_job_does_not_run_until_it_is_put_back(self):
        """R26"""
        held = Job.objects.get(pk=leave_mark.enqueue("held").id)

        assert held.hold()
        assert run_jobs() == []
        assert held.unhold()

        assert len(run_jobs()) == 1
        assert Mark.objects.get().note == "held"

    def test_an_unheld_job_keeps_its_time_if_that_is_still_to_come(self):
        tomorrow = timezone.now() + timezone.timedelta(days=1)
        job = Job.objects.get(pk=nothing.using(run_after=tomorrow).enqueue().id)

        job.hold()
        job.unhold()

        assert row(job.pk, "available_at") == (tomorrow,)

    def test_an_unheld_job_that_was_due_is_available_from_now_on(self):
        job = Job.objects.get(pk=nothing.enqueue().id)
        job.hold()

        job.unhold()

        job.refresh_from_db()
        assert job.available_at > job.created_at

    def test_only_pending_jobs_can_be_held_and_only_held_ones_unheld(self):
        running = Job.objects.get(pk=enqueue())
        claim_one()
        failed = dead_letter()

        assert not running.hold()
        assert not failed.hold()
        assert not failed.unhold()


@pytest.mark.django_db
class TestCancelling:
    def test_a_cancelled_job_never_runs(self):
        job = Job.objects.get(pk=leave_mark.enqueue("never").id)

        assert job.cancel()

        assert run_jobs() == []
        job.refresh_from_db()
        assert (job.status, job.attempts) == ("cancelled", 0)
        assert job.finished_at is not None

    def test_a_held_job_can_be_cancelled_and_a_finished_one_cannot(self):
        finished = dead_letter()
        held = Job.objects.get(pk=enqueue())
        held.hold()

        assert held.cancel() == Changed(changed=1, busy=0, skipped=0)
        assert finished.cancel() == Changed(changed=0, busy=0, skipped=1)

        assert row(finished.pk, "status") == ("failed",)

    def test_a_cancelled_job_can_be_requeued(self):
        job = Job.objects.get(pk=leave_mark.enqueue("after all").id)
        job.cancel()

        assert job.requeue()

        assert len(run_jobs()) == 1


@pytest.mark.django_db
class TestCancellingWhatRuns:
    @pytest.fixture
    def running(self):
        """A running job, in its second attempt."""
        job = Job.objects.get(pk=leave_mark.enqueue("running").id)
        Job.objects.settle([Retried(claim_of(claim_one("first")), 0.0, ErrorRecord.plain(ValueError, "no"))])
        claim_one("second")
        job.refresh_from_db()
        return job

    def test_the_job_is_cancelled_and_the_answer_says_that_it_was_running(self, running):
        """R26"""
        answer = running.cancel()

        assert answer == Changed(changed=1, busy=0, skipped=0, running=1)
        running.refresh_from_db()
        assert (running.status, running.claim_version, running.lease_until) == ("cancelled", 3, None)
        assert running.finished_at is not None
        assert running.last_error == people.CANCELLED_TEXT

    def test_the_attempt_counts_and_is_kept_as_cancelled(self, running):
        """R25, R26"""
        running.cancel()

        attempt = running.failed_attempts.get(claim_version=2)
        assert (attempt.attempt, attempt.outcome, attempt.counted) == (2, "cancelled", True)
        assert (attempt.error_class, attempt.message) == (class_path_of(TaskCancelled), people.CANCELLED_TEXT)
        assert (attempt.worker, attempt.started_at) == ("second", running.claimed_at)
        assert attempt.ended_at >= attempt.started_at
        assert row(running.pk, "attempts") == (2,)

    def test_the_task_framework_says_failed_and_with_which_error(self, running):
        running.cancel()

        result = leave_mark.get_result(str(running.pk))

        assert result.status.name == "FAILED"
        assert [error.exception_class for error in result.errors] == [ValueError, TaskCancelled]
        assert result.worker_ids == ["first", "second"]

    @pytest.mark.parametrize("kind", ENDINGS)
    def test_nothing_that_its_task_comes_to_changes_the_row(self, running, kind):
        """R14, R21"""
        claim = Claim(running.pk, running.claim_version)
        running.cancel()
        before = Job.objects.values().get(pk=running.pk)

        settlement = Job.objects.settle([ENDINGS[kind](claim)])

        assert settlement.lost == [ENDINGS[kind](claim)]
        assert Job.objects.values().get(pk=running.pk) == before
        assert running.failed_attempts.count() == 2
        assert Job.objects.renew([claim]) == set()

    def test_it_can_be_requeued_and_what_ran_before_still_changes_nothing(self, running):
        claim = Claim(running.pk, running.claim_version)
        running.cancel()

        assert running.requeue()
        lost = Job.objects.settle([Succeeded(claim)]).lost

        assert lost == [Succeeded(claim)]
        assert row(running.pk, "status", "attempts", "claim_version") == ("pending", 0, 4)
        assert len(run_jobs()) == 1

    def test_its_key_is_free_at_once(self):
        """R04"""
        job = Job.objects.get(pk=nothing.using(job_key="k").enqueue().id)
        claim_one()

        job.cancel()

        assert nothing.using(job_key="k").enqueue().created


@pytest.mark.django_db(transaction=True)
def test_workers_are_told_once_if_running_jobs_were_cancelled_and_not_otherwise():
    with second_connection() as other:
        sql(other, f"LISTEN {CANCEL_CHANNEL}")
        [enqueue() for _ in range(5)]

        Job.objects.filter(pk=enqueue()).cancel()
        quiet = list(other.connection.notifies(timeout=0))
        claim_one(), claim_one(), claim_one()
        cancelled = Job.objects.cancel()
        heard = list(other.connection.notifies(timeout=5, stop_after=1))
        heard += other.connection.notifies(timeout=0)

    assert cancelled == Changed(changed=5, busy=0, skipped=1, running=3)
    assert quiet == []
    assert [(notification.channel, notification.payload) for notification in heard] == [(CANCEL_CHANNEL, "")]


@pytest.mark.django_db
def test_many_jobs_are_counted_by_what_became_of_them():
    pending = [enqueue() for _ in range(3)]
    claim_one()

    held = Job.objects.hold()
    unheld = Job.objects.filter(pk=pending[2]).unhold()
    cancelled = Job.objects.cancel()
    again = Job.objects.cancel()

    assert held == Changed(changed=2, busy=0, skipped=1)
    assert unheld == Changed(changed=1, busy=0, skipped=0)
    assert cancelled == Changed(changed=3, busy=0, skipped=0, running=1)
    assert again == Changed(changed=0, busy=0, skipped=3)
    assert [bool(each) for each in (held, unheld, cancelled, again)] == [True, True, True, False]
    assert [row(job_id, "status")[0] for job_id in pending] == ["cancelled"] * 3


@pytest.mark.django_db
def test_each_batch_hears_which_jobs_were_changed():
    ids = {enqueue(), enqueue()}
    heard = []

    Job.objects.hold(each_batch=heard.append)

    assert heard == [ids]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verb", ["hold", "cancel"])
class TestLockedRows:
    def test_one_exact_job_that_someone_holds_is_busy_and_the_caller_goes_on(self, verb):
        """R13"""
        job = Job.objects.get(pk=enqueue())
        with lock_on(job.pk), transaction.atomic():
            with pytest.raises(JobBusy, match="held by another transaction"):
                getattr(job, verb)()
            Mark.objects.create(note="the transaction is usable")

        assert Mark.objects.exists()
        assert row(job.pk, "status") == ("pending",)

    def test_of_many_jobs_the_one_that_someone_holds_is_left_and_counted(self, verb):
        """R13"""
        busy, *_ = [enqueue() for _ in range(3)]
        with lock_on(busy):
            changed = getattr(Job.objects, verb)()

        assert changed == Changed(changed=2, busy=1, skipped=0)
        assert row(busy, "status") == ("pending",)


@pytest.mark.django_db(transaction=True)
def test_a_job_that_is_cancelled_and_claimed_at_the_same_moment_did_not_run_or_is_said_to_be_running():
    """Case B156"""
    rounds = 500
    gate = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    ids, answers, statuses = [], [], Counter()

    def cancel_each():
        for number in range(rounds):
            gate.wait()
            answers.append(cancel_one(ids[number]) if number % 2 else cancel_some(ids[number]))
            gate.wait()

    cancelling = InThread(cancel_each)
    for _ in range(rounds):
        ids.append(enqueue())
        gate.wait()
        claimed = Job.objects.claim("worker")
        gate.wait()
        status, version, attempts = row(ids[-1], "status", "claim_version", "attempts")
        assert (status, version, attempts, [job.id for job in claimed], answers[-1]) in [
            ("cancelled", 0, 0, [], "cancelled"),
            ("cancelled", 2, 1, ids[-1:], "running"),
            ("running", 1, 1, ids[-1:], "busy"),
        ]
        statuses[answers[-1]] += 1
    cancelling.result()

    assert set(statuses) >= {"cancelled", "running"}, "the two did not race"


@pytest.mark.django_db(transaction=True)
def test_a_job_that_is_claimed_after_a_cancel_has_looked_is_found_running_under_the_lock():
    """Case B156: between the snapshot and the lock."""
    job_id = enqueue()
    with pausing() as pause, actor() as a:
        pause.stop(a)
        cancelling = InThread(lambda: people.cancel(a, [job_id]))
        pause.wait_for_arrival()
        claimed = claim_one()
        pause.go_on()

        assert cancelling.result() == {job_id: True}

    assert row(job_id, "status", "claim_version") == ("cancelled", 2)
    assert JobAttempt.objects.get().claim_version == claimed.claim_version


@pytest.mark.django_db(transaction=True)
def test_a_job_that_ends_after_a_cancel_has_looked_stays_as_it_ended():
    """R14: between the snapshot and the lock."""
    job_id = enqueue()
    claim = claim_of(claim_one())
    with pausing() as pause, actor() as a:
        pause.stop(a)
        cancelling = InThread(lambda: people.cancel(a, [job_id]))
        pause.wait_for_arrival()
        Job.objects.settle([Succeeded(claim)])
        pause.go_on()

        assert cancelling.result() == {}

    assert row(job_id, "status", "claim_version") == ("done", 1)
    assert not JobAttempt.objects.exists()


@pytest.mark.django_db
class TestKeysAtRequeue:
    def test_a_job_whose_key_a_live_job_holds_is_left_out_and_counted(self):
        """R04, case B123"""
        held = [dead_letter(f"key {number}") for number in range(5)]
        free = [dead_letter(f"free {number}") for number in range(15)]
        for job in held:
            nothing.using(job_key=job.job_key).enqueue()

        changed = Job.objects.filter(status="failed").requeue()

        assert changed == Changed(changed=15, busy=0, skipped=0, key_held=5)
        assert {row(job.pk, "status")[0] for job in free} == {"pending"}
        assert {row(job.pk, "status")[0] for job in held} == {"failed"}

    def test_of_several_dead_letters_with_one_key_the_first_is_requeued(self):
        """R04"""
        jobs = [dead_letter("k") for _ in range(3)]

        changed = Job.objects.requeue()

        assert changed == Changed(changed=1, busy=0, skipped=0, key_held=2)
        assert [row(job.pk, "status")[0] for job in jobs] == ["pending", "failed", "failed"]

    def test_one_exact_job_says_that_its_key_is_held(self):
        job = dead_letter("k")
        nothing.using(job_key="k").enqueue()

        with pytest.raises(JobKeyHeld, match="another job has its key"):
            job.requeue()

        assert row(job.pk, "status") == ("failed",)


@pytest.mark.django_db(transaction=True)
def test_a_key_that_is_taken_during_a_requeue_costs_only_its_own_job():
    """R04: the requeue waits for the other transaction, meets its key, and leaves that job out."""
    taken, *free = [dead_letter(f"key {number}") for number in range(4)]
    with taking_the_key_of(taken) as cursor:
        requeuing = InThread(lambda: Job.objects.filter(status="failed").requeue())
        wait_for_any_lock_wait(connection)
        cursor.execute("COMMIT")

    assert requeuing.result() == Changed(changed=3, busy=0, skipped=0, key_held=1)
    assert {row(job.pk, "status")[0] for job in free} == {"pending"}
    assert row(taken.pk, "status") == ("failed",)


def cancel_one(job_id):
    try:
        return said_by(Job(pk=job_id).cancel())
    except JobBusy:
        return "busy"


def cancel_some(job_id):
    return said_by(Job.objects.filter(pk=job_id).cancel())


def said_by(answer):
    return "running" if answer.running else "cancelled" if answer else "busy" if answer.busy else "skipped"


@contextmanager
def taking_the_key_of(job):
    """A second connection has inserted a job with the key of *job* and not committed; its cursor."""
    with second_connection() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(
            "INSERT INTO django_pgqueue_job (backend, queue_name, task_path, args, kwargs, status, priority,"
            " attempts, max_attempts, claim_version, job_key)"
            " VALUES ('default', 'default', %s, '[]', '{}', 'pending', 0, 0, 5, 0, %s)",
            [nothing.module_path, job.job_key],
        )
        yield cursor


@contextmanager
def lock_on(job_id):
    """A second connection holds the row of *job_id* for the length of a block."""
    with second_connection() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        assert people.lock_one(other, job_id)
        yield
        cursor.execute("ROLLBACK")


def wait_for_any_lock_wait(connection):
    def someone_waits():
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return cursor.fetchone()[0]

    wait_until(someone_waits, "the requeue to wait for the key")


@pytest.mark.django_db(transaction=True)
def test_a_key_that_another_transaction_is_about_to_take_makes_its_job_busy_and_nobody_waits_for_long():
    """R04, R13"""
    taken, *free = [dead_letter(f"key {number}") for number in range(3)]
    with taking_the_key_of(taken), transaction.atomic():
        with pytest.raises(JobBusy):
            taken.requeue()
        many = Job.objects.filter(status="failed").requeue()
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            [limit] = cursor.fetchone()

    assert many == Changed(changed=2, busy=1, skipped=0)
    assert {row(job.pk, "status")[0] for job in free} == {"pending"}
    assert limit != "500ms"  # the caller's own
