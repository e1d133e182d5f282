"""What one attempt comes to, whatever the task does: seen through run_jobs()."""

import asyncio
import logging
import os
import sys
import threading
from datetime import timedelta
from importlib import import_module

import pytest
from django.dispatch import Signal

from django_pgqueue import Fail, Retry, Snooze, compat, results
from django_pgqueue.backoff import MAX_DELAY_SECONDS
from django_pgqueue.compat import TaskResultStatus
from django_pgqueue.exceptions import Interrupted, Interruption, TaskTimeout, UnstorableResult
from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import (
    MAX_MESSAGE_CHARS,
    MAX_TRACEBACK_CHARS,
    ErrorRecord,
    Failed,
    Released,
    Retried,
    Snoozed,
)
from django_pgqueue.testing import run_jobs
from django_pgqueue.worker import attempt

from .app import tasks
from .app.models import Mark
from .helpers import InThread, Surrounded, backend, claim_of, claim_one, enqueue, here, make_due, row

SUCCESSFUL, FAILED, READY = TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED, TaskResultStatus.READY

pytestmark = pytest.mark.django_db


def run_one(action, task=tasks.act, **changes):
    """Run *action* as a job with *changes* to its row; return what is to be read of it, and its attempt's record."""
    tasks.ACTS["action"] = action
    result = task.enqueue("action")
    if changes:
        Job.objects.filter(pk=result.id).update(**changes)
    *_, ran = run_jobs()  # several, where there is no wait between attempts
    return ran, JobAttempt.objects.filter(job_id=result.id).last()


def raising(error):
    def action():
        raise error

    return action


def wait_of(ran):
    """The whole seconds between the end of a job's last attempt and its next."""
    return round(
        (row(ran.id, "available_at")[0] - JobAttempt.objects.filter(job_id=ran.id).last().ended_at).total_seconds()
    )


def run_until_over(result):
    """Run a job again and again; return how often it ran."""
    for count in range(1, 100):
        run_jobs()
        if row(result.id, "status") != ("pending",):
            return count
        make_due(int(result.id))
    raise AssertionError("it never ends")


# ---- attempts


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_a_job_that_always_fails_runs_exactly_as_often_as_it_may(max_attempts):
    """R23, R25"""
    result = tasks.refuse_order.enqueue(7)
    here("UPDATE django_pgqueue_job SET max_attempts = %s", [max_attempts])

    runs = run_until_over(result)

    result.refresh()
    assert (runs, Mark.objects.count(), result.attempts) == (max_attempts,) * 3
    assert [error.exception_class for error in result.errors] == [ValueError] * max_attempts
    assert row(result.id, "status", "attempts") == ("failed", max_attempts)


def test_a_failure_keeps_its_message_and_traceback_in_plain_columns():
    """R23"""
    result = tasks.refuse_order.enqueue(7)

    run_jobs()

    [record] = JobAttempt.objects.filter(job_id=result.id)
    assert (record.attempt, record.outcome, record.counted, record.claim_version) == (1, "error", True, 1)
    assert (record.error_class, record.message) == ("builtins.ValueError", "order 7 is refused")
    assert "in refuse_order" in record.traceback
    assert record.started_at <= record.ended_at
    assert row(result.id, "last_error") == ("ValueError: order 7 is refused",)


def test_a_dead_letter_that_is_requeued_has_all_its_attempts_again():
    """R24"""
    result = tasks.refuse_order.enqueue(7)
    first = run_until_over(result)

    assert Job.objects.get(pk=result.id).requeue()
    second = run_until_over(result)

    assert (first, second) == (5, 5)


def test_jobs_that_failed_together_come_back_apart():
    """R23"""
    tasks.refuse_order.enqueue_many([[n] for n in range(100)])
    here("UPDATE django_pgqueue_job SET attempts = 5, max_attempts = 10")

    run_jobs()

    waits = here(
        "SELECT round(extract(epoch FROM job.available_at - attempt.ended_at))"
        "  FROM django_pgqueue_job AS job JOIN django_pgqueue_jobattempt AS attempt ON attempt.job_id = job.id"
    )
    assert (len(waits), len(set(waits)) >= 50) == (100, True)
    assert all(3_600 <= seconds <= 4_320 for (seconds,) in waits)


