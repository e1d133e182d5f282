"""
Each fault alone, on a steady stream of jobs, and what it costs: ``python -m tests.chaos --each``.

The figures come from the rows: when each job was enqueued and done, by the server's clock, which is also ours.
They are told, not judged. What is judged is what stands in the books: see `verdict`.
"""

import re
import time
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import django.db
from django.db import connection

from .fleet import GRACE_SECONDS, Fleet, Worker
from .kinds import LEASE_SECONDS
from .lone_faults import FAULTS, LoneFault, Stage
from .producers import LIVE_SQL, PAUSE_AFTER_ERROR_SECONDS, Ledger, Producer
from .server import Server
from .verdict import Verdict

if TYPE_CHECKING:
    from tests.proxy import Proxy

RATE = 20  # jobs a second
STREAM = ("quick", "quick", "atomic", "quick", "quick", "quick", "quick", "atomic", "quick", "steady")
FLAGS = ("--concurrency", "8", "--grace", str(GRACE_SECONDS))
WINDOW_SECONDS = 5.0  # in which a rate is counted
SETTLING_SECONDS = 1.5
PATIENCE_SECONDS = 90.0 + 3 * LEASE_SECONDS  # for the backlog to be gone
LATE_SECONDS = 2.0  # a job that is not done so long after its enqueue belongs to a backlog

CLEAR_SQL = """
TRUNCATE django_pgqueue_job, django_pgqueue_jobattempt, django_pgqueue_worker, chaos_effect, chaos_once
"""

BACKLOG_SQL = """
SELECT count(*)
  FROM django_pgqueue_job
 WHERE status IN ('pending', 'running')
   AND starts_with(args->>0, '0-')
   AND created_at < greatest(to_timestamp(%(ended)s), clock_timestamp() - make_interval(secs => %(late)s))
"""

DONE_SQL = """
SELECT extract(epoch FROM created_at)::float8, extract(epoch FROM finished_at)::float8
  FROM django_pgqueue_job
 WHERE status = 'done'
   AND starts_with(args->>0, '0-')
 ORDER BY finished_at
"""

OUTCOMES_SQL = "SELECT outcome, count(*) FROM django_pgqueue_jobattempt GROUP BY outcome ORDER BY outcome"


class Stream(Producer):
    """Enqueues at a steady rate, by a way of its own to the server, and makes up for nothing that it could not."""

    def run(self) -> None:
        kinds = cycle(STREAM)
        due = time.monotonic()
        while not self._stopping.wait(max(due - time.monotonic(), 0)):
            due = max(due + 1 / RATE, time.monotonic() - 0.5)
            if self.is_held_back:
                continue
            try:
                self.enqueue_one(next(kinds))
            except django.db.Error:
                connection.close()
                self._stopping.wait(PAUSE_AFTER_ERROR_SECONDS)
        connection.close()


class Times(NamedTuple):
    """When a fault *began* and *ended*, and from when on no job was late any more."""

    began: float
    ended: float
    caught_up: float


