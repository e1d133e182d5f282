"""What a claim takes, in which order, what it leaves alone, and what it does while others claim, too."""

from datetime import timedelta

import psycopg
import pytest
from django.db import OperationalError, connections, transaction
from django.utils import timezone

from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import Claim, ErrorRecord, Released, Retried, Succeeded
from django_pgqueue.statements import claim as claiming
from django_pgqueue.worker import attempt
from django_pgqueue.worker import connection as connection_module
from tests.helpers import (
    InThread,
    actor,
    claim_jobs,
    claim_of,
    claim_one,
    enqueue,
    enqueue_jobs,
    here,
    make_due,
    pausing,
    pid_of,
    row,
    second_connection,
    sql,
    wait_for_waiter,
    worker_session,
)

two_connections = pytest.mark.django_db(transaction=True)
numbered_from_one = pytest.mark.django_db(transaction=True, reset_sequences=True)

CLAIMABLE_SQL = "SELECT id FROM django_pgqueue_job WHERE status = 'pending' ORDER BY id"


def claim_on(connection, limit=1, owner="worker", queue_names=None):
    """Claim as a worker does, on a connection of its own."""
    bands = claiming.due(claiming.sweep(connection, queue_names))
    return claiming.claim(connection, bands, owner, limit, 60)


def ids_of(jobs):
    return [job.id for job in jobs]


# ---- the outcomes of the published demo


@numbered_from_one
def test_two_workers_get_two_jobs_without_waiting():
    """R07: while A holds job 1's row, B receives job 2."""
    enqueue_jobs(3)
    with actor() as a, actor() as b:
        sql(a, "BEGIN")
        first = claim_on(a, owner="A")
        second = claim_on(b, owner="B")
        sql(a, "COMMIT")

    assert (ids_of(first), ids_of(second)) == ([1], [2])
    assert Job.objects.filter(status="running").count() == 2


@numbered_from_one
def test_nowait_on_a_held_row_is_refused_and_the_transaction_goes_on_after_a_rollback():
    """R13: SQLSTATE 55P03 at once; the transaction needs a rollback, here to its savepoint."""
    enqueue_jobs(2)
    with second_connection() as a:
        sql(a, "BEGIN")
        sql(a, "SELECT id FROM django_pgqueue_job WHERE id = 1 FOR UPDATE")

        with transaction.atomic():
            here("SAVEPOINT before_nowait")
            with pytest.raises(OperationalError) as refused:
                here("SELECT id FROM django_pgqueue_job WHERE id = 1 FOR UPDATE NOWAIT")
            with pytest.raises(Exception, match="current transaction is aborted"):
                here("SELECT 1")
            here("ROLLBACK TO SAVEPOINT before_nowait")
            after = here("SELECT id FROM django_pgqueue_job WHERE id = 2 FOR UPDATE NOWAIT")

    assert refused.value.__cause__.sqlstate == "55P03"
    assert after == [(2,)]


@numbered_from_one
def test_skip_locked_passes_over_a_held_row_to_job_2():
    """R07, R13."""
    enqueue_jobs(3)
    with second_connection() as a:
        sql(a, "BEGIN")
        sql(a, "SELECT id FROM django_pgqueue_job WHERE id = 1 FOR UPDATE")

        found = here("SELECT id FROM django_pgqueue_job ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED")

    assert found == [(2,)]


@numbered_from_one
def test_the_claim_beside_a_held_row_is_job_2_at_version_1():
    """R06: one statement selects, marks and returns."""
    enqueue_jobs(3)
    with second_connection() as a:
        sql(a, "BEGIN")
        sql(a, "SELECT id FROM django_pgqueue_job WHERE id = 1 FOR UPDATE")

        [job] = Job.objects.claim("B")

    assert (job.id, job.claim_version) == (2, 1)
    assert row(2, "status", "claimed_by", "claim_version", "attempts") == ("running", "B", 1, 1)
    assert row(1, "status", "claimed_by", "claim_version", "attempts") == ("pending", None, 0, 0)


@numbered_from_one
def test_nothing_to_claim_is_not_nothing_left():
    """R10: with every row locked a claim is empty, while a plain count still sees three."""
    enqueue_jobs(3)
    with second_connection() as a:
        sql(a, "BEGIN")
        sql(a, "SELECT id FROM django_pgqueue_job FOR UPDATE")

        claimed = Job.objects.claim("B", 3)
        pending = Job.objects.filter(status="pending").count()
        sql(a, "ROLLBACK")
        claimed_later = Job.objects.claim("B", 3)

    assert (claimed, pending) == ([], 3)
    assert ids_of(claimed_later) == [1, 2, 3]


