"""Tasks that run for too long, and tasks that are told to end: in real workers. LIMIT, HEART, R18, R25."""

import re
import signal

import pytest

from django_pgqueue.exceptions import TaskCancelled, TaskTimeout
from django_pgqueue.models import Job, JobAttempt

from .app import long_tasks as tasks
from .app.models import Mark
from .app.worker_tasks import leave_mark, mark_and_wait_for
from .helpers import row, wait_until
from .workers import barrier, wait_for_mark, wait_for_status

pytestmark = pytest.mark.django_db(transaction=True)


def attempts_of(result):
    return list(JobAttempt.objects.filter(job_id=int(result.id)).order_by("attempt").values_list("outcome", "counted"))


class TestTimeout:
    @pytest.mark.parametrize(
        "task", [tasks.loop_for_ever, tasks.query_for_ever, tasks.sleep_for_ever, tasks.query_for_ever_async]
    )
    def test_a_task_over_its_time_has_used_up_an_attempt_and_its_process_goes_on(self, start_worker, task):
        """B154: there is a trace of each, and it does not repeat for ever. B155: the next jobs run."""
        long = task.enqueue("long")
        worker = start_worker("--concurrency", "1").wait_ready()

        wait_for_status(long.id, "failed")
        leave_mark.enqueue("next")
        wait_for_mark("next")

        assert worker.stop() == 0
        assert Mark.objects.filter(note="long").count() == 2
        assert attempts_of(long) == [("timeout", True)] * 2
        long.refresh()
        assert [error.exception_class for error in long.errors] == [TaskTimeout] * 2
        assert "timeout of 1 s" in long.errors[0].traceback
        assert f"in {task.name}" in long.errors[0].traceback, "it shows where the time was spent"
        assert row(int(long.id), "last_error") == ("TaskTimeout: The task ran for longer than its timeout of 1 s.",)
        assert len(re.findall(r"Child \d+ is ready", worker.log)) == 1

    def test_a_task_that_catches_its_interruption_and_returns_has_succeeded(self, start_worker):
        result = tasks.clean_up_and_return.enqueue("tidy")
        start_worker().wait_ready()

        wait_for_status(result.id, "done")

        result.refresh()
        assert result.return_value == "tidy: The task ran for longer than its timeout."
        assert attempts_of(result) == []

    @pytest.mark.parametrize("task", [tasks.wait_in_c, tasks.hold_the_gil])
    def test_a_task_stuck_in_c_code_is_ended_with_its_process_and_its_neighbours_lose_nothing(self, start_worker, task):
        with barrier(61) as lock:
            neighbour = mark_and_wait_for.enqueue("neighbour", 61)
            worker = start_worker("--concurrency", "2", "--grace", "2", LEASE_SECONDS="600").wait_ready()
            wait_for_mark("neighbour")
            stuck = task.enqueue("stuck", 6000)

            worker.wait_for_log(r"is (replaced|killed): the task of job \d+ goes on")
            lock.release()
            wait_for_status(stuck.id, "failed")
            wait_for_status(neighbour.id, "done")
            assert worker.stop() == 0

        assert Mark.objects.filter(note="stuck").count() == 1
        assert attempts_of(stuck) == [("timeout", True)]
        assert row(int(neighbour.id), "attempts") == (1,), "finished first, or given back"

    def test_a_task_that_is_stuck_alone_is_not_waited_for(self, start_worker):
        stuck = tasks.wait_in_c.enqueue("stuck", 6000)
        worker = start_worker("--concurrency", "1", "--grace", "2", LEASE_SECONDS="600").wait_ready()

        wait_for_status(stuck.id, "failed")
        leave_mark.enqueue("next")
        wait_for_mark("next")

        assert worker.stop() == 0
        assert attempts_of(stuck) == [("timeout", True)]


class TestEnding:
    def test_a_running_task_whose_job_is_cancelled_is_ended(self, start_worker):
        """R26: and the job stays as the person left it."""
        unwanted = tasks.loop_until_interrupted.enqueue("unwanted")
        worker = start_worker("--concurrency", "1", LEASE_SECONDS="3").wait_ready()
        wait_for_mark("unwanted")

        assert Job.objects.filter(pk=int(unwanted.id)).cancel().changed == 1

        wait_for_mark("unwanted: TaskCancelled")
        leave_mark.enqueue("next")
        wait_for_mark("next")
        assert worker.stop() == 0
        assert row(int(unwanted.id), "status", "attempts") == ("cancelled", 1)
        unwanted.refresh()
        assert [error.exception_class for error in unwanted.errors] == [TaskCancelled]

    def test_a_task_whose_claim_is_lost_is_ended_and_the_other_worker_runs_it(self, start_worker):
        """R18, R21"""
        result = tasks.loop_until_interrupted.enqueue("robbed")
        worker = start_worker("--concurrency", "1", LEASE_SECONDS="1").wait_ready()
        wait_for_mark("robbed")

        Job.objects.filter(pk=int(result.id)).update(claim_version=7, claimed_by="another worker")

        wait_for_mark("robbed: ClaimLost")
        leave_mark.enqueue("next")
        wait_for_mark("next")
        assert worker.stop() == 0
        assert row(int(result.id), "status", "claim_version", "claimed_by") == ("running", 7, "another worker")

    def test_at_the_end_of_the_grace_period_a_sync_task_is_interrupted_and_its_attempt_given_back(self, start_worker):
        """B23, B24"""
        result = tasks.loop_until_interrupted.enqueue("long")
        worker = start_worker("--grace", "1", LEASE_SECONDS="600").wait_ready()
        wait_for_mark("long")

        assert worker.stop() == 0

        assert Mark.objects.filter(note="long: Interrupted").count() == 1
        assert row(int(result.id), "status", "attempts", "lease_until") == ("pending", 0, None)
        assert attempts_of(result) == [("released", False)]


