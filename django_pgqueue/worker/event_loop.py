"""
The event loop that all async tasks share, in a thread of its own, started by the first of them.

Whatever a task leaves in it goes on beside later ones. What a task calls by ``sync_to_async`` runs in a thread
that belongs to this attempt alone, with connections of its own, and ends with it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import partial
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async

from .cleaning import leave_clean
from .interruption import AsyncCode

logger = logging.getLogger("django_pgqueue")

STOP_SECONDS = 1.0  # for the loop to end


class EventLoop:
    """*helpers* is the most threads that it may have for what must not block it."""

    def __init__(self, helpers: int) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._helpers = ThreadPoolExecutor(helpers, "pgqueue-async-helper")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run *coroutine* while the calling thread waits; raises what it raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop()).result()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run *coroutine*, in a context of its own. From another thread."""
        self.loop().call_soon_threadsafe(self.go_on_with, coroutine)

    def go_on_with(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run *coroutine*, in a context of its own. In the loop."""
        self.loop().create_task(coroutine, context=Context())

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Return what *function* returns, which may use the database."""
        return await self.loop().run_in_executor(self._helpers, _and_leave_clean, function)

    def stop(self) -> None:
        """End the loop, if it ends soon: something that a task has left behind may block it."""
        if self._loop is not None and self._thread is not None:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()
        self._helpers.shutdown(wait=False)

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop, running."""
        if self._loop is not None and self._thread is not None:
            return self._loop
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._work, args=(self._loop,), name="pgqueue-async", daemon=True
                )
                self._thread.start()
            return self._loop

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopping:
            try:
                loop.run_forever()
            except BaseException:
                # A SystemExit ends its task and leaves the loop, which has others to run.
                logger.debug("An async task has left the event loop; going on.", exc_info=True)


async def call_apart(
    code: AsyncCode, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call an async *function* as *code*, with a thread of its own for its synchronous parts."""
    context = ThreadSensitiveContext()
    async with context:
        try:
            return await code.run(function(*args, **kwargs))
        finally:
            if context in SyncToAsync.context_to_thread_executor:  # it has had such parts
                await sync_to_async(partial(leave_clean, may_keep=False), thread_sensitive=True)()


def _and_leave_clean(function: Callable[[], Any]) -> Any:
    try:
        return function()
    finally:
        leave_clean(may_keep=False)