@two_connections
def test_two_concurrent_claims_get_two_ids():
    """R06, R07: both claims are open at the same time."""
    enqueue_jobs(2)
    with actor() as a, actor() as b:
        for connection in (a, b):
            sql(connection, "BEGIN")
        first, second = claim_on(a, owner="A"), claim_on(b, owner="B")
        for connection in (a, b):
            sql(connection, "COMMIT")

    assert len({*ids_of(first), *ids_of(second)}) == 2
    assert set(Job.objects.values_list("claimed_by", flat=True)) == {"A", "B"}


# ---- what a claim writes and gives


@pytest.mark.django_db
def test_a_claim_begins_an_attempt_with_a_lease():
    """R02, R06: claimer, time, lease end, attempt and version are written and returned."""
    job_id = enqueue(args='["ü", {"a": 1}]', kwargs='{"b": null}', priority=7, max_attempts=3, queue_name="email")

    [job] = Job.objects.claim("host:1", lease_seconds=90)

    stored = Job.objects.get(pk=job_id)
    assert job[:4] == ((job_id, 1), "default", "email", "tests.app.tasks.add")
    assert (job.args, job.kwargs) == ('["ü", {"a": 1}]', '{"b": null}')
    assert (job.priority, job.attempts, job.max_attempts, job.claimed_by) == (7, 1, 3, "host:1")
    assert (job.created_at, job.started_at, job.claimed_at) == (
        stored.created_at.timestamp(),
        stored.started_at.timestamp(),
        stored.claimed_at.timestamp(),
    )
    assert (stored.status, stored.attempts, stored.claim_version, stored.claimed_by) == ("running", 1, 1, "host:1")
    assert stored.available_at <= stored.claimed_at == stored.started_at
    assert stored.lease_until - stored.claimed_at == timedelta(seconds=90)


@pytest.mark.django_db
def test_every_claim_counts_an_attempt_and_raises_the_version_but_the_first_start_stays():
    """R06, R21."""
    job_id = enqueue()
    first = claim_one()
    Job.objects.settle([Retried(claim_of(first), 0, ErrorRecord.plain(ValueError, "no"))])

    second = claim_one()

    assert (second.id, second.attempts, second.claim_version) == (job_id, 2, 2)
    assert second.started_at == first.started_at < second.claimed_at


@pytest.mark.django_db
def test_a_claim_leaves_every_other_status_alone():
    """R06: only pending rows are taken."""
    moment = timezone.now()
    for status in ("blocked", "held", "done", "failed", "cancelled"):
        finished = moment if status in ("done", "failed", "cancelled") else None
        Job.objects.create(backend="default", queue_name="default", status=status, finished_at=finished)
    enqueue()
    claim_one()

    assert Job.objects.claim("worker", 10) == []


@pytest.mark.django_db
@pytest.mark.parametrize("limit", [0, -1])
def test_a_claim_of_no_jobs_takes_none(limit):
    enqueue()

    assert Job.objects.claim("worker", limit) == []


@pytest.mark.django_db
def test_a_claim_may_return_fewer_jobs_than_asked():
    """R11."""
    ids = enqueue_jobs(3)

    assert ids_of(Job.objects.claim("worker", 100)) == ids
    assert Job.objects.claim("worker", 100) == []


# ---- order


@pytest.mark.django_db
def test_jobs_of_a_queue_come_by_priority_then_availability_then_id():
    """R05, R06."""
    low, late, early, same_moment, high = (
        enqueue(priority=-100),
        enqueue(),
        enqueue(),
        enqueue(),
        enqueue(priority=100),
    )
    moment = timezone.now() - timedelta(minutes=1)
    Job.objects.filter(pk__in=[early, same_moment]).update(available_at=moment)
    Job.objects.filter(pk=low).update(available_at=moment - timedelta(days=1))

    one_by_one = [claim_one().id for _ in range(5)]

    assert one_by_one == [high, early, same_moment, late, low]


