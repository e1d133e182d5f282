"""Django's contract of a backend, and what a TaskResult tells."""

import subprocess
import sys
import traceback
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.utils import timezone

from django_pgqueue import PgQueueBackend, Retry
from django_pgqueue.backend import MAX_ID
from django_pgqueue.compat import (
    BaseTaskBackend,
    Task,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    task_backends,
    task_finished,
    task_started,
)
from django_pgqueue.exceptions import ClaimExpired, Interrupted
from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import ErrorRecord, Failed, Released, Retried, Succeeded
from django_pgqueue.testing import OWNER, run_jobs

from .app import tasks
from .helpers import backend, claim_of, claim_one, database_alias, expire_lease, here, make_due, row

SUCCESSFUL, FAILED, READY, RUNNING = (
    TaskResultStatus.SUCCESSFUL,
    TaskResultStatus.FAILED,
    TaskResultStatus.READY,
    TaskResultStatus.RUNNING,
)


def retry(job, error=None):
    """End a claim with an error, due again at once."""
    Job.objects.settle([Retried(claim_of(job), 0, ErrorRecord.of(error or ValueError("again")))])


def result_of(job):
    return tasks.add.get_result(str(job.id))


# ---- what the backend says it can


def test_the_backend_supports_everything_that_django_asks_for():
    ours = task_backends["default"]

    assert isinstance(ours, BaseTaskBackend)
    assert ours.supports_defer
    assert ours.supports_async_task
    assert ours.supports_get_result
    assert ours.supports_priority


def test_async_tasks_run(db):
    """supports_async_task is honoured; the other three are by the tests of delays, results and priorities."""
    tasks.add_async.enqueue(1, 2)
    tasks.confirm_order_async.enqueue(7)

    assert [each.status for each in run_jobs()] == [SUCCESSFUL] * 2
    assert here("SELECT note FROM app_mark") == [("order 7 confirmed",)]


def test_a_backend_with_wrong_options_can_be_made_but_not_used(db, settings):
    settings.TASKS = {"default": backend(MAX_ATTEMPT=3)}

    assert task_backends["default"].alias == "default"
    with pytest.raises(ImproperlyConfigured, match="Did you mean 'MAX_ATTEMPTS'"):
        tasks.add.enqueue(1, 2)


# ---- a result, from its beginning to its end


def test_a_waiting_job_is_ready(db):
    result = tasks.add.enqueue(1, 2)

    found = tasks.add.get_result(result.id)

    assert found == result


def test_a_claimed_job_is_running(db):
    tasks.add.enqueue(1, b=2)
    job = claim_one("a worker")

    found = result_of(job)

    assert (found.status, found.worker_ids, found.errors) == (RUNNING, ["a worker"], [])
    assert (found.args, found.kwargs) == ([1], {"b": 2})
    assert found.enqueued_at <= found.started_at == found.last_attempted_at
    assert found.finished_at is None
    with pytest.raises(ValueError, match="not finished yet"):
        found.return_value  # noqa: B018


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False, {"a": [1, None]}])
def test_a_successful_job_has_its_return_value(db, value):
    result = tasks.echo.enqueue(value)

    run_jobs()

    result.refresh()
    assert (result.status, result.return_value, result.is_finished) == (SUCCESSFUL, value, True)
    assert (result.worker_ids, result.errors) == ([OWNER], [])
    assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at


def test_a_failed_job_has_no_return_value(db):
    result = tasks.send_receipt.enqueue(1)
    job = claim_one()
    Job.objects.settle([Failed(claim_of(job), ErrorRecord.of(ValueError("no")))])

    result.refresh()

    assert (result.status, result.is_finished) == (FAILED, True)
    assert result.finished_at >= result.started_at
    with pytest.raises(ValueError, match="failed"):
        result.return_value  # noqa: B018


