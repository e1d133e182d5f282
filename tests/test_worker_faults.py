"""Real workers and what can befall them: hostile tasks, full pipes, statements that fail, children that break."""

import os
import re
import signal
from pathlib import Path

import pytest
from django.db import connections

from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import Claim
from django_pgqueue.worker.cleaning import leave_clean
from django_pgqueue.worker.process import ChildProcess
from django_pgqueue.worker.supervisor import MAX_EARLY_DEATHS, Supervisor

from .app.models import Mark
from .app.worker_tasks import (
    async_exit_process,
    async_leave_mark,
    async_mark_and_wait_for,
    break_control_loop,
    end_process_at_once,
    fail,
    fork_and_terminate,
    kill_own_process,
    leave_mark,
    mark_and_wait_for,
    read_all_input,
)
from .helpers import InThread, database_alias, enqueue, here, row, second_connection, sql, wait_until, worker_session
from .helpers import worker_config as config
from .workers import barrier

pytestmark = pytest.mark.django_db(transaction=True)


def wait_for_status(job_id, status):
    wait_until(lambda: row(job_id, "status") == (status,), f"job {job_id} to be {status}")


def wait_for_mark(note):
    wait_until(lambda: Mark.objects.filter(note=note).exists(), f"mark {note!r}")


@pytest.fixture
def child(monkeypatch):
    """A child without a supervisor's threads; killed in the end."""
    monkeypatch.setenv("TEST_DATABASE", connections["default"].settings_dict["NAME"])
    child = ChildProcess(config())
    wait_until(lambda: child.said().has_started, "the child to start")
    yield child
    if child.exit_code() is None:
        child.kill()
        child.wait(30)
    child.forget()


def fill_both_pipes(child):
    for _ in range(70_000):
        child.wake()
    child.tell_lost([Claim(2**62 + number, 2**62) for number in range(5_000)])


class TestThePipe:
    """What a supervisor says to a child that does not read at the moment."""

    def test_a_word_that_does_not_fit_spoils_no_other(self, child):
        os.kill(child.pid, signal.SIGSTOP)
        fill_both_pipes(child)
        os.kill(child.pid, signal.SIGCONT)

        wait_until(lambda: child.stop(0) or child.exit_code() is not None, "the child's end")

        assert child.exit_code() == 0

    def test_a_full_pipe_does_not_keep_a_child_from_hearing_that_it_is_to_stop(self, child):
        os.kill(child.pid, signal.SIGSTOP)
        fill_both_pipes(child)

        child.stop(0)
        os.kill(child.pid, signal.SIGCONT)

        assert child.wait(30) == 0

    def test_many_children_leave_no_descriptor_open(self, monkeypatch):
        monkeypatch.setenv("BREAK_CHILD", "1")
        before = len(list(Path("/dev/fd").iterdir()))

        for _ in range(5):
            child = ChildProcess(config())
            assert child.wait(30) == 11
            child.forget()

        assert len(list(Path("/dev/fd").iterdir())) == before

    def test_a_child_that_cannot_be_started_leaves_no_descriptor_open(self, monkeypatch):
        before = len(list(Path("/dev/fd").iterdir()))
        monkeypatch.setattr("sys.executable", "/nowhere/python")

        for _ in range(5):
            with pytest.raises(OSError, match="nowhere"):
                ChildProcess(config())

        assert len(list(Path("/dev/fd").iterdir())) == before

    def test_a_supervisor_that_cannot_start_a_child_tries_again_before_it_gives_up(self, monkeypatch, caplog):
        tries = []

        def fail_to_fork(config):
            tries.append(config)
            raise BlockingIOError("no more processes")

        monkeypatch.setattr("django_pgqueue.worker.place.ChildProcess", fail_to_fork)
        supervisor = Supervisor(config())
        supervisor._sleep = lambda seconds: setattr(supervisor._places[0], "restart_at", 0.0)

        assert supervisor._supervise() == 1

        assert len(tries) == MAX_EARLY_DEATHS
        assert "giving up" in caplog.text


