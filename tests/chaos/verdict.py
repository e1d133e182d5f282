"""The books: what was enqueued, as the producers know it, against the rows and the effects that are there."""

from collections import Counter, defaultdict
from typing import Any

from .kinds import KINDS, Kind, child_of
from .producers import Fate, Ledger
from .server import Server

JOBS_SQL = "SELECT id, args->>0, status, attempts FROM django_pgqueue_job ORDER BY id"
EFFECTS_SQL = "SELECT token, job_id, claimed_at FROM chaos_effect"
ONCE_EFFECTS_SQL = "SELECT token FROM chaos_once"
FINISHED = ("done", "failed", "cancelled")
MUST_BE_ZERO = ("lost", "stuck", "rolled_back_effects", "atomic_doubled", "claims_run_twice", "workers_lost")
SHOWN = 10  # examples of each kind of trouble


class Verdict:
    """*numbers* is the answer, *trouble* what stands behind those that must be zero."""

    def __init__(self, server: Server, ledger: Ledger) -> None:
        self.trouble: dict[str, list[str]] = defaultdict(list)
        self._jobs: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
        for job_id, token, status, attempts in server.fetch(JOBS_SQL):
            self._jobs[token].append((job_id, status, attempts))
        runs = server.fetch(EFFECTS_SQL)
        self._effects = Counter(token for token, _, _ in runs)
        self._effects.update(token for (token,) in server.fetch(ONCE_EFFECTS_SQL))
        entries = ledger.entries
        enqueued = [token for token, entry in entries.items() if self._is_enqueued(token, entry.fate)]
        rolled_back = [token for token in entries if token not in set(enqueued)]
        for token in [*enqueued]:
            kind = KINDS[entries[token].kind]
            self._look_at(token, kind)
            if kind.has_child and self._statuses(token) == ["done"]:
                enqueued.append(child_of(token))
                self._look_at(child_of(token), KINDS["quick"])
        for token in {*rolled_back, *self._jobs, *self._effects} - set(enqueued):
            if self._jobs[token] or self._effects[token]:
                self._blame("rolled_back_effects", token, "was rolled back")
        for (token, _job, claimed_at), count in Counter(runs).items():
            if count > 1:
                self._blame("claims_run_twice", token, f"the claim of {claimed_at} ran {count} times")
        statuses = Counter(status for jobs in self._jobs.values() for _, status, _ in jobs)
        doubled = [token for token in enqueued if self._effects[token] > 1]
        self.numbers: dict[str, Any] = {
            "enqueued": len(enqueued),
            "rolled_back": len(rolled_back),
            "done": statuses["done"],
            "failed": statuses["failed"],
            "effects": self._effects.total(),
            "doubled": len(doubled),
            **{name: len(self.trouble[name]) for name in MUST_BE_ZERO},
        }

    def blame(self, name: str, words: list[str]) -> None:
        self.trouble[name] += words
        self.numbers[name] = len(self.trouble[name])

    @property
    def is_good(self) -> bool:
        return not any(self.numbers[name] for name in MUST_BE_ZERO)

    def explanations(self) -> list[str]:
        return [f"{name}: {words}" for name in MUST_BE_ZERO for words in self.trouble[name][:SHOWN]]

    def _is_enqueued(self, token: str, fate: Fate) -> bool:
        return fate is Fate.COMMITTED or (fate is Fate.UNKNOWN and token in self._jobs)

    def _statuses(self, token: str) -> list[str]:
        return [status for _, status, _ in self._jobs[token]]

    def _look_at(self, token: str, kind: Kind) -> None:
        name = kind.task
        effects = self._effects[token]
        statuses = self._statuses(token)
        if len(statuses) != 1:
            self._blame("lost", token, f"{name}, was committed and has {len(statuses)} rows")
        elif statuses[0] not in FINISHED:
            self._blame("stuck", token, f"{name}, has not ended")
        elif statuses[0] != kind.ends:
            self._blame("lost", token, f"{name}, should be {kind.ends}")
        elif kind.has_effect and not effects:
            self._blame("lost", token, f"{name}, left no effect")
        if kind.is_once and effects > (statuses == ["done"]):
            self._blame("atomic_doubled", token, f"{name}, has more effects than it may")

    def _blame(self, name: str, token: str, words: str) -> None:
        jobs = ", ".join(f"job {id} {status} after {attempts} attempts" for id, status, attempts in self._jobs[token])
        self.trouble[name].append(f"{token} ({jobs or 'no job'}; {self._effects[token]} effects) {words}")
