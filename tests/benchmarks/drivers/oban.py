"""Drives oban, with uvloop as its own command does."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import uvloop
from oban import Oban, worker

from ..record import record
from .common import OPTIONS, URL, answer, enqueue_async, slices


@worker(queue="default")
class Noop:
    async def process(self, job) -> None:
        record(job.args["number"])


async def _work() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    pool = await Oban.create_pool(URL)
    async with Oban(pool=pool, queues={"default": OPTIONS.get("limit", 10)}):
        await stop.wait()
    await pool.close()


async def _enqueue(words: list[str]) -> None:
    pool = await Oban.create_pool(URL)
    oban = Oban(pool=pool)

    async def bulk(numbers: range) -> None:
        for part in slices(numbers):
            await oban.enqueue_many(Noop.new({"number": number}) for number in part)

    await enqueue_async(words, lambda number: oban.enqueue(Noop.new({"number": number})), bulk)
    await pool.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install"]:
            subprocess.run([Path(sys.executable).with_name("oban"), "install", "--dsn", URL], check=True)
            answer()
        case ["worker"]:
            uvloop.run(_work())
        case words:
            uvloop.run(_enqueue(words))
