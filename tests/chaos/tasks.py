"""What the jobs do. *token* names the enqueue that a job comes from."""

import asyncio
import ctypes
import time

from django.db import connection

from django_pgqueue import task

from . import effects
from .kinds import LEASE_SECONDS, child_of

LONGER_THAN_A_LEASE = LEASE_SECONDS * 1.5


class Flaw(Exception):
    """Raised on purpose."""


@task(takes_context=True)
def quick(context, token):
    effects.record(context, "quick", token)


@task(takes_context=True)
def query(context, token):
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM chaos_effect WHERE token = %s", [token])
    effects.record(context, "query", token)


@task(takes_context=True)
async def in_the_loop(context, token):
    await asyncio.sleep(0.01)
    await effects.arecord(context, "in_the_loop", token)


@task(takes_context=True)
def flaky(context, token):
    if context.attempt <= 1 + len(token) % 3:
        raise Flaw(token)
    effects.record(context, "flaky", token)


@task(max_attempts=3)
def hopeless(token):
    raise Flaw(token)


@task(takes_context=True)
def slow(context, token):
    time.sleep(LONGER_THAN_A_LEASE)
    effects.record(context, "slow", token)


@task(takes_context=True)
async def slow_in_the_loop(context, token):
    await asyncio.sleep(LONGER_THAN_A_LEASE)
    await effects.arecord(context, "slow_in_the_loop", token)


@task(takes_context=True, timeout=2)
def overdue(context, token):
    while context.attempt == 1:
        time.sleep(0.01)
    effects.record(context, "overdue", token)


@task(takes_context=True, timeout=2)
def overdue_in_c(context, token):
    if context.attempt == 1:
        time.sleep(3_600)
    effects.record(context, "overdue_in_c", token)


@task(takes_context=True, timeout=2)
async def overdue_in_the_loop(context, token):
    if context.attempt == 1:
        await asyncio.sleep(3_600)
    await effects.arecord(context, "overdue_in_the_loop", token)


@task(takes_context=True)
def steady(context, token):
    time.sleep(0.5)
    effects.record(context, "steady", token)


@task(takes_context=True, timeout=2)
def overdue_in_sql(context, token):
    if context.attempt == 1:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(3600)")
    effects.record(context, "overdue_in_sql", token)


@task(max_attempts=2)
def deadly(token):
    ctypes.string_at(0)  # at once, and in this thread; what kill() sends may arrive when the task has returned


@task(takes_context=True, atomic=True)
def atomic(context, token):
    effects.happen_with(context, token)


@task(takes_context=True, atomic=True)
def atomic_flaky(context, token):
    effects.happen_with(context, token)
    if context.attempt == 1:
        raise Flaw(token)


@task(takes_context=True, atomic=True)
def atomic_slow(context, token):
    effects.happen_with(context, token)
    time.sleep(LONGER_THAN_A_LEASE)


@task(takes_context=True, atomic=True)
def atomic_parent(context, token):
    effects.happen_with(context, token)
    quick.enqueue(child_of(token))
