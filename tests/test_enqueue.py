from datetime import UTC, datetime, timedelta
from enum import IntEnum

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import DatabaseError, connection, models, transaction
from django.db.migrations.executor import MigrationExecutor
from django.test import TestCase
from django.utils import timezone

from django_pgqueue.backend import PgQueueBackend
from django_pgqueue.compat import BaseTaskBackend, InvalidTask, TaskResultStatus, task_enqueued
from django_pgqueue.models import Job
from django_pgqueue.statements.database import CHANNEL
from django_pgqueue.statements.enqueue import BULK_ROWS
from django_pgqueue.tasks import rerouted
from django_pgqueue.testing import run_jobs

from .app import tasks
from .app.models import Mark
from .helpers import (
    PATIENCE_SECONDS,
    InThread,
    backend,
    database_alias,
    enqueue,
    fall_asleep,
    here,
    make_due,
    row,
    second_connection,
    sql,
)

HOUR = timedelta(hours=1)

committing = pytest.mark.django_db(transaction=True)


class Change(Exception):
    """Of mind: rolls a block back."""


class Queue(models.TextChoices):
    EMAIL = "email"


class Urgency(IntEnum):
    HIGH = 50


def counts(observer):
    """Rows of business and of jobs, as another connection sees them."""
    return sql(observer, "SELECT (SELECT count(*) FROM app_mark), (SELECT count(*) FROM django_pgqueue_job)")[0]


def place_order(number):
    Mark.objects.create(note=f"order {number}")
    return tasks.confirm_order.enqueue(number)


# ---- the caller's transaction


@committing
def test_a_job_commits_with_the_rows_of_its_transaction():
    """R01"""
    with second_connection() as observer:
        with transaction.atomic():
            place_order(1)
            before = counts(observer)
        after = counts(observer)

    assert (before, after) == ((0, 0), (1, 1))


@committing
def test_outside_a_transaction_a_job_commits_at_once():
    """R01"""
    with second_connection() as observer:
        place_order(1)

        assert counts(observer) == (1, 1)


@committing
def test_a_rolled_back_transaction_takes_its_jobs_with_it():
    """R01"""
    with pytest.raises(Change), transaction.atomic():
        place_order(1)
        tasks.add.enqueue_many([[1, 2]] * 3)
        raise Change

    assert (Mark.objects.count(), Job.objects.count()) == (0, 0)


@committing
def test_a_rolled_back_savepoint_takes_its_jobs_with_it_and_no_others():
    """R01"""
    with transaction.atomic():
        place_order(1)
        with pytest.raises(Change), transaction.atomic():
            place_order(2)
            tasks.add.enqueue_many([[1, 2]] * 3)
            raise Change
        place_order(3)

    assert list(Job.objects.order_by("id").values_list("args", flat=True)) == [[1], [3]]
    assert list(Mark.objects.order_by("id").values_list("note", flat=True)) == ["order 1", "order 3"]


@committing
def test_an_error_of_the_database_after_the_enqueue_takes_the_job_with_it():
    """R01"""
    with pytest.raises(DatabaseError), transaction.atomic():
        place_order(1)
        here("SELECT 1/0")

    assert (Mark.objects.count(), Job.objects.count()) == (0, 0)


@committing
def test_awaiting_an_enqueue_stays_in_the_transaction():
    """R01"""
    with pytest.raises(Change), transaction.atomic():
        async_to_sync(tasks.add.aenqueue)(1, 2)
        assert Job.objects.count() == 1
        raise Change

    assert Job.objects.count() == 0


@committing
def test_each_thread_enqueues_in_its_own_transaction():
    """R01"""
    with transaction.atomic():
        place_order(1)
        elsewhere = InThread(lambda: place_order(2)).result()
        transaction.set_rollback(True)

    assert list(Job.objects.values_list("id", "args")) == [(int(elsewhere.id), [2])]


def test_enqueueing_needs_no_hook_at_commit(db):
    """R01"""
    place_order(1)

    assert connection.run_on_commit == []
    assert Job.objects.count() == 1


