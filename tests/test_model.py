"""
The statements against a plain Python model (`model`), in random order, over real connections.

Three actors take turns: two of Django's connections and a worker's session. The first may keep a transaction
open, with rows locked or changed in it, while the others go on. Time stands still unless it is told to pass,
because the connections ask a table for it; so every moment is compared exactly.
"""

import json
import os
from contextlib import contextmanager

import psycopg
import pytest
from django.db import connections, transaction
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_pgqueue import JobBusy, JobKeyHeld
from django_pgqueue.managers import Changed, recover_lost
from django_pgqueue.models import Job
from django_pgqueue.outcomes import Claim, ErrorRecord, Failed, Released, Retried, Snoozed, Succeeded
from django_pgqueue.statements import claim as claiming
from django_pgqueue.statements import enqueue as enqueueing
from django_pgqueue.statements import leases, people, upkeep
from django_pgqueue.statements import settle as settling
from django_pgqueue.statements.database import is_lock_conflict, is_refusal
from django_pgqueue.worker.connection import Session

from .helpers import database_alias, here, new_job, sql
from .model import FINISHED, LIVE, MAX_REFUNDS, Attempt, Queue, Row, Transaction

pytestmark = pytest.mark.django_db(transaction=True)

ERROR = ErrorRecord.plain(ValueError, "no")
VERBS = {"hold": people.HOLD, "unhold": people.UNHOLD, "cancel": people.CANCEL, "requeue": people.REQUEUE}

# The names in our statements are unqualified: a schema in front of pg_catalog answers for the clock, and for the
# server's start, which was long before.
CLOCK_SQL = """
CREATE SCHEMA pgqueue_model;
CREATE TABLE pgqueue_model.clock (seconds float8 NOT NULL);
INSERT INTO pgqueue_model.clock VALUES (0);
CREATE FUNCTION pgqueue_model.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    'SELECT to_timestamp(seconds) FROM pgqueue_model.clock';
CREATE FUNCTION pgqueue_model.pg_postmaster_start_time() RETURNS timestamptz LANGUAGE sql STABLE AS
    'SELECT to_timestamp(-86400)';
ALTER TABLE django_pgqueue_job SET (autovacuum_enabled = false);
ALTER TABLE django_pgqueue_jobattempt SET (autovacuum_enabled = false)
"""
NO_CLOCK_SQL = """
SET client_min_messages = warning;
DROP SCHEMA pgqueue_model CASCADE;
ALTER TABLE django_pgqueue_job RESET (autovacuum_enabled);
ALTER TABLE django_pgqueue_jobattempt RESET (autovacuum_enabled)
"""
ROWS_SQL = """
SELECT id, queue_name, priority, job_key, max_attempts, EXTRACT(EPOCH FROM available_at)::float8, status, attempts,
       claim_version, snoozes, claimed_by, EXTRACT(EPOCH FROM claimed_at)::float8,
       EXTRACT(EPOCH FROM lease_until)::float8, EXTRACT(EPOCH FROM started_at)::float8,
       EXTRACT(EPOCH FROM finished_at)::float8, return_value::text,
       (SELECT json_agg(json_build_array(claim_version, attempt, outcome, counted) ORDER BY attempt.id)::text
          FROM django_pgqueue_jobattempt AS attempt WHERE job_id = job.id)
  FROM django_pgqueue_job AS job
 ORDER BY id
"""


# ---- the actors


class Caller:
    """Django's connection *alias*, through ``Job.objects``."""

    def __init__(self, alias):
        self.alias = alias
        self.connection = connections[alias]
        self.manager = Job.objects.db_manager(alias)

    def enqueue(self, job):
        return self.manager.enqueue(job)

    def claim(self, owner, limit, queues, lease):
        return self.manager.claim(owner, limit, queue_names=queues, lease_seconds=lease)

    def renew(self, claims, lease):
        return self.manager.renew(claims, lease)

    def settle(self, outcomes):
        return self.manager.settle(outcomes)

    def recover(self, limit):
        return self.manager.recover(limit)

    def change(self, verb, ids):
        return getattr(Job.objects.using(self.alias).filter(pk__in=ids), verb)()

    def prune(self, older_than):
        return Job.objects.using(self.alias).prune(older_than)


