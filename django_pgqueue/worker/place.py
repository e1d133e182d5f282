"""
A place for one child of a worker: it is started here, watched, and started again after its death.

A child that dies is replaced after a pause that doubles from death to death, so that one which cannot live
does not spin. One that asked to be recycled, having run its number of jobs or grown too large, is replaced at
once. One that hangs, as the `Vigil` sees it, is replaced, too: if it can hear it finishes its other jobs before.
"""

import logging
import time
from collections.abc import Callable

from .child import EXIT_RECYCLE
from .config import WorkerConfig
from .process import ChildProcess, Said
from .upkeep import Death, cause_of
from .vigil import Verdict, Vigil

logger = logging.getLogger("django_pgqueue")

FIRST_RESTART_PAUSE_SECONDS = 0.1
LONGEST_RESTART_PAUSE_SECONDS = 5.0
HEALTHY_SECONDS = 60.0  # after this long a child's death is not counted with those before it
MAX_EARLY_DEATHS = 6  # in a row, before a child has said that it started
KILL_PATIENCE_SECONDS = 5.0
KILL_AFTER_SECONDS = 5.0  # past the grace period


class Place:
    """For the supervisor's main thread. *report* is told of each death."""

    def __init__(self, config: WorkerConfig, report: Callable[[Death], None]) -> None:
        self.child: ChildProcess | None = None
        self.is_drained = False  # a burst is over here
        self.restart_at = 0.0  # monotonic
        self._config = config
        self._report = report
        self._is_stopping = False
        self._vigil = Vigil(config.grace)
        self._verdict: Verdict | None = None
        self._kill_at = float("inf")
        self._has_started = False
        self._since = 0.0
        self._early_deaths = 0
        self._restart_pause = FIRST_RESTART_PAUSE_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether no child is here and none will be."""
        return self.child is None and (self._is_stopping or self.is_drained or self.gave_up)

    @property
    def gave_up(self) -> bool:
        return self._early_deaths >= MAX_EARLY_DEATHS

    def look(self) -> Said:
        """See how the child is, and start one where it is time to; what it has said since the last time."""
        said = Said()
        if self.child is not None:
            said = self._listen(self.child)
            exit_code = self.child.exit_code()
            if exit_code is not None:
                self._bury(self.child, exit_code)
            elif not self._is_stopping:
                self._watch(self.child)
        if self.child is None and not self.is_over and time.monotonic() >= self.restart_at:
            self._start()
        return said

    def stop(self, grace: float) -> None:
        """Let what runs finish within *grace* seconds, and start no other child."""
        self._is_stopping = True
        if self.child is not None:
            self.child.stop(grace)
            if not self._has_started:
                self.child.terminate()  # rather than when it has imported everything: nothing is claimed yet

    def kill(self) -> None:
        """End the child at once, and start no other."""
        self._is_stopping = True
        if self.child is not None:
            self.child.kill()
            self.child.wait(KILL_PATIENCE_SECONDS)
            self.look()

    def _watch(self, child: ChildProcess) -> None:
        if self._verdict is None:
            verdict = self._vigil.look(child.vitals(), child.held(), is_stopped=child.is_stopped())
            if verdict is not None:
                self._replace(child, verdict)
        elif time.monotonic() > self._kill_at:
            child.kill()

    def _replace(self, child: ChildProcess, verdict: Verdict) -> None:
        self._verdict = verdict
        if verdict.can_hear:
            logger.error("Child %s is replaced: %s. It finishes its other jobs first.", child.pid, verdict.why)
            child.stop(self._config.grace)
            self._kill_at = time.monotonic() + self._config.grace + KILL_AFTER_SECONDS
        else:
            logger.error("Child %s is killed: %s.", child.pid, verdict.why)
            child.kill()

    def _start(self) -> None:
        self._has_started = False
        self._vigil = Vigil(self._config.grace)
        self._verdict = None
        self._kill_at = float("inf")
        self._since = time.monotonic()
        try:
            self.child = ChildProcess(self._config)
        except OSError as error:  # no memory, or too many processes or files
            self._early_deaths += 1
            self._plan_restart()
            logger.error("A child could not be started (%s).", error)

    def _listen(self, child: ChildProcess) -> Said:
        said = child.said()
        if said.has_started and not self._has_started:
            self._has_started = True
            self._early_deaths = 0
            logger.info("Child %s is ready.", child.pid)
        return said

    def _bury(self, child: ChildProcess, exit_code: int) -> None:
        self.child = None
        held = child.held()
        # A burst is over when the child ends and holds nothing; a task, too, can end the process with 0.
        was_stopped = child.was_told_to_stop or (self._config.burst and not held)
        is_expected = exit_code == 0 and was_stopped and self._verdict is None
        is_recycled = exit_code == EXIT_RECYCLE and not held
        if not self._has_started and not child.was_told_to_stop:
            self._early_deaths += 1
        cause = cause_of(exit_code) if self._verdict is None else self._verdict.why
        is_ours = child.was_told_to_stop or (self._verdict is not None and not self._verdict.blames_tasks)
        self._report(Death(child.owner, child.application_name, held, cause, time.monotonic(), is_ours))
        child.forget()
        if is_expected:
            self.is_drained = self._config.burst
        elif is_recycled or self._verdict is not None:
            logger.info("Child %s has ended and is replaced.", child.pid)
        elif not self._is_stopping:
            self._plan_restart()
            pause = max(self.restart_at - time.monotonic(), 0.0)
            logger.error("Child %s died (%s); another starts in %.1f s.", child.pid, cause, pause)

    def _plan_restart(self) -> None:
        if time.monotonic() - self._since > HEALTHY_SECONDS:
            self._restart_pause = FIRST_RESTART_PAUSE_SECONDS
        self.restart_at = time.monotonic() + self._restart_pause
        self._restart_pause = min(self._restart_pause * 2, LONGEST_RESTART_PAUSE_SECONDS)