class OrderTest(TestCase):
    """R01: Django's own TestCase, which never commits."""

    def test_a_job_is_there_at_once(self):
        with self.captureOnCommitCallbacks() as callbacks:
            place_order(1)

        assert callbacks == []
        assert Job.objects.count() == 1

    def test_a_job_is_gone_in_the_next_test(self):
        self.test_a_job_is_there_at_once()


@pytest.fixture
def on_other(settings):
    """The backend of a second database."""
    settings.TASKS = {"default": backend(DATABASE="other")}


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_the_transaction_that_counts_is_that_of_the_database_with_the_jobs(on_other):
    """R01"""
    with pytest.raises(Change), transaction.atomic(using="other"):
        tasks.add.enqueue(1, 2)
        raise Change
    with pytest.raises(Change), transaction.atomic(using="default"):
        kept = tasks.add.enqueue(3, 4)
        raise Change

    assert list(Job.objects.using("other").values_list("id", "args")) == [(int(kept.id), [3, 4])]
    assert not Job.objects.using("default").exists()


@pytest.mark.django_db(databases=["default", "other"])
def test_jobs_of_a_second_database_run_and_can_be_read(on_other):
    result = tasks.add.enqueue(1, 2)
    many = tasks.add.enqueue_many([[3, 4]])

    ran = run_jobs()

    assert [each.return_value for each in ran] == [3, 7]
    assert tasks.add.get_result(result.id).status == TaskResultStatus.SUCCESSFUL
    assert Job.objects.using("other").filter(id__in=[result.id, *many], status="done").count() == 2


class JobsOnOther:
    """A router for the jobs alone."""

    def db_for_write(self, model, **hints):
        return "other" if model._meta.app_label == "django_pgqueue" else None

    db_for_read = db_for_write


@pytest.mark.django_db(databases=["default", "other"])
def test_without_the_option_the_router_decides_which_database_has_the_jobs(settings):
    settings.DATABASE_ROUTERS = [JobsOnOther()]

    tasks.confirm_order.enqueue(1)
    [ran] = run_jobs()

    assert ran.status == TaskResultStatus.SUCCESSFUL
    assert Job.objects.using("other").count() == 1
    assert Job.objects.using("default").count() == 0
    assert Mark.objects.using("default").count() == 1


@committing
def test_jobs_live_in_whatever_schema_the_search_path_says(settings):
    settings.TASKS = {"default": backend(DATABASE="in_schema")}
    here("CREATE SCHEMA app_schema")
    try:
        with database_alias("in_schema", options="-c search_path=app_schema") as in_schema:
            MigrationExecutor(in_schema).migrate([("django_pgqueue", "0001_initial")])

            ids = [tasks.add.enqueue(1, 2).id, *map(str, tasks.add.enqueue_many([[3, 4]]))]
            ran = run_jobs()

            assert [(each.id, each.return_value) for each in ran] == list(zip(ids, [3, 7], strict=True))
            assert here("SELECT count(*) FROM app_schema.django_pgqueue_job WHERE status = 'done'") == [(2,)]
            assert here("SELECT count(*) FROM public.django_pgqueue_job") == [(0,)]
            MigrationExecutor(in_schema).migrate([("django_pgqueue", None)])
    finally:
        here("SET client_min_messages = warning; DROP SCHEMA app_schema CASCADE; RESET client_min_messages")


# ---- what is refused


