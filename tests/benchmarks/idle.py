"""
idle: what a worker costs that has nothing to do.

`statements_per_s` is what the server counts in its database (by pg_stat_statements, and where there is none, by
transactions, as `transactions_per_s`), `cpu_percent` is of one core, `pss_mb` the memory of all its processes; for
this project also the supervisor's and a child's alone.
"""

import time
from functools import partial
from pathlib import Path

from .bench import Case, Figures, Options, Stage
from .processes import cpu_seconds, pss_mb
from .server import has_library
from .systems import Ours, System

SETTLING_SECONDS, SECONDS, QUICK_SECONDS = 10.0, 30.0, 10.0
JOBS = 20  # that it has run before

STATEMENTS_SQL = """
SELECT COALESCE(sum(calls), 0)::bigint FROM pg_stat_statements
 WHERE dbid = (SELECT oid FROM pg_database WHERE datname = %s)
"""
TRANSACTIONS_SQL = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"


def settings(programs: Path | None) -> dict[str, str]:
    return {"shared_preload_libraries": "pg_stat_statements"} if has_library(programs, "pg_stat_statements") else {}


def cases(options: Options) -> list[Case]:
    seconds = QUICK_SECONDS if options.quick else SECONDS
    return [Case(system.name, "idle", partial(_idle, system, seconds)) for system in options.systems]


def _idle(system: System, seconds: float) -> Figures:
    databases = system.databases
    counted = "pg_stat_statements" in databases.value("postgres", "SHOW shared_preload_libraries")
    name, statement = ("statements_per_s", STATEMENTS_SQL) if counted else ("transactions_per_s", TRANSACTIONS_SQL)
    if counted:
        databases.value("postgres", "CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    stage = Stage(system, system.idle)
    with stage.workers() as workers:
        stage.drive("paced", JOBS, 20, 0)
        stage.wait_for(JOBS, workers)
        stage.wait_until_none_waits()
        time.sleep(SETTLING_SECONDS)
        processes = [*workers.roots, *workers.below]
        began, calls, cpu = (
            time.monotonic(),
            databases.value("postgres", statement, [stage.database]),
            cpu_seconds(processes),
        )
        time.sleep(seconds)
        took = time.monotonic() - began
        figures = {
            name: (databases.value("postgres", statement, [stage.database]) - calls) / took,
            "cpu_percent": (cpu_seconds(processes) - cpu) / took * 100,
            "pss_mb": sum(map(pss_mb, processes)),
        }
        if isinstance(system, Ours):
            figures |= {"supervisor_pss_mb": pss_mb(workers.roots[0]), "child_pss_mb": pss_mb(workers.below[0])}
    stage.check(JOBS)
    return figures