def test_a_job_that_fails_at_once_lets_the_others_go_first():
    """R25"""
    order = []
    tasks.ACTS.update(
        backoff=lambda error, task_result: 0,
        fail=lambda: order.append("failing") or 1 / 0,
        work=lambda: order.append("working"),
    )
    tasks.act_with_backoff.enqueue("fail")
    tasks.act.enqueue_many([["work"]] * 20)

    run_jobs()

    assert order == ["failing", *["working"] * 20, *["failing"] * 4]


def test_every_other_error_is_one_more_attempt():
    ran, record = run_one(raising(LookupError("no such order")))

    assert (ran.status, ran.attempts, record.outcome) == (READY, 1, "error")
    assert 15 <= wait_of(ran) <= 18


# ---- Retry and Fail


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (Retry(100), 100),
        (Retry(delay=timedelta(minutes=5)), 300),
        (Retry(0), 0),
        (Retry(-5), 0),
        (Retry(float("inf")), MAX_DELAY_SECONDS),
        (Retry(10**400), MAX_DELAY_SECONDS),
        (Retry(timedelta.max), MAX_DELAY_SECONDS),
    ],
    ids=lambda value: f"{getattr(value, 'delay', value)!r:.25}",
)
def test_retry_says_when_the_job_runs_again(error, seconds):
    """R23"""
    ran, _ = run_one(raising(error), max_attempts=2)

    assert (ran.status, ran.attempts) == ((READY, 1) if seconds else (FAILED, 2))
    assert not seconds or wait_of(ran) == seconds


def test_retry_without_a_delay_leaves_it_to_the_backoff():
    tasks.ACTS["backoff"] = lambda error, task_result: 77 if isinstance(error, Retry) else 0

    ran, record = run_one(raising(Retry(reason="not yet")), task=tasks.act_with_backoff)

    assert (ran.status, wait_of(ran)) == (READY, 77)
    assert (record.error_class, record.message) == ("django_pgqueue.exceptions.Retry", "not yet")


def test_a_retry_counts_and_the_last_one_is_a_failure():
    """R23"""
    ran, record = run_one(raising(Retry(5)), max_attempts=1)

    assert (ran.status, record.message) == (FAILED, "the task asked to be retried")


def test_a_retry_keeps_what_caused_it():
    def action():
        try:
            {}["key"]
        except KeyError as error:
            raise Retry(5) from error

    _, record = run_one(action)

    assert "KeyError: 'key'" in record.traceback
    assert record.traceback.rstrip().endswith("the task asked to be retried")


@pytest.mark.parametrize("delay", ["soon", float("nan"), True, object(), b"1"], ids=lambda value: f"{value!r:.10}")
def test_a_retry_with_a_delay_that_is_none_falls_back_on_the_default(caplog, delay):
    ran, _ = run_one(raising(Retry(delay)))

    assert ran.status == READY
    assert 15 <= wait_of(ran) <= 18
    assert "The backoff of tests.app.tasks.act failed; the default applies." in caplog.text


def test_fail_makes_a_dead_letter_at_once():
    """R24"""
    ran, record = run_one(raising(Fail("the address does not exist")))

    assert (ran.status, ran.attempts) == (FAILED, 1)
    assert ran.errors[0].exception_class is Fail
    assert (record.message, record.counted) == ("the address does not exist", True)


def test_subclasses_of_retry_and_fail_are_those():
    class Later(Retry):
        pass

    class Never(Fail):
        pass

    assert run_one(raising(Later(50)))[0].status == READY
    assert run_one(raising(Never()))[0].status == FAILED


# ---- backoff


def test_a_tasks_backoff_gets_the_error_and_the_result_of_the_attempt():
    seen = []
    error = ValueError("no")
    tasks.ACTS["backoff"] = lambda *given: seen.append(given) or timedelta(seconds=33)

    ran, _ = run_one(raising(error), task=tasks.act_with_backoff)

    [(got_error, got_result)] = seen
    assert wait_of(ran) == 33
    assert got_error is error
    assert (got_result.id, got_result.attempts, got_result.status) == (ran.id, 1, TaskResultStatus.RUNNING)


def test_a_tasks_backoff_of_none_says_do_not_retry():
    tasks.ACTS["backoff"] = lambda error, task_result: None

    ran, record = run_one(raising(ValueError("no use")), task=tasks.act_with_backoff)

    assert (ran.status, ran.attempts, record.message) == (FAILED, 1, "no use")


