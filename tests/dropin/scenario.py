"""
Use every documented feature of Django's Tasks framework, and print what could be observed, as JSON.

    python scenario.py 'db_worker --batch' 'db_worker --batch --backend reports'

Each feature below is a generator: what it yields first is seen before the workers have run, what it yields
next is seen after them. Nothing here knows which backend runs the tasks, but for what the framework itself
lets a project ask: ``supports_defer`` and ``supports_get_result``.
"""

import asyncio
import json
import shlex
import subprocess
import sys
from datetime import datetime, timedelta
from functools import partial

import django

django.setup()

from django.core.checks import run_checks  # noqa: E402
from django.db import connection, transaction  # noqa: E402
from django.utils import timezone  # noqa: E402
from library import tasks  # noqa: E402
from library.framework import (  # noqa: E402
    InvalidTask,
    InvalidTaskBackend,
    TaskContext,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    default_task_backend,
    task,
    task_backends,
)
from library.models import Event, Loan  # noqa: E402

FEATURES = []


def feature(function=None, *, needs=()):
    """Register a feature; it is left out if the default backend lacks one of *needs*."""
    if function is None:
        return partial(feature, needs=needs)
    if all(getattr(default_task_backend, need) for need in needs):
        FEATURES.append(function)
    return function


def describe(result):
    """What of a result does not depend on chance."""
    try:
        value = result.return_value
    except ValueError:
        value = "raises ValueError"
    moments = [result.enqueued_at, result.started_at, result.last_attempted_at, result.finished_at]
    known = [moment for moment in moments if moment is not None]
    return {
        "is a TaskResult": isinstance(result, TaskResult),
        "id is text": isinstance(result.id, str),
        "status": TaskResultStatus(result.status).value,
        "task": [result.task.name, result.task.module_path, result.task.priority, result.task.queue_name],
        "task's backend": result.task.backend,
        "backend": result.backend,
        "args": result.args,
        "kwargs": result.kwargs,
        "is finished": result.is_finished,
        "attempts": result.attempts,
        "workers": len(result.worker_ids),
        "errors": [[error.exception_class_path, error.traceback.splitlines()[-1]] for error in result.errors],
        "return value": value,
        "moments": [moment is not None for moment in moments],
        "moments in order": known == sorted(known) and all(timezone.is_aware(moment) for moment in known),
    }


def fresh(result):
    if result.task.get_backend().supports_get_result:
        result.refresh()
    return result


RAISED = {  # the backport has other names for some
    "InvalidTask": InvalidTask,
    "InvalidTaskBackend": InvalidTaskBackend,
    "TaskResultDoesNotExist": TaskResultDoesNotExist,
    "TaskResultMismatch": TaskResultMismatch,
    "TypeError": TypeError,
    "ValueError": ValueError,
}


def raised(call, *args, **kwargs):
    """The name of what a call raises."""
    try:
        call(*args, **kwargs)
    except tuple(RAISED.values()) as error:
        return next(name for name, kind in RAISED.items() if isinstance(error, kind))
    return "nothing"


def events(result):
    found = Event.objects.filter(result_id=result.id).order_by("pk")
    return [[event.signal, event.status] for event in found]


# ---- enqueue


@feature
def a_bare_task():
    result = tasks.lend.enqueue("Emma", days=7)
    yield describe(result)
    yield describe(fresh(result)), Loan.objects.filter(title="Emma").count()


@feature
def a_task_without_arguments_or_result():
    result = tasks.nothing.enqueue()
    yield describe(result)
    yield describe(fresh(result))


@feature
def a_task_with_queue_and_priority():
    result = tasks.remind.enqueue("Ada")
    yield describe(result)
    yield describe(fresh(result))


@feature
def aenqueue():
    result = asyncio.run(tasks.lend.aenqueue("Persuasion"))
    yield describe(result)
    yield describe(fresh(result)), Loan.objects.filter(title="Persuasion").count()


