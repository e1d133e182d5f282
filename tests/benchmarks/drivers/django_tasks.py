"""Drives the backends of Django's Tasks framework: this project's, django-tasks-db, django-ox."""

import os
import random
import sys
import threading
import time

import django

django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection, transaction  # noqa: E402

from ..project import tasks  # noqa: E402
from ..record import record  # noqa: E402
from .common import Measured, answer, enqueue  # noqa: E402

TASK = tasks.BY_SHAPE[os.environ.get("BENCH_SHAPE") or "plain"]


def main(words: list[str]) -> None:
    match words:
        case ["install"]:
            call_command("migrate", verbosity=0)
            answer()
        case ["call", count]:
            _call(int(count))
        case ["statement"]:
            answer(statement=_statement_of_enqueue())
        case ["transactions", count, per_second, first, longest_ms, clients]:
            _in_transactions(int(count), float(per_second), int(first), float(longest_ms) / 1_000, int(clients))
        case ["beside-a-long-one", count, per_second, first]:
            _beside_a_long_one(count, per_second, first)
        case ["claims", count, *limits]:
            from .claims import time_claims

            answer(**time_claims(int(count), map(int, limits)))
        case _:
            connection.ensure_connection()
            enqueue(words, TASK.enqueue, _bulk)


def _bulk(numbers: range) -> None:
    if hasattr(TASK, "enqueue_many"):
        TASK.enqueue_many([[number] for number in numbers])
    elif hasattr(TASK.get_backend(), "enqueue_many"):
        TASK.get_backend().enqueue_many(TASK, [((number,), {}) for number in numbers])
    else:
        with transaction.atomic():
            for number in numbers:
                TASK.enqueue(number)


def _call(count: int) -> None:
    """What calling the function costs by itself."""
    measured = Measured()
    for number in range(count):
        TASK.func(number)
    measured.answer()


def _statement_of_enqueue() -> str:
    """What `enqueue` sends, with its values in it."""
    sent = []

    def watch(execute, sql, parameters, many, context):
        sent.append(connection.ops.compose_sql(sql, parameters))
        return execute(sql, parameters, many, context)

    with transaction.atomic(), connection.execute_wrapper(watch):
        TASK.enqueue(0)
        transaction.set_rollback(True)
    return ";\n".join(" ".join(text.split()) for text in sent if "SAVEPOINT" not in text)


def _in_transactions(count: int, per_second: float, first: int, longest: float, clients: int) -> None:
    """At a steady rate by many *clients*, each transaction open for up to *longest* seconds after it has enqueued."""
    measured = Measured()
    choose = random.Random(1)
    waits = [choose.uniform(0, longest) for _ in range(count)]
    places = iter(range(count))
    choosing = threading.Lock()
    began = time.monotonic() + 1  # when all are connected

    def client() -> None:
        connection.ensure_connection()
        while True:
            with choosing:
                place = next(places, None)
            if place is None:
                break
            time.sleep(max(began + place / per_second - time.monotonic(), 0))
            with transaction.atomic():
                TASK.enqueue(first + place)
                if longest:
                    time.sleep(waits[place])
            record(first + place)
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    measured.answer()


def _beside_a_long_one(count: str, per_second: str, first: str) -> None:
    """At a steady rate, while a transaction is open that has enqueued a job, too: the last one."""

    def paced() -> None:
        enqueue(["paced", count, per_second, first], TASK.enqueue, _bulk)
        connection.close()

    with transaction.atomic():
        TASK.enqueue(int(first) + int(count))
        others = threading.Thread(target=paced)
        others.start()
        others.join()


if __name__ == "__main__":
    main(sys.argv[1:])