@pytest.mark.django_db
def test_a_batch_comes_in_the_order_in_which_its_jobs_would_have_come():
    """R06: RETURNING promises no order, the claim does."""
    expected = {}
    for n in range(60):
        priority = (n * 7) % 5 - 2
        job_id = enqueue(priority=priority)
        available_at = timezone.now() - timedelta(seconds=(n * 13) % 11)
        Job.objects.filter(pk=job_id).update(available_at=available_at)
        expected[job_id] = (-priority, available_at, job_id)

    batches = [ids_of(Job.objects.claim("worker", 25)) for _ in range(3)]

    assert [job_id for batch in batches for job_id in batch] == sorted(expected, key=expected.__getitem__)


@pytest.mark.django_db
def test_priority_counts_across_queues_and_then_the_queue_that_waits_longest():
    """R05, R06."""
    newest = enqueue(queue_name="a")
    oldest = enqueue(queue_name="b")
    urgent = enqueue(queue_name="c", priority=1)
    Job.objects.filter(pk=oldest).update(available_at=timezone.now() - timedelta(minutes=1))

    one_by_one = [claim_one().id for _ in range(3)]

    assert one_by_one == [urgent, oldest, newest]


@pytest.mark.django_db
def test_a_backlog_in_one_queue_does_not_keep_another_waiting():
    """R05: the queue whose first job has waited longest is served first, however long the others are."""
    enqueue_jobs(50, queue_name="long")
    other = enqueue(queue_name="other")
    enqueue_jobs(50, queue_name="long")

    claimed = [claim_one().id for _ in range(51)]

    assert claimed[50] == other


@pytest.mark.django_db
def test_only_the_named_queues_are_served():
    """R12: by name, once each, whatever else waits."""
    mail, _, report = enqueue(queue_name="mail"), enqueue(queue_name="other", priority=100), enqueue(queue_name="r")

    assert Job.objects.claim("worker", 9, queue_names=[]) == []
    assert Job.objects.claim("worker", 9, queue_names=["unknown", "Mail", "mai"]) == []
    assert ids_of(Job.objects.claim("worker", 9, queue_names=["r", "mail", "mail", "unknown"])) == [mail, report]
    assert row(mail, "attempts") == (1,)


@pytest.mark.django_db
def test_queues_with_awkward_names_are_queues_like_others():
    names = ["a", "A", "a ", "ä", "zürich", "%s", "{a,b}", '"', "'", "\\", "NULL", "日本", "x" * 128]
    ids = {name: enqueue(queue_name=name) for name in names}

    for name, job_id in ids.items():
        assert ids_of(Job.objects.claim("worker", 9, queue_names=[name])) == [job_id]
    Job.objects.release([Claim(job_id, 1) for job_id in ids.values()])
    assert set(ids_of(Job.objects.claim("worker", 99))) == set(ids.values())


# ---- availability


@pytest.mark.django_db
def test_a_future_job_is_not_claimed_until_it_is_due():
    """R03."""
    job_id = enqueue(run_after=timezone.now() + timedelta(days=3))

    before = Job.objects.claim("worker", 10)
    make_due(job_id)

    assert before == []
    assert claim_one().id == job_id


@pytest.mark.django_db
def test_a_future_job_never_hides_a_due_one():
    """R03, R06: neither in its own queue and priority, nor one of higher priority, nor in a queue before."""
    tomorrow = timezone.now() + timedelta(days=1)
    enqueue_jobs(20, run_after=tomorrow, priority=5)
    enqueue_jobs(20, run_after=tomorrow, queue_name="aaa")
    enqueue_jobs(20, run_after=tomorrow)
    due = [enqueue(priority=5), enqueue()]

    assert ids_of(Job.objects.claim("worker", 100)) == due


@pytest.mark.django_db
@pytest.mark.parametrize("moment", ["infinity", "10000-01-01", "294276-12-31"])
def test_a_moment_beyond_python_s_calendar_set_by_hand_stops_no_worker(moment):
    """R03: PostgreSQL knows moments that have no datetime."""
    forever, due = enqueue(priority=1), enqueue()
    here("UPDATE django_pgqueue_job SET available_at = %s WHERE id = %s", [moment, forever])

    bands = claiming.sweep(connections["default"])
    claimed = Job.objects.claim("worker", 10)

    assert min(band.due_in for band in bands if band.due_in > 0) > 1e9
    assert ids_of(claimed) == [due]