REFUSED_CALLS = {
    "NUL": (lambda: tasks.echo.enqueue("a\x00b"), ValueError, "Argument 'value'"),
    "NUL in a key": (lambda: tasks.echo.enqueue({"k\x00": 1}), ValueError, "Argument 'value'"),
    "NUL in a name": (lambda: tasks.take_anything.enqueue(**{"k\x00": 1}), ValueError, "name of an argument"),
    "lone surrogate": (lambda: tasks.echo.enqueue("\ud800"), ValueError, "Argument 'value'"),
    "NaN": (lambda: tasks.echo.enqueue([float("nan")]), ValueError, "Argument 'value'"),
    "bytes": (lambda: tasks.echo.enqueue(b"\xff"), ValueError, "Argument 'value'"),
    "set": (lambda: tasks.echo.enqueue({1}), TypeError, "Argument 'value'"),
    "model instance": (lambda: tasks.echo.enqueue(Group(name="a row")), TypeError, "Argument 'value'"),
    "queryset": (lambda: tasks.echo.enqueue(Group.objects.all()), TypeError, "Argument 'value'"),
    "keys": (lambda: tasks.echo.enqueue({1: 2}), TypeError, "Argument 'value'"),
    "20 MB": (lambda: tasks.echo.enqueue("x" * 20_000_000), ValueError, "more than the 1,048,576"),
    "signature": (lambda: tasks.echo.enqueue(1, 2), TypeError, "cannot be called like this"),
    "queue": (lambda: tasks.add.using(queue_name="unknown").enqueue(1, 2), InvalidTask, "unknown"),
    "run_after": (lambda: tasks.add.using(run_after=HOUR).enqueue(1, 2), InvalidTask, "run_after"),
    "naive": (lambda: tasks.add.using(run_after=datetime(2099, 1, 1)).enqueue(1, 2), InvalidTask, "aware"),
    "awaited": (lambda: async_to_sync(tasks.echo.aenqueue)("\x00"), ValueError, "Argument 'value'"),
    "one of many": (lambda: tasks.echo.enqueue_many([[1], ["\x00"]]), ValueError, "Call 1: Argument 'value'"),
    "no call": (lambda: tasks.echo.enqueue_many([[1], "xyz"]), TypeError, "Call 1 must be a list or tuple"),
}


@committing
@pytest.mark.parametrize(("call", "error", "complaint"), REFUSED_CALLS.values(), ids=REFUSED_CALLS.keys())
def test_what_is_refused_is_refused_before_any_sql_and_the_transaction_goes_on(
    django_assert_num_queries, call, error, complaint
):
    with transaction.atomic():
        Mark.objects.create(note="before")
        with django_assert_num_queries(0), pytest.raises(error, match=complaint):
            call()
        Mark.objects.create(note="after")

    assert (Mark.objects.count(), Job.objects.count()) == (2, 0)


def test_a_queue_that_has_been_removed_since_is_refused_at_enqueue(db, settings):
    settings.TASKS = {"default": backend("default")}
    tasks.add.enqueue(1, 2)

    for _ in range(2):
        with pytest.raises(InvalidTask, match="'email' is not valid"):
            tasks.send_receipt.enqueue(1)
        with pytest.raises(InvalidTask, match="'email' is not valid"):
            tasks.send_receipt.enqueue_many([[1]])

    assert [job.queue_name for job in Job.objects.all()] == ["default"]


def test_a_task_is_refused_whatever_valid_one_it_was_made_from(db):
    tasks.add.enqueue(1, 2)

    with pytest.raises(InvalidTask, match="whole number"):
        rerouted(tasks.add, priority=101).enqueue(1, 2)


def test_many_tasks_are_told_from_each_other(db, monkeypatch):
    monkeypatch.setattr("django_pgqueue.backend.MAX_VALID", 2)
    made = [tasks.add.using(priority=priority) for priority in range(5)]

    for task in made + made[::-1]:
        task.enqueue(1, 2)

    assert [job.priority for job in Job.objects.order_by("id")] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]


# ---- the row


def test_a_job_is_a_row_that_plain_sql_can_read(db):
    """R02"""
    result = tasks.send_receipt.enqueue(123)

    [found] = here(
        "SELECT id::text, backend, queue_name, task_path, args, kwargs, status, priority, attempts, max_attempts,"
        "       claim_version, claimed_by, claimed_at, lease_until, last_error, started_at, finished_at"
        "  FROM django_pgqueue_job WHERE args->>0 = '123'"
    )

    assert found == (
        *(result.id, "default", "email", "tests.app.tasks.send_receipt", "[123]", "{}", "pending", 20, 0, 2),
        *(0, None, None, None, None, None, None),
    )


