"""
Real workers while the database is away or will not serve them, in each of the ways in which that happens.

Each time: the same processes, a log that does not grow with the outage, what was in hand is written later, and
what is enqueued afterwards is done.
"""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.db import connections

from django_pgqueue.models import Job

from .app.models import Mark
from .app.worker_tasks import leave_mark
from .helpers import database_alias, here, new_job, second_connection, sql, wait_until
from .proxy import Proxy
from .servers import servers
from .workers import JobInHand

pytestmark = pytest.mark.django_db(transaction=True)

QUICK = {"LEASE_SECONDS": "6"}  # upkeep asks often, and so meets the outage soon


class Watched:
    """What must be true of *worker* at the end of an outage."""

    def __init__(self, worker):
        self.worker = worker
        self.child = worker.child_pid

    def must_be_the_same(self, outages=1):
        assert self.worker.child_pid == self.child
        assert self.worker.stop() == 0
        log = self.worker.log
        # Each outage is told by upkeep; a child or the listener may add what only they have met.
        assert outages <= log.count("is not available") <= 2 * outages
        assert len(log.splitlines()) <= 8 + 4 * outages
        assert "something fails" not in log
        assert "Traceback" not in log
        assert "lost" not in log


def enqueue_mark(note, using="default"):
    job = new_job(task_path=leave_mark.module_path, args=json.dumps([note]))
    return Job.objects.db_manager(using).enqueue(job).id


def wait_done(job_id, using="default"):
    wait_until(lambda: Job.objects.using(using).get(pk=job_id).status == "done", f"job {job_id} to be done")


class TestSettings:
    """What an administrator can do to a running database."""

    def test_a_database_that_is_read_only_for_a_while(self, start_worker, tmp_path, proxy):
        watched = Watched(start_worker(DATABASE_URL=proxy.url, **QUICK).wait_ready())
        in_hand = JobInHand(tmp_path)
        with database_setting("default_transaction_read_only", "on"):
            end_backends("pgqueue%")
            in_hand.finish()
            job_id = enqueue_mark("meanwhile")  # this session is older than the setting
            wait_for_tries(proxy)

        wait_done(job_id)
        wait_done(in_hand.id)
        in_hand.must_have_run_once()
        watched.must_be_the_same()

    def test_no_connection_left_for_a_while(self, start_worker, tmp_path, proxy, worker_role):
        proxy.user = worker_role.name
        watched = Watched(start_worker(DATABASE_URL=proxy.url, **QUICK).wait_ready())
        in_hand = JobInHand(tmp_path)
        worker_role.alter("CONNECTION LIMIT 0")
        end_backends("pgqueue%")
        in_hand.finish()
        job_id = enqueue_mark("meanwhile")
        wait_for_tries(proxy)

        worker_role.alter("CONNECTION LIMIT -1")

        wait_done(job_id)
        wait_done(in_hand.id)
        in_hand.must_have_run_once()
        watched.must_be_the_same()

    def test_limits_and_isolation_of_a_role_do_not_reach_the_workers_own_statements(
        self, start_worker, tmp_path, worker_role
    ):
        """Cases B38, B39, B40"""
        worker_role.alter("SET statement_timeout = '500ms'")
        worker_role.alter("SET lock_timeout = '300ms'")
        worker_role.alter("SET idle_in_transaction_session_timeout = '200ms'")
        worker_role.alter("SET default_transaction_isolation = 'serializable'")
        workers = [start_worker(DATABASE_URL=worker_role.url, **QUICK).wait_ready() for _ in range(2)]
        children = [worker.child_pid for worker in workers]
        in_hand = JobInHand(tmp_path)
        jobs = [enqueue_mark(f"{number}") for number in range(200)]
        with second_connection() as other:
            sql(other, "BEGIN")
            sql(other, "LOCK TABLE django_pgqueue_job IN EXCLUSIVE MODE")
            in_hand.finish()
            # Each round of the worker gives up after half a second, and is tried again.
            seen = set()
            wait_until(lambda: seen.add(waiting_since()) or len(seen - {None}) >= 4, "four tries")
            sql(other, "COMMIT")

        wait_until(lambda: not Job.objects.exclude(status="done").exists(), "all jobs")
        in_hand.must_have_run_once()
        assert [worker.child_pid for worker in workers] == children
        assert [worker.stop() for worker in workers] == [0, 0]
        assert Job.objects.filter(pk__in=jobs, attempts=1).count() == 200
        assert Mark.objects.count() == 200
        assert all("lost" not in worker.log and len(worker.log.splitlines()) < 12 for worker in workers)


