"""Tasks whose effects and whose end are one transaction. R17."""

from contextlib import contextmanager
from functools import partial

import pytest
from django.db import IntegrityError, connection, connections, transaction

from django_pgqueue import Fail, Retry, Snooze, task
from django_pgqueue.compat import InvalidTask, TaskResultStatus
from django_pgqueue.exceptions import ClaimLost, TransactionEnded
from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import Failed, Released, Retried, Succeeded
from django_pgqueue.testing import run_jobs
from django_pgqueue.worker import attempt
from django_pgqueue.worker.atomic import atomically

from .app import tasks
from .app.models import Mark
from .helpers import InThread, Surrounded, claim_of, claim_one, database_alias, row, second_connection, wait_until
from .proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)


def run_one(action, **changes):
    """Enqueue an atomic job that does *action*, and run it as a slot does; return what it came to."""
    tasks.ACTS["atomic"] = action
    tasks.act_atomically.enqueue("atomic")
    if changes:
        Job.objects.update(**changes)
    return run(claim_one())


def run(job, database="default"):
    as_in_a_slot = Surrounded(settles=True, atomically=partial(atomically, database, job.claim))
    return attempt.run(job, 0, surroundings=as_in_a_slot)


def mark(note="effect"):
    Mark.objects.create(note=note)


def count_marks():
    return Mark.objects.count()


@contextmanager
def level(name):
    """The project's own isolation level for new transactions."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET default_transaction_isolation = '{name}'")
        try:
            yield
        finally:
            cursor.execute("RESET default_transaction_isolation")


def test_effects_and_end_are_committed_together():
    seen = []

    def look_from_outside():
        mark()
        with second_connection() as other, other.cursor() as cursor:
            cursor.execute("SELECT (SELECT count(*) FROM app_mark), (SELECT status FROM django_pgqueue_job)")
            seen.append(cursor.fetchone())
        return {"sum": 3}

    ran = run_one(look_from_outside)

    assert seen == [(0, "running")]
    assert (ran.outcome, ran.is_settled) == (Succeeded(ran.outcome.claim, '{"sum": 3}'), True)
    assert Job.objects.values_list("status", "attempts", "return_value").get() == ("done", 1, {"sum": 3})
    assert count_marks() == 1


@pytest.mark.parametrize("error", [ValueError("no"), Retry(5), Snooze(5), Fail("no"), SystemExit(1)], ids=repr)
def test_whatever_a_task_raises_undoes_its_effects(error):
    def act():
        mark()
        raise error

    ran = run_one(act)

    assert not ran.is_settled
    assert count_marks() == 0
    assert Job.objects.get().status == "running", "it is settled by the control loop, as every other"
    assert not connection.in_atomic_block


def test_a_result_that_cannot_be_stored_undoes_its_effects():
    def act():
        mark()
        return object()

    ran = run_one(act)

    assert isinstance(ran.outcome, Failed) and not ran.is_settled
    assert count_marks() == 0


def test_a_result_that_the_database_refuses_undoes_its_effects_and_is_one_more_attempt(settings):
    """A trigger, a check: the statement comes from the task's own transaction, and fails with it."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_pgqueue_job ADD CONSTRAINT small CHECK (return_value IS NULL) NOT VALID")
    try:
        ran = run_one(lambda: mark() or 5)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE django_pgqueue_job DROP CONSTRAINT small")

    assert isinstance(ran.outcome, Retried) and isinstance(ran.error, IntegrityError)
    assert count_marks() == 0


def test_a_claim_lost_before_the_task_begins_runs_nothing():
    ran = []
    tasks.ACTS["atomic"] = lambda: ran.append("elsewhere, too")
    tasks.act_atomically.enqueue("atomic")
    job = claim_one()
    Job.objects.update(claim_version=7)

    attempted = run(job)

    assert ran == []
    assert isinstance(attempted.error, ClaimLost)
    assert Job.objects.settle([attempted.outcome]).lost == [attempted.outcome]