def test_the_moments_of_a_job_are_those_of_the_clock_not_of_the_transaction(db):
    """R02"""
    result = tasks.add.enqueue(1, 2)

    [(created, available, began)] = here("SELECT created_at, available_at, now() FROM django_pgqueue_job")

    assert began < available <= created
    assert result.enqueued_at == created


def test_max_attempts_is_the_tasks_or_the_backends(db, settings):
    settings.TASKS = {"default": backend(MAX_ATTEMPTS=7)}

    ids = [tasks.send_receipt.enqueue(1).id, tasks.add.enqueue(1, 2).id, tasks.plain_add.enqueue(1, 2).id]

    assert [row(job_id, "max_attempts") for job_id in ids] == [(2,), (7,), (7,)]


def test_a_queue_and_a_priority_may_be_members_of_an_enumeration(db):
    routed = tasks.add.using(queue_name=Queue.EMAIL, priority=Urgency.HIGH)

    ids = [routed.enqueue(1, 2).id, *routed.enqueue_many([[1, 2]])]

    assert [row(job_id, "queue_name", "priority") for job_id in ids] == [("email", 50)] * 2


EXACT = ["", "🐟 עברית \u202e \x01\x7f", "\\u0000 \\", 0, -1, 2**63, -(2**9_000), 0.1, -2.5e-300, True, None, [], {}]


@pytest.mark.parametrize("value", EXACT, ids=lambda value: f"{value!r:.20}")
def test_arguments_and_results_come_back_as_they_went(db, value):
    result = tasks.take_anything.enqueue(value, [value], key={"deeper": value})

    [ran] = run_jobs()

    assert (ran.args, ran.kwargs) == ([value, [value]], {"key": {"deeper": value}})
    assert ran.return_value == {"args": ran.args, "kwargs": ran.kwargs}
    assert type(ran.return_value["args"][0]) is type(value)
    assert (result.args, result.kwargs) == (ran.args, ran.kwargs)


def test_jsonb_keeps_numbers_as_decimals_and_members_in_its_own_order(db):
    tasks.echo.enqueue({"long name": 1e16, "b": -0.0, "a": 1e300})

    [ran] = run_jobs()

    assert list(ran.return_value.items()) == [("a", 10**300), ("b", 0.0), ("long name", 10**16)]
    assert type(ran.return_value["a"]) is int


def test_the_secret_key_plays_no_part(db, settings):
    tasks.add.enqueue(1, 2)
    settings.SECRET_KEY = "rotated"

    [ran] = run_jobs()

    assert ran.return_value == 3


# ---- the result and the signal


def test_the_result_of_a_new_job_is_ready(db):
    result = tasks.confirm_order.enqueue(b"7", note=("a", 1))

    assert (result.status, result.backend, result.task) == (TaskResultStatus.READY, "default", tasks.confirm_order)
    assert (result.args, result.kwargs) == (["7"], {"note": ["a", 1]})
    assert (result.started_at, result.last_attempted_at, result.finished_at) == (None, None, None)
    assert (result.errors, result.worker_ids, result.attempts, result.is_finished) == ([], [], 0, False)
    assert result.id == str(Job.objects.get().pk)


@pytest.fixture
def enqueued():
    """What task_enqueued has told: senders and results."""
    told = []

    def receiver(sender, task_result, **kwargs):
        told.append((sender, task_result))

    task_enqueued.connect(receiver)
    yield told
    task_enqueued.disconnect(receiver)


def test_an_enqueue_is_signalled_once_with_its_result(db, enqueued):
    result = tasks.add.enqueue(1, 2)

    assert enqueued == [(PgQueueBackend, result)]


@pytest.mark.parametrize(("level", "told"), [("DEBUG", 1), ("INFO", 0)])
def test_without_other_receivers_an_enqueue_is_told_to_a_log_that_wants_to_hear_of_it(db, caplog, level, told):
    framework = BaseTaskBackend.__module__.partition(".backends")[0]
    with caplog.at_level(level, framework):
        result = tasks.add.enqueue(1, 2)

    assert len(caplog.records) == told
    assert all(result.id in record.getMessage() for record in caplog.records)


