"""
backlog: what a claim takes from seven million rows, against a table with hardly any.

1,000,000 jobs wait, 1,000,000 are scheduled, 5,000,000 are done.

The worker's own claim, in a transaction with a worker's settings that is rolled back, three hundred times over:
`claim_1_ms` and `claim_100_ms` are the medians for one job and for a hundred, `sweep_ms` that of looking for bands
without floors. `over_empty` is the greater of the claims' two ratios.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from .bench import BenchmarkError, Case, Figures, Options, Stage
from .systems import Ours, System

SIZES = {"empty": (200, 0, 0), "full": (1_000_000, 1_000_000, 5_000_000)}  # pending, scheduled, done
QUICK = 20  # a twentieth of each
CLAIMS, LIMITS = 300, (1, 100)

FILL_SQL = """
INSERT INTO django_pgqueue_job (
    backend, queue_name, task_path, args, kwargs, status, priority,
    available_at, created_at, attempts, max_attempts, claim_version, started_at, finished_at
)
SELECT 'default', 'default', 'tests.benchmarks.project.tasks.noop', jsonb_build_array(number), '{}',
       %(status)s::text, 0, clock_timestamp() + %(seconds)s::int * interval '1 s', clock_timestamp(),
       0, 5, 0,
       CASE WHEN %(status)s::text = 'done' THEN clock_timestamp() END,
       CASE WHEN %(status)s::text = 'done' THEN clock_timestamp() END
  FROM generate_series(1, %(count)s::int) AS number
"""


def cases(options: Options) -> list[Case]:
    ours = next(system for system in options.systems if isinstance(system, Ours))

    @cache
    def filled(name: str) -> str:
        """A database for all runs: it takes a minute to fill."""
        return _fill(ours, name, QUICK if options.quick else 1)

    return [Case(ours.name, name, partial(_claims, ours, filled, name)) for name in SIZES if options.wants(name)]


def add_ratios(results: list[dict[str, Any]]) -> None:
    found = {result["variant"]: result for result in results if "error" not in result}
    if {"empty", "full"} <= found.keys():
        names = [f"claim_{limit}_ms" for limit in LIMITS]
        found["full"]["over_empty"] = round(max(found["full"][name] / found["empty"][name] for name in names), 3)


def _fill(system: System, name: str, part: int) -> str:
    database = system.databases.fresh(f"{system.name}_{name}", system.install)
    pending, scheduled, done = SIZES[name]
    for status, seconds, count in (
        ("done", -3_600, done // part),
        ("pending", 86_400, scheduled // part),
        ("pending", 0, max(pending // part, max(LIMITS))),
    ):
        system.databases.value(database, FILL_SQL, {"status": status, "seconds": seconds, "count": count})
    system.databases.value(database, "VACUUM ANALYZE")
    return database


def _claims(system: System, filled: Callable[[str], str], name: str) -> Figures:
    stage = Stage(system, system.idle, filled(name))
    before = system.waiting(stage.database)
    stage.settle_down()
    figures = stage.drive("claims", CLAIMS, *LIMITS)
    if (after := system.waiting(stage.database)) != before:
        raise BenchmarkError(f"{after} jobs wait, and {before} did before.")
    return figures
