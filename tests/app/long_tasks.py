"""Tasks that do not end by themselves, each in a way of its own."""

import asyncio
import ctypes
import os
import sys
import threading
import time

from asgiref.sync import sync_to_async
from django.db import connection

from django_pgqueue import task
from django_pgqueue.exceptions import Interruption

from .models import Mark


def _mark(note):
    Mark.objects.create(note=note, made_by=str(os.getpid()))


@task(timeout=1, max_attempts=2, backoff=0)
def loop_for_ever(note):
    _mark(note)
    while True:
        pass


@task(timeout=1, max_attempts=2, backoff=0)
def query_for_ever(note):
    _mark(note)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(6000)")


@task(timeout=1, max_attempts=2, backoff=0)
async def sleep_for_ever(note):
    await Mark.objects.acreate(note=note)
    await asyncio.Event().wait()


@task(timeout=1, max_attempts=2, backoff=0)
async def query_for_ever_async(note):
    """As the async methods of a queryset do it, too: in the thread of the task's synchronous parts."""
    await sync_to_async(query_for_ever.func)(note)


@task(timeout=1, max_attempts=2, backoff=0)
def clean_up_and_return(note):
    """It has seen the interruption, and what it had to do is done."""
    try:
        while True:
            pass
    except Interruption as interruption:
        return f"{note}: {interruption}"


@task(timeout=1, max_attempts=1)
def wait_in_c(note, seconds):
    """Nothing arrives in a thread that waits in C code."""
    _mark(note)
    time.sleep(seconds)


@task(timeout=1, max_attempts=1)
def hold_the_gil(note, seconds):
    """As careless C code does: no other thread of this process runs."""
    _mark(note)
    ctypes.PyDLL(None).sleep(seconds)


@task
def hold_the_gil_without_a_limit(note, seconds):
    _mark(note)
    ctypes.PyDLL(None).sleep(seconds)


@task
def loop_for(note, seconds):
    _mark(note)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@task
async def block_the_event_loop_for(note, seconds):
    await Mark.objects.acreate(note=note)
    time.sleep(seconds)


@task(max_attempts=1)
def wedge_the_control_loop(note):
    """Whatever a defect in ours may do: the next turn of the child's loop never ends."""
    _mark(note)
    if Mark.objects.filter(note=note).count() == 1:
        sys.modules["__main__"].Child._turn = lambda self: threading.Event().wait()
        threading.Event().wait()


@task
def take_memory(note, megabytes):
    _mark(note)
    kept.append(bytearray(os.urandom(1_000)) * (megabytes * 1_000))


kept: list[bytearray] = []


@task(max_attempts=5)
def loop_until_interrupted(note):
    """Without a timeout: only a person or the worker ends it."""
    _mark(note)
    try:
        while True:
            pass
    except Interruption as interruption:
        _mark(f"{note}: {type(interruption).__name__}")
        raise