def test_a_receiver_in_the_place_of_the_frameworks_own_is_told(db, enqueued, monkeypatch):
    monkeypatch.setattr(task_enqueued, "receivers", task_enqueued.receivers[-1:])
    monkeypatch.setattr(task_enqueued, "sender_receivers_cache", {})

    tasks.add.enqueue(1, 2)

    assert len(enqueued) == 1


def test_an_enqueue_is_one_statement_alone_and_in_a_transaction(django_assert_num_queries, transactional_db):
    connection.close()  # a session that has enqueued often has prepared it

    with django_assert_num_queries(1) as alone:
        tasks.add.enqueue(1, 2)
    with transaction.atomic(), django_assert_num_queries(1):
        tasks.add.enqueue(1, 2)

    assert alone[0]["sql"].strip().startswith("INSERT")


def test_enqueueing_many_sends_no_signal(db, enqueued):
    tasks.add.enqueue_many([[1, 2]])

    assert enqueued == []


# ---- delays and priorities


def test_a_job_waits_for_its_moment(db):
    """R03"""
    result = tasks.add.using(run_after=timezone.now() + HOUR).enqueue(1, 2)

    early = run_jobs()
    make_due(int(result.id))
    due = run_jobs()

    assert early == []
    assert [each.id for each in due] == [result.id]


def test_the_moment_of_a_job_is_kept_exactly(db):
    """R03"""
    moment = datetime(2099, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)

    result = tasks.add.using(run_after=moment).enqueue(1, 2)

    assert row(result.id, "available_at") == (moment,)
    assert tasks.add.get_result(result.id).task.run_after == moment


@pytest.mark.parametrize("past", [timedelta(days=1), timedelta(days=365 * 500)], ids=["a day", "500 years"])
def test_a_moment_in_the_past_is_now(db, past):
    """R03"""
    result = tasks.add.using(run_after=timezone.now() - past).enqueue(1, 2)
    many = tasks.add.using(run_after=timezone.now() - past).enqueue_many([[1, 2]])
    since = here("SELECT now()")[0][0]

    assert all(row(job_id, "available_at")[0] >= since for job_id in (result.id, *many))
    assert [each.id for each in run_jobs()] == [result.id, *map(str, many)]


def test_the_last_moment_of_the_calendar_can_be_read_again(db):
    last = datetime.max.replace(tzinfo=UTC)

    result = tasks.add.using(run_after=last).enqueue(1, 2)

    assert tasks.add.get_result(result.id).task.run_after == last


def test_a_retry_waits_in_the_same_column_as_a_delay(db):
    """R03"""
    result = tasks.refuse_order.enqueue(1)

    run_jobs()

    [(status, wait)] = here("SELECT status, available_at - clock_timestamp() FROM django_pgqueue_job")
    assert status == "pending"
    assert timedelta(0) < wait <= timedelta(seconds=18)
    assert run_jobs() == []
    assert tasks.refuse_order.get_result(result.id).task.run_after is None


def test_higher_priority_runs_first_and_equals_in_the_order_of_their_enqueue(db):
    """R05"""
    for number, priority in enumerate([-100, 0, 100, 1, -1, 0, 100]):
        tasks.echo.using(priority=priority).enqueue(number)

    assert [each.return_value for each in run_jobs()] == [2, 6, 3, 1, 5, 4, 0]


def test_a_higher_priority_runs_before_what_has_waited_longer(db):
    """R05"""
    waiting = [enqueue() for _ in range(3)]
    here("UPDATE django_pgqueue_job SET available_at = available_at - interval '1 hour'")
    urgent = tasks.add.using(priority=50).enqueue(1, 2)

    assert [each.id for each in run_jobs()] == [urgent.id, *map(str, waiting)]


def test_of_equal_priority_what_was_due_first_runs_first(db):
    """R05"""
    later, sooner = enqueue(), enqueue()
    here("UPDATE django_pgqueue_job SET available_at = available_at - interval '1 hour' WHERE id = %s", [sooner])

    assert [each.id for each in run_jobs()] == [str(sooner), str(later)]