def test_a_result_tells_each_counted_attempt_oldest_first(db):
    result = tasks.add.enqueue(1, 2)
    for number, error in enumerate([KeyError("first"), Retry(1, "second")], start=1):
        retry(claim_one(f"worker {number}"), error)
    first_start = row(result.id, "started_at")[0]
    claim_one("worker 3")

    result.refresh()

    assert result.worker_ids == ["worker 1", "worker 2", "worker 3"]
    assert result.attempts == 3
    assert [error.exception_class for error in result.errors] == [KeyError, Retry]
    assert ["first" in result.errors[0].traceback, "second" in result.errors[1].traceback] == [True, True]
    assert result.started_at == first_start < result.last_attempted_at == row(result.id, "claimed_at")[0]


@pytest.mark.parametrize(
    ("end", "status", "errors"),
    [
        (lambda claim: Succeeded(claim, "5"), SUCCESSFUL, [ValueError]),
        (lambda claim: Failed(claim, ErrorRecord.of(OSError("no"))), FAILED, [ValueError, OSError]),
        (lambda claim: Retried(claim, 60, ErrorRecord.of(OSError("no"))), READY, [ValueError, OSError]),
    ],
    ids=["succeeds", "fails", "retries"],
)
def test_however_the_last_attempt_ends_there_is_one_worker_for_each(db, end, status, errors):
    result = tasks.add.enqueue(1, 2)
    retry(claim_one("worker 1"))
    Job.objects.settle([end(claim_of(claim_one("worker 2")))])

    result.refresh()

    assert (result.status, result.worker_ids) == (status, ["worker 1", "worker 2"])
    assert [error.exception_class for error in result.errors] == errors


def test_a_refunded_attempt_is_not_told(db):
    result = tasks.add.enqueue(1, 2)
    retry(claim_one("worker 1"))
    for number, started in enumerate([False, True, False, True]):
        Job.objects.settle([Released(claim_of(claim_one(f"stopping {number}")), started=started)])

    result.refresh()
    waiting = (result.status, result.worker_ids, len(result.errors))
    claim_one("worker 2")
    result.refresh()

    assert waiting == (READY, ["worker 1"], 1)
    assert (result.status, result.worker_ids, len(result.errors)) == (RUNNING, ["worker 1", "worker 2"], 1)


def test_a_job_released_before_it_started_has_never_started(db):
    result = tasks.add.enqueue(1, 2)
    Job.objects.release([claim_of(claim_one())])

    result.refresh()

    assert (result.started_at, result.last_attempted_at, result.attempts) == (None, None, 0)


def test_a_lost_attempt_has_an_importable_error(db):
    result = tasks.add.enqueue(1, 2)
    expire_lease(claim_one("dead").id)
    Job.objects.recover()

    result.refresh()

    assert (result.status, result.worker_ids) == (READY, ["dead"])
    assert [error.exception_class for error in result.errors] == [ClaimExpired]


def test_an_interruption_that_counts_has_an_importable_error(db, monkeypatch):
    monkeypatch.setattr("django_pgqueue.statements.settle.MAX_REFUNDS", 1)
    result = tasks.add.enqueue(1, 2)
    for owner in ("refunded", "counted"):
        Job.objects.settle([Released(claim_of(claim_one(owner)), started=True)])

    result.refresh()

    assert (result.status, result.worker_ids) == (READY, ["counted"])
    assert [error.exception_class for error in result.errors] == [Interrupted]


def test_a_requeued_job_starts_afresh(db):
    result = tasks.add.enqueue(1, 2)
    retry(claim_one("before"))
    Job.objects.settle([Failed(claim_of(claim_one("before")), ErrorRecord.of(OSError("no")))])
    Job.objects.requeue()

    result.refresh()
    waiting = (result.status, result.worker_ids, result.errors, result.last_attempted_at, result.finished_at)
    retry(claim_one("after"), KeyError("new"))
    result.refresh()

    assert waiting == (READY, [], [], None, None)
    assert result.worker_ids == ["after"]
    assert [error.exception_class for error in result.errors] == [KeyError]


@pytest.mark.parametrize(
    ("status", "told"),
    [("pending", READY), ("blocked", READY), ("held", READY), ("cancelled", FAILED)],
)
def test_every_status_has_its_name_in_django(db, status, told):
    result = tasks.add.enqueue(1, 2)
    here(
        "UPDATE django_pgqueue_job SET status = %s, finished_at = CASE %s WHEN 'cancelled' THEN now() END",
        [status, status],
    )

    result.refresh()

    assert result.status == told


