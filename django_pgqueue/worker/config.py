"""What one worker is told to do: the flags of ``runworker`` and its backend's options, ready for a child."""

import json
from dataclasses import asdict, dataclass

from ..conf import Notify


@dataclass(frozen=True, slots=True)
class Queues:
    """
    Which queues a worker serves: those *named*, or all when none is, never those *excluded*.

    "All" means every queue with jobs, so that jobs of a queue that was removed from the settings are not
    stranded, but for the queues of other backends on the same database, which stand in *excluded*.
    """

    named: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def to_sweep(self) -> list[str] | None:
        """The names to sweep, ``None`` for all queues there are."""
        return [name for name in self.named if name not in self.excluded] if self.named else None

    def serves(self, queue_name: str) -> bool:
        return queue_name not in self.excluded and (not self.named or queue_name in self.named)

    @classmethod
    def of(cls, values: dict[str, list[str]]) -> "Queues":
        """The inverse of ``asdict``, also where JSON has been between."""
        return cls(tuple(values["named"]), tuple(values["excluded"]))

    def __str__(self) -> str:
        names = ", ".join(self.named) or "*"
        return f"{names} except {', '.join(self.excluded)}" if self.excluded else names


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """All durations are in seconds."""

    backend: str
    database: str
    queues: Queues
    concurrency: int  # slots of each child
    processes: int  # children
    max_jobs: int | None  # a child is replaced after these
    max_memory: int | None  # in megabytes; a child that uses more is replaced
    burst: bool
    grace: float
    lease: float
    poll: float
    retention: float | None
    constant_delay: float | None  # before the next attempt of a job whose process died, if not the default
    log_level: int
    notify: Notify = "asleep"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WorkerConfig":
        values = json.loads(text)
        return cls(**{**values, "queues": Queues.of(values["queues"])})

    @property
    def slots(self) -> int:
        """How many jobs the worker runs at the same time."""
        return self.concurrency * self.processes

    @property
    def renewal_interval(self) -> float:
        """Three renewals in a lease, so that one may fail and another be late."""
        return self.lease / 3
