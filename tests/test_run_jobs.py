import logging

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.test import TestCase, TransactionTestCase

from django_pgqueue.compat import TaskResult, TaskResultStatus
from django_pgqueue.models import Job
from django_pgqueue.testing import run_jobs

from .app import tasks
from .app.models import Mark
from .helpers import backend, enqueue, here, row

SUCCESSFUL, FAILED, READY = TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED, TaskResultStatus.READY


def marks():
    return list(Mark.objects.order_by("id").values_list("note", flat=True))


def act(action, **changes):
    """Enqueue a job that does *action*."""
    tasks.ACTS["action"] = action
    result = tasks.act.enqueue("action")
    if changes:
        Job.objects.filter(pk=result.id).update(**changes)
    return result


# ---- what it returns


def test_nothing_to_do_is_an_empty_list(db):
    assert run_jobs() == []


def test_what_ran_is_returned_in_the_order_in_which_it_ran(db):
    second, first = tasks.echo.enqueue("second"), tasks.echo.using(priority=1).enqueue("first")

    ran = run_jobs()

    assert all(isinstance(each, TaskResult) for each in ran)
    assert [(each.id, each.return_value) for each in ran] == [(first.id, "first"), (second.id, "second")]


def test_each_attempt_is_returned(db):
    result = act(lambda: 1 / 0, max_attempts=3)
    tasks.ACTS["backoff"] = lambda error, task_result: 0
    here("""UPDATE django_pgqueue_job SET task_path = 'tests.app.tasks.act_with_backoff'""")

    ran = run_jobs()

    assert [(each.id, each.attempts, each.status) for each in ran] == [
        (result.id, 1, READY),
        (result.id, 2, READY),
        (result.id, 3, FAILED),
    ]


def test_jobs_that_jobs_enqueue_run_too(db):
    tasks.enqueue_next.enqueue(3)

    assert [each.return_value for each in run_jobs()] == [3, 2, 1, 0]


def test_jobs_that_enqueue_each_other_for_ever_are_stopped(db):
    tasks.enqueue_for_ever.enqueue()

    with pytest.raises(RuntimeError, match="has run 5 jobs and there are more"):
        run_jobs(limit=5)

    assert list(Job.objects.order_by("id").values_list("status", "attempts")) == [*[("done", 1)] * 5, ("pending", 0)]


def test_as_many_jobs_as_the_limit_are_not_too_many(db):
    tasks.echo.enqueue_many([[1]] * 3)

    assert len(run_jobs(limit=3)) == 3


def test_a_failure_is_recorded_not_raised(db, caplog):
    result = tasks.refuse_order.enqueue(1)

    [ran] = run_jobs()

    assert (ran.id, ran.status) == (result.id, READY)
    assert ran.errors[0].exception_class is ValueError
    assert [record.levelno for record in caplog.records if record.name == "django_pgqueue"] == [logging.WARNING]


def test_a_failed_job_waits_and_is_not_run_again(db):
    tasks.refuse_order.enqueue(1)

    assert [len(run_jobs()), len(run_jobs())] == [1, 0]
    assert marks() == ["order 1 refused"]


# ---- which jobs


def test_only_the_queues_that_are_named_are_served(db):
    tasks.send_receipt.enqueue(1)
    tasks.echo.enqueue("default")
    tasks.echo.using(queue_name="slow").enqueue("slow")

    assert [each.task.queue_name for each in run_jobs(queue_names=["slow", "email"])] == ["email", "slow"]
    assert run_jobs(queue_names=[]) == []
    assert [each.return_value for each in run_jobs()] == ["default"]


def test_each_backend_has_its_own_jobs(db, settings):
    settings.TASKS = {"default": backend("default"), "reports": backend("reports")}
    routed = tasks.echo.using(backend="reports", queue_name="reports")
    mine, theirs = tasks.echo.enqueue("mine"), routed.enqueue("theirs")

    assert [each.id for each in run_jobs()] == [mine.id]
    assert [each.id for each in run_jobs(backend="reports")] == [theirs.id]


def test_jobs_of_a_queue_that_has_been_removed_run_as_a_worker_would_run_them(db, settings):
    tasks.send_receipt.enqueue(1)
    settings.TASKS = {"default": backend("default")}

    assert [each.status for each in run_jobs()] == [SUCCESSFUL]


def test_a_job_that_is_being_run_is_not_run_again(db):
    result = act(lambda: [each.id for each in run_jobs()])

    [ran] = run_jobs()

    assert (ran.id, ran.return_value) == (result.id, [])


