"""Drives pgqueuer, with asyncpg and uvloop."""

import asyncio
import logging
import signal
import sys

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from ..record import record
from .common import OPTIONS, URL, answer, enqueue_async, slices

logging.getLogger("pgqueuer").setLevel(logging.WARNING)


async def main(words: list[str]) -> None:
    connection = await asyncpg.connect(URL)
    driver = AsyncpgDriver(connection)
    match words:
        case ["install"]:
            await Queries(driver).install()
            answer()
        case ["worker"]:
            await _work(PgQueuer(driver))
        case _:
            await _enqueue(words, Queries(driver))
    await connection.close()


async def _work(queue: PgQueuer) -> None:
    @queue.entrypoint("noop")
    async def noop(job) -> None:
        record(int(job.payload))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, queue.shutdown.set)
    await queue.run(**OPTIONS)


async def _enqueue(words: list[str], queries: Queries) -> None:
    async def single(number: int) -> None:
        await queries.enqueue("noop", str(number).encode())

    async def bulk(numbers: range) -> None:
        for part in slices(numbers):
            await queries.enqueue(["noop"] * len(part), [str(number).encode() for number in part], [0] * len(part))

    await enqueue_async(words, single, bulk)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
