"""What the jobs do. *token* names the enqueue that a job comes from."""

import asyncio
import time

from django.db import connection

from django_pgqueue import task

from . import effects
from .kinds import LEASE_SECONDS

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