def test_the_backends_backoff_applies_where_a_task_has_none(settings):
    settings.TASKS = {"default": backend(BACKOFF=44)}

    ran, _ = run_one(raising(ValueError()))

    assert wait_of(ran) == 44


def test_the_tasks_backoff_goes_before_the_backends(settings):
    settings.TASKS = {"default": backend(BACKOFF=44)}
    tasks.ACTS["backoff"] = lambda error, task_result: 55

    ran, _ = run_one(raising(ValueError()), task=tasks.act_with_backoff)

    assert wait_of(ran) == 55


def test_a_tasks_backoff_of_zero_is_no_missing_one(settings):
    settings.TASKS = {"default": backend(BACKOFF=44)}
    tasks.ACTS["backoff"] = lambda error, task_result: 0

    ran, _ = run_one(raising(Retry(70)), task=tasks.act_with_backoff)

    assert wait_of(ran) == 70


def hostile(value):
    def backoff(error, task_result):
        if isinstance(value, BaseException):
            raise value
        return value

    return backoff


HOSTILE_BACKOFFS = [
    hostile(ZeroDivisionError()),
    hostile(SystemExit(1)),
    hostile(GeneratorExit()),
    hostile(asyncio.CancelledError()),
    hostile("15"),
    hostile(True),
    hostile(float("nan")),
    hostile(object()),
    lambda: 5,
]


@pytest.mark.parametrize("backoff", HOSTILE_BACKOFFS)
def test_a_backoff_that_fails_does_not_cost_the_job_its_retry(caplog, backoff):
    tasks.ACTS["backoff"] = backoff

    ran, record = run_one(raising(ValueError("the task's own")), task=tasks.act_with_backoff)

    assert (ran.status, record.message) == (READY, "the task's own")
    assert 15 <= wait_of(ran) <= 18
    assert "The backoff of tests.app.tasks.act_with_backoff failed" in caplog.text


@pytest.mark.parametrize(
    ("delay", "seconds"), [(-1e9, 0), (float("-inf"), 0), (1e300, MAX_DELAY_SECONDS), (10**400, MAX_DELAY_SECONDS)]
)
def test_a_backoff_beyond_all_bounds_ends_up_within_them(delay, seconds):
    tasks.ACTS["backoff"] = lambda error, task_result: delay

    ran, _ = run_one(raising(ValueError()), task=tasks.act_with_backoff, max_attempts=2)

    assert (ran.status, ran.attempts) == ((READY, 1) if seconds else (FAILED, 2))
    assert not seconds or wait_of(ran) == seconds


# ---- results


class Unprintable:
    def __repr__(self):
        raise AssertionError("nobody asks for it")


class UnreadableMapping(dict):
    def items(self):
        raise LookupError("unreadable")


class UnreadableSequence(list):
    def __iter__(self):
        raise SystemError("unreadable")


UNSTORABLE = {
    "set": ({1}, "set"),
    "nested": ([{"deep": Unprintable()}], "Unprintable"),
    "NaN": (float("nan"), "nan"),
    "NUL": ("a\x00b", "NUL"),
    "surrogate": ("\udcff", "surrogate"),
    "bytes": (b"\xff", "UTF-8"),
    "keys": ({1: 2}, "must be strings"),
    "generator": ((n for n in range(3)), "generator"),
    "large": ("x" * 20_000_000, "1,048,576"),
    "exception": (ValueError("returned, not raised"), "ValueError"),
    "mapping": (UnreadableMapping(a=1), "unreadable"),
    "sequence": (UnreadableSequence([1]), "unreadable"),
}


@pytest.mark.parametrize(("value", "named"), UNSTORABLE.values(), ids=UNSTORABLE.keys())
def test_a_result_that_cannot_be_stored_fails_the_job_at_once_and_is_named(value, named):
    ran, record = run_one(lambda: value)

    assert (ran.status, ran.attempts) == (FAILED, 1)
    assert ran.errors[0].exception_class is UnstorableResult
    assert named in record.message
    assert named in row(ran.id, "last_error")[0]


