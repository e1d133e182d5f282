"""``manage.py pgqueue_health`` and what stands behind it: it says what is wrong, in bounded time, and why."""

import json
import os
import socket
from contextlib import contextmanager

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from django_pgqueue import health
from django_pgqueue.compat import task_backends
from django_pgqueue.models import Job, Worker
from django_pgqueue.statements.upkeep import WorkerReport, report_worker

from .app.worker_tasks import leave_mark
from .helpers import actor, backend, enqueue, here, row, second_connection, sql, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

DUE = "UPDATE django_pgqueue_job SET available_at = clock_timestamp() - make_interval(secs => %s) WHERE id = %s"


def look(alias="default", queue_names=(), **options):
    """The checks by their names."""
    question = health.Question.about(task_backends[alias], queue_names, **options)
    return {check.name: check for check in health.look(question)}


def verdicts(*arguments, **options):
    return {name: check.ok for name, check in look(*arguments, **options).items()}


def be_a_worker(name="w", *, named=(), excluded=(), backend="default", hostname="h", turned_for=0.0, seen_for=0.0):
    """Leave the row that a worker would have written *seen_for* seconds ago."""
    with actor() as connection:
        serves = json.dumps({"named": named, "excluded": excluded})
        report_worker(connection, WorkerReport(name, hostname, 1, backend, "for people", serves, 4, turned_for))
    here(
        "UPDATE django_pgqueue_worker SET seen_at = seen_at - make_interval(secs => %s) WHERE name = %s",
        [seen_for, name],
    )


def wait_for(job_id, seconds):
    """Let a job have been available for so long."""
    here(DUE, [seconds, job_id])


@pytest.fixture
def answer(capsys):
    """Call the command; return its exit code and what it printed."""

    def call(*arguments):
        code = 0
        try:
            call_command("pgqueue_health", *arguments)
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().out

    return call


class TestWorkers:
    def test_all_is_well_where_a_worker_serves_every_queue(self):
        be_a_worker()

        assert verdicts() == {"database": True, "workers": True, "loops": True, "jobs": True}

    def test_nobody_lives(self):
        be_a_worker(seen_for=31)

        checks = look()

        assert {name: check.ok for name, check in checks.items()} == {"database": True, "workers": False, "jobs": True}
        assert "no live worker" in checks["workers"].message

    def test_each_queue_of_the_settings_needs_one(self):
        be_a_worker("a", named=["default"])
        be_a_worker("b", excluded=["slow", "default"])

        workers = look()["workers"]

        assert not workers.ok
        assert "'slow'" in workers.message and "email" not in workers.message and "default" not in workers.message

    def test_so_does_a_queue_that_only_has_jobs(self):
        be_a_worker(named=["default", "email", "slow"])
        job_id = enqueue(queue_name="removed")

        assert "'removed'" in look()["workers"].message

        here("UPDATE django_pgqueue_job SET available_at = clock_timestamp() + interval '1 h' WHERE id = %s", [job_id])
        assert look()["workers"].ok

    def test_one_may_ask_for_some_queues_only(self):
        be_a_worker(named=["default"], turned_for=99)
        be_a_worker("b", named=["email"])

        assert verdicts(queue_names=["email"]) == {"database": True, "workers": True, "loops": True, "jobs": True}
        assert not look(queue_names=["email", "slow"])["workers"].ok

    def test_workers_and_queues_of_other_backends_are_their_own_affair(self, settings):
        settings.TASKS = {"default": backend("default"), "letters": backend("letters")}
        be_a_worker("a", backend="default", excluded=["letters"])
        be_a_worker("b", backend="letters", named=["letters"], turned_for=99)
        wait_for(enqueue(queue_name="letters", backend="letters"), 999)

        assert all(verdicts().values())
        assert verdicts("letters") == {"database": True, "workers": True, "loops": False, "jobs": False}

    def test_a_worker_of_an_earlier_release_says_little_and_is_trusted(self):
        Worker.objects.create(name="w", hostname="h", process_id=1, queues="*", concurrency=4)

        assert verdicts() == {"database": True, "workers": True, "jobs": True}

    def test_a_host_answers_for_its_own_workers_alone(self):
        be_a_worker("a", hostname="here", named=["default"])
        be_a_worker("b", hostname="there", turned_for=99)
        wait_for(enqueue(queue_name="email"), 999)

        assert verdicts(hostname="here") == {"database": True, "workers": True, "loops": True}
        assert verdicts(hostname="there") == {"database": True, "workers": True, "loops": False}
        assert verdicts(hostname="nowhere") == {"database": True, "workers": False}


class TestLoops:
    def test_the_slowest_counts(self):
        be_a_worker("quick", turned_for=1)
        be_a_worker("stuck", turned_for=31)

        loops = look()["loops"]

        assert not loops.ok
        assert "stuck" in loops.message and "quick" not in loops.message

    def test_b19_a_locked_table_stops_the_loops_and_not_the_worker(self, start_worker):
        """B19: the worker reports itself all the while, which is no sign of life."""
        worker = start_worker(LEASE_SECONDS="2", POLL_SECONDS="0.1").wait_ready()
        wait_until(lambda: verdicts(silent_after=5).get("loops"), "a first turn")

        with second_connection() as someone:
            sql(someone, "BEGIN")
            sql(someone, "LOCK TABLE django_pgqueue_job IN ACCESS EXCLUSIVE MODE")
            locked = wait_until(
                lambda: (checks := look(silent_after=5)).get("loops") and not checks["loops"].ok and checks,
                "the loops to be missed",
            )

        assert locked["workers"].ok
        assert "locks the tables" in locked["jobs"].message
        wait_until(lambda: all(verdicts(silent_after=5).values()), "all to be well")
        leave_mark.enqueue("probe")
        wait_until(lambda: row(Job.objects.get().pk, "status") == ("done",), "the probe to be done")
        assert worker.process.poll() is None
        assert worker.log.count("is ready") == 1


