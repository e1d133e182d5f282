"""Many at once on one table, connections that are lost in the middle, and who is woken when."""

import json
import random
from contextlib import contextmanager

import psycopg
import pytest
from django.db import transaction

from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import Claim, ErrorRecord, Failed, Released, Retried, Snoozed, Succeeded
from django_pgqueue.statements import claim as claiming
from django_pgqueue.statements import enqueue as enqueueing
from django_pgqueue.statements import leases, people, upkeep
from django_pgqueue.statements.database import CHANNEL
from django_pgqueue.statements.settle import settle
from django_pgqueue.states import AttemptOutcome
from tests.helpers import (
    PATIENCE_SECONDS,
    InThread,
    actor,
    claim_jobs,
    claim_of,
    claim_one,
    enqueue,
    enqueue_jobs,
    expire_lease,
    fall_asleep,
    here,
    make_due,
    new_job,
    pausing,
    pid_of,
    row,
    second_connection,
    sql,
    wait_until,
    worker_session,
)

pytestmark = pytest.mark.django_db(transaction=True)

ERROR = ErrorRecord.plain(ValueError, "no")


def claim_on(connection, limit, owner):
    bands = claiming.due(claiming.sweep(connection))
    return claiming.claim(connection, bands, owner, limit, 60)


# ---- many workers


@pytest.mark.parametrize("level", ["read committed", "serializable"])
def test_many_workers_run_every_job_exactly_once(level):
    """R06, R07, R09, R14: no claim is lost, none is given twice, and nobody fails (B38)."""
    ids = enqueue_jobs(150) + enqueue_jobs(150, priority=3) + enqueue_jobs(100, queue_name="other")
    ran = []

    def work(owner):
        outcomes, lost = [], []
        with worker_session() as session:
            session.connection.execute(f"SET default_transaction_isolation = '{level}'")
            while True:
                with session.round() as connection:
                    settlement = settle(connection, outcomes)
                    jobs = claim_on(connection, 7, owner)
                lost += settlement.lost + settlement.busy
                if not jobs and not outcomes and Job.objects.filter(status="done").count() == len(ids):
                    return lost
                ran.extend(job.id for job in jobs)
                outcomes = [Succeeded(claim_of(job), str(job.id) if job.id % 2 else None) for job in jobs]

    workers = [InThread(lambda n=n: work(f"worker {n}")) for n in range(4)]
    lost = [worker.result() for worker in workers]

    assert lost == [[], [], [], []]
    assert sorted(ran) == sorted(ids)
    assert set(Job.objects.values_list("status", "attempts", "claim_version")) == {("done", 1, 1)}
    assert JobAttempt.objects.count() == 0


def test_all_verbs_at_once_never_deadlock_and_lose_no_job():
    """R14, R18, R19, R24, R32, B136: whoever meets a locked row passes over it or waits for it in the order of ids."""
    claims_held, rounds = {}, 40

    def patiently(call):
        with actor() as connection:
            for turn in range(rounds):
                with connection.transaction():
                    call(connection, turn)

    def work(connection, turn):
        jobs = claim_on(connection, 20, "worker")
        for job in jobs:
            claims_held[claim_of(job)] = None
        outcomes = []
        for claim in random.Random(turn).sample(list(claims_held), min(len(claims_held), 25)):
            claims_held.pop(claim, None)
            kind = (claim.job_id + claim.version) % 6
            outcomes.append(
                [
                    Succeeded(claim),
                    Succeeded(claim, "1"),
                    Retried(claim, 0, ERROR),
                    Failed(claim, ERROR),
                    Released(claim),
                    Released(claim, started=True),
                ][kind]
            )
        settle(connection, outcomes)

    def renew(connection, turn):
        leases.renew(connection, list(claims_held), 60)

    def enqueue_some(connection, turn):
        enqueueing.insert_jobs(connection, new_job(priority=turn % 3), [("[]", "{}")] * 10)

    def recover(connection, turn):
        connection.execute(
            "UPDATE django_pgqueue_job SET lease_until = clock_timestamp() - interval '1 s' WHERE id IN ("
            " SELECT id FROM django_pgqueue_job WHERE status = 'running' AND id %% 7 = %s FOR UPDATE SKIP LOCKED)",
            [turn % 7],
        )
        jobs = leases.lock_expired(connection, 10)
        leases.recover(connection, jobs, [0.0] * len(jobs), AttemptOutcome.LOST, "a.B", "m")

    def requeue(connection, turn):
        ids = [job_id for (job_id,) in sql(connection, "SELECT id FROM django_pgqueue_job WHERE status = 'failed'")]
        random.Random(turn).shuffle(ids)
        people.requeue(connection, ids)

    def prune(connection, turn):
        pruned.append(upkeep.prune(connection, 0, 0.0, 100).deleted)

    pruned = []
    verbs = [work, work, renew, renew, enqueue_some, recover, requeue, prune, prune]
    actors = [InThread(lambda verb=verb: patiently(verb)) for verb in verbs]
    for each in actors:
        each.result()

    assert Job.objects.count() + sum(pruned) == 10 * rounds
    ended = JobAttempt.objects.values_list("job", "claim_version")
    assert len(set(ended)) == len(ended)