@feature
def arguments_are_json():
    value = {"list": [1, 2.5, None, True], "nested": {"text": "ä \u2603"}, "tuple": (1, 2)}
    result = tasks.echo.enqueue(value)
    yield describe(result), raised(tasks.echo.enqueue, object()), raised(tasks.echo.enqueue, {1, 2})
    yield describe(fresh(result))


@feature
def using():
    changed = tasks.lend.using(priority=-5, queue_name="email", backend="default")
    result = changed.enqueue("Sanditon")
    yield (
        describe(result),
        changed.priority,
        tasks.lend.priority,
        changed is tasks.lend,
        changed.func is tasks.lend.func,
    )
    yield describe(fresh(result))


@feature
def what_a_task_knows_of_itself():
    known = tasks.remind
    yield known.name, known.module_path, known.queue_name, known.priority, known.backend, known.run_after
    yield known.takes_context, tasks.report.takes_context, known.get_backend().alias


@feature
def what_is_refused():
    def nested():
        pass

    def without_context(number):
        pass

    without_context.__qualname__ = "without_context"
    yield {
        "priority too high": raised(tasks.lend.using, priority=101),
        "priority too low": raised(tasks.lend.using, priority=-101),
        "unknown queue": raised(tasks.lend.using, queue_name="nowhere"),
        "unknown backend": raised(tasks.lend.using, backend="nowhere"),
        "nested function": raised(task, nested),
        "context missing": raised(task(takes_context=True), without_context),
    }
    yield None


@feature(needs=["supports_defer"])
def run_after():
    now = timezone.now()
    future = tasks.lend.using(run_after=now + timedelta(days=1)).enqueue("tomorrow")
    past = tasks.lend.using(run_after=now - timedelta(hours=1)).enqueue("an hour ago")
    naive = raised(tasks.lend.using, run_after=datetime(2030, 1, 1))
    yield describe(future), future.task.run_after == now + timedelta(days=1), describe(past), naive
    yield describe(fresh(future)), describe(fresh(past))


@feature(needs=["supports_defer"])
def priority_decides_the_order():
    results = [tasks.lend.using(priority=n).enqueue(f"priority {n}") for n in (-100, 5, 100, -1, 5)]
    yield len(results)
    ids = {result.id: result.task.priority for result in results}
    started = Event.objects.filter(signal="started", result_id__in=ids).order_by("pk")
    yield [ids[event.result_id] for event in started]


# ---- transactions


@feature(needs=["supports_get_result"])
def a_rollback_takes_the_task_along():
    try:
        with transaction.atomic():
            result = tasks.lend.enqueue("rolled back")
            raise tasks.LoanRefused
    except tasks.LoanRefused:
        pass
    yield raised(tasks.lend.get_result, result.id)
    yield Loan.objects.filter(title="rolled back").count()


@feature
def enqueue_on_commit():
    with transaction.atomic():
        transaction.on_commit(partial(tasks.lend.enqueue, title="on commit"))
        before = Event.objects.filter(task_name="lend").count()
    yield Event.objects.filter(task_name="lend").count() > before
    yield Loan.objects.filter(title="on commit").count()


# ---- results


@feature(needs=["supports_get_result"])
def get_result():
    result = tasks.lend.enqueue("Lady Susan")
    found = tasks.lend.get_result(result.id)
    yield describe(found), found.id == result.id, describe(asyncio.run(tasks.lend.aget_result(result.id)))
    yield (
        describe(tasks.lend.get_result(result.id)),
        describe(asyncio.run(tasks.lend.aget_result(result.id))),
        describe(default_task_backend.get_result(result.id)),
        describe(asyncio.run(default_task_backend.aget_result(result.id))),
    )


@feature(needs=["supports_get_result"])
def results_that_are_not_there():
    result = tasks.lend.enqueue("Love and Freindship")
    yield [
        raised(tasks.lend.get_result, "no such id"),
        raised(tasks.lend.get_result, "7b0e6f5c-2f5b-4f0e-9a53-6f1f4c2f3b11"),
        raised(tasks.echo.get_result, result.id),
        raised(lambda: asyncio.run(tasks.echo.aget_result(result.id))),
        raised(lambda: asyncio.run(tasks.echo.aget_result("no such id"))),
    ]
    yield None