class Worker:
    """A worker's session, in rounds; it waits for a lock less long than others, for the test's sake."""

    def __init__(self, session):
        self.session = session

    @property
    def connection(self):
        return self.session.connection

    @contextmanager
    def round(self):
        with self.session.round() as connection:
            sql(connection, "SET LOCAL lock_timeout = '5ms'")
            yield connection

    def enqueue(self, job):
        with self.round() as connection:
            return enqueueing.insert_job(connection, job)

    def claim(self, owner, limit, queues, lease):
        with self.round() as connection:
            bands = claiming.due(claiming.sweep(connection, queues))
            return claiming.claim(connection, bands, owner, limit, lease)

    def renew(self, claims, lease):
        with self.round() as connection:
            return leases.renew(connection, claims, lease)

    def settle(self, outcomes):
        """As a child's round does."""
        try:
            with self.round() as connection:
                return settling.settle(connection, outcomes)
        except psycopg.Error as error:
            assert is_lock_conflict(error) or is_refusal(error), error
            return settling.settle_carefully(self.connection, outcomes, self.round)

    def recover(self, limit):
        with self.round() as connection:
            return recover_lost(connection, leases.lock_expired(connection, limit), 10.0)

    def bury(self, owner, held, started, was_told_to_stop):
        """As the burial of a dead child does; return the ids of what had not started, and of what had."""
        with self.round() as connection:
            jobs = leases.lock_owned(connection, owner, held)
            begun = [job for job in jobs if job.id in started]
            given_back = [Released(job.claim) for job in jobs if job.id not in started]
            if was_told_to_stop:
                given_back += [Released(job.claim, started=True) for job in begun]
            else:
                crashed = leases.AttemptOutcome.CRASHED
                ended = leases.recover(connection, begun, [10.0] * len(begun), crashed, "a.B", "m")
                assert {job.id for job in ended} == {job.id for job in begun}
            assert sorted(settling.settle(connection, given_back).settled, key=repr) == sorted(given_back, key=repr)
        return {job.id for job in jobs if job not in begun}, {job.id for job in begun}

    def change(self, verb, ids):
        with self.round() as connection:
            return VERBS[verb].change(connection, ids)

    def prune(self, older_than):
        with self.round() as connection:
            return upkeep.prune(connection, 0, older_than, 1_000).deleted


class World:
    """The connections, and the time that they see."""

    def __init__(self, session):
        self.first = Caller("first")
        self.second = Caller("second")
        self.worker = Worker(session)
        self.actors = {"first": self.first, "second": self.second, "worker": self.worker}

    def clear(self):
        here("TRUNCATE django_pgqueue_job, django_pgqueue_jobattempt RESTART IDENTITY")
        self.set_time(0)

    def set_time(self, seconds):
        here("UPDATE pgqueue_model.clock SET seconds = %s", [seconds])

    @staticmethod
    def rows(actor):
        """The rows as *actor* sees them."""
        rows = {}
        for *columns, result, history in sql(actor.connection, ROWS_SQL):
            result = None if result is None else json.loads(result)
            attempts = [] if history is None else json.loads(history)
            rows[columns[0]] = Row(*columns, result, tuple(Attempt(*attempt) for attempt in attempts))
        return rows


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(settling, "MAX_REFUNDS", MAX_REFUNDS)
    options = "-c search_path=pgqueue_model,pg_catalog,public"
    here(CLOCK_SQL)
    session = Session("second", "test worker")
    try:
        with database_alias("first", options=options), database_alias("second", options=options) as second:
            sql(second, "SET lock_timeout = '5ms'")  # a settle waits for a row that the first holds
            try:
                yield World(session)
            finally:
                session.close()
    finally:
        here(NO_CLOCK_SQL)


# ---- what they may do