@pytest.mark.second_server
class TestServers:
    def test_a_server_that_is_stopped_for_a_while(self, start_worker, tmp_path, two_servers):
        """Cases B32, B42"""
        server, _ = two_servers
        watched = Watched(start_worker(DATABASE_URL=server.url, TEST_DATABASE="postgres", **QUICK).wait_ready())
        with reached(server) as using:
            for outages, mode in enumerate(("fast", "immediate"), start=1):
                in_hand = JobInHand(tmp_path, using)
                connections[using].close()
                server.stop(mode)
                in_hand.finish()
                watched.worker.wait_for_log(rf"(is not available[\s\S]*){{{outages}}}")
                if mode == "fast":
                    assert cpu_share(watched) < 0.1
                server.start()

                wait_done(enqueue_mark(f"after {mode}", using), using)
                wait_done(in_hand.id, using)
                in_hand.must_have_run_once()
                watched.worker.wait_for_log(rf"(answers again[\s\S]*){{{outages}}}")
        watched.must_be_the_same(outages=2)

    def test_two_servers_that_change_roles(self, start_worker, tmp_path, two_servers):
        """The worker writes where writing is allowed."""
        first, second = two_servers
        url = (
            f"postgres://postgres@/postgres?host={first.folder},{second.folder}&port=5432,5432"
            "&target_session_attrs=read-write"
        )
        with reached(first, "first") as one, reached(second, "second") as two:
            set_read_only(one, "on")
            watched = Watched(start_worker(DATABASE_URL=url, TEST_DATABASE="postgres", **QUICK).wait_ready())
            wait_done(enqueue_mark("on the second", two), two)

            set_read_only(two, "on")
            watched.worker.wait_for_log("is not available")
            set_read_only(one, "off")

            wait_done(enqueue_mark("on the first", one), one)
            watched.worker.wait_for_log("answers again")
        watched.must_be_the_same()


@pytest.fixture
def proxy():
    with Proxy.to_database() as proxy:
        yield proxy


def wait_for_tries(proxy):
    """Return when the worker has met the outage several times, in each of its processes."""
    before = proxy.accepted
    wait_until(lambda: proxy.accepted >= before + 8, "more connections")


@contextmanager
def database_setting(name, value):
    """For the sessions of the test's database that begin in the block."""
    database = connections["default"].settings_dict["NAME"]
    here(f'ALTER DATABASE "{database}" SET {name} = {value}')
    try:
        yield
    finally:
        here(f'ALTER DATABASE "{database}" RESET {name}')


def end_backends(application_name):
    ended = here(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE %s",
        [application_name],
    )
    assert ended >= [(3,)]


def waiting_since():
    """When the statement began that waits for a lock now, if one does."""
    found = here(
        "SELECT query_start FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'pgqueue child%' AND wait_event_type = 'Lock'"
    )
    return found[0][0] if found else None


class WorkerRole:
    """A role without privileges but those on the tables; see the fixture."""

    name = "pgqueue_test_worker"

    def __init__(self, url):
        self.url = url

    def alter(self, what):
        here(f"ALTER ROLE pgqueue_test_worker {what}")


@pytest.fixture
def worker_role():
    """A role for workers, whose settings and limits may be changed."""
    connections["default"].ensure_connection()
    info = connections["default"].connection.info
    here(f"CREATE ROLE pgqueue_test_worker LOGIN PASSWORD '{info.password}'")
    here("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO pgqueue_test_worker")
    here("GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO pgqueue_test_worker")
    password = f":{info.password}" if info.password else ""
    place = f"/{info.dbname}?host={info.host}&port={info.port}"
    yield WorkerRole(f"postgres://pgqueue_test_worker{password}@{place}")
    here("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'pgqueue_test_worker'")
    here("DROP OWNED BY pgqueue_test_worker")
    here("DROP ROLE pgqueue_test_worker")


@pytest.fixture(scope="module")
def programs(django_db_setup, django_db_blocker):
    """Where the server keeps its programs; it runs on this machine."""
    with django_db_blocker.unblock():
        return Path(here("SELECT setting FROM pg_config WHERE name = 'BINDIR'")[0][0])


@pytest.fixture(scope="module")
def two_servers(programs):
    with servers(programs, 2) as two:
        yield two


@contextmanager
def reached(server, name="elsewhere"):
    """An alias of the database of *server*."""
    with database_alias(name, host=str(server.folder), port=5432) as connection:
        connection.settings_dict.update(NAME="postgres", USER="postgres", HOST="", PORT="")
        yield name


def set_read_only(using, value):
    """For the whole server, and for all other sessions at once."""
    sql(connections[using], f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    sql(connections[using], "SELECT pg_reload_conf()")
    sql(connections[using], "SET default_transaction_read_only = off")
    question = "SELECT count(*) FROM pg_file_settings WHERE name = 'default_transaction_read_only' AND applied"
    wait_until(lambda: sql(connections[using], question) == [(1,)], "the setting")
    sql(
        connections[using],
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'",
    )


def cpu_share(watched):
    """The share of one CPU's time that the worker takes, over some seconds of doing nothing else."""
    began = os.times().elapsed
    used = cpu_seconds(watched)
    wait_until(lambda: os.times().elapsed - began > 5)
    return (cpu_seconds(watched) - used) / (os.times().elapsed - began)


def cpu_seconds(watched):
    ticks = 0
    for pid in (watched.worker.process.pid, watched.child):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
