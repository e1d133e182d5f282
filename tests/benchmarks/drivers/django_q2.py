"""Drives django-q2 with its broker in the database."""

import sys

import django

django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection, transaction  # noqa: E402
from django_q.tasks import async_task  # noqa: E402

from .common import answer, enqueue  # noqa: E402

PATH = "tests.benchmarks.project.tasks.noop"


def main(words: list[str]) -> None:
    if words == ["install"]:
        call_command("migrate", verbosity=0)
        answer()
        return
    connection.ensure_connection()
    enqueue(words, lambda number: async_task(PATH, number), _bulk)


def _bulk(numbers: range) -> None:
    with transaction.atomic():
        for number in numbers:
            async_task(PATH, number)


if __name__ == "__main__":
    main(sys.argv[1:])