@pytest.mark.parametrize("change", [{"claim_version": 7}, {"status": "cancelled", "lease_until": None}], ids=str)
def test_a_claim_lost_while_the_task_runs_undoes_its_effects(change):
    def lose():
        mark()
        with second_connection() as other, other.cursor() as cursor:
            columns = ", ".join(f"{name} = %s" for name in change)
            finished = ", finished_at = now()" if "status" in change else ""
            cursor.execute(f"UPDATE django_pgqueue_job SET {columns}{finished}", list(change.values()))

    ran = run_one(lose)

    assert isinstance(ran.error, ClaimLost)
    assert isinstance(ran.outcome, Released) and not ran.is_settled
    assert Job.objects.settle([ran.outcome]).lost == [ran.outcome]
    assert count_marks() == 0
    assert {name: getattr(Job.objects.get(), name) for name in change} == change


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_lease_renewed_meanwhile_does_no_harm_whatever_the_projects_isolation(isolation):
    def be_renewed():
        mark()
        with second_connection() as other, other.cursor() as cursor:
            cursor.execute("UPDATE django_pgqueue_job SET lease_until = lease_until + interval '1 min'")

    with level(isolation):
        ran = run_one(be_renewed)

    assert ran.is_settled
    assert Job.objects.get().status == "done"


def test_the_row_is_locked_for_the_end_only():
    """People and renewals wait for no task."""

    def look_for_locks():
        mark()
        with second_connection() as other, transaction.atomic(using="default"), other.cursor() as cursor:
            cursor.execute("SELECT id FROM django_pgqueue_job FOR UPDATE NOWAIT")
            return bool(cursor.fetchall())

    assert run_one(look_for_locks).outcome.result == "true"