# ---- USE_TZ = False


@pytest.fixture(params=["America/Bogota", "Asia/Shanghai"])
def naive_times(request, settings):
    settings.USE_TZ = False
    settings.TIME_ZONE = request.param


def test_without_time_zones_a_naive_moment_is_local_time(db, naive_times):
    """R03"""
    due = tasks.echo.using(run_after=datetime.now() - HOUR).enqueue("due")
    waiting = tasks.echo.using(run_after=datetime.now() + HOUR).enqueue("waiting")

    ran = run_jobs()

    assert [each.id for each in ran] == [due.id]
    assert here(
        "SELECT round(extract(epoch FROM available_at - created_at) / 60) FROM django_pgqueue_job WHERE id = %s",
        [waiting.id],
    ) == [(60,)]


def test_without_time_zones_an_aware_moment_is_still_that_moment(db, naive_times):
    """R03"""
    due = tasks.echo.using(run_after=datetime.now(UTC) - HOUR).enqueue("due")
    tasks.echo.using(run_after=datetime.now(UTC) + HOUR).enqueue("waiting")

    assert [each.id for each in run_jobs()] == [due.id]


def test_without_time_zones_the_moments_of_a_result_are_naive(db, naive_times):
    told = []
    tasks.ACTS["tell"] = lambda: told.append("ran")

    new = tasks.act.enqueue("tell")
    [ran] = run_jobs()

    moments = [new.enqueued_at, ran.enqueued_at, ran.started_at, ran.last_attempted_at, ran.finished_at]
    assert told == ["ran"]
    assert all(moment.tzinfo is None for moment in moments)
    assert moments == sorted(moments)
    assert abs(moments[0] - datetime.now()) < HOUR


# ---- many at once


def test_many_jobs_have_their_ids_in_the_order_of_their_calls(db):
    calls = [[1, 2], (3, 4), {"a": 5, "b": 6}, [7, 8]]

    ids = tasks.add.enqueue_many(call for call in calls)

    assert ids == sorted(ids)
    assert [row(job_id, "args", "kwargs") for job_id in ids] == [
        ([1, 2], {}),
        ([3, 4], {}),
        ([], {"a": 5, "b": 6}),
        ([7, 8], {}),
    ]
    assert [each.return_value for each in run_jobs()] == [3, 7, 11, 15]


def test_many_jobs_with_large_arguments_go_in_several_statements(db, monkeypatch, django_assert_num_queries):
    monkeypatch.setattr("django_pgqueue.statements.enqueue.BULK_CHARS", 1_000)
    texts = ["x" * 400, "y" * 400, "z" * 400, "large" * 500, "small"]

    with django_assert_num_queries(4):
        ids = tasks.echo.enqueue_many([text] for text in texts)

    assert [row(job_id, "args")[0] for job_id in ids] == [[text] for text in texts]


def test_many_jobs_have_the_tasks_settings(db):
    moment = timezone.now() + HOUR

    [many] = tasks.send_receipt.using(run_after=moment).enqueue_many([[1]])
    one = tasks.send_receipt.using(run_after=moment).enqueue(1).id

    columns = [field.name for field in Job._meta.fields if field.name not in ("id", "created_at")]
    assert row(many, *columns) == row(one, *columns)
    assert tasks.send_receipt.get_result(many).enqueued_at > timezone.now() - HOUR


def test_many_jobs_without_a_delay_have_none(db):
    [job_id] = tasks.add.enqueue_many([[1, 2]])

    assert tasks.add.get_result(job_id).task.run_after is None


def test_no_calls_are_no_jobs(db, django_assert_num_queries):
    with django_assert_num_queries(0):
        assert tasks.add.enqueue_many([]) == []
        assert tasks.add.enqueue_many(iter(())) == []


