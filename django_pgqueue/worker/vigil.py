"""
Tell what is the matter with a child that says nothing: whether it stands still, hangs, or only works hard.

    stopped        by a signal or a debugger: it is left alone, and its leases are not renewed
    wedged         its interpreter runs, its control loop does not: nothing it holds will ever be settled
    overstaying    a task goes on long after its deadline: only the end of the process ends it
    unresponsive   nothing in its interpreter runs, as when C code keeps the GIL: tasks do that and finish, so
                   its leases are renewed, for a long time

Silence is counted in looks, of which each counts two seconds at most: whoever was asleep with the whole
machine, or was stopped with the whole worker, has kept no one waiting.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from ..outcomes import Claim
from .holdings import Held, Vitals

LONGEST_LOOK_SECONDS = 2.0
WEDGED_SECONDS = 30.0
BREATHLESS_SECONDS = 10.0  # without a sign of life, its interpreter is taken to be held
UNRESPONSIVE_SECONDS = 600.0


class Verdict(NamedTuple):
    """
    *why* a child has to be replaced, and whether it *can_hear* so: then it finishes its other jobs before.

    *blames_tasks*: one of its tasks has brought it to this, nobody knows which, so for each it is a crash.
    """

    why: str
    can_hear: bool = False
    blames_tasks: bool = False


class Vigil:
    """Over one child. *grace* is how long a task may go on after its deadline."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._vitals = Vitals(0.0, 0.0, 0.0, 0.0)
        self._looked_at = time.monotonic()
        self._loop_silent = 0.0
        self._breath_silent = 0.0
        self._overstayed: dict[Claim, float] = {}

    def look(self, vitals: Vitals, held: Sequence[Held], *, is_stopped: bool) -> Verdict | None:
        """Return why the child has to be replaced, if it has to."""
        now = time.monotonic()
        passed = 0.0 if is_stopped else min(now - self._looked_at, LONGEST_LOOK_SECONDS)
        self._looked_at = now
        self._loop_silent = self._loop_silent + passed if vitals.looped == self._vitals.looped else 0.0
        self._breath_silent = self._breath_silent + passed if vitals.breathed == self._vitals.breathed else 0.0
        self._vitals = vitals
        late = [entry for entry in held if entry.started and 0.0 < entry.deadline < now]
        self._overstayed = {
            entry.claim: self._overstayed.get(entry.claim, 0.0) + min(passed, now - entry.deadline) for entry in late
        }
        if is_stopped or not vitals.breathed:
            return None
        can_hear = self._breath_silent < BREATHLESS_SECONDS
        for claim, seconds in self._overstayed.items():
            if seconds > self._grace:
                return Verdict(f"the task of job {claim.job_id} goes on {seconds:.0f} s after its time", can_hear)
        if can_hear and self._loop_silent > WEDGED_SECONDS:
            return Verdict(f"its control loop has not turned for {self._loop_silent:.0f} s")
        if self._breath_silent > UNRESPONSIVE_SECONDS:
            return Verdict(f"it has given no sign of life for {self._breath_silent:.0f} s", blames_tasks=True)
        return None
