"""``manage.py pgqueue``: the verbs of the admin from a shell."""

import json

import pytest
from django.core.management import CommandError, call_command

from django_pgqueue.models import Job
from django_pgqueue.testing import run_jobs

from .app.tasks import add, nothing
from .app.worker_tasks import fail
from .helpers import claim_one, enqueue, row

pytestmark = pytest.mark.django_db


@pytest.fixture
def pgqueue(capsys):
    """Call the command and return what it printed."""

    def call(*arguments):
        call_command("pgqueue", *arguments)
        return capsys.readouterr().out

    return call


def test_jobs_are_listed_newest_first_by_what_is_asked_for(pgqueue):
    first = add.enqueue(1, 2)
    second = nothing.using(queue_name="email").enqueue()
    fail.enqueue("broken")
    run_jobs(queue_names=["default"])

    everything = pgqueue("list")
    failed = json.loads(pgqueue("list", "--status", "failed", "--json"))
    email = json.loads(pgqueue("list", "--queue", "email", "--json"))
    adds = json.loads(pgqueue("list", "--task", add.module_path, "--limit", "1", "--json"))

    assert everything.index("worker_tasks.fail") < everything.index("tests.app.tasks.nothing")
    assert "attempt 1 of 1: ValueError: broken" in everything
    assert [job["last_error"] for job in failed] == ["ValueError: broken"]
    assert [job["id"] for job in email] == [int(second.id)]
    assert [job["id"] for job in adds] == [int(first.id)]


def test_one_job_is_shown_with_its_arguments_and_failed_attempts(pgqueue):
    job_id = fail.enqueue("\N{FISH} broken").id
    run_jobs()

    text = pgqueue("show", job_id)
    document = json.loads(pgqueue("show", job_id, "--json"))

    assert "\N{FISH} broken" in text
    assert "Attempt 1 (error, counted) by run_jobs" in text
    assert "Traceback (most recent call last)" in text
    assert document["status"] == "failed"
    assert document["failed_attempts"][0]["error_class"] == "builtins.ValueError"


def test_dead_letters_are_requeued_by_id(pgqueue):
    job_id = fail.enqueue("broken").id
    run_jobs()

    assert pgqueue("requeue", job_id).strip() == "1 requeued"

    assert row(int(job_id), "status", "attempts") == ("pending", 0)


def test_jobs_are_held_put_back_and_cancelled_by_what_they_have_in_common(pgqueue):
    """R26"""
    for _ in range(3):
        nothing.using(queue_name="email").enqueue()
    other = enqueue()

    held = json.loads(pgqueue("hold", "--queue", "email", "--json"))
    unheld = pgqueue("unhold", "--status", "held")
    cancelled = pgqueue("cancel", "--task", nothing.module_path)

    assert held == {"verb": "hold", "changed": 3, "busy": 0, "skipped": 0, "key_held": 0, "running": 0}
    assert unheld.strip() == "3 put back"
    assert cancelled.strip() == "3 cancelled"
    assert row(other, "status") == ("pending",)


def test_all_means_all_that_the_verb_applies_to(pgqueue):
    running, pending = enqueue(), enqueue()
    claim_one()

    assert pgqueue("hold", "--all").strip() == "1 held"

    assert [row(job_id, "status")[0] for job_id in (running, pending)] == ["running", "held"]


def test_cancelling_says_how_many_were_running(pgqueue):
    """R26"""
    for _ in range(3):
        enqueue()
    claim_one()

    assert pgqueue("cancel", "--all").strip() == "3 cancelled (1 of them running, being stopped)"


def test_a_verb_without_jobs_asks_which(pgqueue):
    enqueue()

    with pytest.raises(CommandError, match="Which jobs"):
        pgqueue("cancel")

    assert Job.objects.get().status == "pending"


def test_a_job_that_was_named_and_not_changed_gives_exit_code_1(pgqueue):
    job_id = enqueue()
    claim_one()

    with pytest.raises(SystemExit) as exit_code:
        pgqueue("hold", str(job_id))

    assert exit_code.value.code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "999"], "There is no job 999"),
        (["list", "--backend", "nope"], "no backend 'nope'"),
        (["list", "--backend", "dummy"], "keeps no jobs in a table"),
        (["list", "--status", "lost"], "invalid choice: 'lost'"),
    ],
)
def test_what_does_not_exist_is_said_plainly(pgqueue, arguments, message):
    with pytest.raises(CommandError, match=message):
        pgqueue(*arguments)
