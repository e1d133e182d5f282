"""Tasks that record that they ran, and do nothing else."""

import json
import os
import time
from pathlib import Path

from ..record import record

PATTERN = json.loads(os.environ["BENCH_OPTIONS"]).get("pattern", [0])  # milliseconds

if os.environ["BENCH_SYSTEM"] == "django_pgqueue":
    from django_pgqueue import task
elif os.environ["BENCH_SYSTEM"] == "django-q2":  # it takes any function

    def task():
        return lambda function: function

else:
    try:
        from django.tasks import task
    except ImportError:  # Django 5.2
        from django_tasks import task


@task()
def noop(number):
    record(number)


@task()
async def noop_async(number):
    record(number)


@task()
def noop_with_result(number):
    record(number)
    return {"number": number, "is_done": True}


@task()
def sleep(number):
    """For as long as the pattern says."""
    record(number)
    time.sleep(PATTERN[number % len(PATTERN)] / 1_000)


@task()
def wait(number):
    """Until a file is gone that lies beside the records."""
    record(number)
    hold = Path(os.environ["BENCH_RECORDS"]).parent / "hold"
    while hold.exists():
        time.sleep(0.2)


BY_SHAPE = {"plain": noop, "async": noop_async, "result": noop_with_result, "pattern": sleep, "held": wait}