def test_a_coroutine_returned_by_a_sync_task_is_no_result():
    async def forgotten():
        """Nobody awaits it."""

    coroutine = forgotten()
    ran, record = run_one(lambda: coroutine)
    coroutine.close()

    assert ran.status == FAILED
    assert "coroutine" in record.message


# ---- errors of every kind


class Wordy(Exception):
    """Cannot be made from its own args."""

    def __init__(self, code, place):
        super().__init__(code)
        self.place = place


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class HostileText(str):
    """A str that is not one."""

    def encode(self, *args):
        raise AssertionError("nobody calls it")

    __len__ = __getitem__ = __str__ = encode


def hostile_error(method, answer):
    def ask(self):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return type("Hostile", (Exception,), {method: ask, "__module__": __name__})()


def in_a_circle():
    error = ValueError("one")
    error.__cause__ = KeyError("other")
    error.__cause__.__cause__ = error
    return error


ERRORS = {
    "plain": ValueError("plain"),
    "caused in a circle": in_a_circle(),
    "no module": type("NoModule", (Exception,), {"__module__": None})("no module"),
    "extra arguments": Wordy(1, "here"),
    "holds a lock": Locked(),
    "NUL": ValueError("a\x00b"),
    "surrogate": ValueError(os.fsdecode(b"\xff")),
    "not Latin": ValueError("🐟 עברית \u202e"),
    "bytes": ValueError(b"\xff\x00"),
    "str raises": hostile_error("__str__", ZeroDivisionError()),
    "str exits": hostile_error("__str__", SystemExit(1)),
    "str is cancelled": hostile_error("__str__", asyncio.CancelledError()),
    "str is no text": hostile_error("__str__", 5),
    "str is None": hostile_error("__str__", None),
    "str is hostile": hostile_error("__str__", HostileText("text")),
    "repr raises": hostile_error("__repr__", ZeroDivisionError()),
    "notes": hostile_error("__notes__", 5),
    "SystemExit": SystemExit(3),
    "GeneratorExit": GeneratorExit(),
    "CancelledError": asyncio.CancelledError(),
    "StopIteration": StopIteration(1),
    "MemoryError": MemoryError(),
    "BaseException": BaseException("base"),
    "group": ExceptionGroup("several", [ValueError(n) for n in range(100)]),
    "syntax": SyntaxError("no", ("file\x00.py", 1, 1, "text \ud800", 1, 2)),
    "odd module": type("Odd", (Exception,), {"__module__": 5})("odd"),
    "long name": type("L" * 5_000, (Exception,), {})("long"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_whatever_is_raised_is_recorded_and_the_next_job_runs(error, max_attempts):
    tasks.ACTS["after"] = lambda: "after"

    ran, record = run_one(raising(error), max_attempts=max_attempts)
    tasks.act.enqueue("after")
    [following] = run_jobs()

    assert ran.status == (FAILED if max_attempts == 1 else READY)
    assert (ran.attempts, len(ran.errors)) == (1, 1)
    assert len(record.error_class) <= 255
    assert "in action" in record.traceback or "could not be formatted" in record.traceback
    assert following.return_value == "after"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("🐟 עברית \u202e é"), "🐟 עברית \u202e é"),
        (ValueError("two\nlines"), "two\nlines"),
        (ValueError("a\x00b"), "a\\x00b"),
        (ValueError("\ud800"), "\\ud800"),
        (ValueError(), ""),
        (KeyError("k"), "'k'"),
        (hostile_error("__str__", ZeroDivisionError()), "<str() of this error raised ZeroDivisionError>"),
        (hostile_error("__str__", SystemExit()), "<str() of this error raised SystemExit>"),
    ],
    ids=lambda value: f"{value!a:.20}" if isinstance(value, str) else "",
)
def test_a_message_is_stored_as_it_is_but_for_what_postgresql_refuses(error, message):
    _, record = run_one(raising(error))

    assert record.message == message


def test_the_summary_of_an_error_is_one_line():
    run_one(raising(ValueError("two\r\n  lines\n")))

    assert row(Job.objects.get().pk, "last_error") == ("ValueError: two lines",)


def deep():
    deep()


def chained(length):
    def action():
        error = None
        for number in range(length):
            try:
                raise ValueError(f"cause {number}") from error
            except ValueError as caught:
                error = caught
        raise error

    return action


def nested_groups():
    error = ValueError("innermost")
    for _ in range(1_000):
        error = ExceptionGroup("around", [error])
    raise error