class TestJobs:
    def test_the_oldest_available_job_counts_whatever_its_queue_and_priority(self):
        be_a_worker()
        wait_for(enqueue(priority=5), 10)
        oldest = enqueue(priority=-5, queue_name="email")
        wait_for(oldest, 301)

        jobs = look()["jobs"]

        assert not jobs.ok
        assert f"Job {oldest} in 'email' has been available for 30" in jobs.message
        assert look(max_wait=1_000)["jobs"].ok
        assert look(queue_names=["default"])["jobs"].ok

    @pytest.mark.parametrize("status", ["held", "running", "done", "future"])
    def test_no_other_job_waits(self, status):
        be_a_worker()
        job_id = enqueue()
        wait_for(job_id, 999)
        changes = {
            "held": "status = 'held'",
            "running": "status = 'running', claimed_by = 'w', claimed_at = now(), lease_until = now()",
            "done": "status = 'done', finished_at = now()",
            "future": "available_at = clock_timestamp() + interval '1 h'",
        }
        here(f"UPDATE django_pgqueue_job SET {changes[status]} WHERE id = %s", [job_id])

        assert "No job is waiting" in look()["jobs"].message


class TestDatabase:
    def test_one_that_is_away_is_an_answer(self, answer, settings):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]

        with another_database(**at_port(port)) as alias:  # nobody listens there any more
            settings.TASKS = {"default": backend(DATABASE=alias)}
            code, printed = answer("--json")

        assert code == 1
        [check] = json.loads(printed)["checks"]
        assert (check["name"], check["ok"]) == ("database", False)
        assert "not available" in check["message"]

    def test_one_that_never_answers_is_not_waited_for(self, monkeypatch, settings):
        """A network that swallows packets: the connection is made, and nothing comes back."""
        monkeypatch.setattr(health, "ANSWER_SECONDS", 0.5)
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            another_database(**at_port(listener.getsockname()[1])) as alias,
        ):
            settings.TASKS = {"default": backend(DATABASE=alias)}

            checks = look()

        assert [name for name, check in checks.items() if not check.ok] == ["database"]
        assert "has not answered" in checks["database"].message

    def test_tables_that_are_missing_are_named(self, settings):
        options = connections["default"].settings_dict["OPTIONS"]
        with another_database(OPTIONS={**options, "options": "-c search_path=pg_catalog"}) as alias:
            settings.TASKS = {"default": backend(DATABASE=alias)}

            checks = look()

        assert "manage.py migrate" in checks["database"].message

    def test_a_locked_table_of_workers_is_an_answer(self):
        with second_connection() as someone:
            sql(someone, "BEGIN")
            sql(someone, "LOCK TABLE django_pgqueue_worker IN ACCESS EXCLUSIVE MODE")

            checks = look()

        assert "Someone locks the tables" in checks["database"].message


class TestCommand:
    def test_it_says_each_check_in_a_line_and_its_exit_code_sums_them_up(self, answer):
        unwell = answer()
        be_a_worker()
        well = answer()

        assert (unwell[0], well[0]) == (1, 0)
        assert "FAILED  workers   There is no live worker" in unwell[1]
        assert [line.split()[:2] for line in well[1].splitlines()] == [
            ["ok", "database"],
            ["ok", "workers"],
            ["ok", "loops"],
            ["ok", "jobs"],
        ]

    def test_it_prints_json(self, answer):
        be_a_worker(named=["default"])

        code, printed = answer("--json", "--queue", "default", "--max-wait", "10")

        document = json.loads(printed)
        assert (code, document["ok"]) == (0, True)
        assert [set(check) for check in document["checks"]] == [{"name", "ok", "message"}] * 4

    def test_this_host_is_the_one_that_a_worker_reports(self, answer):
        be_a_worker(hostname=socket.gethostname())

        assert answer("--this-host")[0] == 0
        Worker.objects.update(hostname=f"not {socket.gethostname()}")
        assert answer("--this-host")[0] == 1

    @pytest.mark.parametrize("alias", ["missing", "immediate"])
    def test_a_backend_without_jobs_is_refused(self, alias):
        with pytest.raises(CommandError, match=alias):
            call_command("pgqueue_health", backend=alias)

    def test_it_leaves_nothing_behind(self):
        look()

        name = f"pgqueue health {os.getpid()}"
        ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        wait_until(lambda: here(ours, [name]) == [(0,)], "its connection to be gone")


@contextmanager
def another_database(**changes):
    """An alias that every thread knows, with *changes* to the settings of the test database."""
    connection = connections["default"].copy("another")
    connection.settings_dict |= changes
    connections.settings["another"] = connection.settings_dict
    try:
        yield "another"
    finally:
        del connections.settings["another"]


def at_port(port):
    return {"HOST": "127.0.0.1", "PORT": str(port), "OPTIONS": {}}