@pytest.mark.django_db
@pytest.mark.parametrize("moment", ["-infinity", "4713-01-01 BC", "0001-01-01"])
def test_a_moment_before_python_s_calendar_set_by_hand_is_due(moment):
    """R03."""
    later, earliest = enqueue(), enqueue()
    here("UPDATE django_pgqueue_job SET available_at = %s WHERE id = %s", [moment, earliest])

    assert ids_of(Job.objects.claim("worker", 10)) == [earliest, later]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("moment", "year"), [("infinity", 9999), ("294276-12-31", 9999), ("-infinity", 1), ("4713-01-01 BC", 1)]
)
@pytest.mark.parametrize("column", ["created_at", "started_at"])
def test_a_job_that_began_beyond_python_s_calendar_runs_like_others(settings, column, moment, year):
    """R03: also set by hand, and also where the project's moments have a time zone that is far from UTC."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Pacific/Kiritimati" if year == 9999 else "Pacific/Samoa"
    enqueue(task_path="tests.app.tasks.tell_context", args="[]")
    here(f"UPDATE django_pgqueue_job SET {column} = %s", [moment])

    attempted = attempt.run(claim_one(), None)

    assert isinstance(attempted.outcome, Succeeded)
    shown = {"created_at": attempted.begun.result.enqueued_at, "started_at": attempted.begun.result.started_at}
    assert shown[column].year == year


# ---- the sweep


@pytest.mark.django_db
def test_a_sweep_names_each_queue_and_priority_once_with_its_first_job():
    """R06, R08: bands are read off the pending index, whether they are due or not."""
    first = enqueue(queue_name="a", priority=3)
    enqueue_jobs(3, queue_name="a", priority=3)
    low = enqueue(queue_name="a", priority=-3)
    other = enqueue(queue_name="b")
    future = enqueue(queue_name="c", run_after=timezone.now() + timedelta(hours=1))
    enqueue(queue_name="d")
    Job.objects.filter(queue_name="d").update(status="held")

    bands = claiming.sweep(connections["default"])

    found = {(band.queue_name, band.priority): band for band in bands}
    assert {place: band.first_id for place, band in found.items()} == {
        ("a", 3): first,
        ("a", -3): low,
        ("b", 0): other,
        ("c", 0): future,
    }
    assert len(bands) == 4
    assert found["a", 3].due_in <= 0
    assert 3590 < found["c", 0].due_in < 3600
    assert [band for band in bands if band.due_in > 0] == [found["c", 0]]
    assert claiming.sweep(connections["default"], ["a", "a", "c"]) != []
    assert {band.queue_name for band in claiming.sweep(connections["default"], ["a", "a", "c"])} == {"a", "c"}
    assert len(claiming.sweep(connections["default"], ["a", "a", "c"])) == 3


@pytest.mark.django_db
def test_a_sweep_of_an_empty_table_finds_nothing():
    assert claiming.sweep(connections["default"]) == []
    assert claiming.sweep(connections["default"], ["default"]) == []


@pytest.mark.django_db
def test_a_sweep_finds_every_one_of_many_bands():
    """R06."""
    wanted = {(f"q{n % 40:02}", n // 40 - 3) for n in range(280)}
    for queue_name, priority in wanted:
        enqueue(queue_name=queue_name, priority=priority)

    every = claiming.sweep(connections["default"])
    some = claiming.sweep(connections["default"], [f"q{n:02}" for n in range(0, 40, 2)])

    assert {(band.queue_name, band.priority) for band in every} == wanted
    assert len(every) == 280
    assert len(some) == 140


@pytest.mark.django_db
def test_only_counted_attempts_are_the_past_that_a_retried_job_shows():
    """R23."""
    enqueue()
    for n in range(2):
        claim = claim_of(claim_one(owner=f"worker {n}"))
        Job.objects.settle([Retried(claim, 0, ErrorRecord.plain(ValueError, str(n)))])
        Job.objects.settle([Released(claim_of(claim_one()), started=True)])
    job = claim_one()

    earlier = claiming.earlier_attempts(connections["default"], [job])

    assert [attempt.worker for attempt in earlier[job.id]] == ["worker 0", "worker 1"]
    assert JobAttempt.objects.filter(job=job.id).count() == 4


# ---- with others at work


@two_connections
def test_a_claim_locks_nothing_beyond_its_limit():
    """R06, R12: others find at once what a claim did not take, in the same and in other bands."""
    ids = enqueue_jobs(3, priority=1) + enqueue_jobs(3)
    with actor() as a, actor() as b:
        sql(a, "BEGIN")
        taken = claim_on(a, 2)
        free = sql(b, CLAIMABLE_SQL + " FOR UPDATE SKIP LOCKED")
        sql(a, "ROLLBACK")

    assert ids_of(taken) == ids[:2]
    assert free == [(job_id,) for job_id in ids[2:]]


@two_connections
def test_a_claim_fills_its_limit_behind_locked_rows_and_from_lower_bands():
    """R07, R11: what is locked costs no place."""
    ids = enqueue_jobs(4, priority=1) + enqueue_jobs(4)
    with second_connection() as a:
        sql(a, "BEGIN")
        sql(a, "SELECT 1 FROM django_pgqueue_job WHERE id = ANY(%s) FOR UPDATE", [ids[:3]])

        claimed = Job.objects.claim("worker", 3)

    assert ids_of(claimed) == ids[3:6]


@two_connections
def test_a_claim_that_rolls_back_loses_nothing():
    """R20, R22: the worker is killed before its claim commits."""
    enqueue_jobs(2)
    with actor() as a:
        sql(a, "BEGIN")
        claim_on(a, 2, owner="killed")
        a.close()

    jobs = Job.objects.claim("worker", 2)

    assert [(job.claim_version, job.attempts, job.claimed_by) for job in jobs] == [(1, 1, "worker")] * 2


@two_connections
def test_a_claim_does_not_wait_for_a_foreign_key():
    """R06: a row of someone's own that points at the job locks its key, and a claim changes no key."""
    job_id = enqueue()
    with second_connection() as a:
        sql(a, "BEGIN")
        sql(a, "SELECT 1 FROM django_pgqueue_job FOR KEY SHARE")

        assert ids_of(Job.objects.claim("worker")) == [job_id]