@feature(needs=["supports_get_result"])
def refresh():
    first, second = tasks.lend.enqueue("Lesley Castle"), tasks.lend.enqueue("Evelyn")
    yield first.is_finished, raised(lambda: first.return_value)
    before = first.status
    first.refresh()
    asyncio.run(second.arefresh())
    yield before, describe(first), describe(second)


# ---- context, errors, async


@feature
def context():
    result = tasks.report.enqueue("May")
    yield raised(tasks.report.enqueue, object())
    yield describe(fresh(result))


@feature
def errors():
    result = tasks.refuse.enqueue("Ada")
    yield None
    fresh(result)
    [error] = result.errors
    yield (
        describe(result),
        error.exception_class is tasks.LoanRefused,
        "in refuse" in error.traceback,
        Loan.objects.filter(title="refused to Ada").count(),
    )


@feature
def a_task_that_raises_what_is_no_exception():
    result = tasks.end_the_process.enqueue()
    yield None
    yield describe(fresh(result))


@feature
def a_result_that_is_no_json():
    result = tasks.return_what_is_no_json.enqueue()
    yield None
    yield fresh(result).status, len(result.errors), raised(lambda: result.return_value)


@feature
def async_tasks():
    lent, told, refused = (
        tasks.lend_async.enqueue("Catharine"),
        tasks.tell_attempt_async.enqueue(),
        asyncio.run(tasks.refuse_async.aenqueue("Ada")),
    )
    yield None
    yield [describe(fresh(result)) for result in (lent, told, refused)]


@feature
def tasks_that_enqueue():
    result = tasks.lend_another.enqueue("The Watsons")
    yield None
    yield describe(fresh(result)), Loan.objects.filter(title="The Watsons").count()


@feature
def calling_a_task():
    yield tasks.echo.call(1), asyncio.run(tasks.echo.acall(2)), raised(lambda: tasks.echo(3))
    yield tasks.lend_async.call("called"), asyncio.run(tasks.lend_async.acall("called"))


@feature
def calling_a_task_that_takes_context():
    given = TaskContext(task_result=tasks.at_once.enqueue(1))
    yield tasks.tell_attempt_async.call(given)
    yield asyncio.run(tasks.tell_attempt_async.acall(given))


# ---- signals, checks, backends


@feature
def signals():
    results = [tasks.lend.enqueue("Mansfield Park"), tasks.refuse.enqueue("Bob"), tasks.lend_async.enqueue("Emma II")]
    yield [events(result)[0] for result in results]
    yield [events(result) for result in results]


@feature
def checks():
    yield [message.id for message in run_checks()]
    yield None


@feature
def several_backends():
    yield sorted(task_backends), [task_backends[alias].alias for alias in sorted(task_backends)]
    yield (
        default_task_backend.alias,
        tasks.report.get_backend() is task_backends["reports"],
        raised(lambda: task_backends["nowhere"]),
    )


@feature(needs=["supports_get_result", "supports_defer"])
def what_a_backend_can_do():
    names = ("supports_defer", "supports_async_task", "supports_get_result", "supports_priority")
    yield {name: getattr(default_task_backend, name) for name in names}
    yield None


@feature
def djangos_own_backends():
    ran, kept = tasks.at_once.enqueue(1), tasks.never.enqueue(1)
    yield describe(ran), describe(kept), [result.id for result in task_backends["dummy"].results] == [kept.id]
    task_backends["dummy"].clear()
    yield len(task_backends["dummy"].results)


# ----


def main(workers):
    running = [(function.__name__, function()) for function in FEATURES]
    before = {name: next(steps) for name, steps in running}
    connection.close()
    for worker in workers:
        subprocess.run([sys.executable, "-m", "django", *shlex.split(worker)], check=True, stdout=sys.stderr)
    after = {name: next(steps) for name, steps in running}
    print(json.dumps({"before": before, "after": after}))


if __name__ == "__main__":
    main(sys.argv[1:])
