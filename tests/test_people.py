"""What people do to jobs: hold, unhold, cancel, and requeue where keys are concerned (R26)."""

from contextlib import contextmanager

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_pgqueue import JobBusy, JobKeyHeld
from django_pgqueue.managers import Changed
from django_pgqueue.models import Job
from django_pgqueue.outcomes import ErrorRecord, Failed
from django_pgqueue.statements import people
from django_pgqueue.testing import run_jobs

from .app.models import Mark
from .app.tasks import nothing
from .app.worker_tasks import leave_mark
from .helpers import InThread, claim_of, claim_one, enqueue, row, second_connection, wait_until


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

    def test_a_held_job_can_be_cancelled_and_a_running_one_cannot(self):
        running = Job.objects.get(pk=enqueue())
        claim_one()
        held = Job.objects.get(pk=enqueue())
        held.hold()

        assert held.cancel()
        assert not running.cancel()

        assert row(running.pk, "status") == ("running",)

    def test_a_cancelled_job_can_be_requeued(self):
        job = Job.objects.get(pk=leave_mark.enqueue("after all").id)
        job.cancel()

        assert job.requeue()

        assert len(run_jobs()) == 1


@pytest.mark.django_db
def test_many_jobs_are_counted_by_what_became_of_them():
    pending = [enqueue() for _ in range(3)]
    claim_one()

    held = Job.objects.hold()
    cancelled = Job.objects.cancel()
    unheld = Job.objects.unhold()

    assert held == Changed(changed=2, busy=0, skipped=1)
    assert cancelled == Changed(changed=2, busy=0, skipped=1)
    assert unheld == Changed(changed=0, busy=0, skipped=3)
    assert [row(job_id, "status")[0] for job_id in pending] == ["running", "cancelled", "cancelled"]


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
def test_cancel_and_claim_at_the_same_moment_end_in_one_of_the_two():
    """Case B156"""
    for _ in range(100):
        Job.objects.all().delete()
        job = Job.objects.get(pk=enqueue())

        cancelling = InThread(lambda job=job: people_cancel(job))
        claimed = Job.objects.claim("worker")
        cancelled = cancelling.result()

        status = row(job.pk, "status")[0]
        assert (status, len(claimed), cancelled) in {
            ("running", 1, "no"),
            ("running", 1, "busy"),
            ("cancelled", 0, "yes"),
            ("pending", 0, "busy"),
        }


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


def people_cancel(job):
    try:
        return "yes" if job.cancel() else "no"
    except JobBusy:
        return "busy"


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
