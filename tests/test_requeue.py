"""Dead letters get fresh attempts: many at once, waiting for nobody, or one, with a clear answer."""

import pytest
from django.db import OperationalError, transaction
from django.utils import timezone

from django_pgqueue.exceptions import JobBusy, PgQueueError
from django_pgqueue.managers import BATCH_ROWS, Changed
from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import ErrorRecord, Failed, Retried, Succeeded
from django_pgqueue.statements import people
from tests.helpers import (
    InThread,
    actor,
    claim_jobs,
    claim_of,
    claim_one,
    enqueue,
    enqueue_jobs,
    here,
    pausing,
    row,
    second_connection,
    sql,
)

two_connections = pytest.mark.django_db(transaction=True)

ERROR = ErrorRecord.plain(ValueError, "no")


def dead_letters(count, **changes):
    """Fail *count* new jobs and return their ids."""
    enqueue_jobs(count, **changes)
    claims = claim_jobs(count)
    assert len(Job.objects.settle([Failed(claim, ERROR) for claim in claims]).settled) == count
    return [claim.job_id for claim in claims]


def cancel(job_id):
    Job.objects.filter(pk=job_id).update(status="cancelled", finished_at=timezone.now(), lease_until=None)


# ---- many


@pytest.mark.django_db
def test_a_requeued_job_has_fresh_attempts_and_is_available_now():
    """R24: attempts and availability are reset; the version rises, and the past is kept."""
    [job_id] = dead_letters(1, max_attempts=1)
    Job.objects.filter(pk=job_id).update(return_value={"a": 1})
    began = timezone.now()

    requeued = Job.objects.filter(pk=job_id).requeue()

    assert requeued == Changed(changed=1, busy=0, skipped=0)
    job = Job.objects.get(pk=job_id)
    assert (job.status, job.attempts, job.claim_version) == ("pending", 0, 2)
    assert (job.finished_at, job.return_value, job.lease_until) == (None, None, None)
    assert began <= job.available_at <= timezone.now()
    assert JobAttempt.objects.filter(job=job_id).count() == 1
    assert claim_one().claim == (job_id, 3)


@pytest.mark.django_db
def test_a_cancelled_job_is_requeued_and_every_other_one_is_skipped():
    """R24."""
    cancelled, pending, held, running, done, failed = enqueue_jobs(6)
    Job.objects.filter(pk=running).update(priority=3)
    Job.objects.filter(pk__in=[done, failed]).update(priority=2)
    claim_one()
    claims = {claim.job_id: claim for claim in claim_jobs(2)}
    Job.objects.settle([Succeeded(claims[done], "1"), Failed(claims[failed], ERROR)])
    cancel(cancelled)
    Job.objects.filter(pk=held).update(status="held")
    untouched = list(Job.objects.filter(pk__in=[pending, held, running, done]).order_by("pk").values())

    requeued = Job.objects.all().requeue()

    assert requeued == Changed(changed=2, busy=0, skipped=4)
    assert row(cancelled, "status") == row(failed, "status") == ("pending",)
    assert list(Job.objects.filter(pk__in=[pending, held, running, done]).order_by("pk").values()) == untouched


@pytest.mark.django_db
def test_a_requeue_comes_after_what_has_waited_meanwhile():
    """R24, R25: a dead letter does not go to the head of its queue."""
    [dead] = dead_letters(1)
    waiting = enqueue()

    Job.objects.filter(pk=dead).requeue()

    assert [claim_one().id, claim_one().id] == [waiting, dead]


@pytest.mark.django_db
def test_a_requeue_of_nothing_is_nothing():
    assert Job.objects.none().requeue() == Changed(0, 0, 0)
    assert Job.objects.all().requeue() == Changed(0, 0, 0)


@pytest.mark.django_db
def test_any_queryset_of_jobs_can_be_requeued():
    """R24: filtered, ordered, sliced, or joined with the attempts; each job is counted once."""
    ids = dead_letters(6)
    for _ in range(2):
        Job.objects.filter(pk=ids[0]).requeue()
        Job.objects.settle([Failed(claim_of(claim_one()), ERROR)])
    assert JobAttempt.objects.filter(job=ids[0]).count() == 3

    assert Job.objects.filter(failed_attempts__message="no", pk=ids[0]).requeue() == Changed(1, 0, 0)
    assert Job.objects.order_by("-pk")[:2].requeue() == Changed(2, 0, 0)
    assert Job.objects.filter(failed_attempts__outcome="error").order_by("?").distinct().requeue() == Changed(3, 0, 3)
    assert list(Job.objects.values_list("status", flat=True)) == ["pending"] * 6


@pytest.mark.django_db
def test_more_jobs_than_a_batch_are_all_requeued():
    """R24, B124: in batches by id."""
    count = BATCH_ROWS + 3
    dead_letters(count)

    assert Job.objects.filter(status="failed").requeue() == Changed(count, 0, 0)
    assert Job.objects.filter(status="pending", attempts=0).count() == count


@two_connections
def test_each_batch_is_a_transaction_of_its_own():
    """R24, R32: what is done stays done when a later batch fails."""
    dead_letters(BATCH_ROWS + 3)
    batches = []

    def note(ids):
        batches.append(len(ids))
        if len(batches) == 2:
            raise RuntimeError("in the second batch")

    with pytest.raises(RuntimeError):
        Job.objects.filter(status="failed").requeue(each_batch=note)

    assert batches == [BATCH_ROWS, 3]
    assert Job.objects.filter(status="failed").count() == 3


@pytest.mark.django_db
def test_a_requeue_goes_with_its_caller_s_transaction():
    """R01."""
    [job_id] = dead_letters(1)

    with transaction.atomic():
        assert Job.objects.filter(pk=job_id).requeue().changed == 1
        transaction.set_rollback(True)

    assert row(job_id, "status") == ("failed",)