LARGE = {
    "50 MB": raising(ValueError("x" * 50_000_000 + "end")),
    "50 MB of NUL": raising(ValueError("\x00" * 50_000_000)),
    "50 MB of surrogates": raising(ValueError("\ud800" * 5_000_000)),
    "a million lines": raising(ValueError("x\n" * 1_000_000)),
    "recursion": deep,
    "1000 causes": chained(1_000),
    "nested groups": nested_groups,
    "wide group": raising(ExceptionGroup("wide", [ValueError("x" * 1_000) for _ in range(10_000)])),
}


@pytest.mark.parametrize("action", LARGE.values(), ids=LARGE.keys())
def test_an_error_without_bounds_is_recorded_within_them(action):
    ran, record = run_one(action, max_attempts=1)

    assert ran.status == FAILED
    assert len(record.message) <= MAX_MESSAGE_CHARS
    assert len(record.traceback) <= MAX_TRACEBACK_CHARS
    assert record.error_class in ("builtins.ValueError", "builtins.RecursionError", "builtins.ExceptionGroup")
    assert len(row(ran.id, "last_error")[0]) <= 500


def test_of_a_long_error_the_beginning_and_the_end_are_kept():
    _, record = run_one(raising(ValueError("first " + "x" * 100_000 + " last")))

    assert record.message.startswith("first ")
    assert record.message.endswith(" last")
    assert "characters left out" in record.message


def test_of_a_deep_recursion_the_last_frame_is_kept():
    _, record = run_one(deep)

    assert "in deep" in record.traceback
    assert record.traceback.rstrip().endswith("maximum recursion depth exceeded")


def test_of_many_causes_the_last_is_kept():
    _, record = run_one(chained(1_000))

    assert record.traceback.rstrip().endswith("ValueError: cause 999")


def test_a_class_that_is_local_to_the_task_is_named_though_nobody_can_import_it():
    def action():
        class Local(Exception):
            pass

        raise Local("from inside")

    ran, record = run_one(action)
    [error] = tasks.act.get_result(ran.id).errors

    assert record.error_class.endswith("action.<locals>.Local")
    assert "from inside" in error.traceback
    with pytest.raises(ImportError):
        error.exception_class  # noqa: B018


def test_the_same_error_at_the_same_place_has_the_same_fingerprint():
    def fail_differently(number):
        return lambda: deep() if number == 0 else int(f"x{number}")

    prints = [run_one(fail_differently(number))[1].fingerprint for number in (0, 1, 2)]

    assert prints[0] != prints[1] == prints[2]


def test_ctrl_c_in_the_main_thread_is_the_persons_not_the_tasks():
    tasks.ACTS["interrupt"] = raising(KeyboardInterrupt())
    tasks.act.enqueue("interrupt")

    with pytest.raises(KeyboardInterrupt):
        run_jobs()


def test_a_keyboard_interrupt_in_a_slot_is_the_tasks():
    tasks.ACTS["interrupt"] = raising(KeyboardInterrupt())
    tasks.act.enqueue("interrupt")
    job = claim_one()

    attempted = InThread(lambda: attempt.run(job, None)).result()

    assert isinstance(attempted.outcome, Retried)
    assert attempted.outcome.error.class_path == "builtins.KeyboardInterrupt"


def test_a_database_error_in_a_task_is_one_of_the_task():
    ran, record = run_one(lambda: here("SELECT 1/0"))

    assert ran.status == READY
    assert "division by zero" in record.message
    assert ran.errors[0].exception_class.__name__ == "DataError"


# ---- async tasks


def test_async_tasks_succeed_and_fail_as_others_do():
    async def work():
        await asyncio.sleep(0)
        return "worked"

    async def fail():
        raise ValueError("failed")

    worked, _ = run_one(work, task=tasks.act_async)
    failed, record = run_one(fail, task=tasks.act_async, max_attempts=1)

    assert worked.return_value == "worked"
    assert (failed.status, record.message) == (FAILED, "failed")


def test_a_task_that_cancels_itself_has_failed():
    async def give_up():
        raise asyncio.CancelledError("by itself")

    ran, record = run_one(give_up, task=tasks.act_async)

    assert (ran.status, ran.attempts) == (READY, 1)
    assert record.error_class == "asyncio.exceptions.CancelledError"


