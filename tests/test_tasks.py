import functools
import pickle
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone

import django
import pytest
from asgiref.sync import async_to_sync

from django_pgqueue import Context, Fail, Retry, Task, task
from django_pgqueue.backoff import default_delay
from django_pgqueue.compat import InvalidTask, TaskContext, TaskResultStatus
from django_pgqueue.models import Job
from django_pgqueue.testing import run_jobs

from .app import tasks
from .app.models import Mark

NEXT_YEAR = datetime(datetime.now().year + 1, 1, 1, tzinfo=UTC)
EVERY_BACKEND = ["default", "immediate", "dummy"]


def work():
    """A function that can be a task."""


def work_in_context(context):
    """One that takes the context."""


async def wait_a_little(error, task_result):
    """No rule: the worker does not await it."""


class Callable:
    def __call__(self):
        """Looks like a function."""


anonymous = task(lambda: None)


# ---- the decorator


@pytest.mark.parametrize("decorate", [task, task()], ids=["bare", "called"])
def test_a_task_without_settings_has_djangos_defaults_and_leaves_the_rest_to_the_backend(decorate):
    made = decorate(work)

    assert (made.func, made.priority, made.queue_name, made.backend) == (work, 0, "default", "default")
    assert (made.run_after, made.takes_context) == (None, False)
    assert (made.max_attempts, made.backoff, made.timeout) == (None, None, None)


def test_a_task_keeps_its_settings():
    made = task(
        priority=-100, queue_name="email", takes_context=True, max_attempts=1, backoff=default_delay, timeout=30
    )(work_in_context)

    assert (made.priority, made.queue_name, made.takes_context) == (-100, "email", True)
    assert (made.max_attempts, made.backoff, made.timeout) == (1, default_delay, 30)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_the_decorator_makes_our_task_whatever_the_backend(backend):
    made = task(backend=backend, max_attempts=3)(work)

    assert type(made) is Task
    assert made.max_attempts == 3


def test_a_task_has_the_name_and_path_of_its_function():
    assert (tasks.add.name, tasks.add.module_path) == ("add", "tests.app.tasks.add")


WRONG_SETTINGS = [
    *[("max_attempts", value) for value in (0, -1, 1.5, True, "3", 2**31, float("inf"))],
    *[("backoff", value) for value in (-1, timedelta(-1), "15", float("nan"), True, wait_a_little)],
    *[("timeout", value) for value in (0, -1, 1.5, True, "60", timedelta(minutes=1))],
    *[("priority", value) for value in (True, 1.5, "3", None)],
    *[("queue_name", value) for value in ("", "q" * 129, None, 5)],
]


@pytest.mark.parametrize(("name", "value"), WRONG_SETTINGS, ids=lambda value: f"{value!r:.30}")
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_a_wrong_setting_is_refused_where_the_task_is_defined(name, value, backend):
    with pytest.raises(InvalidTask, match=f"^work: {name} must be") as refusal:
        task(backend=backend, **{name: value})(work)

    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize("priority", [101, -101, 2**40])
def test_a_priority_beyond_100_is_refused(priority):
    with pytest.raises(InvalidTask, match="between -100 and 100"):
        task(priority=priority)(work)


def test_a_queue_that_the_backend_does_not_have_is_refused():
    with pytest.raises(InvalidTask, match="'unknown' is not valid"):
        task(queue_name="unknown")(work)


@pytest.mark.parametrize("name", ["a\x00b", "\ud800"], ids=ascii)
def test_a_queue_whose_name_cannot_be_stored_is_refused(settings, name):
    settings.TASKS = {"default": {"BACKEND": "django_pgqueue.PgQueueBackend", "QUEUES": []}}

    with pytest.raises(InvalidTask, match="queue"):
        task(queue_name=name)(work)


@pytest.mark.parametrize("misspelt", ["max_attempt", "retries", "run_after", "queue"])
def test_a_setting_that_does_not_exist_is_refused(misspelt):
    with pytest.raises(TypeError, match=misspelt):
        task(**{misspelt: 1})(work)


@pytest.mark.parametrize("thing", [functools.partial(work), Callable(), task(work), 5], ids=repr)
def test_only_a_function_can_be_a_task(thing):
    with pytest.raises(InvalidTask, match="A task must be a function"):
        task()(thing)


