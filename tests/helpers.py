"""Situations in one line each. Nothing clever."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connections
from django.db.backends.signals import connection_created

from django_pgqueue.models import Job
from django_pgqueue.outcomes import Claim
from django_pgqueue.statements.bell import ANY_KEY, TABLE
from django_pgqueue.statements.claim import ClaimedJob
from django_pgqueue.statements.database import PLANNER_SETTINGS_SQL, execute
from django_pgqueue.statements.enqueue import NewJob
from django_pgqueue.worker.attempt import Surroundings
from django_pgqueue.worker.config import Queues, WorkerConfig
from django_pgqueue.worker.connection import Session

PATIENCE_SECONDS = 90  # how long a test waits for an event before it fails


def _limit_waiting(connection: Any, **signal: Any) -> None:
    """A row that is never let go fails the test that waits for it; a round's own limit is far below this one."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{PATIENCE_SECONDS // 2}s'")


connection_created.connect(_limit_waiting)


def new_job(**changes: Any) -> NewJob:
    values = {
        "backend": "default",
        "queue_name": "default",
        "task_path": "tests.app.tasks.add",
        "args": "[1, 2]",
        "kwargs": "{}",
        "priority": 0,
        "max_attempts": 5,
        "run_after": None,
    }
    return NewJob(**{**values, **changes})


def enqueue(**changes: Any) -> int:
    """Insert a pending job and return its id."""
    return Job.objects.enqueue(new_job(**changes)).id


def claim_one(owner: str = "worker", **options: Any) -> ClaimedJob:
    [job] = Job.objects.claim(owner, 1, **options)
    return job


class Surrounded(Surroundings):
    """An attempt's surroundings that answer as the test says."""

    def __init__(self, **answers: Any) -> None:
        self.__dict__.update(answers)


def claim_of(job: ClaimedJob) -> Claim:
    return Claim(job.id, job.claim_version)


def expire_lease(job_id: int) -> None:
    """Let the lease of a running job have ended a second ago."""
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "UPDATE django_pgqueue_job SET lease_until = clock_timestamp() - interval '1 s' WHERE id = %s", [job_id]
        )


def make_due(job_id: int) -> None:
    """Let a pending job be available now."""
    with connections["default"].cursor() as cursor:
        cursor.execute("UPDATE django_pgqueue_job SET available_at = clock_timestamp() WHERE id = %s", [job_id])


def row(job_id: int, *columns: str) -> tuple:
    """Read some columns of a job as the database has them now."""
    return Job.objects.values_list(*columns).get(pk=job_id)


def wait_until(condition: Callable[[], Any], what: str = "") -> Any:
    """Return the first true answer of *condition*; fail after PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_SECONDS} s in vain for {what or condition}")
        time.sleep(0.01)  # the only pause in the suite: between two looks at the database
    return answer


@contextmanager
def second_connection(alias: str = "default") -> Iterator[Any]:
    """A second real connection to the test database, in autocommit; whatever it holds ends with the block."""
    connection = connections[alias].copy()
    try:
        connection.ensure_connection()
        yield connection
    finally:
        if connection.connection is not None:
            _let_go(connection.connection)


def _let_go(connection: psycopg.Connection) -> None:
    """Close a connection whose locks are gone when this returns; the server would take its time."""
    if not connection.closed:
        connection.rollback()
        connection.execute("SELECT pg_advisory_unlock_all()")
    connection.close()


class InThread:
    """A call in a thread of its own: ``result()`` joins it, and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="second-actor")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            connections.close_all()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the second actor still waits"
        if self._error is not None:
            raise self._error
        return self._value


def wait_for_lock_wait(connection: Any, process_id: int) -> None:
    """Return once the backend *process_id* waits for a lock; *connection* asks."""

    def waits() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", [process_id])
            answer = cursor.fetchone()
        return bool(answer and answer[0])

    wait_until(waits, f"backend {process_id} to wait for a lock")


# ---- what depends on locks: second actors, and where to make them wait


def enqueue_jobs(count: int, **changes: Any) -> list[int]:
    """Insert *count* pending jobs and return their ids."""
    return Job.objects.enqueue_many(new_job(**changes), [("[1, 2]", "{}")] * count)


def claim_jobs(count: int, owner: str = "worker", **options: Any) -> list[Claim]:
    """Claim exactly *count* jobs."""
    jobs = Job.objects.claim(owner, count, **options)
    assert len(jobs) == count
    return [claim_of(job) for job in jobs]


def sql(connection: Any, statement: str, parameters: Any = None) -> list[tuple]:
    """Run a statement on *connection*, Django's or psycopg's, and return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []


def here(statement: str, parameters: Any = None) -> list[tuple]:
    """Run a statement on the test's own connection."""
    return sql(connections["default"], statement, parameters)


@contextmanager
def actor() -> Iterator[psycopg.Connection]:
    """
    A worker's connection, in autocommit, for use from any thread; its transaction ends with the block.

    It has the settings of a round but for the lock_timeout, which only keeps a broken test from hanging.
    """
    session = Session("default", "test actor")
    try:
        execute(session.connection, PLANNER_SETTINGS_SQL.replace("LOCAL", ""))
        execute(session.connection, f"SET lock_timeout = '{PATIENCE_SECONDS // 2}s'")
        yield session.connection
    finally:
        _let_go(session.connection)


