"""
drain: how many no-op jobs a second a worker runs that finds them all waiting.

The clock begins when every process has begun its first job, so that their start does not count, and ends when
the last job's end is written. `cpu_us_per_job` is what the worker's processes use in that time, the job's own record
included. `python_us_per_job`, for this project, is that of the children alone, less what calling the function costs.
"""

import time
from functools import partial

from .bench import SCRIPTS, Case, Figures, Options, Stage
from .processes import cpu_seconds
from .systems import Ours, System, Variant

BATCH = 200  # jobs of a transaction of the reference
CALLS = 100_000  # of the function alone
QUICK = 5  # a fifth of the jobs


def cases(options: Options) -> list[Case]:
    found = [
        Case(system.name, name, partial(_drain, system, variant, _jobs(options, system, variant)))
        for system in options.systems
        for name, variant in system.variants.items()
        if options.wants(name)
    ]
    if options.pgbench:
        for clients in (1, 2):
            jobs = max((options.jobs or 200_000) // BATCH // clients, 1) * BATCH * clients
            found.append(Case("pgbench", f"sync-{clients}", partial(_reference, options, clients, jobs)))
    return [case for case in found if options.wants(case.variant)]


def _jobs(options: Options, system: System, variant: Variant) -> int:
    jobs = options.jobs or system.jobs * variant.processes
    return max(jobs // QUICK, 1) if options.quick else jobs


def _drain(system: System, variant: Variant, jobs: int) -> Figures:
    stage = Stage(system, variant)
    stage.drive("bulk", jobs)
    stage.settle_down()
    with stage.workers() as workers:
        stage.wait_until_all_work(workers, jobs)
        before = stage.records.count()
        below, processes = workers.below, [*workers.roots, *workers.below]
        cpu, cpu_below = cpu_seconds(processes), cpu_seconds(below)
        stage.wait_for(jobs, workers)
        stage.wait_until_none_waits()
        ended = time.monotonic_ns()
        cpu, cpu_below = cpu_seconds(processes) - cpu, cpu_seconds(below) - cpu_below
    stage.check(jobs)
    began = stage.records.first_of_each()[-1]
    counted = sum(moment >= began for _, moment in stage.records.read())
    figures = {"jobs_per_s": counted / (ended - began) * 1e9, "jobs": jobs}
    if (rest := jobs - before) > jobs / 2:  # otherwise too few are left to divide by
        figures["cpu_us_per_job"] = cpu / rest * 1e6
        if isinstance(system, Ours):
            bare = stage.drive("call", CALLS)["cpu_seconds"] / CALLS
            figures["python_us_per_job"] = (cpu_below / rest - bare) * 1e6
    return figures


def _reference(options: Options, clients: int, jobs: int) -> Figures:
    """What PostgreSQL does when nothing but its own client asks: claim 200, settle 200."""
    database = options.reference_database(jobs)
    rate, _ = options.pgbench_on(database).run(SCRIPTS / "batch.sql", clients, "-t", str(jobs // BATCH // clients))
    options.check_reference(database, jobs)
    return {"jobs_per_s": rate * BATCH, "jobs": jobs}