@pytest.mark.django_db(transaction=True)
def test_a_result_is_of_one_moment_even_when_the_job_goes_on_meanwhile():
    result = tasks.add.enqueue(1, 2)
    retry(claim_one("worker 1"), KeyError("first"))
    running = Retried(claim_of(claim_one("worker 2")), 0, ErrorRecord.of(OSError("second")))

    def settle_before_attempts_are_read(execute, statement, *rest):
        if JobAttempt._meta.db_table in statement:
            Job.objects.db_manager("worker").settle([running])
        return execute(statement, *rest)

    with database_alias("worker"), connection.execute_wrapper(settle_before_attempts_are_read):
        result.refresh()

    assert (result.status, result.worker_ids) == (RUNNING, ["worker 1", "worker 2"])
    assert [error.exception_class for error in result.errors] == [KeyError]
    assert JobAttempt.objects.count() == 2


# ---- ways to ask


def test_a_result_can_be_awaited(db):
    result = async_to_sync(tasks.add.aenqueue)(1, 2)
    run_jobs()

    async_to_sync(result.arefresh)()
    found = async_to_sync(tasks.add.aget_result)(result.id)

    assert (result.status, result.return_value) == (SUCCESSFUL, 3)
    assert found == result


UNKNOWN_IDS = [
    *("x", "", " ", "1 ", "٣", "²", "-1", "+1", "1.0", "1e3", "0x1", "1_0", "1\x00", "\ud800", "None", "9" * 5_000),
    *(None, True, 1.0, -1, 0, MAX_ID, MAX_ID + 1, 2**70, b"1", [], {}, object()),
]


@pytest.mark.parametrize("unknown", UNKNOWN_IDS, ids=lambda value: f"{value!a:.20}")
def test_an_id_that_no_job_has_does_not_exist(db, unknown):
    tasks.add.enqueue(1, 2)

    for ask in (tasks.add.get_result, task_backends["default"].get_result):
        with pytest.raises(TaskResultDoesNotExist):
            ask(unknown)


def test_it_does_not_exist_when_awaited_either(db):
    with pytest.raises(TaskResultDoesNotExist):
        async_to_sync(tasks.add.aget_result)("x")


def test_a_question_about_an_unknown_id_leaves_the_transaction_intact(db):
    for unknown in (2**70, "\x00", MAX_ID):
        with pytest.raises(TaskResultDoesNotExist):
            tasks.add.get_result(unknown)

    assert here("SELECT 1") == [(1,)]


def test_the_result_of_another_task_is_a_mismatch(db):
    result = tasks.add.enqueue(1, 2)

    with pytest.raises(TaskResultMismatch, match=r"tests\.app\.tasks\.add"):
        tasks.echo.get_result(result.id)
    with pytest.raises(TaskResultMismatch):
        async_to_sync(tasks.echo.aget_result)(result.id)


def test_a_backend_knows_its_own_jobs_only(db, settings):
    result = tasks.add.enqueue(1, 2)
    settings.TASKS = {"default": backend("default"), "second": backend("second")}

    with pytest.raises(TaskResultDoesNotExist):
        task_backends["second"].get_result(result.id)


# ---- reading checks no routing again


def test_the_result_of_a_job_tells_the_routing_it_was_enqueued_with(db):
    moment = timezone.now() + timedelta(hours=1)
    result = tasks.add.using(priority=7, queue_name="slow", run_after=moment).enqueue(1, 2)

    task = tasks.add.get_result(result.id).task

    assert (task.priority, task.queue_name, task.run_after) == (7, "slow", moment)
    assert type(task) is type(tasks.add)


def test_a_result_can_be_read_after_its_queue_was_removed(db, settings):
    result = tasks.send_receipt.enqueue(1)
    settings.TASKS = {"default": backend("default")}

    found = tasks.send_receipt.get_result(result.id)
    result.refresh()

    assert (found.task.queue_name, found.status) == ("email", READY)