class TestSilence:
    """HEART: who works hard is left alone, who hangs is replaced, who is stopped loses its leases."""

    @pytest.mark.slow
    def test_whatever_keeps_a_process_busy_ten_leases_long_it_runs_once(self, start_worker):
        """B15, B16, B08: a lease of 3 s, jobs of 30 s, and a second worker that would take them."""
        jobs = [
            tasks.hold_the_gil_without_a_limit.enqueue("gil", 30),
            tasks.loop_for.enqueue("loop", 30),
            tasks.block_the_event_loop_for.enqueue("event loop", 30),
        ]
        worker = start_worker("--concurrency", "1", "--processes", "3", LEASE_SECONDS="3").wait_ready()
        for note in ("gil", "loop", "event loop"):
            wait_for_mark(note)
        watching = start_worker("--concurrency", "3", LEASE_SECONDS="3").wait_ready()

        for job in jobs:
            wait_for_status(job.id, "done")

        assert [row(int(job.id), "attempts", "claim_version") for job in jobs] == [(1, 1)] * 3
        assert Mark.objects.count() == 3
        assert worker.stop() == 0
        assert watching.stop() == 0
        assert " WARNING " not in worker.log + watching.log

    @pytest.mark.slow
    def test_a_child_whose_control_loop_hangs_is_replaced_and_its_job_given_back(self, start_worker):
        """B19"""
        result = tasks.wedge_the_control_loop.enqueue("wedge")
        worker = start_worker("--concurrency", "2", LEASE_SECONDS="600").wait_ready()

        worker.wait_for_log(r"is killed: its control loop has not turned for 3\d s")
        wait_for_status(result.id, "done")

        assert worker.stop() == 0
        assert row(int(result.id), "attempts") == (1,)
        assert attempts_of(result) == [("released", False)]

    def test_a_stopped_child_keeps_no_lease_and_what_it_does_afterwards_changes_nothing(self, start_worker):
        """R21, B11"""
        with barrier(62) as lock:
            result = mark_and_wait_for.enqueue("slow", 62)
            first = start_worker("--concurrency", "1", LEASE_SECONDS="2", BACKOFF="0").wait_ready()
            wait_for_mark("slow")
            first.signal_child(signal.SIGSTOP)
            second = start_worker("--concurrency", "1", LEASE_SECONDS="2", BACKOFF="0").wait_ready()

            wait_for_mark("slow", 2)  # the first worker's supervisor may have recovered it
            first.signal_child(signal.SIGCONT)
            first.wait_for_log(rf"claim of job {result.id} \(version 1\) is lost")
            lock.release()
            wait_for_status(result.id, "done")
            leave_mark.enqueue("next")
            wait_for_mark("next")

        assert row(int(result.id), "attempts", "status") == (2, "done")
        assert attempts_of(result) == [("lost", True)]
        assert first.stop() == second.stop() == 0

    def test_a_whole_worker_stopped_for_longer_than_its_lease_runs_nothing_a_third_time(self, start_worker):
        """B20, R15: ran twice, the late finish changed nothing, and nobody is killed for having been asleep."""
        with barrier(63) as lock:
            result = mark_and_wait_for.enqueue("slow", 63)
            first = start_worker("--concurrency", "1", LEASE_SECONDS="2", BACKOFF="0").wait_ready()
            wait_for_mark("slow")
            first.signal_all(signal.SIGSTOP)
            second = start_worker("--concurrency", "1", LEASE_SECONDS="2", BACKOFF="0").wait_ready()
            wait_for_mark("slow", 2)
            lock.release()
            wait_for_status(result.id, "done")

            first.signal_all(signal.SIGCONT)
            first.wait_for_log(rf"claim of job {result.id} \(version 1\) is lost")
            leave_mark.enqueue("next")
            wait_for_mark("next")

        assert row(int(result.id), "attempts", "claim_version", "status") == (2, 3, "done")
        assert Mark.objects.filter(note="slow").count() == 2
        assert first.stop() == second.stop() == 0
        assert "killed" not in first.log


class TestMemory:
    def test_a_child_that_has_grown_too_large_is_replaced_after_its_job(self, start_worker):
        worker = start_worker("--concurrency", "1", "--max-memory", "300").wait_ready()
        large = tasks.take_memory.enqueue("large", 400)
        wait_for_status(large.id, "done")
        worker.wait_for_log(r"Uses \d+ MB, more than --max-memory allows")

        leave_mark.enqueue("next")
        wait_for_mark("next")

        first, second = re.findall(r"Child (\d+) is ready", worker.log)
        assert first != second
        assert Mark.objects.get(note="next").made_by == second
        assert worker.stop() == 0
        assert " ERROR " not in worker.log


def test_jobs_waiting_behind_one_that_is_stuck_are_given_to_others(start_worker):
    """R12: a child that is being replaced gives back what it has not begun."""
    stuck = tasks.wait_in_c.enqueue("stuck", 6000)
    worker = start_worker("--concurrency", "1", "--grace", "2", LEASE_SECONDS="600").wait_ready()
    wait_for_mark("stuck")
    others = [leave_mark.enqueue(f"other {number}") for number in range(20)]

    wait_until(lambda: Mark.objects.filter(note__startswith="other").count() == 20, "the others to run")

    wait_for_status(stuck.id, "failed")
    assert {row(int(other.id), "attempts") for other in others} == {(1,)}
    assert worker.stop() == 0