@contextmanager
def worker_session(alias: str = "default") -> Iterator[Session]:
    """A worker's session."""
    session = Session(alias, "test worker")
    try:
        yield session
    finally:
        _let_go(session.connection)


def worker_config(**changes: Any) -> WorkerConfig:
    """What a worker of one child with four slots is told, which does not poll; or as *changes* say."""
    values = {
        "backend": "default",
        "database": "default",
        "queues": Queues(),
        "concurrency": 4,
        "processes": 1,
        "max_jobs": None,
        "max_memory": None,
        "burst": False,
        "grace": 25.0,
        "lease": 60.0,
        "poll": 600.0,
        "retention": None,
        "constant_delay": None,
        "log_level": logging.INFO,
    }
    return WorkerConfig(**{**values, **changes})


def fall_asleep(connection: Any, key: int = ANY_KEY) -> None:
    """Let enqueues on other connections see a worker that sleeps, for as long as *connection* lives."""
    sql(connection, f"SELECT pg_advisory_lock({TABLE}, %s)", [key])


def pid_of(connection: Any) -> int:
    return sql(connection, "SELECT pg_backend_pid()")[0][0]


def wait_for_waiter(holder: int) -> None:
    """Return once some backend waits for a lock that the backend *holder* has."""
    question = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
    with second_connection() as observer:
        wait_until(lambda: sql(observer, question, [holder])[0][0], f"someone to wait for backend {holder}")


class Pause:
    """A place where actors stop: see `pausing`."""

    def __init__(self, control: Any) -> None:
        self._control = control
        sql(control, "SELECT pg_advisory_lock(4711)")

    def stop(self, connection: Any) -> None:
        """Let the next statement of *connection* that updates jobs, or asks for the time, stop after its snapshot."""
        sql(connection, "SET search_path = pgqueue_test, pg_catalog, public")

    def wait_for_arrival(self) -> None:
        wait_for_waiter(pid_of(self._control))

    def go_on(self) -> None:
        sql(self._control, "SELECT pg_advisory_unlock_all()")


# A statement has its snapshot before its triggers fire and before it asks for the time. So what others commit
# while it stops there is what it meets under its locks, and did not see. The names in our statements are
# unqualified, and a schema in front of pg_catalog can answer them.
_PAUSE_SQL = """
CREATE SCHEMA pgqueue_test;
CREATE FUNCTION pgqueue_test.pause() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('search_path') LIKE 'pgqueue_test%' THEN
        PERFORM pg_catalog.pg_advisory_lock_shared(4711);
        PERFORM pg_catalog.pg_advisory_unlock_shared(4711);
    END IF;
END $$;
CREATE FUNCTION pgqueue_test.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pgqueue_test.pause();
    RETURN pg_catalog.clock_timestamp();
END $$;
CREATE FUNCTION pgqueue_test.pause_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pgqueue_test.pause();
    RETURN NULL;
END $$;
CREATE TRIGGER pause BEFORE UPDATE ON django_pgqueue_job
   FOR EACH STATEMENT EXECUTE FUNCTION pgqueue_test.pause_update();
"""


@contextmanager
def pausing() -> Iterator[Pause]:
    """A `Pause` at which the statements of chosen connections stop until it says `go_on`. Opened before them."""
    with second_connection() as control:
        sql(control, _PAUSE_SQL)
        pause = Pause(control)
        try:
            yield pause
        finally:
            pause.go_on()
            sql(control, "SET client_min_messages = warning; DROP SCHEMA pgqueue_test CASCADE")


@contextmanager
def job_trigger(body: str, *, at_commit: bool = False) -> Iterator[None]:
    """A trigger for each updated job that runs *body*, PL/pgSQL: before the update, or at its COMMIT."""
    kind, when = ("CONSTRAINT TRIGGER", "AFTER") if at_commit else ("TRIGGER", "BEFORE")
    deferral = "DEFERRABLE INITIALLY DEFERRED" if at_commit else ""
    here(f"CREATE FUNCTION pgqueue_test_trigger() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body} RETURN NEW; END$$")
    here(
        f"CREATE {kind} pgqueue_test {when} UPDATE ON django_pgqueue_job {deferral} "
        "FOR EACH ROW EXECUTE FUNCTION pgqueue_test_trigger()"
    )
    try:
        yield
    finally:
        here("DROP TRIGGER pgqueue_test ON django_pgqueue_job")
        here("DROP FUNCTION pgqueue_test_trigger()")


# ---- other databases, other backends

OURS = "django_pgqueue.PgQueueBackend"


def backend(*queues: str, **options: Any) -> dict[str, Any]:
    """The settings of one backend of ours: its queues, none for any, and its OPTIONS."""
    return {"BACKEND": OURS, "QUEUES": list(queues), "OPTIONS": options}


@contextmanager
def database_alias(name: str, **options: Any) -> Iterator[Any]:
    """Another alias of the test database, with *options* added to its OPTIONS; its connection is a second one."""
    connection = connections["default"].copy(name)
    connection.settings_dict["OPTIONS"].update(options)
    connections[name] = connection
    try:
        yield connection
    finally:
        connection.close()
        del connections[name]
