"""Tasks with telling names, and the effects they leave."""

from collections.abc import Callable
from typing import Any

from django.db import transaction

from django_pgqueue import Snooze, task

from .models import Mark

try:
    from django.tasks import task as django_task
except ImportError:  # Django 5.2: the backport
    from django_tasks import task as django_task


@task
def add(a, b):
    return a + b


@task
def nothing():
    pass


@task
def echo(value):
    return value


@task
def take_anything(*args, **kwargs):
    return {"args": args, "kwargs": kwargs}


@task
def confirm_order(number, *, note=""):
    """Leave a row."""
    Mark.objects.create(note=f"order {number} confirmed{note}")


@task
def refuse_order(number):
    """Leave a row, then fail."""
    Mark.objects.create(note=f"order {number} refused")
    raise ValueError(f"order {number} is refused")


@task(queue_name="email", priority=20, max_attempts=2, backoff=3, timeout=60)
def send_receipt(number):
    return f"receipt {number}"


@task
async def add_async(a, b):
    return a + b


@task
async def confirm_order_async(number):
    await Mark.objects.acreate(note=f"order {number} confirmed")


@task(takes_context=True)
def tell_context(context, *seen):
    return {"attempt": context.attempt, "cancelled": context.cancelled, "id": context.task_result.id, "seen": seen}


@task(takes_context=True)
async def tell_context_async(context):
    return {"attempt": context.attempt, "cancelled": context.cancelled}


@task
def enqueue_next(number):
    """Enqueue itself for one less, down to zero."""
    if number:
        enqueue_next.enqueue(number - 1)
    return number


@task
def enqueue_for_ever():
    enqueue_for_ever.enqueue()


# What a test wants a task to do: a function of the test, found by the name that the job carries.
ACTS: dict[str, Callable[..., Any]] = {}


@task
def act(name):
    return ACTS[name]()


@task
async def act_async(name):
    return await ACTS[name]()


@task(backoff=lambda error, task_result: ACTS["backoff"](error, task_result))
def act_with_backoff(name):
    return ACTS[name]()


# The same, as plain Django writes it.
@django_task(priority=5)
def plain_add(a, b):
    return a + b


@django_task(takes_context=True)
def plain_tell_attempt(context):
    return context.attempt


@task
@transaction.atomic(durable=True)
def confirm_order_durably(number):
    Mark.objects.create(note=f"order {number} confirmed")


@task
def snooze(delay):
    raise Snooze(float("nan") if delay == "nan" else delay)


@task(atomic=True)
def act_atomically(name):
    return ACTS[name]()