def test_a_task_that_its_worker_cancels_is_released():
    tasks.ACTS["cancelled"] = raising(asyncio.CancelledError())
    tasks.act.enqueue("cancelled")
    job = claim_one()

    attempted = attempt.run(job, None, surroundings=Surrounded(reason=lambda: Interrupted))

    assert attempted.outcome == Released(claim_of(job), started=True)


def test_an_error_while_the_worker_stops_is_still_an_error():
    tasks.ACTS["broken"] = raising(ValueError("own"))
    tasks.act.enqueue("broken")

    attempted = attempt.run(claim_one(), None, surroundings=Surrounded(reason=lambda: Interrupted))

    assert isinstance(attempted.outcome, Retried)


@pytest.mark.parametrize("decision", [Retry(60), Fail("too slow"), Snooze(60)], ids=repr)
@pytest.mark.parametrize("reason", [TaskTimeout, Interrupted])
def test_a_task_that_is_interrupted_may_decide_how_its_attempt_ends(reason, decision):
    def act():
        try:
            raise reason
        except Interruption:
            raise decision  # noqa: B904 - as users write it

    tasks.ACTS["interrupted"] = act
    tasks.act.enqueue("interrupted")

    outcome = attempt.run(claim_one(), None, surroundings=Surrounded(reason=lambda: reason)).outcome

    assert type(outcome) is {Retry: Retried, Fail: Failed, Snooze: Snoozed}[type(decision)]
    assert getattr(outcome, "delay_seconds", 60) == 60
    assert getattr(outcome, "ending", "error") == "error"


# ---- the context


def test_the_context_tells_the_attempt_and_the_job():
    result = tasks.tell_context.enqueue("seen")
    told_async = tasks.tell_context_async.enqueue()

    run_jobs()

    result.refresh()
    told_async.refresh()
    assert result.return_value == {"attempt": 1, "cancelled": False, "id": result.id, "seen": ["seen"]}
    assert told_async.return_value == {"attempt": 1, "cancelled": False}


def test_the_context_counts_attempts_from_one():
    result = tasks.tell_context.enqueue()
    Job.objects.settle([Retried(claim_of(claim_one()), 0, ErrorRecord.of(ValueError()))])

    run_jobs()

    result.refresh()
    assert result.return_value["attempt"] == result.attempts == 2


def test_the_context_tells_that_the_claim_was_lost():
    tasks.tell_context.enqueue()

    attempted = attempt.run(claim_one(), None, surroundings=Surrounded(is_lost=lambda: True))

    assert '"cancelled": true' in attempted.outcome.result


# ---- rows that do not fit the code


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [("null", "{}"), ('"x"', "{}"), ('{"a": 1}', "{}"), ("[]", "[]"), ("1", "null"), ("[" * 500 + "]" * 500, "{}")],
    ids=lambda value: value[:10],
)
def test_a_row_whose_arguments_are_no_call_fails_with_a_reason_and_the_others_run(args, kwargs):
    spoilt = enqueue()
    here("UPDATE django_pgqueue_job SET args = %s::jsonb, kwargs = %s::jsonb", [args, kwargs])
    healthy = tasks.add.enqueue_many([[1, 2]] * 3)

    ran = run_jobs()

    assert [each.status for each in ran] == [FAILED, *[SUCCESSFUL] * 3]
    assert "stored argument" in row(spoilt, "last_error")[0].lower()
    assert all(row(job_id, "status") == ("done",) for job_id in healthy)


UNKNOWN_PATHS = {
    "deleted": "tests.app.tasks.deleted",
    "module deleted": "tests.app.gone.task",
    "module of nobody": "json.dumps",
    "not installed": "tests.test_attempt.deep",
    "no task": "tests.app.tasks.Mark",
    "no function": "tests.app.tasks.ACTS",
    "inside a task": "tests.app.tasks.add.call",
    "no dots": "add",
    "odd dots": "..tests.app.tasks.add",
    "empty": "",
    "trailing dot": "tests.app.tasks.",
    "not Python": "tests.app.tasks.a b; import os",
    "dunder": "tests.app.tasks.__name__",
}


@pytest.fixture
def _nothing_was_warned_of(monkeypatch):
    monkeypatch.setattr(attempt, "_unknown_tasks", set())


