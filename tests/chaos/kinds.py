"""The kinds of jobs, what each promises, and how often it is enqueued."""

import os
from typing import NamedTuple

LEASE_SECONDS = float(os.environ.get("CHAOS_LEASE", "3"))


def child_of(token: str) -> str:
    """The token of the job that a job enqueues."""
    return f"{token}/child"


class Kind(NamedTuple):
    """*share* is how many of a hundred jobs are of this kind, about. *task* is a function of `tasks`."""

    task: str
    share: float
    ends: str = "done"  # the status in which each must be at the end
    is_once: bool = False  # its effect happens exactly once, whatever goes wrong
    has_child: bool = False  # a part of its effect is that it enqueues one "quick" job

    @property
    def has_effect(self) -> bool:
        return self.ends == "done"


KINDS = {
    kind.task: kind
    for kind in (
        Kind("quick", 32),
        Kind("query", 14),  # looks at the database by Django's own connection, too
        Kind("in_the_loop", 12),  # async
        Kind("flaky", 8),  # fails a few times before
        Kind("hopeless", 4, ends="failed"),
        Kind("slow", 2),  # takes longer than a lease
        Kind("slow_in_the_loop", 1),
        Kind("overdue", 2),  # takes longer than its timeout, the first time
        Kind("overdue_in_c", 0.3),  # where nothing can interrupt it
        Kind("overdue_in_the_loop", 1.5),
        Kind("atomic", 12, is_once=True),
        Kind("atomic_flaky", 4, is_once=True),  # fails after its effect, the first time
        Kind("atomic_slow", 3, is_once=True),
        Kind("atomic_parent", 4, is_once=True, has_child=True),
        # For faults that happen alone.
        Kind("steady", 0),
        Kind("overdue_in_sql", 0),
        Kind("deadly", 0, ends="failed"),
    )
}