@pytest.mark.parametrize("call", ["12", 1, None, {1, 2}, b"12", range(2)], ids=repr)
def test_a_call_is_a_list_a_tuple_or_a_dictionary(db, call):
    with pytest.raises(TypeError, match=r"^Call 2 must be a list or tuple of arguments, or a dictionary"):
        tasks.add.enqueue_many([[1, 2], [3, 4], call])

    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("call", "error", "complaint"),
    [
        ([1], TypeError, r"^Call 1: add\(\) cannot be called like this"),
        ([1, "\x00"], ValueError, r"^Call 1: Argument 'b' of add\(\) holds a NUL"),
        ({"a": 1, "b": {1}}, TypeError, r"^Call 1: Argument 'b' of add\(\) holds a set"),
    ],
)
def test_one_call_that_is_refused_refuses_them_all(db, call, error, complaint):
    with pytest.raises(error, match=complaint):
        tasks.add.enqueue_many([[1, 2], call, [3, 4]])

    assert not Job.objects.exists()


class Unreadable(dict):
    """Its members cannot be read, for a reason whose class wants more than a text."""

    def items(self):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "unreadable")


def test_a_refusal_is_reported_whatever_its_class(db):
    with pytest.raises(ValueError, match=r"^Call 0: .*unreadable"):
        tasks.echo.enqueue_many([[Unreadable(a=1)]])


def test_calls_that_break_off_leave_no_jobs(db):
    def calls():
        yield [1, 2]
        raise Change

    with pytest.raises(Change):
        tasks.add.enqueue_many(calls())

    assert not Job.objects.exists()


@committing
@pytest.mark.parametrize("server_side_binding", [False, True])
def test_twenty_thousand_jobs_are_enqueued_in_order(settings, server_side_binding):
    settings.TASKS = {"default": backend(DATABASE="bound")}
    with database_alias("bound", server_side_binding=server_side_binding):
        ids = tasks.echo.enqueue_many([n] for n in range(20_000))

    stored = here("SELECT id, (args->>0)::int FROM django_pgqueue_job ORDER BY id")
    assert stored == list(zip(ids, range(20_000), strict=True))


@committing
def test_server_side_binding_makes_no_difference(settings):
    settings.TASKS = {"default": backend(DATABASE="bound")}
    with database_alias("bound", server_side_binding=True):
        tasks.add.enqueue(1, 2)
        tasks.add.using(run_after=timezone.now() + HOUR).enqueue(3, 4)
        tasks.refuse_order.enqueue(1)
        ran = run_jobs()

        assert [each.status for each in ran] == [TaskResultStatus.SUCCESSFUL, TaskResultStatus.READY]
        assert ran[1].errors[0].exception_class is ValueError


@committing
def test_many_jobs_are_inserted_all_or_none_even_in_several_statements():
    here(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$BEGIN IF NEW.args->>0 = '{BULK_ROWS + 1}' THEN RAISE 'refused'; END IF; RETURN NEW; END$$"
    )
    here("CREATE TRIGGER refuse BEFORE INSERT ON django_pgqueue_job FOR EACH ROW EXECUTE FUNCTION refuse()")
    try:
        with pytest.raises(DatabaseError, match="refused"):
            tasks.echo.enqueue_many([n] for n in range(BULK_ROWS + 2))

        assert Job.objects.count() == 0
    finally:
        here("DROP FUNCTION refuse CASCADE")


# ---- the notification


@committing
def test_a_transaction_rings_once_for_each_queue_with_its_name_alone():
    with second_connection() as listener:
        sql(listener, f"LISTEN {CHANNEL}")
        fall_asleep(listener)
        with transaction.atomic():
            for _ in range(20):
                tasks.echo.enqueue("x" * 100_000)
                tasks.send_receipt.enqueue(1)
            tasks.add.enqueue_many([[1, 2]] * 2_000)
        with pytest.raises(Change), transaction.atomic():
            tasks.add.using(queue_name="slow").enqueue(1, 2)
            raise Change
        here("SELECT pg_notify(%s, 'the end')", [CHANNEL])

        heard = []
        for notification in listener.connection.notifies(timeout=PATIENCE_SECONDS):
            heard.append(notification.payload)
            if notification.payload == "the end":
                break

    assert sorted(heard[:-1]) == ["default", "email"]
