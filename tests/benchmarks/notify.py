"""
notify: what waking workers costs eight clients that commit enqueues as fast as they can.

pgbench sends the very statement that `enqueue` sends (`enqueue`; `always` with ``NOTIFY: "always"``), and an INSERT of
the same row that wakes nobody (`plain`), while a worker is there whose slots are all taken. `over_plain` is the ratio
of the medians.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django_pgqueue.conf import problems

from .bench import BenchmarkError, Case, Figures, Options, Stage
from .systems import Ours, System, Variant

CLIENTS = 8
SECONDS, QUICK_SECONDS = 8, 2
SLOTS = 4
HOLD = "hold"  # the file whose end is that of the tasks

PLAIN_SQL = """
INSERT INTO django_pgqueue_job (
    backend, queue_name, task_path, args, kwargs, status, priority,
    available_at, created_at, attempts, max_attempts, claim_version
)
VALUES (
    'default', 'default', 'tests.benchmarks.project.tasks.noop', '[0]', '{}', 'pending', 0,
    clock_timestamp(), clock_timestamp(), 0, 5, 0
)
RETURNING id, created_at
"""


def cases(options: Options) -> list[Case]:
    if options.pgbench is None:
        return []
    ours = next(system for system in options.systems if isinstance(system, Ours))
    seconds = QUICK_SECONDS if options.quick else SECONDS
    return [
        Case(ours.name, name, partial(_commits, options, ours, name, seconds))
        for name in _names()
        if options.wants(name)
    ]


def _names() -> list[str]:
    has_choice = not problems({"NOTIFY": "always"})
    return ["enqueue", *(["always"] if has_choice else []), "plain"]


def add_ratios(results: list[dict[str, Any]]) -> None:
    found = {result["variant"]: result for result in results if "commits_per_s" in result}
    if plain := found.pop("plain", None):
        for result in found.values():
            result["over_plain"] = round(result["commits_per_s"] / plain["commits_per_s"], 3)


def _commits(options: Options, system: System, name: str, seconds: int) -> Figures:
    backend = {"NOTIFY": "always"} if name == "always" else {}
    stage = Stage(system, Variant(1, {"flags": ["--concurrency", str(SLOTS)], "backend": backend}, "held"))
    statement = " ".join(PLAIN_SQL.split()) if name == "plain" else stage.drive("statement")["statement"]
    script = stage.folder / "statement.sql"
    script.write_text(statement + ";\n")
    with _busy_worker(stage):
        rate, commits = options.pgbench_on(stage.database).run(script, CLIENTS, "-T", str(seconds))
        waiting = system.waiting(stage.database) - SLOTS
        if waiting != commits:
            raise BenchmarkError(f"{waiting} jobs are there, and {commits} were enqueued.")
    return {"commits_per_s": rate}


@contextmanager
def _busy_worker(stage: Stage) -> Iterator[None]:
    """A worker whose slots are all taken, by tasks that wait for their end."""
    hold = stage.folder / HOLD
    hold.touch()
    with stage.workers() as workers:
        stage.drive("single", SLOTS)
        stage.wait_for(SLOTS, workers)
        try:
            yield
        finally:
            stage.system.databases.value(stage.database, "DELETE FROM django_pgqueue_job WHERE status = 'pending'")
            hold.unlink()
            stage.wait_until_none_waits()
    stage.check(SLOTS)
