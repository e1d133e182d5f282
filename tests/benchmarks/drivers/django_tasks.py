"""Drives the backends of Django's Tasks framework: this project's, django-tasks-db."""

import os
import sys

import django

django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection, transaction  # noqa: E402

from ..project import tasks  # noqa: E402
from .common import Measured, answer, enqueue  # noqa: E402

TASK = tasks.BY_SHAPE[os.environ.get("BENCH_SHAPE") or "plain"]


def main(words: list[str]) -> None:
    match words:
        case ["install"]:
            call_command("migrate", verbosity=0)
            answer()
        case ["call", count]:
            _call(int(count))
        case _:
            connection.ensure_connection()
            enqueue(words, TASK.enqueue, _bulk)


def _bulk(numbers: range) -> None:
    if hasattr(TASK, "enqueue_many"):
        TASK.enqueue_many([[number] for number in numbers])
        return
    with transaction.atomic():
        for number in numbers:
            TASK.enqueue(number)


def _call(count: int) -> None:
    """What calling the function costs by itself."""
    measured = Measured()
    for number in range(count):
        TASK.func(number)
    measured.answer()


if __name__ == "__main__":
    main(sys.argv[1:])