@pytest.mark.parametrize("thing", [len, Callable, Callable().__call__], ids=repr)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_only_a_function_of_a_module_can_be_a_task(thing, backend):
    def inner():
        """Nobody finds it by its path."""

    for function in (thing, inner):
        with pytest.raises(InvalidTask, match="module level"):
            task(backend=backend)(function)


def test_a_task_that_takes_the_context_has_it_as_its_first_argument():
    with pytest.raises(InvalidTask, match="first argument of 'context'"):
        task(takes_context=True)(work)


def test_a_path_that_is_longer_than_its_column_is_refused():
    def longest():
        """Renamed below."""

    longest.__qualname__ = "f" * (512 - len(f"{__name__}."))
    task(longest)

    longest.__qualname__ += "f"
    with pytest.raises(InvalidTask, match="path may have at most 512 characters"):
        task(longest)


def test_a_task_that_no_worker_could_find_is_refused_at_enqueue(db):
    elsewhere = task(work)

    for unreachable in (elsewhere, anonymous):
        with pytest.raises(InvalidTask, match=r"No worker could run this task: .* not in a module of an installed app"):
            unreachable.enqueue()
        with pytest.raises(InvalidTask, match=r"No worker could run this task"):
            unreachable.enqueue_many([[]])

    assert not Job.objects.exists()


def test_a_task_whose_path_names_another_one_by_now_is_refused_at_enqueue(db):
    def impostor(a, b):
        """Stands where add() stands."""

    impostor.__module__, impostor.__qualname__ = tasks.add.func.__module__, tasks.add.func.__qualname__

    with pytest.raises(InvalidTask, match=r"'tests\.app\.tasks\.add' is another task by now"):
        task(impostor).enqueue(1, 2)

    assert not Job.objects.exists()


if django.VERSION >= (6, 1):

    def test_a_task_can_be_pickled():
        urgent = tasks.send_receipt.using(priority=1)

        assert pickle.loads(pickle.dumps(urgent)) == replace(tasks.send_receipt, priority=1)


# ---- using()


def test_using_changes_djangos_four_settings_of_a_copy():
    changed = tasks.send_receipt.using(priority=1, queue_name="slow", run_after=NEXT_YEAR, backend="default")

    assert (changed.priority, changed.queue_name, changed.run_after) == (1, "slow", NEXT_YEAR)
    assert (changed.max_attempts, changed.backoff, changed.timeout) == (2, 3, 60)
    assert (tasks.send_receipt.priority, tasks.send_receipt.queue_name) == (20, "email")


def test_using_can_say_priority_zero():
    assert tasks.send_receipt.using(priority=0).priority == 0


@pytest.mark.parametrize("setting", ["max_attempts", "backoff", "timeout", "takes_context", "func"])
def test_using_cannot_change_anything_else(setting):
    with pytest.raises(TypeError, match=setting):
        tasks.add.using(**{setting: 1})


@pytest.mark.parametrize(
    "run_after",
    [
        datetime(2099, 1, 1),
        date(2099, 1, 1),
        timedelta(days=3),
        "2099-01-01",
        4_070_908_800,
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),  # in UTC, the year 10,000
        datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
    ],
    ids=repr,
)
def test_run_after_is_an_aware_datetime_or_refused(run_after):
    with pytest.raises(InvalidTask, match="run_after must be"):
        tasks.add.using(run_after=run_after)


@pytest.mark.parametrize("setting", [{"priority": 101}, {"priority": 1.5}, {"queue_name": "unknown"}])
def test_using_is_checked_at_once(setting):
    with pytest.raises(InvalidTask):
        tasks.add.using(**setting)


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(Exception, match="'nowhere' doesn't exist"):
        tasks.add.using(backend="nowhere")


# ---- calling


def test_a_task_can_be_called_without_a_queue():
    assert tasks.add.call(1, b=2) == 3
    assert tasks.add_async.call(1, b=2) == 3
    assert async_to_sync(tasks.add.acall)(1, b=2) == 3
    assert async_to_sync(tasks.add_async.acall)(1, b=2) == 3


def test_a_task_that_takes_the_context_gets_ours_from_any_backend():
    result = tasks.add.using(backend="dummy").enqueue(1, 2)
    plain = TaskContext(task_result=result)

    told = [tasks.tell_context.call(plain), async_to_sync(tasks.tell_context_async.acall)(plain)]

    assert [(each["attempt"], each["cancelled"]) for each in told] == [(0, False), (0, False)]