@two_connections
def test_jobs_that_someone_holds_are_counted_as_busy_and_wait_for_nobody():
    """R13, R24."""
    ids = dead_letters(5)
    enqueue()
    with second_connection() as other:
        sql(other, "BEGIN")
        sql(other, "SELECT 1 FROM django_pgqueue_job WHERE id = ANY(%s) FOR UPDATE", [ids[1:3]])

        requeued = Job.objects.all().requeue()

    assert requeued == Changed(changed=3, busy=2, skipped=1)
    assert [row(job_id, "status")[0] for job_id in ids] == ["pending", "failed", "failed", "pending", "pending"]


@two_connections
def test_a_job_requeued_and_claimed_by_others_meanwhile_is_not_requeued_again():
    """R21, R24: the status is checked again under the row's lock."""
    first, second = dead_letters(2)
    with pausing() as pause, actor() as a:
        pause.stop(a)
        requeuing = InThread(lambda: people.requeue(a, [first, second]))
        pause.wait_for_arrival()
        Job.objects.filter(pk=first).requeue()
        claim_one()
        pause.go_on()
        requeued = requeuing.result()

    assert set(requeued) == {second}
    assert row(first, "status", "claim_version", "attempts") == ("running", 3, 1)


@two_connections
def test_two_requeues_share_the_jobs_and_neither_waits():
    """R24, B136: whatever order each asked for."""
    ids = dead_letters(10)
    with actor() as a, actor() as b:
        for connection in (a, b):
            sql(connection, "BEGIN")
        first = people.requeue(a, ids[:6])
        second = people.requeue(b, ids[::-1])
        for connection in (a, b):
            sql(connection, "COMMIT")

    assert (set(first), set(second)) == (set(ids[:6]), set(ids[6:]))
    assert set(Job.objects.values_list("claim_version", flat=True)) == {2}


# ---- one


@pytest.mark.django_db
def test_one_job_is_requeued_or_was_none_to_requeue():
    """R24."""
    [job_id] = dead_letters(1)
    job = Job.objects.get(pk=job_id)

    assert job.requeue()
    assert not job.requeue()
    assert row(job_id, "status", "attempts", "claim_version") == ("pending", 0, 2)
    job.delete()
    assert not Job(pk=job_id).requeue()


@two_connections
@pytest.mark.parametrize("lock", ["FOR UPDATE", "FOR NO KEY UPDATE", "FOR SHARE"])
def test_one_job_that_someone_holds_is_busy_at_once_and_the_caller_s_transaction_goes_on(lock):
    """R13: NOWAIT for one exact job, 55P03 beneath; what the caller did before and does after is kept."""
    [job_id] = dead_letters(1)
    job = Job.objects.get(pk=job_id)
    with second_connection() as other:
        sql(other, "BEGIN")
        sql(other, f"SELECT 1 FROM django_pgqueue_job {lock}")

        with transaction.atomic():
            here("SET LOCAL statement_timeout = '5s'")  # waiting would end in 57014
            before = enqueue()
            with pytest.raises(JobBusy, match=f"Job {job_id} .* Try again") as busy:
                job.requeue()
            after = enqueue()
        with pytest.raises(JobBusy):
            job.requeue()

    assert isinstance(busy.value, PgQueueError)
    assert isinstance(busy.value.__cause__, OperationalError)
    assert busy.value.__cause__.__cause__.sqlstate == "55P03"
    assert Job.objects.filter(pk__in=[before, after]).count() == 2
    assert job.requeue()


@two_connections
def test_a_foreign_key_does_not_make_a_job_busy():
    """R13."""
    [job_id] = dead_letters(1)
    with second_connection() as other:
        sql(other, "BEGIN")
        sql(other, "SELECT 1 FROM django_pgqueue_job FOR KEY SHARE")

        assert Job.objects.get(pk=job_id).requeue()


# ---- afterwards


@pytest.mark.django_db
def test_the_old_claim_of_a_requeued_job_ends_nothing():
    """R21."""
    enqueue()
    claim = claim_of(claim_one())
    Job.objects.settle([Failed(claim, ERROR)])
    Job.objects.all().requeue()

    settlement = Job.objects.settle([Failed(claim, ERROR)])

    assert settlement.lost == [Failed(claim, ERROR)]
    assert row(claim.job_id, "status", "attempts") == ("pending", 0)


@pytest.mark.django_db
def test_a_requeued_job_may_use_all_its_attempts_again():
    """R23, R24, B65."""
    [job_id] = dead_letters(1, max_attempts=2)
    Job.objects.all().requeue()

    for attempt in (1, 2):
        job = claim_one()
        assert (job.attempts, job.max_attempts) == (attempt, 2)
        Job.objects.settle([Retried(claim_of(job), 0, ERROR)])

    assert list(JobAttempt.objects.order_by("id").values_list("attempt", "claim_version")) == [(1, 1), (1, 3), (2, 4)]
    assert row(job_id, "attempts") == (2,)


@pytest.mark.django_db
@pytest.mark.parametrize("moment", ["infinity", "2999-01-01", "-infinity"])
def test_a_requeued_job_is_available_now_wherever_it_stood(moment):
    """R24: a reminder that was cancelled, or a row that was put far off by hand."""
    [job_id] = dead_letters(1)
    cancel(job_id)
    here("UPDATE django_pgqueue_job SET available_at = %s", [moment])
    began = timezone.now()

    Job.objects.all().requeue()

    assert began <= row(job_id, "available_at")[0] <= timezone.now()
    assert claim_one().id == job_id
