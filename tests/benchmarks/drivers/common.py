"""
What the drivers in Python share: how they enqueue, in which rhythm, and how they answer.

    install                         make the tables
    single COUNT                    enqueue one job per transaction
    bulk COUNT                      enqueue as fast as the system can
    paced COUNT PER_SECOND FIRST    one per transaction, at a steady rate, numbers from FIRST on; record each commit
    worker                          run jobs until SIGTERM

The answer is a line of JSON: the seconds and the processor's seconds that enqueueing took.
"""

import asyncio
import json
import os
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..record import record

URL = os.environ.get("BENCH_URL", "")
OPTIONS: dict[str, Any] = json.loads(os.environ.get("BENCH_OPTIONS", "{}"))


def answer(**values: Any) -> None:
    print(json.dumps(values))


class Measured:
    """The seconds, and the processor's seconds of this process, from here to `answer`."""

    def __init__(self) -> None:
        self._began, self._cpu = time.monotonic(), _cpu()

    def answer(self) -> None:
        answer(seconds=time.monotonic() - self._began, cpu_seconds=_cpu() - self._cpu)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def enqueue(words: list[str], single: Callable[[int], Any], bulk: Callable[[range], Any]) -> None:
    """Do what *words* say with a system that is called without await."""
    match words:
        case ["single", count]:
            measured = Measured()
            for number in range(int(count)):
                single(number)
            measured.answer()
        case ["bulk", count]:
            measured = Measured()
            bulk(range(int(count)))
            measured.answer()
        case ["paced", count, per_second, first]:
            measured = Measured()
            began = time.monotonic()
            for place in range(int(count)):
                time.sleep(max(began + place / float(per_second) - time.monotonic(), 0))
                single(int(first) + place)
                record(int(first) + place)
            measured.answer()
        case _:
            raise SystemExit(f"What is {words}?")


async def enqueue_async(
    words: list[str], single: Callable[[int], Awaitable[Any]], bulk: Callable[[range], Awaitable[Any]]
) -> None:
    """The same with a system that is awaited."""
    match words:
        case ["single", count]:
            measured = Measured()
            for number in range(int(count)):
                await single(number)
            measured.answer()
        case ["bulk", count]:
            measured = Measured()
            await bulk(range(int(count)))
            measured.answer()
        case ["paced", count, per_second, first]:
            measured = Measured()
            began = time.monotonic()
            for place in range(int(count)):
                await asyncio.sleep(max(began + place / float(per_second) - time.monotonic(), 0))
                await single(int(first) + place)
                record(int(first) + place)
            measured.answer()
        case _:
            raise SystemExit(f"What is {words}?")


def slices(numbers: range, size: int = 1_000) -> list[range]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
