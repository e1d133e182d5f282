"""
What is measured: this project, and others, each at the best settings that a light search has found.

A system is driven by a program of its own in `drivers`, run by the interpreter that has the system's packages. It
installs the tables, enqueues, and is the worker where the system has no command for that.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .environments import ROOT, node_with, python_with
from .processes import Driver
from .server import Databases

DRIVERS = Path(__file__).parent / "drivers"
# Of the same versions as this project has. Django 5.2 needs the backport of Tasks.
WITH_DJANGO = (
    *(f"django=={version('django')}", f"psycopg[binary]=={version('psycopg')}"),
    *(("django-tasks>=0.12",) if version("django") < "6" else ()),
)


@dataclass(frozen=True)
class Variant:
    """
    One way to run a system: so many *processes*, its worker with *options*.

    *shape* is what the jobs are, where a system has a choice: a plain function unless named.
    """

    processes: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    shape: str = ""


class System:
    """*jobs* is how many make a run of a second or more; *idle* the variant at the system's defaults."""

    name: str
    jobs: int
    variants: Mapping[str, Variant]
    idle = Variant()
    single_jobs = 3_000
    bulk_jobs = 100_000
    waiting_sql: str  # how many jobs have not ended
    done_sql: str | None = None  # how many have ended well; None where they are deleted
    claim_mark = "skip locked"  # what only the claim's text has, in lower case
    pinned_jobs = 0  # for a run of a few seconds with the horizon pinned; as many as `jobs` unless given

    def __init__(self, databases: Databases) -> None:
        self.databases = databases

    def driver(self) -> list[str]:
        raise NotImplementedError

    def prepare(self) -> None:
        """Install what it needs, so that nothing is installed while something is measured."""
        self.driver()

    def worker_commands(self, variant: Variant) -> list[list[str]]:
        """The programs that make up a worker."""
        return [[*self.driver(), "worker"]] * variant.processes

    def environment(self, database: str, variant: Variant | None = None, **more: str) -> dict[str, str]:
        """What the driver and the worker need to know; *more* goes on top."""
        variant = variant or self.idle
        return {
            **os.environ,
            "PYTHONPATH": os.fspath(ROOT),
            "BENCH_SYSTEM": self.name,
            "BENCH_DSN": self.databases.dsn(database),
            "BENCH_URL": self.databases.url(database),
            "BENCH_OPTIONS": json.dumps(dict(variant.options)),
            "BENCH_SHAPE": variant.shape,
            **more,
        }

    def fresh(self) -> str:
        """Return the name of a new database with this system's tables and no job."""
        return self.databases.fresh(self.name, self.install)

    def install(self, database: str) -> None:
        Driver([*self.driver(), "install"], self.environment(database)).answer()

    def waiting(self, database: str) -> int:
        return self.databases.value(database, self.waiting_sql)

    def done(self, database: str) -> int | None:
        return self.databases.value(database, self.done_sql) if self.done_sql else None


class _InPython(System):
    packages: tuple[str, ...]
    module: str

    @cached_property
    def _python(self) -> str:
        return python_with(self.name, self.packages)

    def driver(self) -> list[str]:
        return [self._python, "-m", f"tests.benchmarks.drivers.{self.module}"]


class _OnDjango(_InPython):
    module = "django_tasks"

    def environment(self, database: str, variant: Variant | None = None, **more: str) -> dict[str, str]:
        here = {"DJANGO_SETTINGS_MODULE": "tests.benchmarks.project.settings"}
        return super().environment(database, variant, **here, **more)


