"""
A worker killed with all its children at each point of a job's way: its row in the end, and the count of its effects.

R16, R17, R20, R22, R27; B01, B05.
"""

import signal
from datetime import timedelta

import pytest
from django.utils import timezone

from django_pgqueue.models import Job, JobAttempt

from .app.models import Mark
from .app.worker_tasks import atomic_mark_and_wait_for, leave_mark, mark_and_wait_for
from .helpers import here, job_trigger, make_due, row, wait_until
from .workers import a_child_is_in, a_place_to_wait_at, barrier, wait_for_mark, wait_for_status, who_sleeps

pytestmark = pytest.mark.django_db(transaction=True)

SHORT = {"LEASE_SECONDS": "2", "BACKOFF": "0"}


def wait_while_becoming(status):
    return f"WHILE NEW.status = '{status}' AND pgqueue_test_is_held() LOOP PERFORM pg_sleep(0.01); END LOOP;"


def outcomes():
    return list(JobAttempt.objects.values_list("outcome", flat=True))


def count_effects(note):
    return Mark.objects.filter(note=note).count()


def test_killed_while_its_claim_is_under_way(start_worker):
    """A claim alone is one statement, which the server ends by itself: nobody has the job until its lease is over."""
    with a_place_to_wait_at(71) as lock, job_trigger(wait_while_becoming("running")):
        job = leave_mark.enqueue("effect")
        killed = start_worker(**SHORT).wait_ready()
        wait_until(lambda: a_child_is_in("WITH moment"), "the claim to be under way")

        killed.kill_all()
        lock.release()

        start_worker(**SHORT)
        wait_for_status(job.id, "done")
    assert row(int(job.id), "attempts", "claim_version") == (2, 3)
    assert (count_effects("effect"), outcomes()) == (1, ["lost"])


def test_a_child_killed_while_its_claim_is_under_way_costs_the_job_no_attempt(start_worker):
    """Its supervisor looks until nothing is left of it, and knows that it has published no such claim."""
    with a_place_to_wait_at(71) as lock, job_trigger(wait_while_becoming("running")):
        job = leave_mark.enqueue("effect")
        worker = start_worker(LEASE_SECONDS="600").wait_ready()
        wait_until(lambda: a_child_is_in("WITH moment"), "the claim to be under way")

        worker.signal_child(signal.SIGKILL)
        worker.wait_for_log(r"Child \d+ died \(SIGKILL\)")
        lock.release()

        wait_for_status(job.id, "done")
    assert row(int(job.id), "attempts", "claim_version") == (1, 3)
    assert (count_effects("effect"), outcomes()) == (1, [])


def test_killed_before_the_claim_of_a_round_commits(start_worker):
    """The row was never anyone's; the next worker runs it as if nothing had been. Nor was the end written."""
    with a_place_to_wait_at(71) as lock, job_trigger(wait_while_becoming("running")), barrier(78) as holding:
        lock.release()
        first = mark_and_wait_for.enqueue("first", 78)
        killed = start_worker("--concurrency", "1", **SHORT).wait_ready()
        wait_for_mark("first")
        here("SELECT pg_advisory_lock(71)")
        job = leave_mark.enqueue("effect")
        holding.release()  # its end and the claim of the next are one round
        wait_until(lambda: a_child_is_in("WITH moment"), "the claim to be under way")

        killed.kill_all()
        here("SELECT pg_advisory_unlock(71)")

        start_worker(**SHORT)
        wait_for_status(job.id, "done")
        wait_for_status(first.id, "done")
    assert row(int(job.id), "attempts", "claim_version") == (1, 1)
    assert row(int(first.id), "attempts", "claim_version") == (2, 3)