@pytest.mark.usefixtures("_nothing_was_warned_of")
@pytest.mark.parametrize("path", UNKNOWN_PATHS.values(), ids=UNKNOWN_PATHS.keys())
def test_a_job_whose_task_is_not_known_here_waits_and_has_not_been_tried(path, caplog):
    job_id = enqueue(task_path=path, max_attempts=1)

    [ran] = run_jobs()

    assert (ran.status, ran.attempts, ran.errors) == (READY, 0, [])
    assert row(job_id, "available_at")[0] - row(job_id, "claimed_at")[0] >= timedelta(seconds=30)
    assert row(job_id, "last_error")[0].startswith("UnknownTask: ")
    assert not JobAttempt.objects.exists()
    [line] = [record for record in caplog.records if record.name == "django_pgqueue"]
    assert line.levelno == logging.WARNING
    assert f"Job {job_id} ({path})" in line.getMessage()
    assert "cannot be run here" in line.getMessage()


@pytest.mark.usefixtures("_nothing_was_warned_of")
def test_a_task_that_is_not_known_is_warned_of_once_and_not_for_each_of_its_jobs(caplog):
    caplog.set_level(logging.DEBUG, "django_pgqueue")
    for path in ("tests.app.tasks.deleted", "tests.app.tasks.renamed"):
        for _ in range(3):
            enqueue(task_path=path)

    run_jobs()

    lines = [record for record in caplog.records if "cannot be run here" in record.getMessage()]
    assert sorted(line.levelname for line in lines) == ["DEBUG"] * 4 + ["WARNING"] * 2
    warned = [line.task_path for line in lines if line.levelname == "WARNING"]
    assert sorted(warned) == ["tests.app.tasks.deleted", "tests.app.tasks.renamed"]


@pytest.mark.usefixtures("_nothing_was_warned_of")
def test_of_very_many_unknown_tasks_only_so_many_are_warned_of(caplog):
    for number in range(attempt.MAX_UNKNOWN_TASKS + 20):
        enqueue(task_path=f"tests.app.tasks.generated_{number}")

    run_jobs()

    assert caplog.text.count("cannot be run here") == len(attempt._unknown_tasks) == attempt.MAX_UNKNOWN_TASKS


def test_an_unknown_task_runs_once_a_worker_knows_it():
    job_id = enqueue(task_path="tests.app.tasks.added_later", max_attempts=1)
    for _ in range(30):  # more than there are refunds of begun attempts
        run_jobs()
        make_due(job_id)

    tasks.added_later = tasks.add
    try:
        [ran] = run_jobs()
    finally:
        del tasks.added_later

    assert (ran.status, ran.attempts, ran.return_value) == (SUCCESSFUL, 1, 3)


@pytest.fixture
def module_that(monkeypatch, tmp_path):
    """A module of an installed app that does something when it is imported."""

    def make(code):
        monkeypatch.setattr(
            import_module("tests.app"), "__path__", [*import_module("tests.app").__path__, str(tmp_path)]
        )
        (tmp_path / "fresh.py").write_text(code)
        sys.modules.pop("tests.app.fresh", None)
        return "tests.app.fresh.task"

    yield make
    sys.modules.pop("tests.app.fresh", None)


@pytest.mark.usefixtures("_nothing_was_warned_of")
@pytest.mark.parametrize("code", ["1/0", "raise SystemExit(1)", "import nowhere", "def (", "def __getattr__(n): 1/0"])
def test_a_module_that_cannot_be_imported_makes_its_tasks_unknown(module_that, code, caplog):
    enqueue(task_path=module_that(code))

    [ran] = run_jobs()

    assert (ran.status, ran.attempts) == (READY, 0)
    assert "cannot be imported" in caplog.text


def test_code_outside_installed_apps_is_never_imported(tmp_path, monkeypatch):
    (tmp_path / "outsider.py").write_text("task = 'a module that stays in sys.modules'\n")
    monkeypatch.syspath_prepend(tmp_path)
    enqueue(task_path="outsider.task")

    run_jobs()

    assert sys.modules.pop("outsider", None) is None


