"""Snooze: a job that was too early runs again later and has used no attempt."""

from datetime import timedelta

import pytest

from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import Snoozed
from django_pgqueue.testing import run_jobs
from django_pgqueue.worker.attempt import MAX_SNOOZES

from .app.tasks import snooze
from .helpers import claim_of, claim_one, enqueue, make_due, row

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(("delay", "seconds"), [(90, 90), (0.5, 0.5), (timedelta(hours=2), 7200), (-5, 0)])
def test_a_snoozed_job_waits_for_the_delay_and_keeps_its_attempts(delay, seconds):
    job_id = enqueue()
    claim = claim_of(claim_one())

    settled = Job.objects.settle([Snoozed(claim, max(seconds, 0))]).settled

    assert len(settled) == 1
    job = Job.objects.get(pk=job_id)
    assert (job.status, job.attempts, job.snoozes, job.lease_until) == ("pending", 0, 1, None)
    waited = (job.available_at - job.claimed_at).total_seconds()
    assert seconds <= waited < seconds + 60
    assert not JobAttempt.objects.exists()


def test_a_task_that_snoozes_is_run_again_when_it_is_due_with_all_its_attempts():
    job_id = int(snooze.enqueue(3_600).id)

    for times in (1, 2, 3):
        [result] = run_jobs()
        assert (result.status, result.attempts, result.errors) == ("READY", 0, [])
        assert row(job_id, "attempts", "snoozes") == (0, times)
        assert run_jobs() == []
        make_due(job_id)


def test_a_job_that_snoozes_without_end_is_failed(caplog):
    job_id = int(snooze.enqueue(0).id)
    Job.objects.filter(pk=job_id).update(snoozes=MAX_SNOOZES)

    run_jobs()

    assert row(job_id, "status", "attempts") == ("failed", 1)
    assert "Snooze" in row(job_id, "last_error")[0]


def test_a_requeued_job_may_snooze_afresh():
    job_id = int(snooze.enqueue(3_600).id)
    Job.objects.filter(pk=job_id).update(snoozes=MAX_SNOOZES)
    run_jobs()

    Job.objects.filter(pk=job_id).requeue()
    run_jobs()

    assert row(job_id, "status", "snoozes") == ("pending", 1)


@pytest.mark.parametrize("delay", ["soon", None, float("nan")])
def test_a_delay_that_is_none_is_said_in_the_log_and_costs_nothing(delay, caplog):
    job_id = int(snooze.enqueue("soon" if delay == "soon" else None if delay is None else "nan").id)

    run_jobs()

    assert row(job_id, "status", "attempts") == ("pending", 0)
    assert "The default applies" in caplog.text
