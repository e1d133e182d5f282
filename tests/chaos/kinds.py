"""The kinds of jobs, what each promises, and how often it is enqueued."""

from typing import NamedTuple

LEASE_SECONDS = 3.0


class Kind(NamedTuple):
    """*share* is how many of a hundred jobs are of this kind. *task* is a function of `tasks`."""

    task: str
    share: float
    ends: str = "done"  # the status in which each must be at the end
    is_once: bool = False  # its effect happens exactly once, whatever goes wrong

    @property
    def has_effect(self) -> bool:
        return self.ends == "done"


KINDS = {
    kind.task: kind
    for kind in (
        Kind("quick", 46),
        Kind("query", 20),  # looks at the database by Django's own connection, too
        Kind("in_the_loop", 12),  # async
        Kind("flaky", 10),  # fails a few times before
        Kind("hopeless", 4, ends="failed"),
        Kind("slow", 3),  # takes longer than a lease
        Kind("slow_in_the_loop", 2),
    )
}
