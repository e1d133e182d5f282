"""Old done jobs go, in batches, without waiting for anybody; everything else stays."""

from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.utils import timezone

from django_pgqueue.managers import BATCH_ROWS
from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import ErrorRecord, Failed, Released, Retried, Succeeded
from django_pgqueue.statements import upkeep
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
    second_connection,
    sql,
    worker_session,
)

two_connections = pytest.mark.django_db(transaction=True)

ERROR = ErrorRecord.plain(ValueError, "no")
WEEK = 7 * 24 * 3600.0


def done_jobs(count, age=timedelta(days=8)):
    """Jobs that were created and finished *age* ago, and their ids."""
    ids = enqueue_jobs(count)
    moment = timezone.now() - age
    Job.objects.filter(pk__in=ids).update(status="done", finished_at=moment, created_at=moment)
    return ids


def left():
    return list(Job.objects.order_by("pk").values_list("pk", flat=True))


def walk(connection, limit=1_000):
    """Walk the table once from its beginning, as a worker does; return how many were deleted in each step."""
    steps, after = [], 0
    while True:
        pruned = upkeep.prune(connection, after, WEEK, limit)
        steps.append(pruned.deleted)
        if pruned.finished:
            return steps
        after = pruned.last_id


PRUNERS = {
    "queryset": lambda: Job.objects.all().prune(WEEK),
    "walk": lambda: sum(walk(connections["default"])),
    "walk in small steps": lambda: sum(walk(connections["default"], 2)),
}


@pytest.mark.django_db
@pytest.mark.parametrize("prune", PRUNERS.values(), ids=PRUNERS)
def test_only_done_jobs_that_are_old_enough_are_deleted(prune):
    """R32, B137: whatever their age, jobs that live or have failed stay."""
    old = done_jobs(3)
    fresh = done_jobs(2, timedelta(days=6))
    long_ago = timezone.now() - timedelta(days=999)
    others = []
    for status in ("pending", "blocked", "held", "running", "failed", "cancelled"):
        [job_id] = enqueue_jobs(1)
        Job.objects.filter(pk=job_id).update(
            status=status,
            created_at=long_ago,
            available_at=long_ago,
            finished_at=long_ago if status in ("failed", "cancelled") else None,
            lease_until=long_ago if status == "running" else None,
            claimed_at=long_ago,
            claimed_by="x",
        )
        others.append(job_id)
    more = done_jobs(2)

    deleted = prune()

    assert deleted == len(old) + len(more)
    assert left() == fresh + others
    assert prune() == 0


@pytest.mark.django_db
@pytest.mark.parametrize("prune", PRUNERS.values(), ids=PRUNERS)
def test_the_attempts_of_deleted_jobs_go_with_them_and_no_others(prune):
    """R32."""
    old, kept = enqueue(), enqueue()
    for _ in range(2):
        claims = claim_jobs(2)
        Job.objects.settle([Retried(claims[0], 0, ERROR), Released(claims[1], started=True)])
    Job.objects.settle([Succeeded(claim) for claim in claim_jobs(2)])
    moment = timezone.now() - timedelta(days=8)
    Job.objects.filter(pk=old).update(finished_at=moment, created_at=moment)

    assert prune() == 1

    assert left() == [kept]
    assert list(JobAttempt.objects.values_list("job", flat=True)) == [kept, kept]


@pytest.mark.django_db
def test_an_empty_table_is_walked_at_once():
    assert upkeep.prune(connections["default"], 0, WEEK, 1_000) == (0, None, True)
    assert Job.objects.all().prune(WEEK) == 0


@pytest.mark.django_db
def test_a_walk_looks_at_so_many_rows_in_each_step_and_goes_on_from_there():
    """R32, B140: in small batches, by the primary key."""
    ids = done_jobs(7)
    connection = connections["default"]

    steps = [upkeep.prune(connection, 0, WEEK, 3)]
    while not steps[-1].finished:
        steps.append(upkeep.prune(connection, steps[-1].last_id, WEEK, 3))

    assert [tuple(step) for step in steps] == [(3, ids[2], False), (3, ids[5], False), (1, ids[6], True)]
    assert left() == []


@pytest.mark.django_db
def test_a_walk_ends_where_the_jobs_become_too_young():
    """R32: behind a batch that was created within the retention nothing can be old enough."""
    done_jobs(2)
    enqueue_jobs(2)
    young = enqueue_jobs(6)

    steps = walk(connections["default"], 2)

    assert steps == [2, 0]
    assert left()[-6:] == young


@pytest.mark.django_db
def test_a_walk_goes_on_over_old_jobs_that_it_may_not_delete():
    """R32: dead letters at the beginning of the table hide nothing behind them."""
    blocked_by = done_jobs(5)
    Job.objects.filter(pk__in=blocked_by).update(status="failed")
    old = done_jobs(2)

    assert walk(connections["default"], 2) == [0, 0, 1, 1]
    assert left() == blocked_by
    assert not Job.objects.filter(pk__in=old).exists()


@pytest.mark.django_db
@pytest.mark.parametrize("prune", PRUNERS.values(), ids=PRUNERS)
def test_a_job_that_took_long_is_as_old_as_its_end(prune):
    """R32: created before the retention, finished within it."""
    [job_id] = done_jobs(1)
    Job.objects.filter(pk=job_id).update(finished_at=timezone.now())

    assert prune() == 0
    assert left() == [job_id]


@pytest.mark.django_db
@pytest.mark.parametrize("prune", PRUNERS.values(), ids=PRUNERS)
@pytest.mark.parametrize("column", ["created_at", "finished_at", "available_at"])
@pytest.mark.parametrize("moment", ["infinity", "-infinity", "10000-01-01"])
def test_moments_without_a_datetime_stop_no_pruning(prune, column, moment):
    """R32: set by hand."""
    ids = done_jobs(3)
    here(f"UPDATE django_pgqueue_job SET {column} = %s WHERE id = %s", [moment, ids[1]])

    prune()

    assert left() == (ids[1:2] if column == "finished_at" and moment != "-infinity" else [])


