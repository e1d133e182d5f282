"""
enqueue: how many jobs one client enqueues a second, one per transaction (`single`) and as fast as it can (`bulk`).

`client_us_per_job` is the processor's time of that client. pgbench inserts a plain row, and a thousand rows at once.
"""

from functools import partial

from .bench import SCRIPTS, BenchmarkError, Case, Figures, Options, Stage
from .systems import System

ROWS = 1_000  # of a statement of insert_many.sql
QUICK = 5  # a fifth of the jobs


def cases(options: Options) -> list[Case]:
    found = []
    for name in ("single", "bulk"):
        if not options.wants(name):
            continue
        for system in options.systems:
            jobs = system.single_jobs if name == "single" else system.bulk_jobs
            found.append(Case(system.name, name, partial(_enqueue, system, name, _count(options, jobs))))
        if options.pgbench:
            jobs = _count(options, 5_000 if name == "single" else 100_000)
            found.append(Case("pgbench", name, partial(_insert, options, name, jobs)))
    return found


def _count(options: Options, jobs: int) -> int:
    return options.jobs or (jobs // QUICK if options.quick else jobs)


def _enqueue(system: System, word: str, jobs: int) -> Figures:
    stage = Stage(system, system.idle)
    answer = stage.drive(word, jobs)
    waiting = system.waiting(stage.database)
    if waiting != jobs:
        raise BenchmarkError(f"{waiting} jobs are there, and {jobs} were enqueued.")
    return {"per_s": jobs / answer["seconds"], "client_us_per_job": answer["cpu_seconds"] / jobs * 1e6}


def _insert(options: Options, word: str, jobs: int) -> Figures:
    database = options.reference_database()
    script, rows = ("insert.sql", 1) if word == "single" else ("insert_many.sql", ROWS)
    times = max(jobs // rows, 1)
    rate, _ = options.pgbench_on(database).run(SCRIPTS / script, 1, "-t", str(times))
    if (found := options.databases.value(database, "SELECT count(*) FROM job")) != times * rows:
        raise BenchmarkError(f"{found} rows are there, and {times * rows} were inserted.")
    return {"per_s": rate * rows}
