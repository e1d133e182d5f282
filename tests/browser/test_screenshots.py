"""The pictures in the docs, taken by ``make screenshots``; without it, one more look at the same pages."""

import random
from datetime import timedelta
from hashlib import blake2b

import pytest
from django.utils import timezone

from django_pgqueue.models import Job

from ..admin_pages import LIST, make_attempt, new_job, page_of
from .test_admin import DEAD_LETTERS, TRACEBACK

SIZE = {"width": 1440, "height": 900}
ERRORS = {
    "shop.tasks.send_receipt": ("builtins.ConnectionRefusedError", "[Errno 111] Connection refused"),
    "shop.tasks.charge_card": ("shop.payments.Declined", "The card has expired."),
    "shop.tasks.import_orders": ("builtins.ValueError", "could not convert string to float: 'n/a'"),
}

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def dead_letter():
    """A shop's morning: most went well, some things wait, a mail server was away. Return one of the failed jobs."""
    dice = random.Random(7)
    tasks = list(ERRORS)
    statuses = ["done"] * 30 + ["pending"] * 6 + ["running"] * 2 + ["held"] + ["failed"] * 5 + ["cancelled"]
    now = timezone.now().replace(hour=10, minute=30, second=0)
    jobs = []
    for number in range(240):
        status, task_path = dice.choice(statuses), dice.choice(tasks)
        began = now - timedelta(seconds=20 * (240 - number))
        error_class, message = ERRORS[task_path]
        jobs.append(
            new_job(
                status,
                task_path=task_path,
                queue_name="email" if task_path.endswith("receipt") else "default",
                args=[1000 + number],
                created_at=began,
                available_at=began,
                attempts=0 if status in ("pending", "held", "cancelled") else 5 if status == "failed" else 1,
                last_error=f"{error_class.rpartition('.')[2]}: {message}" if status == "failed" else None,
                started_at=began if status == "failed" else None,
            )
        )
        if status in ("done", "failed", "cancelled"):
            jobs[-1].finished_at = began + timedelta(minutes=4)
    failed = [job for job in Job.objects.bulk_create(jobs) if job.status == "failed"]
    for job in failed:
        error_class, message = ERRORS[job.task_path]
        for attempt in range(1, 6):
            started = job.created_at + timedelta(seconds=4**attempt / 5)
            make_attempt(
                job,
                attempt,
                attempt=attempt,
                error_class=error_class,
                fingerprint=blake2b(error_class.encode(), digest_size=8).hexdigest(),
                message=message,
                traceback=TRACEBACK,
                started_at=started,
                ended_at=started + timedelta(milliseconds=140),
                worker="web-1:4711",
            )
    return next(job for job in failed if job.task_path == "shop.tasks.send_receipt")


def test_pictures_of_the_admin(visit, take, dead_letter):
    page = visit(viewport=SIZE)

    page.goto(LIST)
    take(page, "jobs", 620)
    page.goto(page_of(dead_letter))
    take(page, "job", 900)
    page.goto(DEAD_LETTERS)
    take(page, "dead-letters", 410)
    page.get_by_role("button", name="Requeue").first.click()
    page.get_by_role("button", name="Yes, I\u2019m sure").wait_for()
    take(page, "question", 490)


def test_pictures_in_the_dark(visit, take, dead_letter):
    page = visit(color_scheme="dark", viewport=SIZE)

    page.goto(LIST)
    take(page, "jobs-dark", 620)
    page.goto(page_of(dead_letter))
    page.get_by_text("Attempts, newest first").evaluate("element => element.scrollIntoView()")
    take(page, "attempts-dark", 620)
