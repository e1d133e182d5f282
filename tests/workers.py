"""Real workers: ``runworker`` in a process of its own, on the database of the test."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

from django.db import connections

from django_pgqueue.models import Job
from django_pgqueue.statements.bell import ANY_KEY, FIRST_LEAD_KEY

from .app.models import Mark
from .app.worker_tasks import write_after_reading
from .helpers import PATIENCE_SECONDS, here, new_job, row, second_connection, wait_until

ROOT = Path(__file__).resolve().parent.parent


def _pooled_url() -> str | None:
    """With --through-pgbouncer, where workers find the database."""
    return os.environ.get("WORKER_DATABASE_URL")


class RunningWorker:
    """One started worker. *log* is what it has printed so far."""

    command: tuple[str, ...] = ()  # that starts it

    def __init__(self, log_file: Path, *flags: str, **environment: str) -> None:
        self.log_file = log_file
        database = connections["default"].settings_dict["NAME"]
        self._output = log_file.open("w")
        if pooled := _pooled_url():
            environment = {"DATABASE_URL": pooled, **environment}
        self.process = subprocess.Popen(
            [*self.command, sys.executable, "-m", "django", "runworker", *flags],
            cwd=ROOT,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "TEST_DATABASE": database, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def warnings(self) -> list[str]:
        """The lines that warn, but for the one about a pooler that the suite has chosen."""
        lines = (line for line in self.log.splitlines() if "WARNING" in line)
        return [line for line in lines if "Notifications do not arrive" not in line or not _pooled_url()]

    def wait_ready(self) -> "RunningWorker":
        self.wait_for_log(r"Child \d+ is ready")
        return self

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            assert self.process.poll() is None or re.search(pattern, self.log), f"the worker ended:\n{self.log}"
            return re.search(pattern, self.log)

        return wait_until(look, f"the log to say {pattern!r}")

    @property
    def child_pid(self) -> int:
        """The process id of the newest child."""
        return int(re.findall(r"Child (\d+) is ready", self.log)[-1])

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: Signals) -> None:
        os.kill(self.pid, number)

    def children(self) -> list[int]:
        """The process ids of its living children, and of dead ones that it has not buried."""
        return children_of(self.pid)

    def signal_child(self, number: Signals) -> None:
        """Send a signal to the newest child alone."""
        os.kill(self.child_pid, number)

    def signal_all(self, number: Signals) -> None:
        """Send a signal to the worker and its children at once."""
        os.killpg(self.process.pid, number)

    def wait(self) -> int:
        """Wait for the worker's end and return its exit code."""
        return self.process.wait(PATIENCE_SECONDS)

    def stop(self) -> int:
        """SIGTERM, and wait."""
        self.signal(SIGTERM)
        return self.wait()

    def kill_all(self) -> None:
        """Kill the whole tree at once, as a power cut does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, SIGKILL)
        self.process.wait(PATIENCE_SECONDS)
        self._output.close()


class FirstProcess(RunningWorker):
    """A worker that is PID 1 of a namespace of its own, as in a container."""

    # Whoever is not root becomes it, in a namespace of users.
    as_root = () if os.geteuid() == 0 else ("--map-root-user",)
    command = ("unshare", *as_root, "--pid", "--fork", "--kill-child", "--mount-proc")

    @property
    def pid(self) -> int:
        """As it is seen from outside."""
        [pid] = wait_until(lambda: children_of(self.process.pid), "the namespace's first process")
        return pid


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has reaped yet is dead.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@contextmanager
def barrier(key: int) -> Iterator[Any]:
    """Hold the advisory lock *key*, for which tasks wait; ``release()`` lets them go."""
    with second_connection() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [key])
        yield _Barrier(cursor, key)


class _Barrier:
    def __init__(self, cursor: Any, key: int) -> None:
        self._cursor = cursor
        self._key = key

    def release(self) -> None:
        self._cursor.execute("SELECT pg_advisory_unlock_all()")


def who_sleeps():
    """The process ids of the supervisors that sleep, on the lock of any queue."""
    found = here(
        "SELECT application_name FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE locktype = 'advisory'"
        " AND granted AND objid = %s AND application_name ~ '^pgqueue (listener|bell) '"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        [ANY_KEY],
    )
    return [int(name.split()[-1]) for (name,) in found]


def wait_for_mark(note: str, count: int = 1) -> None:
    """Wait until tasks have left the mark *note* so often."""
    wait_until(lambda: Mark.objects.filter(note=note).count() >= count, f"mark {note!r}")


def wait_for_status(job_id: int | str, status: str) -> None:
    wait_until(lambda: row(int(job_id), "status") == (status,), f"job {job_id} to be {status}")


def listener() -> tuple[int, str, bool] | None:
    """
    The backend that listens for a worker and is rung: its process id, its state, and whether it has no snapshot.

    Of two at the same time, as after a connection that the server does not know to be lost, one has the lock.
    """
    found = here(
        "SELECT pid, state, backend_xmin IS NULL FROM pg_stat_activity JOIN pg_locks USING (pid)"
        " WHERE datname = current_database() AND application_name LIKE 'pgqueue listener%%'"
        " AND locktype = 'advisory' AND granted AND objid >= %s",
        [FIRST_LEAD_KEY],
    )
    return found[0] if found else None


class JobInHand:
    """A job, in the database *using*, that runs now and needs no database until it is told to finish."""

    def __init__(self, folder: Path, using: str = "default") -> None:
        self._pipe = folder / "pipe"
        self._effects = folder / "effects"
        self._using = using
        for path in (self._pipe, self._effects):
            path.unlink(missing_ok=True)
        os.mkfifo(self._pipe)
        args = json.dumps([str(self._pipe), str(self._effects)])
        job = new_job(task_path=write_after_reading.module_path, args=args)
        self.id = Job.objects.db_manager(using).enqueue(job).id
        wait_until(lambda: self._row().status == "running", "a job in hand")

    def finish(self) -> None:
        pipe = wait_until(self._open, "the task to read")
        os.write(pipe, b"done")
        os.close(pipe)

    def must_have_run_once(self) -> None:
        assert self._effects.read_text() == "done\n"
        job = self._row()
        assert (job.status, job.attempts, job.claim_version) == ("done", 1, 1)

    def _row(self) -> Job:
        return Job.objects.using(self._using).get(pk=self.id)

    def _open(self) -> int | None:
        with suppress(OSError):  # nobody reads yet
            return os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
        return None


@contextmanager
def a_place_to_wait_at(key: int) -> Iterator[_Barrier]:
    """`pgqueue_test_is_held()` answers, without waiting itself, whether the advisory lock *key* is held."""
    here(
        "CREATE FUNCTION pgqueue_test_is_held() RETURNS bool LANGUAGE sql VOLATILE AS"
        f" $$SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = {key})$$"
    )
    try:
        with barrier(key) as lock:
            yield lock
    finally:
        here("DROP FUNCTION pgqueue_test_is_held()")


def a_child_is_in(statement: str) -> bool:
    """Whether a *statement* of a child's control loop that begins so waits in a trigger, at `a_place_to_wait_at`."""
    return bool(
        here(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
            f" AND application_name LIKE 'pgqueue child%' AND ltrim(query, E'\\n') LIKE '{statement}%'"
        )[0][0]
    )
