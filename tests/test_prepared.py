"""What enqueues often has its statement prepared, where nothing depends on that: all else is as it was."""

from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pgqueue.models import Job
from django_pgqueue.statements import prepared
from django_pgqueue.statements.database import CHANNEL
from django_pgqueue.statements.prepared import USES
from django_pgqueue.worker import cleaning

from .app import tasks
from .helpers import (
    PATIENCE_SECONDS,
    InThread,
    backend,
    database_alias,
    fall_asleep,
    here,
    second_connection,
    sql,
)
from .pooler import pgbouncer

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _new_session():
    connection.close()
    connection.ensure_connection()
    yield
    connection.close()


def enqueue_often(count=USES + 1):
    for _ in range(count):
        tasks.add.enqueue(1, 2)


def sent_by(act, on=connection):
    """The first word of each statement that *act* sends."""
    with CaptureQueriesContext(on) as statements:
        act()
    return [statement["sql"].split()[0] for statement in statements]


def enqueue():
    tasks.add.enqueue(1, 2)


def rows():
    return here(
        "SELECT backend, queue_name, task_path, args, kwargs, status, priority,"
        " available_at > now() + interval '1 hour', attempts, max_attempts, claim_version, job_key"
        " FROM django_pgqueue_job ORDER BY id"
    )


def test_a_session_that_enqueues_often_prepares_the_statement_once_and_then_executes_it():
    before = sent_by(lambda: enqueue_often(USES))
    then = sent_by(enqueue)
    after = sent_by(lambda: enqueue_often(3))

    assert (before, then, after) == (
        ["INSERT"] * USES,
        ["SELECT", "PREPARE", "EXECUTE"],
        ["EXECUTE"] * 3,
    )
    assert Job.objects.count() == USES + 4


def test_what_is_executed_inserts_the_same_row(settings):
    """Whatever was prepared before in the same session for other tasks, queues, priorities and options."""
    settings.TASKS = {"default": backend(), "other": backend(MAX_ATTEMPTS=9, NOTIFY="never")}
    calls = [
        (tasks.add, (1, 2)),
        (tasks.add.using(run_after=datetime(2300, 1, 1, tzinfo=UTC)), (3, 4)),
        (tasks.add.using(priority=-3), (5, 6)),
        (tasks.add.using(queue_name="slow"), (7, 8)),
        (tasks.add.using(backend="other"), (9, 10)),
        (tasks.echo, ("it's 5 % of 🐟 \\ $1",)),
        (tasks.echo, ({"%(args)s": [None, 1.5]},)),
    ]

    def enqueue_all():
        Job.objects.all().delete()
        return [task.enqueue(*arguments) for task, arguments in calls]

    enqueue_all()
    in_full = rows()
    for _ in range(USES):
        enqueue_all()
    results = []
    executed = sent_by(lambda: results.extend(enqueue_all()))[-len(calls) :]

    assert executed == ["EXECUTE"] * len(calls)
    assert rows() == in_full
    assert [(int(result.id), result.enqueued_at) for result in results] == here(
        "SELECT id, created_at FROM django_pgqueue_job ORDER BY id"
    )


def test_a_session_keeps_so_many_and_no_more(monkeypatch):
    monkeypatch.setattr(prepared, "MOST", 3)

    for priority in range(5):
        for _ in range(2 * USES):
            tasks.add.using(priority=priority).enqueue(1, 2)

    assert here("SELECT count(*) FROM pg_prepared_statements") == [(3,)]
    assert Job.objects.count() == 5 * 2 * USES


def test_what_is_executed_rings_for_those_who_sleep():
    enqueue_often()
    with second_connection() as sleeper:
        sql(sleeper, f"LISTEN {CHANNEL}")
        fall_asleep(sleeper)

        assert sent_by(enqueue) == ["EXECUTE"]

        [heard] = sleeper.connection.notifies(timeout=PATIENCE_SECONDS, stop_after=1)
    assert heard.payload == "default"