@two_connections
def test_an_enqueue_that_has_not_committed_is_not_there():
    """R01."""
    with actor() as a:
        with transaction.atomic():
            enqueue()
            assert claim_on(a) == []
        assert len(claim_on(a)) == 1


@two_connections
def test_a_claim_judges_each_row_again_under_its_lock():
    """R06: what has changed between the claim's snapshot and its lock is not taken, and costs no place."""
    ids = enqueue_jobs(10)
    with pausing() as pause, actor() as a:
        bands = claiming.due(claiming.sweep(a))
        pause.stop(a)
        claiming_thread = InThread(lambda: claiming.claim(a, bands, "A", 4, 60))
        pause.wait_for_arrival()
        assert claim_jobs(1, owner="B")[0].job_id == ids[0]
        Job.objects.filter(pk=ids[1]).update(available_at=timezone.now() + timedelta(days=1))
        Job.objects.filter(pk=ids[2]).update(priority=5)
        Job.objects.filter(pk=ids[3]).update(queue_name="elsewhere")
        Job.objects.filter(pk=ids[4]).update(status="held")
        Job.objects.filter(pk=ids[5]).delete()
        Job.objects.filter(pk=ids[6]).update(available_at=timezone.now() - timedelta(hours=1))
        pause.go_on()
        claimed = claiming_thread.result()

    assert sorted(ids_of(claimed)) == ids[6:10]
    assert row(ids[0], "claimed_by", "claim_version") == ("B", 1)
    assert set(Job.objects.filter(claimed_by="A").values_list("id", flat=True)) == set(ids[6:10])


@two_connections
def test_a_job_claimed_and_given_back_meanwhile_is_claimed_at_the_version_it_has_then():
    """R06, R21: the version rises from what stands in the row, not from what the snapshot saw."""
    job_id = enqueue()
    with pausing() as pause, actor() as a:
        bands = claiming.due(claiming.sweep(a))
        pause.stop(a)
        claiming_thread = InThread(lambda: claiming.claim(a, bands, "A", 1, 60))
        pause.wait_for_arrival()
        Job.objects.settle([Released(claim_of(claim_one()))])
        pause.go_on()
        claimed = claiming_thread.result()

    assert [(job.id, job.claim_version, job.attempts) for job in claimed] == [(job_id, 3, 1)]


# ---- isolation


