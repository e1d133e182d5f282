"""
End a running task from outside: raise an `Interruption` in it, at a moment when that can do no harm.

Python can raise an exception in another thread, and does so wherever that thread happens to be. Done
naively it arrives after the function has returned, kills the thread, or leaves a connection in the middle
of a statement. So here

- it is raised only under a lock, and only while a flag says that the thread is in user code;
- the thread that leaves user code takes the lock, clears the flag and takes back what is still under way;
- a statement in progress is cancelled, because nothing arrives in a thread that waits for the server;
- it is raised SENDS times at most, and the way out of user code stands that many arrivals.

Whoever has been interrupted must not be used again: the slot drops its connections and ends its thread.
"""

import asyncio
import ctypes
import logging
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from itertools import starmap
from typing import Any

import psycopg
from django.db.backends.signals import connection_created
from django.dispatch import receiver

from ..exceptions import Interruption
from . import wrappers

logger = logging.getLogger("django_pgqueue")

SENDS = 2  # one may be swallowed by a task, or by a destructor that it happened to arrive in
CANCEL_PATIENCE_SECONDS = 2.0

_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


class SyncCode:
    """The user code of one attempt in the thread that creates this. `run` once, in that thread."""

    __slots__ = ("_is_inside", "_lock", "_sent", "_thread", "_wrappers", "reason")

    def __init__(self) -> None:
        self.reason: type[Interruption] | None = None  # what it was asked to end for
        self._thread = threading.get_ident()
        # Reentrant, because the owner may be thrown out of a moment in which it cannot say whether it has it.
        self._lock = threading.RLock()
        self._is_inside = False
        self._sent = 0
        # All of them, connected or not: wrappers belong to threads, and no other thread finds them later.
        self._wrappers = wrappers.here()

    def run(self, function: Callable[[], Any]) -> Any:
        """
        Return what *function* returns, or raise what it raises; afterwards nothing more arrives in this thread.

        A function that has returned has returned: an interruption that comes then is dropped.
        """
        returned: list[Any] = []
        error: BaseException | None = None
        # One way out for each that may still arrive, and no call, loop or return outside of them before the
        # last: those are the places where Python lets one arrive.
        try:
            try:
                try:
                    self._is_inside = True
                    # In C from the function's own return to the list, so that nothing can come in between.
                    returned.extend(starmap(function, ((),)))
                except BaseException as raised:
                    error = raised
                self._leave()
            except BaseException as late:
                if error is None:
                    error = late
                self._leave()
        except BaseException as last:
            if error is None:
                error = last
            self._leave()
        if returned:
            return returned[0]
        assert error is not None
        if self.reason is not None:
            for link in chain_of(error):
                # A connection that was just being opened would live as long as the frame that was about to know it.
                traceback.clear_frames(link.__traceback__)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def interrupt(self, reason: type[Interruption]) -> None:
        """Raise *reason* in the function if it is still running. From any other thread; may take two seconds."""
        with self._lock:
            if not self._is_inside or self._sent >= SENDS:
                return
            self.reason = self.reason or reason
        _cancel_statements(self._wrappers)
        with self._lock:
            if self._is_inside and self._sent < SENDS:
                self._sent += 1
                _raise_in_thread(ctypes.c_ulong(self._thread), ctypes.py_object(self.reason))

    def _leave(self) -> None:
        self._lock.acquire()
        self._is_inside = False
        if self._sent:
            try:
                while True:  # in the place of what is still under way, until it has arrived
                    _raise_in_thread(ctypes.c_ulong(self._thread), _TAKEN_BACK)
            except _TakenBack:
                pass
        while self._lock._is_owned():  # type: ignore[attr-defined]  # as often as it was acquired
            self._lock.release()


class _TakenBack(BaseException):
    """Never seen outside of `SyncCode`."""


# Not with NULL, the interpreter's own word for it: Python 3.11 and 3.12 then look for an exception at every
# step for the rest of the process's life, and in 3.11 no function that is traced or profiled ever begins.
_TAKEN_BACK = ctypes.py_object(_TakenBack)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield *error* and what it came of: its cause, or what was being handled when it was raised, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__context__ if link.__cause__ is None else link.__cause__


class AsyncCode:
    """The user code of one attempt in an event loop. `run` it there, once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reason: type[Interruption] | None = None
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None  # touched in the loop's thread only
        self._is_inside = False
        self._sent = 0
        self._opened: list[Any] = []  # wrappers of the threads that run its synchronous parts

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what *coroutine* returns, or raise what it raises: for a cancellation of ours, the reason."""
        _opened.set(self._opened)
        self._task = asyncio.current_task()
        self._is_inside = True
        try:
            return await coroutine
        except asyncio.CancelledError as cancelled:
            if self.reason is None:
                raise
            raise self.reason from cancelled
        finally:
            self._is_inside = False

    def interrupt(self, reason: type[Interruption]) -> None:
        """Cancel the coroutine if it is still running. From any other thread; may take two seconds."""
        opened = self._opened if self._is_inside and self._sent < SENDS else []
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel, reason)
        # Until its statement ends nothing else runs in a thread, not even what cleans up.
        _cancel_statements(opened)

    def _cancel(self, reason: type[Interruption]) -> None:
        if self._is_inside and self._sent < SENDS and self._task is not None:
            self.reason = self.reason or reason
            self._sent += 1
            self._task.cancel()


# Threads that run parts of a coroutine see its context, and the list in it.
_opened: ContextVar[list[Any] | None] = ContextVar("django_pgqueue_opened", default=None)


@receiver(connection_created)
def _note_opened(connection: Any, **signal: Any) -> None:
    opened = _opened.get()
    if opened is not None and connection not in opened:
        opened.append(connection)


def _cancel_statements(wrappers: Iterable[Any]) -> None:
    for wrapper in list(wrappers):  # its owner may add one
        raw = wrapper.connection if wrapper.vendor == "postgresql" else None
        try:
            if raw is not None and raw.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                raw.cancel_safe(timeout=CANCEL_PATIENCE_SECONDS)
        except Exception as error:  # it has ended meanwhile, or the database is away
            logger.debug("A statement could not be cancelled: %s", error)