class TestTasksThatMisbehave:
    def test_a_subprocess_that_reads_its_input_does_not_read_the_supervisors_words(self, start_worker):
        job = read_all_input.enqueue()
        worker = start_worker().wait_ready()

        wait_for_status(int(job.id), "done")

        assert worker.stop() == 0
        assert "killed" not in worker.log

    def test_a_process_that_a_task_forks_ends_by_sigterm_as_any_process_does(self, start_worker):
        job = fork_and_terminate.enqueue()

        assert start_worker("--burst", PYTHONWARNINGS="ignore").wait() == 0

        assert row(int(job.id), "return_value") == (-signal.SIGTERM,)

    def test_an_async_task_that_exits_ends_its_attempt_and_not_the_event_loop(self, start_worker):
        exiting = async_exit_process.enqueue(7)
        async_leave_mark.enqueue("after it")

        assert start_worker("--burst", "--concurrency", "1").wait() == 0

        assert row(int(exiting.id), "status", "last_error") == ("failed", "SystemExit: 7")
        assert Mark.objects.get().note == "after it"

    def test_a_task_that_ends_the_process_with_0_does_not_end_a_burst(self, start_worker):
        ending = end_process_at_once.using(priority=1).enqueue(0)
        leave_mark.enqueue("still due")

        assert start_worker("--burst", "--concurrency", "1").wait() == 0

        assert row(int(ending.id), "status") == ("failed",)
        assert Mark.objects.get().note == "still due"

    def test_a_broken_control_loop_ends_its_process_whatever_still_runs_in_it(self, start_worker):
        """Else the claims of a process that settles nothing would be renewed for ever."""
        with barrier(31):
            stuck = async_mark_and_wait_for.enqueue("stuck", 31)
            worker = start_worker("--grace", "0").wait_ready()
            wait_for_mark("stuck")

            break_control_loop.enqueue()

            worker.wait_for_log(r"Child \d+ died \(exit code 1\)")
            wait_until(lambda: JobAttempt.objects.filter(job_id=int(stuck.id), outcome="crashed").exists())
            assert "TypeError" in worker.log
            assert worker.stop() == 0

    def test_a_connection_that_cannot_even_be_closed_costs_no_slot(self):
        def leave_the_worst():
            connection = connections["default"]
            connection.ensure_connection()
            connection.in_atomic_block = True
            connection.close = _raise
            leave_clean()
            return connections["default"] is connection

        assert InThread(leave_the_worst).result() is False


class TestUpkeep:
    @pytest.mark.parametrize("trouble", ["RAISE 'not today'", "PERFORM pg_sleep(4)"], ids=["fails", "is slow"])
    def test_leases_are_renewed_in_time_while_pruning(self, start_worker, trouble):
        old = int(leave_mark.enqueue("old").id)
        assert start_worker("--burst").wait() == 0
        here("UPDATE django_pgqueue_job SET finished_at = finished_at - interval '8 days'")
        here("UPDATE django_pgqueue_job SET created_at = created_at - interval '9 days'")
        here(
            f"CREATE FUNCTION pgqueue_test_trouble() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {trouble};"
            " RETURN OLD; END$$"
        )
        here(
            "CREATE TRIGGER pgqueue_test BEFORE DELETE ON django_pgqueue_job"
            " FOR EACH ROW EXECUTE FUNCTION pgqueue_test_trouble()"
        )
        try:
            with barrier(32) as lock:
                job = mark_and_wait_for.enqueue("long", 32)
                workers = [start_worker(LEASE_SECONDS="1.5").wait_ready() for _ in range(2)]
                wait_for_mark("long")
                leases = set()
                wait_until(lambda: leases.add(row(int(job.id), "lease_until")) or len(leases) > 20, "20 renewals")
                lock.release()
                wait_for_status(int(job.id), "done")
            assert [worker.stop() for worker in workers] == [0, 0]
        finally:
            here("DROP FUNCTION pgqueue_test_trouble() CASCADE")

        assert row(int(job.id), "attempts", "claim_version") == (1, 1)
        assert Job.objects.filter(pk=old).exists()
        assert all("Recovered" not in worker.log and worker.log.count("not today") <= 1 for worker in workers)

    @pytest.mark.direct("looks for its sessions in the server")
    def test_a_dead_childs_job_whose_row_is_locked_is_put_in_order_when_the_lock_is_gone(self, start_worker):
        """Long before its lease ends."""
        with barrier(33), second_connection() as other:
            job = mark_and_wait_for.enqueue("locked", 33)
            worker = start_worker("--grace", "0").wait_ready()
            wait_for_mark("locked")
            sql(other, "BEGIN")
            sql(other, "SELECT 1 FROM django_pgqueue_job WHERE id = %s FOR UPDATE", [int(job.id)])
            os.kill(worker.child_pid, signal.SIGKILL)
            worker.wait_for_log(r"Child \d+ died")
            wait_until(lambda: worker.log.count("is ready") == 2, "the next child")
            wait_until(lambda: _backends("pgqueue child%") == 1, "the dead child's backend to end")

            sql(other, "COMMIT")

            wait_until(lambda: JobAttempt.objects.filter(outcome="crashed").exists(), "the crash to be recorded")
            assert worker.stop() == 0

    def test_a_job_that_kills_its_process_is_marked_as_started_before_it_may(self, start_worker):
        """Else it would be taken for a buffered one, be refunded, and kill for ever."""
        poison = kill_own_process.enqueue("poison")

        worker = start_worker("--concurrency", "1").wait_ready()

        wait_until(lambda: JobAttempt.objects.filter(job_id=int(poison.id), outcome="crashed").exists(), "its crash")
        assert row(int(poison.id), "attempts") >= (1,)
        assert worker.stop() == 0