@pytest.mark.parametrize(
    "path",
    ["tests.app.tasks.deleted", "tests.app.gone.task", "elsewhere.task", "nodots", "json.dumps", "a.b.<locals>.c"],
)
def test_a_result_can_be_read_after_its_task_was_deleted(db, path):
    result = tasks.add.enqueue(1, 2)
    run_jobs()
    here("UPDATE django_pgqueue_job SET task_path = %s", [path])

    found = task_backends["default"].get_result(result.id)
    found.refresh()

    assert (found.status, found.return_value, found.args) == (SUCCESSFUL, 3, [1, 2])
    assert isinstance(found.task, Task)
    assert path.endswith(found.task.name)
    with pytest.raises(Exception, match="no task"):
        found.task.call()
    with pytest.raises(TaskResultMismatch):
        tasks.add.get_result(result.id)


@pytest.mark.parametrize("args", ["null", '"x"', '{"a": 1}', "7", "[" * 500 + "]" * 500], ids=lambda text: text[:9])
def test_a_result_can_be_read_though_its_arguments_were_spoilt(db, args):
    result = tasks.add.enqueue(1, 2)
    here("UPDATE django_pgqueue_job SET args = %s::jsonb, kwargs = '[]'", [args])

    found = tasks.add.get_result(result.id)

    assert (found.args, found.kwargs) == ([], {})


def test_a_result_with_a_priority_of_old_can_be_read(db, settings):
    result = tasks.add.enqueue(1, 2)
    settings.USE_TZ = False  # so that checking its moment again would fail, too

    assert tasks.add.get_result(result.id).task.priority == 0


# ---- signals


@pytest.fixture
def signalled():
    """What task_started and task_finished have told, in order, as it was then."""
    told = []

    def started(sender, task_result, **kwargs):
        told.append(("started", sender, task_result, task_result.status, task_result.attempts))

    def finished(sender, task_result, **kwargs):
        told.append(("finished", sender, task_result, task_result.status, task_result.attempts))

    task_started.connect(started)
    task_finished.connect(finished)
    yield told
    task_started.disconnect(started)
    task_finished.disconnect(finished)


def names(signalled):
    return [name for name, *_ in signalled]


def test_a_success_is_signalled_with_one_result_for_the_attempt(db, signalled):
    result = tasks.add.enqueue(1, 2)

    run_jobs()

    [(_, sender, before, status_before, attempts), (_, _, after, status_after, _)] = signalled
    assert names(signalled) == ["started", "finished"]
    assert sender is PgQueueBackend
    assert before is after
    assert (status_before, attempts, status_after) == (RUNNING, 1, SUCCESSFUL)
    assert (after.id, after.return_value) == (result.id, 3)
    assert after.finished_at is not None


def test_only_a_final_failure_is_signalled_as_finished(db, signalled):
    result = tasks.send_receipt.using(queue_name="default").enqueue(1)
    here("UPDATE django_pgqueue_job SET task_path = 'tests.app.tasks.refuse_order'")

    run_jobs()
    make_due(int(result.id))
    after_one = names(signalled)
    run_jobs()

    told = signalled[-1][2]
    assert after_one == ["started"]
    assert names(signalled) == ["started", "started", "finished"]
    assert (told.status, told.worker_ids) == (FAILED, [OWNER, OWNER])
    assert [error.exception_class for error in told.errors] == [ValueError, ValueError]


def test_what_was_signalled_is_what_can_be_read(db, signalled):
    tasks.add.enqueue(1, 2)

    [ran] = run_jobs()

    told = signalled[-1][2]
    assert (told.id, told.status, told.started_at, told.worker_ids, told.args) == (
        *(ran.id, ran.status, ran.started_at, ran.worker_ids, ran.args),
    )


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), StopIteration(), GeneratorExit()], ids=repr)
def test_receivers_of_a_failure_find_the_exception_as_if_in_its_handler(db, error):
    def action():
        raise error

    seen = []

    def receiver(sender, task_result, **kwargs):
        seen.append((sys.exc_info()[1], "".join(traceback.format_exception(error))))

    tasks.ACTS["fail"] = action
    tasks.act.enqueue("fail")
    here("UPDATE django_pgqueue_job SET max_attempts = 1")
    task_finished.connect(receiver)
    try:
        run_jobs()
    finally:
        task_finished.disconnect(receiver)

    [(found, text)] = seen
    assert found is error
    assert "in action" in text
    assert "_call_in_handler" not in text
    assert sys.exc_info() == (None, None, None)