class Ours(_OnDjango):
    name = "django_pgqueue"
    flags: list[str] | None = None  # instead of those of the variants
    jobs = 100_000
    pinned_jobs = 500_000
    single_jobs = 5_000
    # One slot: threads of one interpreter do not run no-op jobs faster together.
    variants = {
        "sync-1": Variant(1, {"flags": ["--concurrency", "1"]}),
        "sync-2": Variant(2, {"flags": ["--concurrency", "1"]}),
        "async-1": Variant(1, {"flags": ["--concurrency", "100"]}, "async"),
        "sync-1-results": Variant(1, {"flags": ["--concurrency", "1"]}, "result"),
        "sync-1-signals": Variant(1, {"flags": ["--concurrency", "1"], "logging": "default"}),
    }
    # Each by the index that it has.
    waiting_sql = """
    SELECT (SELECT count(*) FROM django_pgqueue_job WHERE status = 'pending')
         + (SELECT count(*) FROM django_pgqueue_job WHERE status = 'running')
    """
    done_sql = "SELECT count(*) FROM django_pgqueue_job WHERE status = 'done' AND attempts = 1"
    claim_mark = "set status = 'running'"

    @cached_property
    def _python(self) -> str:
        return sys.executable

    def worker_commands(self, variant: Variant) -> list[list[str]]:
        chosen = variant.options.get("flags", ()) if self.flags is None else self.flags
        flags = [*chosen, "--processes", str(variant.processes)]
        return [[sys.executable, "-m", "django", "runworker", *flags]]


class DjangoTasksDb(_OnDjango):
    name = "django-tasks-db"
    jobs = 2_000
    bulk_jobs = 10_000
    pinned_jobs = 6_000
    packages = ("django-tasks-db==0.13.*", *WITH_DJANGO)
    variants = {
        "sync-1": Variant(1, {"flags": ["--no-startup-delay", "--interval", "0.1"]}),
        "sync-2": Variant(2, {"flags": ["--no-startup-delay", "--interval", "0.1"]}),
    }
    idle = Variant(1, {"flags": ["--no-startup-delay"]})
    waiting_sql = "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status IN ('READY', 'RUNNING')"
    done_sql = "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status = 'SUCCESSFUL'"

    def worker_commands(self, variant: Variant) -> list[list[str]]:
        command = [self._python, "-m", "django", "db_worker", "--no-reload", "-v0", *variant.options["flags"]]
        return [command] * variant.processes


class DjangoOx(_OnDjango):
    name = "django-ox"
    jobs = 5_000
    single_jobs = 2_000
    bulk_jobs = 20_000
    packages = ("django-ox==1.9.*", *WITH_DJANGO)
    variants = {
        "sync-1": Variant(1, {"flags": ["--concurrency", "4", "--interval", "0.1"]}),
        "sync-2": Variant(2, {"flags": ["--concurrency", "4", "--interval", "0.1"]}),
    }
    waiting_sql = "SELECT count(*) FROM django_ox_oxtask WHERE status IN ('READY', 'RUNNING')"
    done_sql = "SELECT count(*) FROM django_ox_oxtask WHERE status = 'SUCCESSFUL'"

    def worker_commands(self, variant: Variant) -> list[list[str]]:
        command = [self._python, "-m", "django", "ox_worker", "-v0", *variant.options.get("flags", ())]
        return [command] * variant.processes


class DjangoQ2(_OnDjango):
    name = "django-q2"
    jobs = 4_000
    single_jobs = 2_000
    bulk_jobs = 5_000
    packages = ("django-q2==1.11.*", *WITH_DJANGO, "psutil")
    module = "django_q2"
    variants = {"sync-1": Variant(1, {"bulk": 50}), "sync-2": Variant(1, {"bulk": 50, "workers": 2})}
    waiting_sql = "SELECT count(*) FROM django_q_ormq"
    done_sql = "SELECT count(*) FROM django_q_task WHERE success"

    def worker_commands(self, variant: Variant) -> list[list[str]]:
        return [[self._python, "-m", "django", "qcluster"]]