def test_arguments_that_do_not_fit_the_code_of_today_are_an_ordinary_failure():
    """R23"""
    result = tasks.add.enqueue(1, 2)
    here("""UPDATE django_pgqueue_job SET args = '[1]', kwargs = '{"c": 5}'""")

    runs = run_until_over(result)

    result.refresh()
    assert (runs, result.status) == (5, FAILED)
    assert {error.exception_class for error in result.errors} == {TypeError}
    assert "unexpected keyword argument" in row(result.id, "last_error")[0]
    assert row(result.id, "args", "kwargs") == ([1], {"c": 5})


def test_max_attempts_are_the_rows_not_the_codes():
    ran, _ = run_one(raising(ValueError()), max_attempts=1)

    assert ran.status == FAILED


def test_the_job_of_a_backend_that_is_gone_runs_all_the_same():
    enqueue(backend="renamed since")
    told = []

    def note(sender, task_result, **signal):
        told.append((sender, task_result.status))

    attempted = attempt.run(claim_one(), None)
    compat.task_finished.connect(note)
    try:
        attempt.announce(attempted, attempted.outcome)
    finally:
        compat.task_finished.disconnect(note)

    assert attempted.outcome.result == "3"
    assert told == [(None, SUCCESSFUL)]


# ---- what nobody hears


def test_no_task_result_is_made_that_nobody_looks_at(monkeypatch, caplog):
    """It takes longer than many a task."""
    monkeypatch.setattr(results, "of_claim", None)
    caplog.set_level(logging.WARNING, compat._SIGNALS.logger.name)
    enqueue()

    attempted = attempt.run(claim_one(), None)
    attempt.announce(attempted, attempted.outcome)

    assert attempted.outcome.result == "3"
    assert not attempt.are_successes_heard()


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_a_signal_is_heard_by_any_receiver_and_by_the_frameworks_own_if_it_logs(caplog, level):
    def receiver(**kwargs):
        """Of the project."""

    caplog.set_level(level, compat._SIGNALS.logger.name)
    is_logged = compat.is_heard(compat.task_started, level)
    caplog.set_level(level + 1, compat._SIGNALS.logger.name)
    is_below = compat.is_heard(compat.task_started, level)
    compat.task_started.connect(receiver)
    is_received = compat.is_heard(compat.task_started, level)
    compat.task_started.disconnect(receiver)

    assert (is_logged, is_below, is_received) == (True, False, True)
    assert not compat.is_heard(Signal(), level)


# ---- log lines


def lines(caplog):
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "django_pgqueue"]


def test_a_success_is_said_at_debug(caplog):
    caplog.set_level(logging.DEBUG, "django_pgqueue")
    ran, _ = run_one(lambda: None)

    [(level, text)] = lines(caplog)
    assert level == "DEBUG"
    assert text.startswith(f"Job {ran.id} (tests.app.tasks.act) done in ")


def test_a_retry_is_said_as_a_warning_in_one_line(caplog):
    ran, _ = run_one(raising(ValueError("two\nlines")))

    [(level, text)] = lines(caplog)
    assert level == "WARNING"
    assert text.startswith(f"Job {ran.id} (tests.app.tasks.act) failed in attempt 1 of 5 and runs again in 1")
    assert text.endswith(": ValueError: two lines")


def test_a_final_failure_is_said_as_an_error_with_its_traceback(caplog):
    ran, _ = run_one(raising(ValueError("no")), max_attempts=1)

    [record] = [record for record in caplog.records if record.name == "django_pgqueue"]
    assert (record.levelname, record.exc_info[0]) == ("ERROR", ValueError)
    assert record.getMessage() == (
        f"Job {ran.id} (tests.app.tasks.act) failed for good in attempt 1 of 1: ValueError: no"
    )
    assert (record.job_id, record.task_path, record.queue_name) == (int(ran.id), "tests.app.tasks.act", "default")


@pytest.mark.parametrize("action", LARGE.values(), ids=LARGE.keys())
def test_an_error_without_bounds_is_logged_within_them(caplog, action):
    run_one(action, max_attempts=1)

    assert len(caplog.text) < 2 * MAX_TRACEBACK_CHARS


def test_what_was_refused_is_logged_as_what_was_written(caplog):
    enqueue()
    job = claim_one()
    attempted = attempt.run(job, None)

    attempt.log(attempted, Failed(claim_of(job), ErrorRecord.plain(UnstorableResult, "refused")))

    assert "failed for good in attempt 1 of 5: UnstorableResult: refused" in caplog.text