def run(
    kinds: list[str], server: Server, proxy: "Proxy", directory: Path, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield for each of these faults, or of all, what was measured; ``trouble`` is what must not be."""
    for kind in kinds or FAULTS:
        fault = FAULTS[kind]
        logs = directory / kind
        logs.mkdir(mode=0o755)
        measured = _measure(fault, server, proxy, logs)
        say(_in_words(measured))
        yield measured


def _measure(fault: LoneFault, server: Server, proxy: "Proxy", logs: Path) -> dict[str, Any]:
    server.fetch(CLEAR_SQL)
    ledger = Ledger()
    fleet = Fleet(fault.workers, logs, FLAGS)
    stream = Stream(0, 0, ledger)
    stage = Stage(server, proxy, fleet, ledger, stream)
    try:
        fleet.tend()
        stage.wait_until(lambda: all(worker.is_ready for worker in fleet.working))
        stream.start()
        time.sleep(SETTLING_SECONDS + WINDOW_SECONDS)
        workers = {worker: worker.children for worker in fleet.working}
        said = sum(map(_warnings, fleet.all))
        began = time.time()
        trouble = []
        try:
            fault.happen(stage)
        except (TimeoutError, AssertionError) as error:  # the other faults have their turn
            trouble.append(f"It could not be brought about, or to its end: {error}")
        ended = time.time()
        caught_up = _catch_up(server, ended)
        time.sleep(WINDOW_SECONDS)
        said = sum(map(_warnings, fleet.all)) - said
        kept = {
            "supervisors": all(worker.is_alive for worker in workers),
            "children": all(set(before) <= set(worker.children) for worker, before in workers.items()),
        }
        stream.stop()
        stream.join(30)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while server.fetch(LIVE_SQL)[0][0] and time.monotonic() < deadline:
            time.sleep(0.1)
        fleet.stop(GRACE_SECONDS + 30)
    finally:
        stream.stop()
        fleet.end()
        connection.close()
    verdict = Verdict(server, ledger)
    verdict.blame("workers_lost", [*fleet.ended_by_themselves, *fleet.would_not_end])
    figures = _figures(server.fetch(DONE_SQL), Times(began, ended, caught_up))
    numbers = verdict.numbers
    return {
        "fault": fault.kind,
        "does": fault.does,
        "workers": fault.workers,
        **figures,
        "warnings": said,
        "pid_kept": kept,
        "attempts": dict(server.fetch(OUTCOMES_SQL)),
        **{name: numbers[name] for name in ("done", "failed", "doubled", "lost", "stuck")},
        **{name: numbers[name] for name in ("claims_run_twice", "atomic_doubled")},
        "trouble": trouble + verdict.explanations(),
    }


def _catch_up(server: Server, ended: float) -> float:
    """Wait until what was enqueued before the moment *ended* is done, and nothing else is late; return that moment."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.fetch(BACKLOG_SQL, {"ended": ended, "late": LATE_SECONDS})[0][0] and time.monotonic() < deadline:
        time.sleep(0.05)
    return time.time()


def _warnings(worker: Worker) -> int:
    return len(re.findall(r" (?:WARNING|ERROR|CRITICAL) \[", worker.log_file.read_text(errors="replace")))


def _figures(jobs: list[tuple[float, float]], times: Times) -> dict[str, Any]:
    done = [finished for _, finished in jobs]
    before = _rate(done, times.began - WINDOW_SECONDS)
    if not before or not any(finished > times.ended for finished in done):
        return {"rate_before": round(before, 1), "lasted": round(times.ended - times.began, 1)}
    around = [moment for moment in done if times.began - 1 < moment < times.caught_up + 1]
    hit = [(created, finished) for created, finished in jobs if times.began - LATE_SECONDS < created < times.caught_up]
    late_until = max((finished for created, finished in hit if finished - created > LATE_SECONDS), default=times.ended)
    after = _rate(done, times.caught_up)
    return {
        "rate_before": round(before, 1),
        "lasted": round(times.ended - times.began, 1),
        "longest_pause": round(max(later - earlier for earlier, later in pairwise(around)), 1),
        "first_done_after": round(next(moment for moment in done if moment > times.ended) - times.ended, 1),
        "caught_up_after": round(max(late_until - times.ended, 0.0), 1),
        "longest_wait": round(max(finished - created for created, finished in hit), 1),
        "recovery_percent": round(100 * after / before),
    }


def _rate(done: list[float], since: float) -> float:
    return sum(since <= moment < since + WINDOW_SECONDS for moment in done) / WINDOW_SECONDS


def _in_words(measured: dict[str, Any]) -> str:
    figures = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in measured.items() if name not in ("does", "trouble")
    )
    return "\n           ".join([f"{measured['does']}: {figures}", *measured["trouble"]])