def test_a_context_of_ours_is_passed_on_as_it_is():
    result = tasks.add.using(backend="dummy").enqueue(1, 2)
    cancelled = Context(task_result=result, is_cancelled=lambda: True)

    assert tasks.tell_context.call(cancelled)["cancelled"] is True


# ---- Django's ImmediateBackend and DummyBackend


def test_our_tasks_run_under_the_immediate_backend(db):
    result = tasks.send_receipt.using(backend="immediate").enqueue(7)

    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, "receipt 7")
    assert not Job.objects.exists()


def test_async_tasks_and_the_context_work_under_the_immediate_backend():
    assert tasks.add_async.using(backend="immediate").enqueue(1, 2).return_value == 3
    assert async_to_sync(tasks.add_async.using(backend="immediate").aenqueue)(1, 2).return_value == 3
    assert tasks.tell_context.using(backend="immediate").enqueue("seen").return_value["seen"] == ["seen"]
    told = tasks.tell_context_async.using(backend="immediate").enqueue().return_value
    assert told == {"attempt": 1, "cancelled": False}


@pytest.mark.parametrize("error", [Retry(5), Fail("no")], ids=repr)
def test_retry_and_fail_end_a_task_under_the_immediate_backend(error):
    def end():
        raise error

    tasks.ACTS["end"] = end
    result = tasks.act.using(backend="immediate").enqueue("end")

    assert result.status == TaskResultStatus.FAILED
    assert result.errors[0].exception_class is type(error)


def test_our_tasks_are_kept_by_the_dummy_backend():
    dummy = tasks.send_receipt.using(backend="dummy")

    result = dummy.enqueue(7)

    assert result.status == TaskResultStatus.READY
    assert dummy.get_backend().get_result(result.id).args == [7]


@pytest.mark.parametrize("backend", ["immediate", "dummy"])
def test_only_our_backend_enqueues_many_at_once(backend):
    with pytest.raises(NotImplementedError, match="Backend cannot enqueue many"):
        tasks.add.using(backend=backend).enqueue_many([[1, 2]])


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(
    ("value", "error"), [({1}, TypeError), ("\x00", ValueError), ({1: 2}, TypeError), ("x" * 2**20, ValueError)]
)
def test_every_backend_refuses_what_production_would_refuse(db, backend, value, error):
    confirm_order = tasks.confirm_order.using(backend=backend)

    with pytest.raises(error, match=r"[Aa]rgument.* of confirm_order\(\)"):
        confirm_order.enqueue(value)
    with pytest.raises(TypeError, match="missing a required argument: 'number'"):
        confirm_order.enqueue()

    assert not Job.objects.exists()
    assert not Mark.objects.exists()


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_every_backend_refuses_it_when_awaited(backend):
    confirm_order = tasks.confirm_order.using(backend=backend)

    with pytest.raises(TypeError, match=r"^Argument 'number' of confirm_order\(\) holds a set"):
        async_to_sync(confirm_order.aenqueue)({1})


# ---- Django's own decorator


def test_a_task_of_djangos_own_decorator_runs_on_our_backend(db):
    result = tasks.plain_add.enqueue(1, b=2)
    told = tasks.plain_tell_attempt.enqueue()

    ran = run_jobs()

    assert [each.return_value for each in ran] == [3, 1]
    assert result.task.priority == 5
    assert tasks.plain_add.get_result(result.id).status == TaskResultStatus.SUCCESSFUL
    assert tasks.plain_tell_attempt.get_result(told.id).task == tasks.plain_tell_attempt


@pytest.mark.parametrize(("value", "error"), [({1}, TypeError), ("\x00", ValueError)])
def test_a_task_of_djangos_own_decorator_has_its_arguments_checked(db, value, error):
    with pytest.raises(error, match=r"^Argument 'a' of plain_add\(\)"):
        tasks.plain_add.enqueue(value, 2)

    assert not Job.objects.exists()


def test_djangos_own_decorator_makes_our_task():
    assert type(tasks.plain_add) is Task


if (6, 0) <= django.VERSION < (6, 1):

    def test_the_decorator_of_django_6_0_knows_no_further_settings():
        with pytest.raises(TypeError, match="max_attempts"):
            tasks.django_task(max_attempts=3)(work)

else:

    def test_djangos_own_decorator_takes_our_settings():
        made = tasks.django_task(max_attempts=3, backoff=7)(work)

        assert (made.max_attempts, made.backoff) == (3, 7)
        with pytest.raises(InvalidTask, match="max_attempts"):
            tasks.django_task(max_attempts=0)(work)
