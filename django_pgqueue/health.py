"""
Whether jobs get done: the questions of monitoring, answered from the database in bounded time.

A database that is away, or a table that is locked, is an answer like any other. Each answer is a `Check`: its
name, whether all is well, and a sentence that says what was seen and, if need be, what to do.

    database   it answers, and has the tables
    workers    every queue has a live worker that serves it
    loops      the control loops of all live workers turn
    jobs       no available job has waited for too long
"""

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import psycopg

from .statements import claim as claiming
from .statements import health
from .statements.claim import Band
from .statements.database import is_lock_conflict
from .statements.health import LiveWorker
from .worker.config import Queues
from .worker.connection import Session, describe

if TYPE_CHECKING:
    from .backend import PgQueueBackend

MAX_WAIT_SECONDS = 300.0
SILENT_AFTER_SECONDS = 30.0  # a worker reports itself, and an idle loop turns, every 10 s
STATEMENT_SECONDS = 3.0
ANSWER_SECONDS = 15.0  # for all together: a network that swallows packets answers nothing, not even no


class Check(NamedTuple):
    """One question and its answer."""

    name: str
    ok: bool
    message: str


@dataclass(frozen=True)
class Question:
    """
    What to look at: *backend*, and of its queues those *asked_for*, or all when none is.

    An available job may have waited *max_wait* seconds. A worker that has not reported for *silent_after*
    seconds is dead, and a loop that has not turned for as long is stuck. With a *hostname*, only workers of
    that host are looked at, and no jobs: a worker is not to blame for what others leave undone.
    """

    backend: str
    database: str
    queues: frozenset[str]  # the backend's own; none if it takes any name
    foreign_queues: frozenset[str]  # of other backends on the same database
    asked_for: frozenset[str] = frozenset()
    hostname: str | None = None
    max_wait: float = MAX_WAIT_SECONDS
    silent_after: float = SILENT_AFTER_SECONDS

    @classmethod
    def about(
        cls,
        backend: "PgQueueBackend",
        queue_names: Iterable[str] = (),
        *,
        hostname: str | None = None,
        max_wait: float = MAX_WAIT_SECONDS,
        silent_after: float = SILENT_AFTER_SECONDS,
    ) -> "Question":
        """Ask about *backend*; raises ``ImproperlyConfigured`` when its options are wrong."""
        return cls(
            backend=backend.alias,
            database=backend.database,
            queues=frozenset(backend.queues),
            foreign_queues=frozenset(backend.foreign_queues()),
            asked_for=frozenset(queue_names),
            hostname=hostname,
            max_wait=max_wait,
            silent_after=silent_after,
        )

    def is_about(self, queue_name: str) -> bool:
        return queue_name in self.asked_for if self.asked_for else queue_name not in self.foreign_queues


def look(question: Question) -> list[Check]:
    """Return the checks that could be made, in at most ANSWER_SECONDS; they are not, where the database is away."""
    answers: SimpleQueue[list[Check] | BaseException] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put(_answer(question))
        except BaseException as error:  # a thread begins here; raised below
            answers.put(error)

    # Nothing ends a thread that waits for a dead network; it dies with the process.
    threading.Thread(target=answer, name="pgqueue-health", daemon=True).start()
    try:
        found = answers.get(timeout=ANSWER_SECONDS)
    except Empty:
        return [Check("database", False, f"The database has not answered for {ANSWER_SECONDS:.0f} s.")]
    if isinstance(found, BaseException):
        raise found
    return found


def _answer(question: Question) -> list[Check]:
    session = Session(question.database, f"pgqueue health {os.getpid()}")
    try:
        try:
            with session.round(STATEMENT_SECONDS) as connection:
                workers = health.live_workers(connection, question.backend, question.silent_after)
        except psycopg.Error as error:
            return [Check("database", False, _reason(error))]
        checks = [Check("database", True, "The database answers.")]
        if question.hostname is not None:
            workers = [worker for worker in workers if worker.hostname == question.hostname]
            return [*checks, _workers(question, workers, []), *_loops(question, workers)]
        try:
            with session.round(STATEMENT_SECONDS) as connection:
                bands = claiming.due(claiming.sweep(connection, sorted(question.asked_for) or None))
        except psycopg.Error as error:
            jobs, bands = Check("jobs", False, f"How long jobs wait cannot be seen. {_reason(error)}"), []
        else:
            bands = [band for band in bands if question.is_about(band.queue_name)]
            jobs = _jobs(question, bands)
        return [*checks, _workers(question, workers, bands), *_loops(question, workers), jobs]
    finally:
        session.close()


def _workers(question: Question, workers: list[LiveWorker], due: list[Band]) -> Check:
    """Whether there are workers, and some for each queue; of one host, whatever queues they serve."""
    wanted = question.asked_for
    if not wanted and question.hostname is None:
        wanted = question.queues | {band.queue_name for band in due}
    unserved = sorted(name for name in wanted if not any(_serves(worker, name) for worker in workers))
    if not workers:
        where = "" if question.hostname is None else f" on {question.hostname}"
        return Check("workers", False, f"There is no live worker{where}. Start one: manage.py runworker")
    if unserved:
        names = ", ".join(map(repr, unserved))
        return Check("workers", False, f"No live worker serves {names}. Start one that does: manage.py runworker")
    count = "1 live worker" if len(workers) == 1 else f"{len(workers)} live workers"
    return Check("workers", True, f"{count}, and every queue is served.")


def _loops(question: Question, workers: list[LiveWorker]) -> list[Check]:
    """Whether all turn; nothing where there are none, or none that says."""
    about = [
        worker for worker in workers if not question.asked_for or any(_serves(worker, n) for n in question.asked_for)
    ]
    turns = [(worker.turned_for, worker.name) for worker in about if worker.turned_for is not None]
    if not turns:
        return []
    seconds, name = max(turns)
    if seconds <= question.silent_after:
        return [Check("loops", True, f"Each control loop has turned in the last {seconds:.0f} s.")]
    return [
        Check(
            "loops",
            False,
            f"A control loop of worker {name} has not turned for {seconds:.0f} s. Its log may say why: the database "
            "refuses what it asks, someone locks the jobs' table, or its process does not run.",
        )
    ]


def _jobs(question: Question, due: list[Band]) -> Check:
    """Whether the oldest available job has waited for too long; held ones and those of the future do not wait."""
    if not due:
        return Check("jobs", True, "No job is waiting.")
    oldest = min(due, key=lambda band: band.due_in)
    seen = f"Job {oldest.first_id} in {oldest.queue_name!r} has been available for {-oldest.due_in:.0f} s"
    if -oldest.due_in <= question.max_wait:
        return Check("jobs", True, f"{seen}; none has waited longer.")
    return Check(
        "jobs",
        False,
        f"{seen}, longer than {question.max_wait:.0f} s. Add workers, or look at what keeps them: "
        "manage.py pgqueue list --status running",
    )


def _serves(worker: LiveWorker, queue_name: str) -> bool:
    """Whether the worker serves the queue; one of an earlier release does not say, and is trusted."""
    return worker.serves is None or Queues.of(worker.serves).serves(queue_name)


def _reason(error: psycopg.Error) -> str:
    if is_lock_conflict(error):
        text = " ".join(str(error).split())
        return f"Someone locks the tables, or the database is too slow ({text})."
    return describe(error)
