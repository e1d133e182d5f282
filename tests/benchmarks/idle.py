"""
idle: what a worker costs that has nothing to do.

`statements_per_s` is what the server counts in its database (by pg_stat_statements, and where there is none, by
transactions, as `transactions_per_s`), `cpu_percent` is of one core, `pss_mb` the memory of all its processes; for
this project also the supervisor's and a child's alone.

`20-children` is one worker of this project with that many idle processes, to which ten jobs a second come:
`statements_per_job` are all that the server counts, the INSERT among them.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .bench import BenchmarkError, Case, Figures, Options, Stage
from .processes import cpu_seconds, pss_mb
from .server import Databases, has_library
from .systems import Ours, System, Variant

SETTLING_SECONDS, SECONDS, QUICK_SECONDS = 6.0, 20.0, 8.0
JOBS = 20  # that it has run before
CHILDREN, JOBS_PER_SECOND, START_SECONDS = 20, 10, 120.0

STATEMENTS_SQL = """
SELECT COALESCE(sum(calls), 0)::bigint FROM pg_stat_statements
 WHERE dbid = (SELECT oid FROM pg_database WHERE datname = %s)
"""
TRANSACTIONS_SQL = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"


def settings(programs: Path | None) -> dict[str, str]:
    return {"shared_preload_libraries": "pg_stat_statements"} if has_library(programs, "pg_stat_statements") else {}


def cases(options: Options) -> list[Case]:
    seconds = QUICK_SECONDS if options.quick else SECONDS
    found = []
    for system in options.systems:
        if options.wants("idle"):
            found.append(Case(system.name, "idle", partial(_idle, system, seconds)))
        if options.wants("20-children") and isinstance(system, Ours) and not options.quick:
            found.append(Case(system.name, "20-children", partial(_woken, system, seconds)))
    return found


def _idle(system: System, seconds: float) -> Figures:
    what, count = _counter(system.databases)
    stage = Stage(system, system.idle)
    with stage.workers() as workers:
        stage.drive("paced", JOBS, 20, 0)
        stage.wait_for(JOBS, workers)
        stage.wait_until_none_waits()
        time.sleep(SETTLING_SECONDS)
        processes = [*workers.roots, *workers.below]
        began, counted, cpu = time.monotonic(), count(stage.database), cpu_seconds(processes)
        time.sleep(seconds)
        took = time.monotonic() - began
        figures = {
            f"{what}_per_s": (count(stage.database) - counted) / took,
            "cpu_percent": (cpu_seconds(processes) - cpu) / took * 100,
            "pss_mb": sum(map(pss_mb, processes)),
        }
        if isinstance(system, Ours):
            figures |= {"supervisor_pss_mb": pss_mb(workers.roots[0]), "child_pss_mb": pss_mb(workers.below[0])}
    stage.check(JOBS)
    return figures


def _woken(system: System, seconds: float) -> Figures:
    what, count = _counter(system.databases)
    stage = Stage(system, Variant(CHILDREN, {"flags": ["--concurrency", "1"]}))
    jobs = int(seconds * JOBS_PER_SECOND)
    with stage.workers() as workers:
        deadline = time.monotonic() + START_SECONDS
        while workers.log.count(" is ready") < CHILDREN:
            if workers.have_ended or time.monotonic() > deadline:
                raise BenchmarkError(f"The children do not begin:\n{workers.log[-2000:]}")
            time.sleep(0.2)
        stage.drive("paced", JOBS, JOBS_PER_SECOND, 0)
        stage.wait_for(JOBS, workers)
        time.sleep(SETTLING_SECONDS)
        counted = count(stage.database)
        stage.drive("paced", jobs, JOBS_PER_SECOND, JOBS)
        stage.wait_for(JOBS + jobs, workers)
        time.sleep(0.5)  # for the last ends; asking for them would count
        counted = count(stage.database) - counted
        stage.wait_until_none_waits()
    stage.check(JOBS + jobs)
    return {f"{what}_per_job": counted / jobs}


def _counter(databases: Databases) -> tuple[str, Callable[[str], int]]:
    """What the server counts, and how many there have been in a database."""
    what, statement = "transactions", TRANSACTIONS_SQL
    if "pg_stat_statements" in databases.value("postgres", "SHOW shared_preload_libraries"):
        databases.value("postgres", "CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        what, statement = "statements", STATEMENTS_SQL
    return what, lambda database: databases.value("postgres", statement, [database])