def test_in_a_transaction_it_is_sent_in_full():
    enqueue_often()

    with transaction.atomic():
        of_django = sent_by(enqueue)
    here("BEGIN")
    by_hand = sent_by(enqueue)
    here("COMMIT")
    connection.set_autocommit(False)
    try:
        not_automatic = sent_by(enqueue)
        connection.commit()
    finally:
        connection.set_autocommit(True)

    assert (of_django, by_hand, not_automatic) == (["INSERT"],) * 3
    assert Job.objects.count() == USES + 4


def test_a_transaction_is_not_what_makes_a_session_prepare():
    with transaction.atomic():
        enqueue_often(3 * USES)

    assert sent_by(enqueue) == ["INSERT"]


def test_a_session_that_has_lost_it_inserts_once_and_nobody_notices():
    enqueue_often()
    here("DISCARD ALL")

    lost = sent_by(enqueue)
    later = sent_by(lambda: enqueue_often(2 * USES))

    assert (lost, later) == (["EXECUTE", "INSERT"], ["INSERT"] * 2 * USES)
    assert Job.objects.count() == 3 * USES + 2


def test_a_change_of_a_column_while_it_is_prepared_is_not_noticed():
    enqueue_often()
    with second_connection() as migration:
        sql(migration, "ALTER TABLE django_pgqueue_job ALTER COLUMN created_at TYPE timestamptz(3)")
        try:
            assert sent_by(enqueue) == ["EXECUTE", "INSERT"]
        finally:
            sql(migration, "ALTER TABLE django_pgqueue_job ALTER COLUMN created_at TYPE timestamptz")

    assert Job.objects.count() == USES + 2


def test_an_error_of_the_insert_itself_is_raised_and_not_tried_again():
    enqueue_often()
    here("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'refused'; END$$")
    here("CREATE TRIGGER refuse BEFORE INSERT ON django_pgqueue_job FOR EACH ROW EXECUTE FUNCTION refuse()")
    try:

        def refused():
            with pytest.raises(DatabaseError, match="refused"):
                enqueue()

        assert sent_by(refused) == ["EXECUTE"]
    finally:
        here("DROP FUNCTION refuse CASCADE")
    assert sent_by(enqueue) == ["EXECUTE"]


def test_jobs_go_where_the_search_path_says_at_that_moment():
    enqueue_often()
    here("CREATE SCHEMA tenant")
    try:
        here("CREATE TABLE tenant.django_pgqueue_job (LIKE public.django_pgqueue_job INCLUDING ALL)")
        here("SET search_path TO tenant")

        assert sent_by(enqueue) == ["EXECUTE"]

        assert here("SELECT count(*) FROM tenant.django_pgqueue_job") == [(1,)]
    finally:
        here("RESET search_path")
        here("DROP SCHEMA tenant CASCADE")
    assert Job.objects.count() == USES + 1


@pytest.mark.parametrize("options", [{"server_side_binding": True}, {"prepare_threshold": 3}])
def test_who_binds_on_the_server_or_lets_psycopg_prepare_is_left_alone(settings, options):
    settings.TASKS = {"default": backend(DATABASE="bound")}
    with database_alias("bound", **options) as bound:
        sent = sent_by(lambda: enqueue_often(2 * USES), bound)

    assert sent == ["INSERT"] * 2 * USES


@pytest.mark.pgbouncer
def test_nothing_is_prepared_behind_a_pooler(settings):
    settings.TASKS = {"default": backend(DATABASE="pooled")}
    with pgbouncer("transaction") as url, database_alias("pooled") as pooled:
        address = urlsplit(url)
        pooled.settings_dict.update(HOST=address.hostname, PORT=address.port)
        sent = sent_by(lambda: enqueue_often(3 * USES), pooled)

    assert sent == [*["INSERT"] * USES, "SELECT", *["INSERT"] * 2 * USES]


def test_a_connection_that_a_worker_keeps_for_the_next_job_begins_anew():
    def two_jobs():
        connection.ensure_connection()
        connection.close_at = None  # as CONN_MAX_AGE None would have it
        enqueue_often()
        session = connection.connection
        cleaning.leave_clean()
        assert connection.connection is session
        return sent_by(enqueue_often)

    assert InThread(two_jobs).result() == [*["INSERT"] * USES, "SELECT", "PREPARE", "EXECUTE"]