actors = st.sampled_from(["first", "second", "worker"])
verbs = st.sampled_from(sorted(VERBS))
keys = st.sampled_from([None, None, None, "k", "l"])
queues = st.sampled_from(["a", "b"])
seconds = st.sampled_from([0, 0, 0, 10, 100])
lease_seconds = st.sampled_from([10, 100])
places = st.integers(0, 5)
specifications = st.tuples(
    queues, st.sampled_from([0, 5]), keys, st.sampled_from([0, 0, -10, 10]), st.sampled_from([1, 1, 2, 3])
)
kinds = st.sampled_from(["succeed", "result", "retry", "snooze", "fail", "release", "interrupt", "interrupt"])
locks = st.sampled_from(["UPDATE", "NO KEY UPDATE", "SHARE", "KEY SHARE"])


def has(*statuses, due=False):
    """A rule of use only while some row, committed or not, is in one of *statuses*."""

    def is_of_use(self):
        rows = [*self.model.inside().rows().values(), *self.model.outside().rows().values()]
        return any(row.status in statuses and (not due or row.available <= self.model.now) for row in rows)

    return precondition(is_of_use)


class QueueMachine(RuleBasedStateMachine):
    jobs = Bundle("jobs")

    def __init__(self, world):
        super().__init__()
        self.world = world
        self.model = Queue()
        self.atomic = None
        self.owners = {}  # of each claim that was handed out and not rolled back
        self.handed_inside = []
        self.enqueued = set()
        self.requeued = set()  # in this step, or in the transaction that has just been committed
        self.requeued_inside = set()
        self.pruned = set()
        self.pruned_inside = set()
        self.counted_before = {}  # the attempts that had counted when a job was requeued
        self.batches = []  # what was settled, for when the answer of the COMMIT was lost
        self.seen = {}
        world.clear()

    def teardown(self):
        if self.atomic is not None:
            self.end(commit=True)
        if self.world.rows(self.world.second) == self.model.outside().rows():  # else a step has failed already
            self.run_to_the_end()

    # ---- rules

    @initialize(target=jobs, some=st.lists(specifications, min_size=1, max_size=4))
    def enqueue_some(self, some):
        return multiple(*{self.enqueue_on("second", *specification) for specification in some})

    @precondition(lambda self: len(self.model.inside().rows()) < 6)
    @rule(target=jobs, actor=actors, specification=specifications)
    def enqueue(self, actor, specification):
        if self.side(actor).would_wait_for_key(specification[2]):
            return multiple()
        return self.enqueue_on(actor, *specification)

    def enqueue_on(self, actor, queue, priority, key, delay, max_attempts):
        side = self.side(actor)
        connection = self.world.actors[actor].connection
        [(run_after,)] = sql(connection, "SELECT clock_timestamp() + make_interval(secs => %s)", [delay])
        job = new_job(queue_name=queue, priority=priority, job_key=key, max_attempts=max_attempts, run_after=run_after)

        inserted = self.world.actors[actor].enqueue(job)

        assert inserted.is_new == side.enqueue(
            Row(inserted.id, queue, priority, key, max_attempts, available=side.now + max(delay, 0))
        )
        if not inserted.is_new:
            assert side.holder(key).id == inserted.id
        elif not self.is_inside(actor):
            self.enqueued.add(inserted.id)
        return inserted.id

    @has("pending", due=True)
    @rule(
        actor=actors,
        owner=st.sampled_from(["x/1", "x/2", "y/1"]),
        limit=st.integers(1, 4),
        names=st.sampled_from([None, None, None, ["a"], ["b", "a"]]),
        lease=lease_seconds,
    )
    def claim(self, actor, owner, limit, names, lease):
        expected = self.side(actor).claim(owner, limit, names, lease)

        claimed = self.world.actors[actor].claim(owner, limit, names, lease)

        assert [(job.id, job.claim_version, job.attempts, job.claimed_by) for job in claimed] == [
            (row.id, row.version, row.attempts, row.owner) for row in expected
        ]
        for job in claimed:
            handed = Claim(job.id, job.claim_version)
            assert handed not in self.owners, "one claim, two owners"
            self.owners[handed] = owner
            if self.is_inside(actor):
                self.handed_inside.append(handed)

    @precondition(lambda self: self.owners)
    @rule(actor=actors, chosen=st.lists(places, min_size=1, max_size=4), late=st.booleans(), lease=lease_seconds)
    def renew(self, actor, chosen, late, lease):
        side = self.side(actor)
        claims = (late and self.late_claims()) or self.claims_at(chosen)
        standing = leases.standing(self.world.actors[actor].connection, claims)

        renewed = self.world.actors[actor].renew(claims, lease)

        assert standing == side.standing(claims)
        assert renewed == side.renew(claims, lease)

    @has("running")
    @rule(actor=actors, kind=kinds, delay=seconds)
    def settle_one(self, actor, kind, delay):
        self.settle(actor, [(0, kind, delay)])

    @precondition(lambda self: self.late_claims())
    @rule(actor=actors, kind=kinds, delay=seconds)
    def settle_late(self, actor, kind, delay):
        """By a worker whose job runs elsewhere by now."""
        self.settle_on(actor, [self.outcome(actor, kind, claim, delay) for claim in self.late_claims()])

    @precondition(lambda self: self.owners)
    @rule(actor=actors, chosen=st.lists(st.tuples(places, kinds, seconds), min_size=1, max_size=4))
    def settle_many(self, actor, chosen):
        self.settle(actor, chosen)

    def settle(self, actor, chosen):
        claims = self.claims_at([place for place, _, _ in chosen])
        endings = zip(claims, chosen, strict=True)
        outcomes = [self.outcome(actor, kind, claim, delay) for claim, (_, kind, delay) in endings]
        self.batches.append(outcomes)
        self.settle_on(actor, outcomes)

    @precondition(lambda self: self.batches)
    @rule(actor=actors, which=st.integers(0, 3))
    def settle_again(self, actor, which):
        """The answer of the COMMIT was lost, or so it seems."""
        self.settle_on(actor, self.batches[-1 - which % len(self.batches)])

    @has("running")
    @rule(actor=actors, limit=st.integers(1, 4))
    def recover(self, actor, limit):
        side = self.side(actor)
        expired = side.expired()

        recovered = self.world.actors[actor].recover(limit)

        chosen = {job.id for job in recovered}
        self.assert_longest_ended(chosen, expired, limit)
        seen = self.world.rows(self.world.actors[actor])
        for job in recovered:
            # The manager's default backoff is random.
            assert side.recover(job.id, "lost", seen[job.id].available).status == job.status
            assert job.status == "failed" or seen[job.id].available >= side.now + 10

    @has("running")
    @rule(
        owner=st.sampled_from(["y", "x/2", "x"]),
        held=st.lists(jobs, max_size=1),
        started=st.lists(jobs, max_size=3),
        was_told_to_stop=st.booleans(),
    )
    def bury(self, owner, held, started, was_told_to_stop):
        side = self.side("worker")
        expected = {row.id for row in side.owned(owner, held)}

        unstarted, begun = self.world.worker.bury(owner, held, started, was_told_to_stop)

        assert (unstarted, begun) == (expected - {*started}, expected & {*started})
        side.settle([Released(side.get(job_id).claim) for job_id in unstarted])
        for job_id in begun:
            if was_told_to_stop:
                side.settle([Released(side.get(job_id).claim, started=True)])
            else:
                side.recover(job_id, "crashed", side.now + 10)

    @rule(actor=actors, verb=verbs, ids=st.lists(jobs, min_size=1, max_size=6, unique=True))
    def change_many(self, actor, verb, ids):
        side = self.side(actor)
        if verb == "requeue" and self.would_wait(side, ids):
            return
        changed, counts = side.change(VERBS[verb], ids)

        answer = self.world.actors[actor].change(verb, ids)

        assert answer == (changed if actor == "worker" else counts)
        self.note_requeued(actor, verb, changed)

    @rule(actor=st.sampled_from(["first", "second"]), verb=verbs, job_id=jobs)
    def change_one(self, actor, verb, job_id):
        side = self.side(actor)
        if verb == "requeue" and self.would_wait(side, [job_id]):
            return
        row = side.get(job_id)
        if row is not None and not side.is_free(job_id):
            expected = JobBusy
        elif row is None or row.status not in VERBS[verb].takes:
            expected = Changed(changed=0, busy=0, skipped=1)
        else:
            changed, counts = side.change(VERBS[verb], [job_id])
            expected = counts if changed else JobKeyHeld
            self.note_requeued(actor, verb, changed)
        if expected is not JobBusy:
            side.lock(job_id)  # which it stays until the transaction ends
        job = Job(pk=job_id)
        job._state.db = actor

        try:
            answer = getattr(job, verb)()
        except (JobBusy, JobKeyHeld) as error:
            answer = type(error)

        assert answer == expected

    @has("done")
    @rule(actor=actors, older_than=seconds)
    def prune(self, actor, older_than):
        side = self.side(actor)
        expected = side.prune(side.rows(), older_than)
        (self.pruned_inside if self.is_inside(actor) else self.pruned).update(expected)

        deleted = self.world.actors[actor].prune(older_than)

        assert deleted == len(expected)

    @rule(by=st.sampled_from([1, 10, 100]))
    def let_time_pass(self, by):
        self.model.now += by
        self.world.set_time(self.model.now)

    @precondition(lambda self: self.atomic is None)
    @rule(lock=locks, ids=st.lists(jobs, max_size=3))
    def begin_one(self, lock, ids):
        """The first actor begins a transaction, and may lock rows in it."""
        self.begin(lock, ids)

    def begin(self, lock, ids):
        self.atomic = transaction.atomic(using="first")
        self.atomic.__enter__()
        self.model.open = Transaction()
        locked = sql(
            self.world.first.connection,
            f"SELECT id FROM django_pgqueue_job WHERE id = ANY(%s) FOR {lock}",
            [ids],
        )
        target = self.model.open.key_locked if lock == "KEY SHARE" else self.model.open.locked
        target.update(job_id for (job_id,) in locked)

    @precondition(lambda self: self.atomic is not None)
    @rule(commit=st.booleans(), again=st.booleans(), lock=locks, ids=st.lists(jobs, max_size=3))
    def end_and_begin(self, commit, again, lock, ids):
        """It commits or rolls back, and may begin another."""
        self.end(commit)
        if again:
            self.begin(lock, ids)

    def end(self, commit):
        if commit:
            self.enqueued |= self.model.open.written.keys()
            self.requeued |= self.requeued_inside
            self.pruned |= self.pruned_inside
        else:
            for handed in self.handed_inside:
                self.owners.pop(handed, None)
            transaction.set_rollback(True, using="first")
        self.handed_inside, self.requeued_inside, self.pruned_inside = [], set(), set()
        self.model.end_transaction(commit=commit)
        atomic, self.atomic = self.atomic, None
        atomic.__exit__(None, None, None)

    # ---- what must hold after every step

    @invariant()
    def the_database_and_the_model_agree(self):
        before, self.seen = self.seen, self.world.rows(self.world.second)
        assert self.seen == self.model.outside().rows()
        if self.atomic is not None:
            assert self.world.rows(self.world.first) == self.model.inside().rows()
        self.hold_whatever_the_model_says(before, self.seen)
        self.requeued = set()

    def hold_whatever_the_model_says(self, before, after):
        assert after.keys() == self.enqueued - self.pruned, "no job is lost"
        assert all(after[job_id].version >= row.version for job_id, row in before.items() if job_id in after)
        for row in after.values():
            assert row.attempts <= row.max_attempts
            assert (row.finished is not None) == (row.status in FINISHED)
            assert (row.lease is not None) == (row.status == "running")
            assert row.refunds <= MAX_REFUNDS
            if row.status == "running":
                assert self.owners[row.claim] == row.owner
            if row.id in self.requeued:
                self.counted_before[row.id] = len(row.history) - row.refunds
            counted = len(row.history) - row.refunds - self.counted_before.get(row.id, 0)
            assert counted == row.attempts - (row.status in ("running", "done")), "one record for each failed attempt"
            ended = row.id in before and before[row.id].status in FINISHED and row.id not in self.requeued
            assert not ended or row == before[row.id], "what has ended stays as it is"
        live_keys = [row.key for row in after.values() if row.key and row.status in LIVE]
        assert len(live_keys) == len(set(live_keys))

    def run_to_the_end(self):
        """No job is stuck: when everybody is gone, one worker runs all there is."""
        worker = self.world.worker
        worker.change("unhold", list(self.model.committed))
        for days in (1, 2):
            self.world.set_time(self.model.now + days * 86_400)
            worker.recover(1_000)
        claimed = worker.claim("end", 1_000, None, 10)
        worker.settle([Succeeded(Claim(job.id, job.claim_version)) for job in claimed])
        assert {row.status for row in self.world.rows(worker).values()} <= {*FINISHED}

    # ---- helpers

    def is_inside(self, actor):
        return actor == "first" and self.atomic is not None

    def side(self, actor):
        return self.model.inside() if self.is_inside(actor) else self.model.outside()

    def claims_at(self, chosen):
        """Claims by their *chosen* places: those that hold first, then those lost to another claim that holds."""
        rows = {**self.model.inside().rows(), **self.model.outside().rows()}

        def place(claim):
            row = rows.get(claim.job_id)
            is_running = row is not None and row.status == "running"
            return not (is_running and row.claim == claim), not is_running, -claim.version, claim.job_id

        order = sorted(self.owners, key=place)
        return [order[number % len(order)] for number in chosen]

    def late_claims(self):
        """For each running job the last claim before the one that holds, if there was one."""
        rows = {**self.model.inside().rows(), **self.model.outside().rows()}
        late = {}
        for claim in sorted(self.owners):
            row = rows.get(claim.job_id)
            if row is not None and row.status == "running" and claim.version < row.version:
                late[claim.job_id] = claim
        return list(late.values())

    def outcome(self, actor, kind, claim, delay):
        row = self.side(actor).get(claim.job_id)
        if kind == "retry" and row is not None and row.attempts >= row.max_attempts:
            kind = "fail"  # the worker's to decide, and what it decides
        return {
            "succeed": Succeeded(claim),
            "result": Succeeded(claim, str(claim.job_id)),
            "retry": Retried(claim, float(delay), ERROR),
            "snooze": Snoozed(claim, float(delay)),
            "fail": Failed(claim, ERROR),
            "release": Released(claim, float(delay)),
            "interrupt": Released(claim, float(delay), started=True),
        }[kind]

    def settle_on(self, actor, outcomes):
        note(f"{actor} settles {outcomes}")
        expected = self.side(actor).settle(outcomes)

        settlement = self.world.actors[actor].settle(outcomes)

        assert sorted(settlement.settled, key=repr) == sorted(expected["settled"], key=repr)
        assert sorted(settlement.busy, key=repr) == sorted(expected["busy"], key=repr)
        assert sorted(settlement.lost, key=repr) == sorted(expected["lost"], key=repr)

    def assert_longest_ended(self, chosen, expired, limit):
        assert len(chosen) == min(limit, len(expired)) and chosen <= {row.id for row in expired}
        ends = sorted(row.lease for row in expired)[: len(chosen)]
        assert sorted(row.lease for row in expired if row.id in chosen) == ends

    def would_wait(self, side, ids):
        rows = side.rows()
        return any(side.would_wait_for_key(rows[job_id].key) for job_id in ids if job_id in rows)

    def note_requeued(self, actor, verb, changed):
        if verb == "requeue":
            (self.requeued_inside if self.is_inside(actor) else self.requeued).update(changed)


def run(world, examples, **changes):
    run_state_machine_as_test(
        lambda: QueueMachine(world),
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            **changes,
        ),
    )


def test_the_verbs_do_what_the_model_does(world):
    """
    The same examples each time, so that what fails here fails again.

    ``MODEL_EXAMPLES=500`` tries so many others, new ones each time; a failure prints its steps, and how to repeat it.
    """
    if examples := int(os.environ.get("MODEL_EXAMPLES", "0")):
        run(world, examples)
    else:
        run(world, examples=120, derandomize=True)
