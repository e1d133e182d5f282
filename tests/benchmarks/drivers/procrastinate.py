"""Drives procrastinate: the worker with its async connector and uvloop, enqueueing without."""

import sys
from importlib.resources import files

import procrastinate
import psycopg
import uvloop

from ..record import record
from .common import OPTIONS, URL, answer, enqueue, slices


def make_app(connector: procrastinate.BaseConnector) -> procrastinate.App:
    app = procrastinate.App(connector=connector)

    @app.task(name="noop", queue="default")
    async def noop(number: int) -> None:
        record(number)

    return app


def main(words: list[str]) -> None:
    match words:
        case ["install"]:
            with psycopg.connect(URL, autocommit=True) as connection:
                connection.execute(files("procrastinate").joinpath("sql/schema.sql").read_text())
            answer()
        case ["worker"]:
            uvloop.run(_work())
        case _:
            app = make_app(procrastinate.SyncPsycopgConnector(conninfo=URL))
            with app.open():
                task = app.tasks["noop"]
                enqueue(words, lambda number: task.defer(number=number), lambda numbers: _bulk(task, numbers))


async def _work() -> None:
    app = make_app(procrastinate.PsycopgConnector(conninfo=URL, max_size=OPTIONS.get("pool", 10)))
    async with app.open_async():
        await app.run_worker_async(concurrency=OPTIONS.get("concurrency", 1))


def _bulk(task: procrastinate.tasks.Task, numbers: range) -> None:
    for part in slices(numbers):
        task.batch_defer(*[{"number": number} for number in part])


if __name__ == "__main__":
    main(sys.argv[1:])