def test_receivers_of_a_success_find_no_exception(db):
    seen = []

    def receiver(sender, task_result, **kwargs):
        seen.append(sys.exc_info()[1])

    tasks.add.enqueue(1, 2)
    task_finished.connect(receiver)
    try:
        run_jobs()
    finally:
        task_finished.disconnect(receiver)

    assert seen == [None]


def test_a_receiver_that_raises_stops_nothing(db, caplog):
    def broken(sender, task_result, **kwargs):
        raise LookupError("a receiver's own")

    tasks.add.enqueue(1, 2)
    task_started.connect(broken)
    task_finished.connect(broken)
    try:
        [ran] = run_jobs()
    finally:
        task_started.disconnect(broken)
        task_finished.disconnect(broken)

    assert ran.status == SUCCESSFUL
    assert "a receiver's own" in caplog.text


class Derived(PgQueueBackend):
    """A project's own backend."""


def test_the_sender_of_every_signal_is_the_class_of_the_backend(db, settings, signalled):
    settings.TASKS = {"default": {"BACKEND": f"{__name__}.Derived"}}
    tasks.add.enqueue(1, 2)

    run_jobs()

    assert [sender for _, sender, *_ in signalled] == [Derived, Derived]


# ---- while apps are loading


def run_python(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)


def test_the_package_can_be_imported_without_settings_and_before_apps_are_ready():
    done = run_python(
        "import os; os.environ.pop('DJANGO_SETTINGS_MODULE', None)\n"
        "import django_pgqueue, sys\n"
        "assert 'django_pgqueue.models' not in sys.modules\n"
        "from django.conf import settings\n"
        "assert not settings.configured\n"
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_a_django_without_the_framework_is_told_what_to_install():
    done = run_python(
        "import sys; sys.modules['django.tasks'] = sys.modules['django_tasks'] = None\nimport django_pgqueue\n"
    )

    assert done.returncode == 1
    assert "Install its backport: pip install 'django-pgqueue-jobs[django52]'" in done.stderr


def test_tasks_can_be_defined_while_apps_are_loading(tmp_path):
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "__init__.py").write_text(
        "from django_pgqueue import task\n\n@task(queue_name='email')\ndef send(): pass\n"
    )
    (tmp_path / "early" / "models.py").write_text("from early import send\nsend.using(priority=5)\n")

    done = run_python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from django.conf import settings\n"
        "settings.configure(\n"
        "    INSTALLED_APPS=['early', 'django_pgqueue'],\n"
        "    TASKS={'default': {'BACKEND': 'django_pgqueue.PgQueueBackend', 'QUEUES': ['email']}},\n"
        ")\n"
        "import django; django.setup()\n"
        "from django_pgqueue import registry\n"
        "import early; assert registry.find('early.send') is early.send\n"
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_the_frameworks_own_checks_and_signals_are_there_once_apps_are_ready():
    done = run_python(
        "from django.conf import settings\n"
        "settings.configure(\n"
        "    INSTALLED_APPS=['django_pgqueue'],\n"
        "    DATABASES={'default': {'ENGINE': 'django.db.backends.postgresql'}},\n"
        "    TASKS={'default': {'BACKEND': 'django_pgqueue.PgQueueBackend', 'OPTIONS': {'MAX_ATTEMPT': 3}}},\n"
        ")\n"
        "import django; django.setup()\n"
        "from django.core.checks import run_checks\n"
        "print([message.id for message in run_checks()])\n"
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "['django_pgqueue.E001']"


def test_one_queue_may_be_named_without_a_list():
    backend = PgQueueBackend("single", {"QUEUES": "email"})

    assert backend.queues == {"email"}