def test_killed_after_its_claim_and_before_the_task_begins(start_worker):
    """When a whole worker dies nobody can tell whether a task had begun: the attempt counts."""
    with barrier(72):
        job = leave_mark.enqueue("effect")
        killed = start_worker(**SHORT, HOLD_BEFORE_START="72").wait_ready()
        wait_until(lambda: count_waiting() == 1, "the job to be about to begin")

        killed.kill_all()

    start_worker(**SHORT)
    wait_for_status(job.id, "done")
    assert row(int(job.id), "attempts", "claim_version") == (2, 3)
    assert (count_effects("effect"), outcomes()) == (1, ["lost"])


def test_killed_after_the_effect_and_before_the_end_is_written(start_worker):
    """At least once: here it is twice."""
    with barrier(73):
        job = mark_and_wait_for.enqueue("effect", 73)
        killed = start_worker(**SHORT).wait_ready()
        wait_for_mark("effect")

        killed.kill_all()

    start_worker(**SHORT)
    wait_for_status(job.id, "done")
    assert row(int(job.id), "attempts", "claim_version") == (2, 3)
    assert (count_effects("effect"), outcomes()) == (2, ["lost"])


def test_killed_after_the_effect_of_an_atomic_task_and_before_its_commit(start_worker):
    """R17: exactly once."""
    with barrier(74):
        job = atomic_mark_and_wait_for.enqueue("effect", 74)
        killed = start_worker(**SHORT).wait_ready()
        wait_until(lambda: count_waiting() == 1, "the effect to be there, uncommitted")

        killed.kill_all()

    start_worker(**SHORT)
    wait_for_status(job.id, "done")
    assert row(int(job.id), "attempts", "claim_version") == (2, 3)
    assert (count_effects("effect"), outcomes()) == (1, ["lost"])


def test_a_child_killed_while_the_end_of_a_task_is_written_has_it_written(start_worker):
    """An ending alone is one statement, which the server ends by itself, and nothing runs again."""
    with a_place_to_wait_at(77) as lock, job_trigger(wait_while_becoming("done")):
        job = leave_mark.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("effect")
        worker = start_worker(LEASE_SECONDS="600").wait_ready()
        wait_until(who_sleeps, "it to sleep")
        make_due(int(job.id))  # found by a poll: a ring that came late would have the round claim, too
        wait_until(lambda: a_child_is_in("UPDATE django_pgqueue_job"), "the end to be written")

        worker.signal_child(signal.SIGKILL)
        worker.wait_for_log(r"Child \d+ died \(SIGKILL\)")
        lock.release()

        wait_for_status(job.id, "done")
    assert row(int(job.id), "attempts", "claim_version") == (1, 1)
    assert (count_effects("effect"), outcomes()) == (1, [])


@pytest.mark.parametrize("is_atomic", [False, True], ids=["by the control loop", "with the effects of an atomic task"])
def test_killed_after_the_end_is_written_and_before_the_answer(start_worker, is_atomic):
    """R16: what the server commits without anyone to tell is done, and nothing runs again."""
    with a_place_to_wait_at(75) as lock, job_trigger(wait_while_becoming("done"), at_commit=True):
        job = atomic_mark_and_wait_for.enqueue("effect", 76) if is_atomic else leave_mark.enqueue("effect")
        killed = start_worker(**SHORT).wait_ready()
        wait_until(lambda: count_commits() == 1, "the end to be written, and not committed")

        killed.kill_all()
        lock.release()

        wait_for_status(job.id, "done")
        start_worker(**SHORT).wait_ready()
        after = leave_mark.enqueue("after")
        wait_for_status(after.id, "done")
    assert row(int(job.id), "status", "attempts", "claim_version") == ("done", 1, 1)
    assert (count_effects("effect"), outcomes()) == (1, [])
    assert Job.objects.count() == 2


def count_waiting():
    """How many tasks, or receivers, wait for an advisory lock."""
    return here(
        "SELECT count(*) FROM pg_locks JOIN pg_database AS db ON db.oid = database"
        " WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"
    )[0][0]


def count_commits():
    return here(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
        " AND (query ILIKE 'COMMIT%' OR query ILIKE '%UPDATE django_pgqueue_job%') AND pid <> pg_backend_pid()"
    )[0][0]