class Procrastinate(_InPython):
    name = "procrastinate"
    jobs = 6_000
    bulk_jobs = 20_000
    packages = ("procrastinate==3.10.*", "psycopg[binary]", "uvloop")
    module = "procrastinate"
    variants = {
        "async-1": Variant(1, {"concurrency": 30, "pool": 30}),
        "async-2": Variant(2, {"concurrency": 30, "pool": 30}),
    }
    waiting_sql = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
    done_sql = "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"


class Oban(_InPython):
    name = "oban"
    jobs = 20_000
    bulk_jobs = 20_000
    packages = ("oban==0.7.*", "psycopg[binary]", "uvloop")
    module = "oban"
    variants = {"async-1": Variant(1, {"limit": 200}), "async-2": Variant(2, {"limit": 200})}
    waiting_sql = "SELECT count(*) FROM oban_jobs WHERE state IN ('available', 'scheduled', 'executing', 'retryable')"
    done_sql = "SELECT count(*) FROM oban_jobs WHERE state = 'completed'"


class Chancy(_InPython):
    name = "chancy"
    jobs = 20_000
    bulk_jobs = 20_000
    packages = ("chancy==0.26.*", "psycopg[binary]")
    module = "chancy"
    _best = {"concurrency": 1_000, "eager_polling": True, "polling_interval": 1}
    variants = {"async-1": Variant(1, _best), "async-2": Variant(2, _best)}
    waiting_sql = "SELECT count(*) FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying')"
    done_sql = "SELECT count(*) FROM chancy_jobs WHERE state = 'succeeded'"


class PgQueuer(_InPython):
    name = "pgqueuer"
    jobs = 60_000
    pinned_jobs = 200_000
    packages = ("pgqueuer==1.6.*", "asyncpg", "uvloop", "click", "typer")
    module = "pgqueuer"
    variants = {"async-1": Variant(1, {"batch_size": 500}), "async-2": Variant(2, {"batch_size": 500})}
    waiting_sql = "SELECT count(*) FROM pgqueuer"
    done_sql = "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"


class _InNode(System):
    packages: tuple[str, ...]
    program: str

    @cached_property
    def _node(self) -> tuple[str, Path]:
        return node_with(self.name, self.packages)

    def driver(self) -> list[str]:
        return [self._node[0], os.fspath(DRIVERS / self.program)]

    def environment(self, database: str, variant: Variant | None = None, **more: str) -> dict[str, str]:
        return super().environment(database, variant, NODE_PATH=os.fspath(self._node[1]), **more)


class GraphileWorker(_InNode):
    name = "graphile-worker"
    jobs = 100_000
    pinned_jobs = 200_000
    packages = ("node@22", "graphile-worker@0.18", "pg@8")
    program = "graphile.js"
    _best = {"concurrentJobs": 24, "maxPoolSize": 25, "localQueue": {"size": 500}, "batchDelay": 0}
    variants = {"async-1": Variant(1, _best), "async-2": Variant(2, _best)}
    waiting_sql = "SELECT count(*) FROM graphile_worker._private_jobs"


class PgBoss(_InNode):
    name = "pg-boss"
    jobs = 50_000
    pinned_jobs = 200_000
    packages = ("node@22", "pg-boss@12.38")
    program = "pgboss.js"
    _best = {"batchSize": 1_000, "pollingIntervalSeconds": 0.5, "burstWhenBatchFull": True}
    variants = {"async-1": Variant(1, _best), "async-2": Variant(2, _best)}
    idle = Variant(1, {"notify": True})
    waiting_sql = "SELECT count(*) FROM pgboss.job WHERE state IN ('created', 'retry', 'active') AND name = 'noop'"
    done_sql = "SELECT count(*) FROM pgboss.job WHERE state = 'completed' AND name = 'noop'"


_KINDS: tuple[type[System], ...] = (
    *(GraphileWorker, PgQueuer, DjangoTasksDb),
    *(DjangoOx, Procrastinate, Oban, Chancy, DjangoQ2, PgBoss),
)
PEERS = {kind.name: kind for kind in _KINDS}