@pytest.mark.django_db
def test_a_queryset_prunes_only_its_own_jobs():
    """R32."""
    mail = enqueue(queue_name="mail")
    other = done_jobs(2)
    moment = timezone.now() - timedelta(days=8)
    Job.objects.filter(pk=mail).update(status="done", finished_at=moment)

    assert Job.objects.filter(queue_name="mail").order_by("-finished_at").prune(WEEK) == 1
    assert left() == other
    assert Job.objects.filter(pk__in=other, failed_attempts__isnull=True).prune(0) == 2


@pytest.mark.django_db
def test_more_jobs_than_a_batch_are_all_pruned():
    """R32, B140."""
    done_jobs(BATCH_ROWS + 3)

    assert Job.objects.all().prune(WEEK) == BATCH_ROWS + 3
    assert left() == []


@pytest.mark.django_db
def test_pruning_goes_with_its_caller_s_transaction():
    """R01."""
    ids = done_jobs(2)

    with transaction.atomic():
        assert Job.objects.all().prune(WEEK) == 2
        transaction.set_rollback(True)

    assert left() == ids


@pytest.mark.django_db
def test_dead_letters_are_never_pruned():
    """R24."""
    enqueue()
    Job.objects.settle([Failed(claim_of(claim_one()), ERROR)])
    here("UPDATE django_pgqueue_job SET finished_at = '-infinity', created_at = '-infinity'")

    assert [prune() for prune in PRUNERS.values()] == [0, 0, 0]


# ---- with others at work


@two_connections
@pytest.mark.parametrize("prune", PRUNERS.values(), ids=PRUNERS)
@pytest.mark.parametrize("lock", ["FOR UPDATE", "FOR KEY SHARE"])
def test_a_row_that_someone_holds_stays_and_keeps_no_other(prune, lock):
    """R13, R32: a reader's foreign key holds it, too."""
    ids = done_jobs(5)
    with second_connection() as reader:
        sql(reader, "BEGIN")
        sql(reader, f"SELECT 1 FROM django_pgqueue_job WHERE id = %s {lock}", [ids[2]])
        during = prune()

    assert during == 4
    assert left() == [ids[2]]
    assert prune() == 1


@two_connections
def test_two_pruners_share_the_jobs_and_neither_waits():
    """R32, B139: no deadlock, whatever order each found them in."""
    ids = done_jobs(10)
    with actor() as a, actor() as b:
        for connection in (a, b):
            sql(connection, "BEGIN")
        first = upkeep.prune(a, 0, WEEK, 6).deleted
        second = upkeep.delete_done(b, ids[::-1])
        third = upkeep.prune(b, 0, WEEK, 1_000).deleted
        for connection in (a, b):
            sql(connection, "COMMIT")

    assert (first, second, third) == (6, 4, 0)
    assert left() == []


@two_connections
def test_many_pruners_at_once_delete_every_job_once():
    """R32, B139."""
    done_jobs(600)

    def prune_as_a_worker():
        deleted, after = 0, 0
        with worker_session() as session:
            while True:
                with session.round() as connection:
                    pruned = upkeep.prune(connection, after, WEEK, 7)
                deleted += pruned.deleted
                if pruned.finished:
                    return deleted
                after = pruned.last_id

    actors = [InThread(prune_as_a_worker) for _ in range(3)]
    actors.append(InThread(lambda: Job.objects.all().prune(WEEK)))

    assert sum(pruner.result() for pruner in actors) == 600
    assert left() == []


@two_connections
@pytest.mark.slow
def test_a_large_table_is_pruned_in_steps_none_of_which_takes_long():
    """R32, B140: under a statement_timeout that one delete for all of them would exceed."""
    ids = done_jobs(300_000)
    keep = enqueue()

    with worker_session() as session:
        deleted, after = 0, 0
        while True:
            with session.round() as connection:
                connection.execute("SET LOCAL statement_timeout = '2s'")
                pruned = upkeep.prune(connection, after, WEEK, 1_000)
            deleted += pruned.deleted
            if pruned.finished:
                break
            after = pruned.last_id

    assert deleted == len(ids)
    assert left() == [keep]


@two_connections
@pytest.mark.parametrize("how", ["walk", "ids"])
def test_a_job_that_comes_back_to_life_meanwhile_is_not_deleted(how):
    """R32: status and age are checked again under the row's lock, not only in the snapshot."""
    revived, younger, old = done_jobs(3)
    with pausing() as pause, actor() as pruner:
        # The statement that deletes has no updates to stop at; it stops at the clock, or at its first DELETE.
        here(
            "CREATE TRIGGER pause_delete BEFORE DELETE ON django_pgqueue_job"
            " FOR EACH STATEMENT EXECUTE FUNCTION pgqueue_test.pause_update()"
        )
        pause.stop(pruner)
        prune = {
            "walk": lambda: upkeep.prune(pruner, 0, WEEK, 1_000).deleted,
            "ids": lambda: upkeep.delete_done(pruner, [revived, younger, old]),
        }[how]
        pruning = InThread(prune)
        pause.wait_for_arrival()
        Job.objects.filter(pk=revived).update(status="pending", finished_at=None)
        Job.objects.filter(pk=younger).update(finished_at=timezone.now())
        make_due(revived)
        pause.go_on()
        deleted = pruning.result()

    assert revived in left()
    assert (deleted, left()) == ((1, [revived, younger]) if how == "walk" else (2, [revived]))