def test_an_error_of_the_commit_is_the_tasks():
    """A deferred constraint: nothing was wrong before."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE app_mark ADD CONSTRAINT one_of_each UNIQUE (note) DEFERRABLE INITIALLY DEFERRED")

    def mark_twice():
        mark("same")
        mark("same")

    try:
        ran = run_one(mark_twice)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE app_mark DROP CONSTRAINT one_of_each")

    assert isinstance(ran.outcome, Retried) and isinstance(ran.error, IntegrityError)
    assert Job.objects.get().status == "running"
    assert count_marks() == 0


def test_an_error_in_a_hook_of_the_commit_is_only_logged(caplog):
    def act():
        mark()
        transaction.on_commit(lambda: 1 / 0)
        return 5

    ran = run_one(act)

    assert ran.is_settled and ran.error is None
    assert Job.objects.values_list("status", "return_value").get() == ("done", 5)
    assert count_marks() == 1
    assert "on_commit() failed; the job is done" in caplog.text


def test_hooks_of_the_commit_are_called_once_and_of_a_rollback_never():
    called = []

    def act():
        transaction.on_commit(lambda: called.append("hook"))

    run_one(act)
    assert called == ["hook"]

    def fail():
        act()
        raise ValueError

    run_one(fail)
    assert called == ["hook"]


def test_a_task_may_nest_transactions_and_undo_a_part():
    def act():
        mark("kept")
        with transaction.atomic():
            mark("undone")
            transaction.set_rollback(True)

    assert run_one(act).is_settled
    assert list(Mark.objects.values_list("note", flat=True)) == ["kept"]


def test_a_task_that_gives_up_its_transaction_has_failed():
    def act():
        mark()
        transaction.set_rollback(True)

    ran = run_one(act)

    assert isinstance(ran.outcome, Retried)
    assert count_marks() == 0


@pytest.mark.parametrize("and_then", ["", "SELECT 1", "BEGIN"])
def test_a_task_that_ends_its_transaction_by_itself_has_failed(and_then):
    """Also if it has begun another: what it did before would stay, whatever becomes of the claim."""

    def act():
        mark("committed by hand")
        with connection.cursor() as cursor:
            for statement in ("COMMIT", *filter(None, [and_then])):
                cursor.execute(statement)

    ran = run_one(act)

    assert isinstance(ran.error, TransactionEnded)
    assert not ran.is_settled
    assert Job.objects.get().status == "running"


@pytest.mark.parametrize("close", [connection.close, lambda: connection.connection.close()], ids=["Django", "psycopg"])
def test_a_task_that_closes_its_connection_has_failed(close):
    def act():
        mark()
        close()

    ran = run_one(act)

    assert isinstance(ran.outcome, Retried) and not ran.is_settled
    assert count_marks() == 0
    assert Job.objects.get().status == "running"


def test_a_project_without_autocommit_has_its_atomic_tasks_committed():
    with database_alias("manual") as manual:
        manual.settings_dict["AUTOCOMMIT"] = False
        tasks.ACTS["atomic"] = lambda: bool(Mark.objects.using("manual").create(note="effect"))
        tasks.act_atomically.enqueue("atomic")
        job = claim_one()

        ran = run(job, "manual")

    assert ran.is_settled
    assert Job.objects.get().status == "done"
    assert count_marks() == 1


def test_a_held_row_is_waited_for():
    tasks.ACTS["atomic"] = mark
    tasks.act_atomically.enqueue("atomic")
    job = claim_one()
    with second_connection() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT id FROM django_pgqueue_job FOR UPDATE")
        running = InThread(lambda: run(job))
        wait_until(lambda: waiting_for_locks() == 1, "the settle to wait for the row")

        cursor.execute("ROLLBACK")

        assert running.result().is_settled
    assert Job.objects.get().status == "done"


def waiting_for_locks():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return cursor.fetchone()[0]


class TestUnknownCommit:
    """R16: the COMMIT of an atomic task got no answer."""

    def test_what_was_committed_is_not_run_again(self):
        tasks.act_atomically.enqueue("atomic")
        job = claim_one()
        with Proxy.to_database() as proxy, proxy.alias() as alias:
            tasks.ACTS["atomic"] = lambda: Mark.objects.using(alias).create(note="effect") and None
            lost = proxy.lose_commit_answer("'done'")
            ran = run(job, alias)
            connections[alias].close()
        assert lost.happened and not ran.is_settled and isinstance(ran.outcome, Retried)

        settlement = Job.objects.settle([ran.outcome])

        assert settlement.settled == [Succeeded(claim_of(job))]
        assert Job.objects.get().status == "done"
        assert count_marks() == 1

    @pytest.mark.parametrize("ending", [Retried, Failed])
    def test_if_the_row_is_done_at_our_version_it_was_our_commit(self, ending):
        ran = run_one(lambda: 5)
        claim = ran.outcome.claim
        error = attempt.ErrorRecord.of(OSError("connection lost"))
        uncertain = Retried(claim, 0, error) if ending is Retried else Failed(claim, error)

        settlement = Job.objects.settle([uncertain])

        assert settlement.settled == [Succeeded(claim)] and not settlement.lost
        assert Job.objects.values_list("status", "return_value").get() == ("done", 5)
        assert not JobAttempt.objects.exists()

    def test_if_it_was_rolled_back_the_attempt_has_failed(self):
        ran = run_one(lambda: 1 / 0)

        settlement = Job.objects.settle([ran.outcome])

        assert settlement.settled == [ran.outcome]
        assert Job.objects.get().status == "pending"

    def test_someone_elses_done_is_not_ours(self):
        ran = run_one(lambda: 1 / 0)
        Job.objects.update(claim_version=7, status="done", finished_at="2026-01-01T00:00Z", lease_until=None)

        assert Job.objects.settle([ran.outcome]).lost == [ran.outcome]


def test_an_async_task_cannot_be_atomic():
    with pytest.raises(InvalidTask, match="cannot be atomic"):

        @task(atomic=True)
        async def never():
            pass


@pytest.mark.parametrize("value", [1, "yes", None])
def test_atomic_is_true_or_false(value):
    with pytest.raises(InvalidTask, match="atomic must be True or False"):
        task(atomic=value)(tasks.add.func)


def test_run_jobs_undoes_what_an_atomic_task_did_before_it_failed():
    def act():
        mark()
        raise ValueError

    tasks.ACTS["atomic"] = act
    tasks.act_atomically.enqueue("atomic")

    [result] = run_jobs()

    assert result.status in (TaskResultStatus.READY, TaskResultStatus.FAILED)
    assert count_marks() == 0


def test_connections_of_other_databases_have_transactions_of_their_own():
    """Only what is in the jobs' database is one with the end."""

    def act():
        assert connections["default"].in_atomic_block
        assert not connections["other"].in_atomic_block

    assert run_one(act).is_settled


def test_a_job_that_is_settled_has_its_row_as_it_was_written():
    ran = run_one(lambda: None)

    assert row(ran.job.id, "status", "attempts", "claim_version", "lease_until") == ("done", 1, 1, None)