# ---- lost connections


def test_the_claim_of_a_killed_worker_may_still_commit_and_is_found_by_its_name():
    """R20, R22: its statement runs on in the server after its death; the second look finds what the first could not."""
    job_id = enqueue()
    with pausing() as pause, actor() as dead, actor() as undertaker:
        [band] = claiming.sweep(dead)
        parameters = {
            "queue_names": [band.queue_name],
            "priorities": [band.priority],
            "floors_at": [band.floor_at],
            "floor_ids": [band.floor_id],
            "owner": "dead/1",
            "limit": 1,
            "lease_seconds": 60,
        }
        statement = psycopg.ClientCursor(dead).mogrify(claiming.CLAIM_SQL, parameters)
        pause.stop(dead)
        backend = pid_of(dead)
        dead.pgconn.send_query(statement.encode())
        dead.pgconn.flush()
        pause.wait_for_arrival()
        dead.pgconn.finish()

        first_look = leases.lock_owned(undertaker, "dead", [])
        pause.go_on()
        question = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: sql(undertaker, question, [backend]) == [(0,)], "the dead worker's backend to end")
        second_look = leases.lock_owned(undertaker, "dead", [])
        settle(undertaker, [Released(job.claim) for job in second_look])

    assert first_look == []
    assert [job.id for job in second_look] == [job_id]
    assert row(job_id, "status", "attempts", "claim_version") == ("pending", 0, 2)


def test_a_claim_whose_commit_was_not_answered_is_renewed_by_nobody():
    """R18, R19: a renewal names claims, not owners; so that lease runs out and the job is taken back."""
    enqueue_jobs(2)
    with worker_session() as child, worker_session() as supervisor:
        with child.round() as connection:
            [known] = claim_on(connection, 1, "child/1")
        sql(child.connection, "BEGIN")
        [unknown] = claim_on(child.connection, 1, "child/1")
        child.connection.pgconn.send_query(b"COMMIT")
        child.connection.pgconn.flush()
        child.connection.pgconn.finish()
        wait_until(lambda: Job.objects.filter(status="running").count() == 2)
        for job in (known, unknown):
            expire_lease(job.id)

        with supervisor.round() as connection:
            renewed = leases.renew(connection, [claim_of(known)], 60)
        recovered = Job.objects.recover()

    assert renewed == {known.id}
    assert [job.id for job in recovered] == [unknown.id]
    assert row(known.id, "status") == ("running",)


def test_a_worker_killed_between_its_settle_and_its_commit_has_settled_nothing():
    """R16, R22: the job is as it was, and its lease will run out."""
    enqueue()
    claim = claim_of(claim_one())
    with actor() as dead:
        sql(dead, "BEGIN")
        settle(dead, [Succeeded(claim)])
        backend = pid_of(dead)
        here("SELECT pg_terminate_backend(%s)", [backend])
        with pytest.raises(psycopg.OperationalError):
            sql(dead, "COMMIT")

    assert row(claim.job_id, "status", "claim_version") == ("running", 1)
    assert Job.objects.settle([Succeeded(claim)]).settled == [Succeeded(claim)]


# ---- who is woken


@contextmanager
def listening(*, asleep=True):
    """Yield a function that returns the payloads committed since its last call, to a worker that is *asleep* or not."""
    with second_connection() as sender, second_connection() as wrapper:
        listener = wrapper.connection
        listener.execute(f"LISTEN {CHANNEL}")
        if asleep:
            fall_asleep(wrapper)

        def heard():
            sql(sender, "SELECT pg_notify(%s, '(the end)')", [CHANNEL])
            payloads = []
            for notification in listener.notifies(timeout=PATIENCE_SECONDS):
                if notification.payload == "(the end)":
                    return sorted(payloads)
                payloads.append(notification.payload)
            raise AssertionError("the notification at the end did not come")

        yield heard