class TestConnections:
    @pytest.mark.direct("looks for its sessions in the server")
    def test_async_tasks_leave_no_connection_open_where_connections_are_kept(self, start_worker):
        for number in range(60):
            async_leave_mark.enqueue(f"{number}")
        worker = start_worker("--concurrency", "4", CONN_MAX_AGE="600").wait_ready()
        wait_until(lambda: not Job.objects.exclude(status="done").exists(), "the end of all jobs")

        # Claiming, upkeep and listening; those of the jobs' threads are closed with them.
        wait_until(lambda: _backends("%") <= 3 + 1, "the connections to be closed")

        assert worker.stop() == 0

    @pytest.mark.direct("looks for its sessions in the server")
    @pytest.mark.parametrize("checks", [{}, {"CONN_HEALTH_CHECKS": "1"}], ids=["unchecked", "checked"])
    def test_a_kept_connection_that_broke_while_idle_does_not_cost_the_next_job_an_attempt(self, start_worker, checks):
        worker = start_worker("--concurrency", "1", CONN_MAX_AGE="600", **checks).wait_ready()
        wait_for_status(int(leave_mark.enqueue("before").id), "done")
        here(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND datname = current_database() AND application_name NOT LIKE 'pgqueue%'"
        )

        after = int(leave_mark.enqueue("after").id)

        wait_for_mark("after")
        wait_for_status(after, "done")
        assert row(after, "attempts") == (1,)
        assert worker.stop() == 0

    def test_a_round_works_where_statements_are_prepared_at_once(self):
        with database_alias("preparing", prepare_threshold=0), worker_session("preparing") as session:
            for _ in range(3):
                with session.round() as connection:
                    assert sql(connection, "SELECT 1") == [(1,)]

    def test_a_round_keeps_to_a_limit_of_its_own(self):
        with worker_session() as session, session.round(0.25) as connection:
            assert sql(connection, "SHOW statement_timeout") == [("250ms",)]


class TestLogging:
    def test_a_projects_logging_prints_what_the_child_says_once(self, start_worker):
        fail.enqueue("no way out")

        worker = start_worker("--burst", LOGGING_OF_A_PROJECT="1")

        assert worker.wait() == 0
        assert re.findall(r"(\S+) \S* ?Job \d+ .*failed for good", worker.log) == ["project:"]

    def test_a_tasks_name_cannot_forge_a_line_of_the_log(self, start_worker):
        enqueue(task_path="x\n2026-01-01 ERROR forged\x1b[2J")

        worker = start_worker("--burst", "--queue", "default")

        assert worker.wait() == 0
        assert "\x1b" not in worker.log
        assert not re.search(r"^2026-01-01 ERROR forged", worker.log, re.MULTILINE)
        assert r"x\x0a2026-01-01 ERROR forged\x1b[2J" in worker.log


def _backends(application_name):
    """Count the worker's and its tasks' backends, not the test's own, by the name they give."""
    return here(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend' AND application_name LIKE %s"
        " AND query NOT LIKE 'SELECT pg_advisory_lock(%%' AND query NOT LIKE 'SELECT 1 FROM django_pgqueue_job%%'",
        [application_name],
    )[0][0]


def _raise(*args):
    raise RuntimeError("cannot be closed")
