"""Tasks that tests run in real workers. Locks stand for whatever takes time."""

import asyncio
import ctypes
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.utils import timezone, translation

from django_pgqueue import Retry, task
from django_pgqueue.compat import task_started

from .models import Mark

if "HOLD_BEFORE_START" in os.environ:
    # Between the claim's COMMIT and the first line of the task.
    task_started.connect(lambda **kwargs: _wait_for(int(os.environ["HOLD_BEFORE_START"])), weak=False)


@task
def leave_mark(note):
    Mark.objects.create(note=note, made_by=str(os.getpid()))


if "BEFORE_THE_DEPLOY" not in os.environ:

    @task(max_attempts=1)
    def added_since(note):
        Mark.objects.create(note=note)


@task
def mark_and_wait_for(note, key):
    """Leave a mark, then wait until the test lets go of the advisory lock *key*."""
    Mark.objects.create(note=note, made_by=str(os.getpid()))
    _wait_for(key)
    Mark.objects.create(note=f"{note} ended")


@task
async def async_leave_mark(note):
    await Mark.objects.acreate(note=note)


@task
async def async_mark_and_sleep(note):
    """An async task that would never end by itself."""
    await Mark.objects.acreate(note=note)
    await asyncio.Event().wait()


@task
async def async_mark_and_wait_for(note, key):
    await Mark.objects.acreate(note=note)
    await sync_to_async(_wait_for)(key)


@task(takes_context=True)
def wait_until_cancelled(context, note, key):
    """Ask the context again and again; say so when it answers."""
    Mark.objects.create(note=note)
    while not context.cancelled:
        _wait_for(key)
    Mark.objects.create(note=f"{note} cancelled")


@task(takes_context=True, max_attempts=3, backoff=0)
def fail_once(context, note):
    Mark.objects.create(note=note)
    if context.attempt == 1:
        raise ValueError(f"{note} fails once")


@task(takes_context=True, max_attempts=3, backoff=1)
def fail_once_and_wait(context, note):
    Mark.objects.create(note=note)
    if context.attempt == 1:
        raise ValueError(f"{note} fails once")


@task(max_attempts=1)
def fail(message):
    raise ValueError(message)


@task(atomic=True)
def atomic_enqueue_next(number):
    if number:
        atomic_enqueue_next.enqueue(number - 1)


@task(atomic=True)
def atomic_mark_and_wait_for(note, key):
    Mark.objects.create(note=note)
    _wait_for(key)


@task(max_attempts=50, backoff=0)
def fail_at_once_and_retry(note):
    Mark.objects.create(note=note)
    raise Retry(0)


@task(max_attempts=1)
def exit_process(code):
    raise SystemExit(code)


@task(max_attempts=1)
async def async_exit_process(code):
    raise SystemExit(code)


@task(max_attempts=1)
def end_process_at_once(code):
    """As C code may do it: nothing is cleaned up."""
    os._exit(code)


@task(max_attempts=2)
def segfault():
    """As a defect in C code does it."""
    ctypes.string_at(0)


@task(max_attempts=2, backoff=0)
def kill_own_process(note):
    Mark.objects.create(note=note)
    os.kill(os.getpid(), 9)


@task
def write_after_reading(pipe, path):
    """Wait for someone to write into *pipe*, then add that to the file *path*. No database is needed."""
    text = Path(pipe).read_text()
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


@task
def leave_settings_behind():
    """What a careless task leaves on its connection and in its thread."""
    translation.activate("de")
    timezone.activate("Asia/Tokyo")
    with connection.cursor() as cursor:
        cursor.execute("SET search_path = pg_catalog")
        cursor.execute("SET statement_timeout = '4321ms'")
        cursor.execute("CREATE TEMPORARY TABLE left_behind (x int)")


@task
def leave_transaction_open():
    transaction.atomic().__enter__()
    Mark.objects.create(note="never committed")


@task
def leave_transaction_broken():
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            cursor.execute("SELECT 1/0")
        except Exception:
            return


@task
def leave_connection_closed():
    connection.ensure_connection()
    connection.connection.close()


@task(takes_context=True)
def report_settings(context):
    """Return what a task meets at its start."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT current_setting('search_path'), current_setting('statement_timeout'),"
            " to_regclass('pg_temp.left_behind')::text, current_setting('TimeZone')"
        )
        search_path, statement_timeout, table, database_zone = cursor.fetchone()
    return {
        "search_path": search_path,
        "statement_timeout": statement_timeout,
        "temporary_table": table,
        "database_zone": database_zone,
        "language": translation.get_language(),
        "zone": timezone.get_current_timezone_name(),
        "in_transaction": connection.in_atomic_block,
        "logged_queries": len(connection.queries_log),
    }


@task
def report_connection():
    """Return the processes at both ends of this task's connection."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return [os.getpid(), cursor.fetchone()[0]]


@task
def make_queries(count):
    for _ in range(count):
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")


@task
def enqueue_another(note):
    leave_mark.enqueue(note)


@task
def read_all_input():
    """Let a subprocess read its standard input, inherited from ours, to the end, as ffmpeg and ssh do."""
    subprocess.run([sys.executable, "-c", "import sys; sys.stdin.read()"], check=True)


@task
def fork_and_terminate():
    """What a pool of multiprocessing does at its end; return how the forked process ended."""
    forked = multiprocessing.get_context("fork").Process(target=_wait_for_ever)
    forked.start()
    forked.terminate()
    forked.join(30)
    return forked.exitcode or forked.kill()


@task
def break_control_loop():
    """Whatever a defect in ours may do: the next turn of the child's loop raises."""
    sys.modules["__main__"].Child._turn = None


@task
def be_stuck(note):
    """In C code, where nothing can interrupt it."""
    Mark.objects.create(note=note)
    time.sleep(3_600)


@task
def leave_orphans(count, directory):
    """Start processes that outlive the process that started them, and say so by a file each."""
    script = 'for number in $(seq "$1"); do (sleep 0.01; : > "$2/$number") & done'
    subprocess.run(["sh", "-c", script, "orphans", str(count), directory], check=True)


@task
def say(text):
    raise ValueError(text)


def _wait_for_ever():
    multiprocessing.Event().wait()


def _wait_for(key):
    with connection.cursor() as cursor:
        # Of the transaction, so that a pooled session that outlives a killed process does not keep it.
        cursor.execute("SELECT pg_advisory_xact_lock_shared(%s)", [key])