def test_a_notification_comes_with_the_commit_and_names_the_queue_and_nothing_else():
    """R31, B115."""
    with listening() as heard:
        with transaction.atomic():
            enqueue(queue_name="mail", args=json.dumps(["secret"]))
            before = heard()
        after = heard()

    assert (before, after) == ([], ["mail"])


def test_an_enqueue_that_is_rolled_back_wakes_nobody():
    """R01, R31: the outer block, or a savepoint alone."""
    with listening() as heard:
        with transaction.atomic():
            enqueue(queue_name="kept")
            with transaction.atomic():
                enqueue(queue_name="savepoint")
                transaction.set_rollback(True)
        with transaction.atomic():
            enqueue(queue_name="rolled back")
            transaction.set_rollback(True)

        assert heard() == ["kept"]


def test_a_transaction_notifies_once_for_each_queue_however_many_jobs_it_enqueues():
    """R31, B46."""
    with listening() as heard:
        with transaction.atomic():
            for n in range(200):
                enqueue(queue_name=f"queue {n % 2}")
            enqueue_jobs(300, queue_name="queue 2")

        assert heard() == ["queue 0", "queue 1", "queue 2"]


def test_large_arguments_and_long_names_fit_into_a_notification():
    """R31, B43."""
    name = "𝄞" * 128
    with listening() as heard:
        enqueue(args=json.dumps(["x" * 1_000_000]), queue_name=name)
        enqueue_jobs(2000, queue_name="many")

        assert heard() == ["many", name]
    assert Job.objects.count() == 2001


@pytest.mark.parametrize(("asleep", "told"), [(True, ["default"]), (False, [])])
def test_claims_renewals_and_endings_wake_nobody_and_retries_who_sleeps(asleep, told):
    """R31, B46: NOTIFY takes a lock on the whole database at commit."""
    with listening(asleep=asleep) as heard:
        enqueue_jobs(6)
        enqueued = heard()
        claims = claim_jobs(6)
        Job.objects.renew(claims)
        settlement = Job.objects.settle([Succeeded(claims[0]), Succeeded(claims[1], "1"), Failed(claims[3], ERROR)])
        deleted = Job.objects.all().prune(0)
        lost = Job.objects.settle([Released(Claim(claims[5].job_id, 99)), Released(Claim(0, 1), started=True)]).lost
        requeued = Job.objects.filter(status="done").requeue()

        endings = heard()
        Job.objects.settle([Retried(claims[2], 10, ERROR)])
        retried = heard()
        Job.objects.settle([Snoozed(claims[5], 10)])
        snoozed = heard()
        expire_lease(claims[4].job_id)
        recovered = Job.objects.recover()
        recovery = heard()

    assert (len(settlement.settled), len(recovered), deleted, len(lost), any(requeued)) == (3, 1, 2, 2, False)
    assert endings == []
    assert (enqueued, retried, snoozed, recovery) == (told, told, told, told)


def test_what_becomes_available_again_wakes_each_queue_once():
    """R31: a job given back, a dead letter given fresh attempts, a held one let go."""
    for queue_name in ("a", "b"):
        enqueue_jobs(5, queue_name=queue_name)
    with listening() as heard:
        Job.objects.release(claim_jobs(10))
        released = heard()
        Job.objects.settle([Released(claim, started=True) for claim in claim_jobs(10)])
        interrupted = heard()
        Job.objects.settle([Failed(claim, ERROR) for claim in claim_jobs(10)])
        failed = heard()
        one = Job.objects.filter(queue_name="a").first()
        one.requeue()
        requeued_one = heard()
        Job.objects.all().requeue()
        requeued_rest = heard()
        Job.objects.all().hold()
        held = heard()
        Job.objects.all().unhold()
        unheld = heard()

    assert (released, interrupted, failed, held, unheld) == (["a", "b"], ["a", "b"], [], [], ["a", "b"])
    assert (requeued_one, requeued_rest) == (["a"], ["a", "b"])


def test_a_claim_decides_and_not_the_notification():
    """R10, R31: whoever is woken finds the job, or finds that another was faster; both are well."""
    with listening() as heard, actor() as a, actor() as b:
        job_id = enqueue()
        assert heard() == ["default"]
        first, second = claim_on(a, 1, "A"), claim_on(b, 1, "B")

    assert ([job.id for job in first], second) == ([job_id], [])


def test_a_job_whose_notification_nobody_heard_is_found_by_asking():
    """R31: polling alone is correct."""
    job_id = enqueue()
    make_due(job_id)

    assert claim_one().id == job_id
