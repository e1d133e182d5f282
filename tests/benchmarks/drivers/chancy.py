"""Drives chancy."""

import asyncio
import logging
import sys

from chancy import Chancy, Queue, Worker, job

from ..record import record
from .common import OPTIONS, URL, answer, enqueue_async

LOGGER = logging.getLogger("chancy")
LOGGER.setLevel(logging.WARNING)


@job(queue="default")
async def noop(*, number: int) -> None:
    record(number)


async def main(words: list[str]) -> None:
    async with Chancy(URL, log=LOGGER) as chancy:
        match words:
            case ["install"]:
                await chancy.migrate()
                await _declare(chancy)
                answer()
            case ["worker"]:
                await _declare(chancy)
                async with Worker(chancy) as worker:
                    await worker.wait_for_shutdown()
            case _:
                await _enqueue(words, chancy)


async def _declare(chancy: Chancy) -> None:
    await chancy.declare(Queue("default", executor=Chancy.Executor.Async, **OPTIONS), upsert=True)


async def _enqueue(words: list[str], chancy: Chancy) -> None:
    async def single(number: int) -> None:
        await chancy.push(noop.job.with_kwargs(number=number))

    async def bulk(numbers: range) -> None:
        jobs = [noop.job.with_kwargs(number=number) for number in numbers]
        async for _ in chancy.push_many(jobs, batch_size=1_000):
            pass

    await enqueue_async(words, single, bulk)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
