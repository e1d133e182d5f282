"""Signals at every moment of a worker's life: how it ends, with which exit code, and what becomes of its jobs (R12)."""

import os
import signal
import subprocess

import pytest
from django.db import transaction

from django_pgqueue.models import Job, JobAttempt, Worker

from .app.models import Mark
from .app.worker_tasks import be_stuck, leave_mark, leave_orphans, mark_and_wait_for
from .helpers import job_trigger, row, wait_until
from .workers import FirstProcess, RunningWorker, a_child_is_in, a_place_to_wait_at, barrier, is_alive

pytestmark = pytest.mark.django_db(transaction=True)


def wait_for_mark(note):
    wait_until(lambda: Mark.objects.filter(note=note).exists(), f"mark {note!r}")


def nothing_was_claimed():
    return not Job.objects.exclude(status="pending", attempts=0, claim_version=0).exists()


@pytest.fixture(params=[RunningWorker, FirstProcess], ids=["of a shell", "as PID 1"])
def kind(request):
    """Of a worker: a process as any other, or the first one of a container, to which signals need a handler."""
    if request.param is FirstProcess:
        _skip_without_namespaces()
    return request.param


def _skip_without_namespaces():
    tried = subprocess.run([*FirstProcess.command, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this machine gives nobody a PID namespace of his own: {tried.stderr.strip()}")


class TestStarting:
    @pytest.fixture
    def stands_still(self, tmp_path):
        """The file that is there while a start stands still, and what to start a worker with for that."""
        place = tmp_path / "stands-still"
        return place, {"STAND_STILL": str(place)}

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
    def test_a_signal_before_the_first_child_ends_the_worker_and_nothing_is_claimed(
        self, start_worker, stands_still, kind, number
    ):
        """Case B29: as PID 1 it would not even be delivered, did nobody handle it yet."""
        place, environment = stands_still
        leave_mark.enqueue_many([[f"{number}"] for number in range(5)])
        worker = start_worker("--burst", kind=kind, STAND_STILL_IN_CHECKS="1", **environment)
        wait_until(place.exists, "the worker to stand still")

        worker.signal(number)
        place.unlink()

        assert worker.wait() == 0
        assert nothing_was_claimed()
        assert "Traceback" not in worker.log

    def test_a_second_signal_ends_a_worker_that_does_not_even_get_to_its_first_child(self, start_worker, stands_still):
        place, environment = stands_still
        worker = start_worker(STAND_STILL_IN_CHECKS="1", **environment)
        wait_until(place.exists, "the worker to stand still")

        worker.signal(signal.SIGTERM)
        worker.signal(signal.SIGINT)

        assert worker.wait() == 3

    def test_a_child_that_is_still_starting_is_not_waited_for(self, start_worker, stands_still):
        place, environment = stands_still
        leave_mark.enqueue_many([[f"{number}"] for number in range(5)])
        worker = start_worker("--grace", "86400", **environment)
        wait_until(place.exists, "the child to stand still")
        [child] = worker.children()

        worker.signal(signal.SIGTERM)

        assert worker.wait() == 0
        assert not is_alive(child)
        assert nothing_was_claimed()


class TestIdle:
    def test_an_idle_worker_stops_when_asked_whatever_it_waits_for(self, start_worker, kind):
        """Cases B29, B30: it polls every ten minutes, which is longer than this test would wait."""
        worker = start_worker("--processes", "2", kind=kind, POLL_SECONDS="600")
        worker.wait_for_log(r"(Child \d+ is ready[\s\S]*){2}")
        wait_until(Worker.objects.exists, "the worker to report itself")
        children = worker.children()

        worker.signal(signal.SIGTERM)

        assert worker.wait() == 0
        assert not any(is_alive(child) for child in children)
        assert not Worker.objects.exists()

    @pytest.mark.slow
    def test_ten_idle_workers_stop_at_ten_moments(self, start_worker):
        """Case B30"""
        workers = [start_worker(POLL_SECONDS="600") for _ in range(10)]

        for worker in workers:
            worker.wait_ready().signal(signal.SIGTERM)

        assert [worker.wait() for worker in workers] == [0] * 10


class TestClaiming:
    def test_what_is_claimed_while_the_signal_arrives_goes_back_unstarted(self, start_worker):
        """R12: the claim, a statement of its own, is committing when the worker is told to stop."""
        wait = "WHILE NEW.status = 'running' AND pgqueue_test_is_held() LOOP PERFORM pg_sleep(0.01); END LOOP;"
        with a_place_to_wait_at(21) as lock, job_trigger(wait, at_commit=True):
            jobs = leave_mark.enqueue_many([[f"{number}"] for number in range(3)])
            worker = start_worker("-v", "2").wait_ready()
            wait_until(lambda: a_child_is_in("WITH moment"), "the claim to be committing")

            worker.signal(signal.SIGTERM)
            worker.wait_for_log("Told to stop")
            lock.release()

            assert worker.wait() == 0
        assert set(Job.objects.values_list("pk", "status", "attempts")) == {(int(pk), "pending", 0) for pk in jobs}
        assert not Mark.objects.exists()
        assert not JobAttempt.objects.exists()


class TestRunning:
    def test_a_ctrl_c_reaches_the_whole_group_and_lets_running_jobs_finish(self, start_worker):
        with barrier(22) as lock:
            running = mark_and_wait_for.enqueue("running", 22)
            worker = start_worker("--concurrency", "1").wait_ready()
            wait_for_mark("running")
            waiting = leave_mark.enqueue("waiting")

            os.killpg(worker.pid, signal.SIGINT)
            worker.wait_for_log("Stopping")
            lock.release()

            assert worker.wait() == 0
        assert row(int(running.id), "status", "attempts") == ("done", 1)
        assert row(int(waiting.id), "status", "attempts") == ("pending", 0)
        assert "KeyboardInterrupt" not in worker.log

    @pytest.mark.parametrize(
        ("first", "second"),
        [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)],
        ids=lambda number: number.name,
    )
    def test_a_second_signal_ends_the_worker_at_once_and_the_job_goes_back(self, start_worker, first, second):
        """Case B25: it is stuck where nothing can interrupt it, and has a day to finish."""
        stuck = be_stuck.enqueue("stuck")
        worker = start_worker("--grace", "86400").wait_ready()
        wait_for_mark("stuck")
        children = worker.children()
        worker.signal(first)
        worker.wait_for_log("Stopping: no more")

        worker.signal(second)

        assert worker.wait() == 3
        assert not any(is_alive(child) for child in children)
        assert row(int(stuck.id), "status", "attempts") == ("pending", 0)
        assert set(JobAttempt.objects.values_list("outcome", "counted")) == {("released", False)}

    def test_five_deploys_in_a_row_cost_a_job_that_outlasts_them_no_attempt(self, start_worker):
        """Case B24, R12: each worker is told to stop while it runs the job; it has one attempt in all."""
        with barrier(23) as lock:
            workers = [start_worker("--grace", "0", "--concurrency", "1") for _ in range(6)]
            children = {worker.wait_ready().child_pid: worker for worker in workers}
            with transaction.atomic():
                job = mark_and_wait_for.enqueue("deployed", 23)
                Job.objects.update(max_attempts=1)

            for count in range(1, 6):
                wait_until(lambda count=count: Mark.objects.filter(note="deployed").count() == count, f"run {count}")
                runs_in = int(Mark.objects.latest("pk").made_by)
                assert children[runs_in].stop() == 0
            wait_until(lambda: Mark.objects.filter(note="deployed").count() == 6, "the last worker to run it")
            lock.release()
            wait_until(lambda: row(int(job.id), "status") == ("done",), "its end")

        assert row(int(job.id), "attempts") == (1,)
        assert list(JobAttempt.objects.values_list("outcome", "counted")) == [("released", False)] * 5

    def test_a_child_whose_supervisor_was_killed_goes_though_its_task_is_stuck(self, start_worker):
        """Long before the end of the grace period: nobody renews its leases any more."""
        be_stuck.enqueue("stuck")
        worker = start_worker("--grace", "86400", LEASE_SECONDS="3").wait_ready()
        wait_for_mark("stuck")
        child = worker.child_pid

        worker.signal(signal.SIGKILL)

        wait_until(lambda: not is_alive(child), "the child's end")


def test_as_pid_1_a_worker_buries_the_processes_that_tasks_leave_behind(start_worker, tmp_path):
    """Each would be a zombie until the container ends."""
    _skip_without_namespaces()
    worker = start_worker(kind=FirstProcess).wait_ready()
    children = worker.children()

    job = leave_orphans.enqueue(20, str(tmp_path))

    wait_until(lambda: all((tmp_path / f"{number}").exists() for number in range(1, 21)), "the orphans' ends")
    wait_until(lambda: row(int(job.id), "status") == ("done",), "the job's end")
    wait_until(lambda: worker.children() == children, "the orphans to be buried")
    assert worker.stop() == 0


class TestExitCodes:
    """0 and 3: see above. 1 for a child that cannot start: see the tests of workers."""

    def test_wrong_flags_are_told_by_the_exit_code(self, start_worker):
        unknown_queue = start_worker("--queue", "emial")
        no_number = start_worker("--concurrency", "none")

        assert unknown_queue.process.wait(90) == 1
        assert no_number.process.wait(90) == 2