@two_connections
def test_at_repeatable_read_a_claim_beside_another_fails_with_40001():
    """R09: a row that was claimed after the snapshot is an error there, instead of a row to pass over."""
    enqueue_jobs(2)
    with actor() as a:
        sql(a, "BEGIN ISOLATION LEVEL REPEATABLE READ")
        sql(a, "SELECT 1")
        Job.objects.claim("B")

        with pytest.raises(psycopg.errors.SerializationFailure) as failed:
            claim_on(a)

    assert failed.value.sqlstate == "40001"


@two_connections
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_worker_claims_at_read_committed_whatever_the_default_is(level):
    """R09."""
    ids = enqueue_jobs(2)
    with worker_session() as a:
        sql(a.connection, f"SET default_transaction_isolation = '{level}'")
        with a.round() as connection:
            [(actual,)] = sql(connection, "SHOW transaction_isolation")
            Job.objects.claim("B")
            claimed = claim_on(connection, owner="A")

    assert actual == "read committed"
    assert ids_of(claimed) == ids[1:]
    assert row(ids[0], "claimed_by") == ("B",)


SETTINGS = ["enable_bitmapscan", "enable_seqscan", "jit", "lock_timeout", "statement_timeout"]
OF_A_ROUND = ["off", "off", "off", "500", "10000"]


def settings_of(connection):
    question = "SELECT setting FROM pg_settings WHERE name = ANY(%s) ORDER BY name"
    return [setting for (setting,) in sql(connection, question, [SETTINGS])]


@two_connections
def test_a_session_of_the_worker_s_own_has_the_settings_of_a_round_from_its_start():
    """R09: neither a round nor a single statement has to bring them along."""
    with worker_session() as a:
        with a.single() as connection:
            alone = settings_of(connection)
        with a.round() as connection:
            inside = settings_of(connection)
        with a.round(2.0) as connection:
            limited = settings_of(connection)
        after = settings_of(a.connection)

    assert alone == inside == after == OF_A_ROUND
    assert limited == [*OF_A_ROUND[:4], "2000"]


@two_connections
def test_behind_a_pooler_the_settings_of_a_round_end_with_it(monkeypatch):
    """R09: session state would leak to whoever has the session next. So it would from Django's connection."""
    monkeypatch.setattr(connection_module, "is_pooled", lambda connection: True)
    with worker_session() as a:
        before = settings_of(a.connection)
        with a.single() as connection:
            alone = settings_of(connection)
        with a.round() as connection:
            inside = settings_of(connection)
        after = settings_of(a.connection)
    own_before = settings_of(connections["default"])
    Job.objects.claim("worker")

    assert before == after != inside
    assert alone == inside == OF_A_ROUND
    assert settings_of(connections["default"]) == own_before


@two_connections
def test_a_claim_waits_for_an_exclusive_lock_on_the_table_no_longer_than_a_round_may():
    """R13: lock_timeout bounds what SKIP LOCKED does not."""
    enqueue()
    with second_connection() as a, worker_session() as b:
        sql(a, "BEGIN")
        sql(a, "LOCK TABLE django_pgqueue_job IN ACCESS EXCLUSIVE MODE")

        with pytest.raises(psycopg.errors.LockNotAvailable), b.round() as connection:
            claim_on(connection)
        sql(a, "ROLLBACK")
        with b.round() as connection:
            claimed = claim_on(connection)

    assert len(claimed) == 1


@two_connections
def test_a_claim_waits_for_nobody_in_its_own_transaction_either():
    """R07: a caller who claims inside atomic() holds the rows; others pass over them."""
    ids = enqueue_jobs(2)
    with actor() as a, transaction.atomic():
        mine = claim_one()
        theirs = claim_on(a, 2)

    assert ([mine.id], ids_of(theirs)) == (ids[:1], ids[1:])


@two_connections
def test_for_update_without_skip_locked_would_wait():
    """R13: the three answers differ; this one waits until the holder is through."""
    [job_id] = enqueue_jobs(1)
    with actor() as a, actor() as b:
        sql(a, "BEGIN")
        claim_on(a)
        waiting = InThread(lambda: sql(b, "SELECT status FROM django_pgqueue_job FOR UPDATE"))
        wait_for_waiter(pid_of(a))
        sql(a, "COMMIT")

        assert waiting.result() == [("running",)]
    assert row(job_id, "status") == ("running",)
