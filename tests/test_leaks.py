"""Nothing of one job reaches the next: sessions, transactions, languages, time zones, query logs, connections."""

from collections import defaultdict

import pytest
from django.db import connections

from django_pgqueue.models import Job

from .app.models import Mark
from .app.worker_tasks import (
    async_leave_mark,
    async_mark_and_wait_for,
    leave_connection_closed,
    leave_mark,
    leave_settings_behind,
    leave_transaction_broken,
    leave_transaction_open,
    make_queries,
    mark_and_wait_for,
    report_connection,
    report_settings,
)
from .helpers import second_connection, wait_until
from .workers import barrier

pytestmark = pytest.mark.django_db(transaction=True)

KEEPING = {"closed after each job": {}, "kept": {"CONN_MAX_AGE": "600"}}


@pytest.mark.direct("in transaction mode, what a task sets is set for whoever gets its session next")
@pytest.mark.parametrize("environment", KEEPING.values(), ids=KEEPING.keys())
def test_a_job_meets_default_settings_whatever_the_one_before_has_left(start_worker, environment):
    """Case B147"""
    clean = report_settings.enqueue()
    for careless in (leave_settings_behind, leave_transaction_open, leave_transaction_broken, leave_connection_closed):
        careless.enqueue()
        report_settings.enqueue()

    assert start_worker("--burst", "--concurrency", "1", **environment).wait() == 0

    assert set(Job.objects.values_list("status", flat=True)) == {"done"}
    reports = list(Job.objects.filter(task_path=report_settings.module_path).values_list("return_value", flat=True))
    expected = Job.objects.get(pk=clean.id).return_value
    assert expected["in_transaction"] is False
    assert expected["temporary_table"] is None
    assert reports == [expected] * 5
    assert not Mark.objects.exists()  # what was never committed


@pytest.mark.parametrize("environment", KEEPING.values(), ids=KEEPING.keys())
def test_the_query_log_of_debug_is_empty_for_each_job(start_worker, environment):
    """Case B148"""
    for _ in range(3):
        make_queries.enqueue(20)
    report_settings.enqueue()

    assert start_worker("--burst", "--concurrency", "1", DEBUG="1", **environment).wait() == 0

    # One query of its own before it reads the log.
    assert Job.objects.get(task_path=report_settings.module_path).return_value["logged_queries"] == 1


@pytest.mark.direct("counts the server's sessions, which a pooler keeps")
def test_connections_stay_within_the_slots_and_go_after_the_last_job(start_worker):
    """Case B36"""
    for number in range(50):
        leave_mark.enqueue(f"{number}")
        async_leave_mark.enqueue(f"{number}")
    with barrier(21) as lock:
        for number in range(4):
            mark_and_wait_for.using(priority=-1).enqueue(f"last {number}", 21)
            async_mark_and_wait_for.using(priority=-1).enqueue(f"last async {number}", 21)
        worker = start_worker("--concurrency", "8").wait_ready()

        wait_until(lambda: Mark.objects.filter(note__startswith="last").count() == 8, "all slots to be busy")
        most = count_backends()
        lock.release()
        wait_until(lambda: not Job.objects.exclude(status="done").exists(), "the end of all jobs")

        # Claiming, upkeep, listening, and one connection for each slot.
        assert most <= 8 + 3
        wait_until(lambda: count_backends() <= 3, "the slots' connections to be closed")
    assert worker.stop() == 0


@pytest.mark.direct("a pooler shares the sessions out anew for each transaction")
@pytest.mark.parametrize("environment", [{"CONN_MAX_AGE": "600"}, {"POOL": "1"}], ids=["kept", "pool"])
def test_no_two_children_share_a_connection(start_worker, environment):
    """Case B35"""
    with barrier(23) as lock:
        for number in range(4):
            mark_and_wait_for.enqueue(f"first {number}", 23)
        worker = start_worker("--processes", "2", "--concurrency", "2", **environment)
        wait_until(lambda: Mark.objects.count() == 4, "all slots to be busy")
        lock.release()
    for _ in range(100):
        report_connection.enqueue()
    wait_until(lambda: not Job.objects.exclude(status="done").exists(), "the end of all jobs")
    assert worker.stop() == 0

    assert set(Job.objects.values_list("status", "attempts")) == {("done", 1)}
    reports = Job.objects.filter(task_path=report_connection.module_path).values_list("return_value", flat=True)
    children_of = defaultdict(set)
    for process, backend in reports:
        children_of[backend].add(process)
    assert {len(children) for children in children_of.values()} == {1}


@pytest.mark.direct("looks at the server's sessions, which a pooler keeps")
def test_the_control_connection_is_idle_and_pins_no_horizon_while_a_task_runs(start_worker):
    """Case B40"""
    with barrier(22):
        mark_and_wait_for.enqueue("long", 22)
        worker = start_worker("--grace", "0").wait_ready()
        wait_until(lambda: Mark.objects.exists(), "the task")

        with second_connection() as other, other.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgqueue%%'"
                " AND datname = current_database() AND (state <> 'idle' OR backend_xmin IS NOT NULL)"
            )
            [(busy,)] = cursor.fetchall()

        assert busy == 0
        worker.stop()


def count_backends():
    """Count the backends on the test's database that are not the test's own."""
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            " AND query NOT LIKE 'SELECT pg_advisory_lock(%%' AND query NOT LIKE '%%unlock_all%%'"
        )
        return cursor.fetchone()[0]