@pytest.mark.parametrize("alias", ["immediate", "dummy"])
def test_another_backend_is_refused(alias):
    with pytest.raises(TypeError, match=rf"needs a PgQueueBackend; TASKS\['{alias}'\] is \w+Backend"):
        run_jobs(backend=alias)


# ---- in the transaction of the test


def test_what_a_failed_task_has_written_stays_as_in_autocommit(db):
    tasks.refuse_order.enqueue(1)

    run_jobs()

    assert marks() == ["order 1 refused"]


def test_a_database_error_in_a_task_does_not_break_the_tests_transaction(db):
    Mark.objects.create(note="before")
    result = act(lambda: here("SELECT 1/0"), max_attempts=1)

    [ran] = run_jobs()
    Mark.objects.create(note="after")

    assert (ran.id, ran.status) == (result.id, FAILED)
    assert marks() == ["before", "after"]


def test_a_constraint_that_is_violated_is_an_error_of_the_task_alone(db):
    Group.objects.create(name="only one")
    act(lambda: Group.objects.create(name="only one"), max_attempts=1)

    [ran] = run_jobs()

    assert issubclass(ran.errors[0].exception_class, IntegrityError)
    assert Group.objects.count() == 1


def test_a_task_that_catches_its_database_error_has_succeeded(db):
    def action():
        try:
            with transaction.atomic():
                here("SELECT 1/0")
        except DatabaseError:
            Mark.objects.create(note="caught")
        return "went on"

    act(action)

    assert [each.return_value for each in run_jobs()] == ["went on"]
    assert marks() == ["caught"]


def test_a_task_that_leaves_its_transaction_broken_breaks_nothing_else(db):
    def action():
        try:
            here("SELECT 1/0")
        except DatabaseError:
            return "it does not know"

    act(action)
    following = tasks.confirm_order.enqueue(1)

    assert [each.status for each in run_jobs()] == [SUCCESSFUL, SUCCESSFUL]
    assert row(following.id, "status") == ("done",)


def test_a_task_may_roll_its_own_block_back(db):
    def action():
        with transaction.atomic():
            Mark.objects.create(note="rolled back")
            transaction.set_rollback(True)
        Mark.objects.create(note="kept")

    act(action)

    assert [each.status for each in run_jobs()] == [SUCCESSFUL]
    assert marks() == ["kept"]


def test_async_tasks_use_the_tests_transaction(db):
    tasks.confirm_order_async.enqueue(1)

    assert [each.status for each in run_jobs()] == [SUCCESSFUL]
    assert marks() == ["order 1 confirmed"]


class InTestCase(TestCase):
    def test_jobs_run_and_what_they_write_is_there(self):
        result = tasks.confirm_order.enqueue(1)

        [ran] = run_jobs()

        self.assertEqual((ran.id, ran.status), (result.id, SUCCESSFUL))
        self.assertEqual(marks(), ["order 1 confirmed"])

    def test_everything_is_rolled_back_with_the_test(self):
        self.test_jobs_run_and_what_they_write_is_there()

    def test_a_task_may_want_the_outermost_block_as_in_a_worker(self):
        tasks.confirm_order_durably.enqueue(1)

        [ran] = run_jobs()

        self.assertEqual(ran.status, SUCCESSFUL)
        self.assertEqual(marks(), ["order 1 confirmed"])

    def test_a_broken_transaction_is_mended_for_the_next_query(self):
        act(lambda: here("SELECT 1/0"))

        run_jobs()

        self.assertFalse(connection.needs_rollback)
        self.assertEqual(marks(), [])


class InTransactionTestCase(TransactionTestCase):
    def test_jobs_run_in_autocommit_as_in_a_worker(self):
        in_transaction = []
        act(lambda: in_transaction.append(connection.in_atomic_block))

        run_jobs()

        self.assertEqual(in_transaction, [False])

    def test_a_task_may_want_the_outermost_block(self):
        tasks.confirm_order_durably.enqueue(1)

        [ran] = run_jobs()

        self.assertEqual(ran.status, SUCCESSFUL)

    def test_inside_a_block_of_the_test_no_task_has_the_outermost(self):
        tasks.confirm_order_durably.enqueue(1)

        with transaction.atomic():
            [ran] = run_jobs()

        self.assertEqual(ran.errors[0].exception_class, RuntimeError)

    def test_a_rolled_back_block_takes_what_ran_in_it_along(self):
        job_id = enqueue()

        with transaction.atomic():
            run_jobs()
            transaction.set_rollback(True)

        self.assertEqual(row(job_id, "status", "attempts"), ("pending", 0))
