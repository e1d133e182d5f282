"""What a process takes with it when it dies, and what it does not."""

import pytest
from django.db import transaction

from django_pgqueue.models import Job, JobAttempt

from .app.tasks import nothing
from .app.worker_tasks import segfault
from .helpers import make_due, row, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

QUICK = 200


def test_a_job_whose_task_segfaults_is_a_dead_letter_after_its_attempts_and_costs_those_beside_it_none(start_worker):
    """R12, R25: twice at the head of a batch; those behind it are put back as if they were never claimed."""
    worker = start_worker("--concurrency", "1").wait_ready()
    let_it_learn_that_jobs_are_short()

    with transaction.atomic():
        poison = int(segfault.enqueue().id)
        nothing.enqueue_many([[]] * QUICK)
    wait_until(lambda: row(poison, "status", "attempts") == ("pending", 1), "the first death")
    wait_until_others_are_done(poison)
    with transaction.atomic():
        make_due(poison)
        nothing.enqueue_many([[]] * QUICK)
    wait_until(lambda: row(poison, "status", "attempts") == ("failed", 2), "the second death")
    wait_until_others_are_done(poison)

    worker.wait_for_log(r"(SIGSEGV\): 1 jobs were running, [1-9]\d* go back[\s\S]*){2}")
    attempts = JobAttempt.objects.filter(job=poison).order_by("attempt")
    assert [(each.attempt, each.outcome, each.counted) for each in attempts] == [
        (1, "crashed", True),
        (2, "crashed", True),
    ]
    # Those of the others that had run and were not settled yet have run again.
    others = JobAttempt.objects.exclude(job=poison)
    assert set(others.values_list("outcome", "counted")) <= {("released", False)}
    assert all("SIGSEGV" in text for text in (attempts[0].message, attempts[1].message, row(poison, "last_error")[0]))
    assert attempts[0].worker != attempts[1].worker
    assert set(Job.objects.exclude(pk=poison).values_list("status", "attempts")) == {("done", 1)}
    assert worker.stop() == 0


def let_it_learn_that_jobs_are_short():
    """Then it claims many at a time."""
    nothing.enqueue_many([[]] * QUICK)
    wait_until_others_are_done(0)


def wait_until_others_are_done(job_id):
    wait_until(lambda: not Job.objects.exclude(pk=job_id).exclude(status="done").exists(), "the others to be done")
