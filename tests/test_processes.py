"""Several children in one worker: they share the work, wake each other, and are replaced one by one."""

import os
import signal

import pytest

from django_pgqueue.models import Job

from .app.models import Mark
from .app.worker_tasks import leave_mark, mark_and_wait_for
from .helpers import wait_until
from .workers import barrier

pytestmark = pytest.mark.django_db(transaction=True)


def wait_for_marks(prefix, count):
    wait_until(lambda: Mark.objects.filter(note__startswith=prefix).count() >= count, f"{count} marks {prefix!r}")


def wait_for_children(worker, count):
    worker.wait_for_log(rf"(Child \d+ is ready[\s\S]*){{{count}}}")


def test_children_work_side_by_side(start_worker):
    with barrier(31) as lock:
        for number in range(4):
            mark_and_wait_for.enqueue(f"side {number}", 31)

        worker = start_worker("--processes", "2", "--concurrency", "2")
        wait_for_marks("side", 4)
        lock.release()

        wait_until(lambda: Job.objects.filter(status="done").count() == 4, "all four")
    assert len(set(Mark.objects.exclude(made_by="").values_list("made_by", flat=True))) == 2
    assert worker.stop() == 0


@pytest.mark.direct("hears of jobs by notifications")
def test_a_child_that_finds_more_than_it_can_take_wakes_another(start_worker):
    """R31: neither polls within the test."""
    worker = start_worker("--processes", "3", "--concurrency", "1", POLL_SECONDS="600")
    wait_for_children(worker, 3)
    with barrier(32):
        mark_and_wait_for.enqueue_many([[f"more {number}", 32] for number in range(3)])

        wait_for_marks("more", 3)

        assert len(set(Mark.objects.values_list("made_by", flat=True))) == 3
        worker.signal(signal.SIGTERM)


@pytest.mark.direct("hears of jobs by notifications")
def test_an_idle_child_is_woken_while_another_is_busy(start_worker):
    worker = start_worker("--processes", "2", "--concurrency", "1", POLL_SECONDS="600")
    wait_for_children(worker, 2)
    with barrier(33):
        mark_and_wait_for.enqueue("busy", 33)
        wait_for_marks("busy", 1)

        for number in range(5):
            leave_mark.enqueue(f"idle {number}")
            wait_for_marks(f"idle {number}", 1)

        worker.signal(signal.SIGTERM)


@pytest.mark.direct("hears of jobs by notifications")
def test_a_busy_worker_runs_what_was_announced_as_soon_as_a_slot_is_free(start_worker):
    worker = start_worker("--processes", "2", "--concurrency", "1", POLL_SECONDS="600")
    wait_for_children(worker, 2)
    with barrier(34) as lock:
        for number in range(2):
            mark_and_wait_for.enqueue(f"busy {number}", 34)
        wait_for_marks("busy", 2)
        leave_mark.enqueue("next")

        lock.release()

        wait_for_marks("next", 1)
    assert worker.stop() == 0


def test_a_killed_child_is_replaced_and_the_others_go_on(start_worker):
    """Case B27"""
    worker = start_worker("--processes", "2", "--concurrency", "1")
    wait_for_children(worker, 2)
    with barrier(35) as lock:
        for number in range(2):
            mark_and_wait_for.enqueue(f"pair {number}", 35)
        wait_for_marks("pair", 2)
        victim, survivor = Mark.objects.order_by("pk")

        os.kill(int(victim.made_by), signal.SIGKILL)
        wait_for_children(worker, 3)
        lock.release()

        wait_until(lambda: Mark.objects.filter(note=f"{survivor.note} ended").exists(), "the survivor")
    wait_until(lambda: Job.objects.filter(status="pending", attempts=1).exists(), "the crashed job")
    wait_until(lambda: Job.objects.filter(status="done", attempts=1).count() == 1, "the survivor's job to be settled")
    assert worker.process.poll() is None
    assert worker.stop() == 0


def test_a_child_is_replaced_after_its_number_of_jobs(start_worker):
    for number in range(10):
        leave_mark.enqueue(f"{number}")

    worker = start_worker("--burst", "--concurrency", "2", "--max-jobs", "5")

    assert worker.wait() == 0
    pids = list(Mark.objects.values_list("made_by", flat=True))
    assert sorted(pids.count(pid) for pid in set(pids)) == [5, 5]
    assert worker.log.count("has ended and is replaced") == 2
    assert set(Job.objects.values_list("status", "attempts")) == {("done", 1)}
    assert "died" not in worker.log


def test_a_burst_of_several_children_ends_when_nothing_is_left(start_worker):
    leave_mark.enqueue_many([[f"{number}"] for number in range(200)])

    assert start_worker("--burst", "--processes", "2").wait() == 0

    assert Mark.objects.count() == 200
    assert set(Job.objects.values_list("status", "attempts")) == {("done", 1)}


def test_children_that_cannot_start_end_the_worker_together(start_worker):
    """Case B28"""
    worker = start_worker("--processes", "2", BREAK_CHILD="1")

    assert worker.wait() == 1

    assert worker.log.count("giving up") == 1
