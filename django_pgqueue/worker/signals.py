"""
The signals that ask a worker to stop, and those of its children's ends.

They are watched from the first moment of the command, before Django's checks and long before there is a child,
and counted: the first asks for an orderly end, the second for one at once. A handler only counts, and wakes
the main thread. As PID 1 the worker would get none of them without a handler, and nobody else buries orphans.
"""

import os
import select
import signal
import socket
from collections.abc import Collection, Sequence
from types import FrameType

EXIT_FORCED = 3


class Signals:
    """For the main thread. *count* is how often the worker was asked to stop."""

    def __init__(self) -> None:
        self.count = 0
        self.are_heeded = False  # set by the supervisor, which then decides what a second signal does
        self._alarm: socket.socket | None = None

    def watch(self) -> None:
        """Install the handlers, if that was not done before."""
        if self._alarm is not None:
            return
        # A signal wakes select(), whatever the main thread is about to do.
        self._alarm, self._wake_writer = socket.socketpair()
        self._alarm.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to wake

    def sleep(self, seconds: float, voices: Sequence[int]) -> None:
        """Sleep until a signal, *seconds* at most, or until one of the descriptors *voices* is readable."""
        assert self._alarm is not None
        alarm = self._alarm.fileno()
        ready, _, _ = select.select([alarm, *voices], [], [], seconds)
        if alarm in ready:
            self._alarm.recv(4096)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 and not self.are_heeded:
            os._exit(EXIT_FORCED)  # something before the first child takes long; nothing is claimed yet


def bury_orphans(children: Collection[int]) -> None:
    """
    As PID 1 of a container, let go of dead processes that are not among *children*.

    What tasks leave behind becomes the child of PID 1 when its parent ends, and would stay as a zombie.
    """
    if os.getpid() != 1:
        return
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in children:  # whose end is for its place to see; then this goes on
            return
        os.waitpid(dead.si_pid, 0)
