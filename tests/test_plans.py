"""
What the planner makes of the statements, whatever it knows or believes about the table.

The tables are copied into a schema of their own, which ``search_path`` puts in front: fresh, without
statistics, and autovacuum keeps its hands off. Every statement is planned with its values, as in its first
executions, and without them, as when PostgreSQL keeps a prepared plan; and it is executed, and rolled back.
"""

import json
import re

import psycopg
import pytest

from django_pgqueue.statements import claim as claiming
from django_pgqueue.statements import enqueue as enqueueing
from django_pgqueue.statements import leases, people, upkeep
from django_pgqueue.statements import settle as settling
from django_pgqueue.statements.database import CANCEL_CHANNEL
from tests.helpers import sql, worker_session

pytestmark = pytest.mark.django_db

PENDING, RUNNING, PRIMARY_KEY = "pgqueue_job_pending", "pgqueue_job_running", "django_pgqueue_job_pkey"
JOB_KEY = "pgqueue_job_key"
ATTEMPTS = "pgqueue_attempt_claim"
JOINS = {"Nested Loop", "Hash Join", "Merge Join"}
SORTS = {"Sort", "Incremental Sort"}

COPY_SQL = """
DROP SCHEMA IF EXISTS plans CASCADE;
CREATE SCHEMA plans;
CREATE UNLOGGED TABLE plans.django_pgqueue_job (
    LIKE django_pgqueue_job INCLUDING ALL EXCLUDING INDEXES
) WITH (autovacuum_enabled = off);
CREATE UNLOGGED TABLE plans.django_pgqueue_jobattempt (
    LIKE django_pgqueue_jobattempt INCLUDING ALL EXCLUDING INDEXES
) WITH (autovacuum_enabled = off);
"""

INDEXES_SQL = """
SELECT replace(pg_get_indexdef(indexrelid), ' ON public.', ' ON plans.')
  FROM pg_index
 WHERE indrelid IN ('django_pgqueue_job'::regclass, 'django_pgqueue_jobattempt'::regclass)
"""

FILL_SQL = """
INSERT INTO django_pgqueue_job (
    backend, queue_name, task_path, args, kwargs, status, priority, created_at, available_at, attempts, max_attempts,
    claim_version, claimed_by, claimed_at, lease_until, started_at, finished_at
)
SELECT 'default', 'queue ' || n %% 3, 'shop.tasks.send_receipt', '[1]', '{}', %(status)s, n %% 2,
       now() - interval '9 days', now() - interval '9 days' + n * interval '1 ms' + %(wait)s * interval '1 day',
       running, 5, running, 'host:1:a/1', now(),
       CASE WHEN running = 1 THEN now() + (n %% 2 - 0.5) * interval '1 hour' END,
       now(), CASE WHEN %(status)s IN ('done', 'failed') THEN now() - interval '8 days' END
  FROM generate_series(1, %(count)s::int) AS n,
       LATERAL (SELECT (%(status)s = 'running')::int AS running) AS state
"""


def fill(connection, status, count, wait=0):
    sql(connection, FILL_SQL, {"status": status, "count": count, "wait": wait})


def fill_with_all(connection, done=12_000, future=4_000, pending=3_000, running=2_000, failed=1_000):
    fill(connection, "done", done)
    fill(connection, "pending", future, wait=30)
    fill(connection, "failed", failed)
    fill(connection, "running", running)
    fill(connection, "pending", pending)
    sql(
        connection,
        "INSERT INTO django_pgqueue_jobattempt (job_id, claim_version, attempt, outcome, counted, error_class,"
        " fingerprint, message, traceback, worker, started_at, ended_at)"
        " SELECT id, -version, 1, 'error', version > 1, '', '', '', '', '', now(), now()"
        "   FROM django_pgqueue_job, generate_series(1, 3) AS version WHERE status IN ('failed', 'running')",
    )


def analyze(connection):
    sql(connection, "ANALYZE django_pgqueue_job")
    sql(connection, "ANALYZE django_pgqueue_jobattempt")


def is_empty(connection):
    pass


def is_fresh(connection):
    fill_with_all(connection)


def is_well_known(connection):
    fill_with_all(connection)
    analyze(connection)


def was_empty_when_analyzed(connection):
    analyze(connection)
    fill_with_all(connection)


def was_full_of_done_jobs_when_analyzed(connection):
    fill(connection, "done", 20_000)
    analyze(connection)
    sql(connection, "DELETE FROM django_pgqueue_job")
    fill_with_all(connection, done=0)


def was_full_of_done_jobs_when_analyzed_and_is_empty(connection):
    fill(connection, "done", 20_000)
    analyze(connection)
    sql(connection, "DELETE FROM django_pgqueue_job")


def was_all_pending_when_analyzed(connection):
    fill(connection, "pending", 20_000)
    analyze(connection)
    sql(connection, "UPDATE django_pgqueue_job SET status = 'done', finished_at = now() - interval '8 days'")
    fill_with_all(connection)


def was_all_running_when_analyzed(connection):
    fill(connection, "running", 20_000)
    analyze(connection)
    sql(connection, "DELETE FROM django_pgqueue_job")
    fill_with_all(connection)


def is_full_of_future_jobs(connection):
    fill_with_all(connection, future=20_000, pending=10)
    analyze(connection)


def has_millions_of_jobs(connection):
    fill_with_all(connection, done=5_000_000, future=1_000_000, pending=1_000_000, running=30_000, failed=20_000)
    analyze(connection)


def has_a_million_jobs_and_no_statistics(connection):
    fill_with_all(connection, done=600_000, future=250_000, pending=100_000, running=30_000, failed=20_000)


def has_a_million_future_jobs_and_ten_that_are_due(connection):
    fill_with_all(connection, done=500_000, future=1_000_000, pending=10, running=1_000)
    analyze(connection)


STATES = [
    is_empty,
    is_fresh,
    is_well_known,
    was_empty_when_analyzed,
    was_full_of_done_jobs_when_analyzed,
    was_full_of_done_jobs_when_analyzed_and_is_empty,
    was_all_pending_when_analyzed,
    was_all_running_when_analyzed,
    is_full_of_future_jobs,
    pytest.param(has_millions_of_jobs, marks=pytest.mark.slow),
    pytest.param(has_a_million_jobs_and_no_statistics, marks=pytest.mark.slow),
    pytest.param(has_a_million_future_jobs_and_ten_that_are_due, marks=pytest.mark.slow),
]
DEAD_ROWS = {state for state in STATES if getattr(state, "__name__", "").startswith("was_")} - {was_empty_when_analyzed}


class Table:
    """The copied table in one of its states, seen through a worker's session."""

    def __init__(self, session, state):
        self._session = session
        self.state = state
        self._ids = {}

    def ids(self, status, count):
        """Ids of *count* jobs in *status*, 1,000 at most, from all over the table; made up where there are none."""
        if status not in self._ids:
            found = sql(
                self._session.connection,
                "SELECT id FROM django_pgqueue_job WHERE status = %s ORDER BY md5(id::text) LIMIT 1000",
                [status],
            )
            self._ids[status] = [job_id for (job_id,) in found] or list(range(1, 1001))
        return self._ids[status][:count]

    def plans(self, statement, parameters):
        """Yield the statement's plans under a round's settings: with its values, and without."""
        with self._session.round() as connection:
            yield Plan(sql(connection, EXPLAIN + statement, parameters)[0][0])
            sql(connection, "ROLLBACK")
        with self._session.round() as connection:
            sql(connection, "SET LOCAL plan_cache_mode = force_generic_plan")
            names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement)))
            numbered = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", statement)
            sql(connection, f"PREPARE generic AS {numbered}")
            try:
                values = ", ".join(["%s"] * len(names))
                execute = "EXECUTE generic" + (f"({values})" if names else "")
                with psycopg.ClientCursor(connection) as cursor:
                    cursor.execute(EXPLAIN + execute, [parameters[name] for name in names])
                    yield Plan(cursor.fetchone()[0])
            finally:
                sql(connection, "DEALLOCATE generic")
            sql(connection, "ROLLBACK")


EXPLAIN = "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF, FORMAT JSON) "


class Plan:
    def __init__(self, explained):
        self.top = explained[0]["Plan"]
        self.nodes = list(_walk(self.top))

    def __repr__(self):
        return json.dumps(self.top, indent=1)

    @property
    def types(self):
        return {node["Node Type"] for node in self.nodes}

    @property
    def sorts_jobs(self):
        """Whether rows of the table are sorted. Names of queues to notify, gathered from a CTE, may be."""
        sorts = [node for node in self.nodes if node["Node Type"] in SORTS]
        return any(below.get("Relation Name") == "django_pgqueue_job" for sort in sorts for below in _walk(sort))

    @property
    def buffers(self):
        return self.top["Shared Hit Blocks"] + self.top["Shared Read Blocks"]

    def scans_of(self, relation):
        """How the relation is read: pairs of the kind of scan and its index."""
        return {
            (node["Node Type"], node.get("Index Name"))
            for node in self.nodes
            if node.get("Relation Name") == relation and "Scan" in node["Node Type"]
        }


def _walk(node):
    yield node
    for child in node.get("Plans", ()):
        yield from _walk(child)


@pytest.fixture(scope="module", params=STATES, ids=lambda state: state.__name__)
def table(request, django_db_setup, django_db_blocker):
    with django_db_blocker.unblock(), worker_session() as session:
        connection = session.connection
        copy_tables(connection)
        request.param(connection)
        yield Table(session, request.param)
        sql(connection, "DROP SCHEMA plans CASCADE")


def copy_tables(connection):
    """Put empty copies of the tables in front, for this session."""
    sql(connection, "SET statement_timeout = 0")
    sql(connection, COPY_SQL)
    for (index,) in sql(connection, INDEXES_SQL):
        sql(connection, index)
    sql(connection, "SET search_path = plans")


def check(table, statement, parameters, *, job, attempts=(), buffers, sort=False, join=False):
    """
    Check both plans: which indexes read jobs and attempts, that no jobs are sorted or joined but where
    that is allowed, and how many pages are touched where the table has no dead rows.
    """
    for plan in table.plans(statement, parameters):
        scans = plan.scans_of("django_pgqueue_job")
        assert {kind for kind, _ in scans} <= {"Index Scan", "Index Only Scan"}, plan
        assert {index for _, index in scans} <= set(job), plan
        scans = plan.scans_of("django_pgqueue_jobattempt")
        assert {kind for kind, _ in scans} <= {"Index Scan", "Index Only Scan"}, plan
        assert {index for _, index in scans} <= set(attempts), plan
        assert sort or not plan.sorts_jobs, plan
        assert join or not plan.types & JOINS, plan
        if table.state not in DEAD_ROWS:
            assert plan.buffers <= buffers, plan


# ---- claiming

ALL_BANDS = [(f"queue {queue}", priority) for priority in (1, 0) for queue in range(3)]


KNOWN = {
    "no band is known": [],
    "all are known": [claiming.Part(*band) for band in ALL_BANDS],
    "a part of each": [claiming.Part(*band, 0.0, 2e9) for band in ALL_BANDS],
    "one is not": [claiming.Part(*band) for band in ALL_BANDS[1:]],
}


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
def test_a_sweep_skips_through_the_pending_index(table, known):
    """R08: a few pages for each band and gap, however many jobs there are; it sorts a few rows at a time."""
    every = claiming.sweep_parameters(known)
    check(table, claiming.SWEEP_SQL, every, job=[PENDING], buffers=120, sort=True, join=True)
    named = claiming.sweep_parameters(known, ["queue 0", "queue 1", "queue 2", "queue 9"])
    check(table, claiming.SWEEP_QUEUES_SQL, named, job=[PENDING], buffers=100, join=True)


@pytest.mark.parametrize("limit", [1, 10, 500])
def test_a_claim_reads_each_band_off_the_pending_index_without_sorting(table, limit):
    """R08, B130: whatever is done or not due yet; the rows are then found by the primary key."""
    parameters = {
        "queue_names": [queue_name for queue_name, _ in ALL_BANDS],
        "priorities": [priority for _, priority in ALL_BANDS],
        "floors_at": [float("-inf"), 0.0, 1e9] * 2,
        "floor_ids": [0, 1, 2] * 2,
        "limit": limit,
        "owner": "host:1:a/1",
        "lease_seconds": 60,
    }
    check(table, claiming.CLAIM_SQL, parameters, job=[PENDING, PRIMARY_KEY], buffers=40 + 24 * limit, join=True)
    for plan in table.plans(claiming.CLAIM_SQL, parameters):
        [band] = [node for node in plan.nodes if node.get("Index Name") == PENDING]
        for column in ("queue_name", "priority", "available_at <=", "ROW(available_at, id) >="):
            assert column in band["Index Cond"], plan
        # Asked again under the row's lock; the index holds nothing else anyway.
        assert band["Filter"] == "((status)::text = 'pending'::text)", plan
        assert [n["Index Name"] for n in plan.nodes if "Index Cond" in n] == [PENDING, PRIMARY_KEY], plan
        assert plan.types & JOINS <= {"Nested Loop"}, plan


def test_the_past_of_retried_jobs_is_read_by_its_key(table):
    """R23, R33."""
    for count in (1, 50, 500):
        parameters = {"ids": table.ids("running", count)}
        check(table, claiming.EARLIER_SQL, parameters, job=[], attempts=[ATTEMPTS], buffers=20 + 8 * count)


# ---- settling


def values_for(table, count):
    ids = table.ids("running", count)
    count = len(ids)
    return {
        "ids": ids,
        "fences": [f"{job_id}:1:running" for job_id in ids],
        "version": 1,
        "results": json.dumps({job_id: {} for job_id in ids}),
        "delays": [15.0] * count,
        "summaries": ["summary"] * count,
        "error_classes": ["a.B"] * count,
        "fingerprints": ["f"] * count,
        "messages": ["message"] * count,
        "tracebacks": ["traceback"] * count,
        "endings": ["timeout"] * count,
        "delay": 0.0,
        "reason": "reason",
        "refunds": settling.MAX_REFUNDS,
        "error_class": "a.B",
        "message": "message",
    }


def used_by(statement, values):
    return {name: value for name, value in values.items() if f"%({name})s" in statement}


SETTLE = {
    "succeed": settling.SUCCEED_SQL,
    "succeed with a result": settling.SUCCEED_WITH_RESULT_SQL,
    "retry": settling.RETRY_SQL,
    "snooze": settling.SNOOZE_SQL,
    "fail": settling.FAIL_SQL,
    "release": settling.RELEASE_SQL,
    "interrupt": settling.INTERRUPT_SQL,
}
SIZES = [(kind, count) for kind in SETTLE for count in (1, 50, 200)]
SIZES += [("succeed", 1000), ("succeed with a result", 1000)]


@pytest.mark.parametrize(("kind", "count"), SIZES, ids=lambda value: str(value))
def test_an_ending_finds_its_rows_by_the_primary_key_without_a_join(table, kind, count):
    """R14, R33: for one job and for many."""
    statement = SETTLE[kind]
    values = used_by(statement, values_for(table, count))
    check(table, statement, values, job=[PRIMARY_KEY], attempts=[ATTEMPTS], buffers=40 + 30 * count)


@pytest.mark.parametrize("count", [1, 50, 1000])
def test_what_was_not_written_is_looked_up_by_the_primary_key(table, count):
    """R14."""
    parameters = {"ids": table.ids("done", count)}
    for statement in (settling.MISSING_SQL, settling.LOCK_SQL):
        check(table, statement, parameters, job=[PRIMARY_KEY], buffers=20 + 8 * count)


# ---- leases


@pytest.mark.parametrize("count", [1, 50, 200, 1000])
def test_a_renewal_finds_its_rows_by_the_primary_key(table, count):
    """R18, B135."""
    values = {**values_for(table, count), "lease_seconds": 60.0}
    check(table, leases.RENEW_SQL, used_by(leases.RENEW_SQL, values), job=[PRIMARY_KEY], buffers=40 + 28 * count)
    check(table, leases.STANDING_SQL, used_by(leases.STANDING_SQL, values), job=[PRIMARY_KEY], buffers=20 + 8 * count)


@pytest.mark.parametrize("reach", [None, 60.0, 1e9])
def test_expired_leases_are_read_off_the_index_of_running_jobs(table, reach):
    """R19: the longest ended first, no further than the clock or the limit."""
    parameters = {"limit": 500, "patience": 0.0, "reach": reach}
    check(table, leases.EXPIRED_SQL, parameters, job=[RUNNING], buffers=40 + 3 * 500)
    for plan in table.plans(leases.EXPIRED_SQL, parameters):
        [scan] = [node for node in plan.nodes if node.get("Index Name") == RUNNING]
        assert "lease_until" in scan["Index Cond"], plan


def test_the_jobs_of_an_owner_are_read_off_the_index_of_running_jobs(table):
    """R19: as many rows as run anywhere, and no others."""
    parameters = {"owner": "host:2", "held": list(range(1, 100))}
    check(table, leases.OWNED_SQL, parameters, job=[RUNNING], buffers=5_000)


@pytest.mark.parametrize("count", [1, 50, 500])
def test_a_recovery_finds_its_rows_by_the_primary_key_without_a_join(table, count):
    """R19."""
    values = {**values_for(table, count), "outcome": "lost", "fingerprint": "lost", "summary": "summary"}
    values = used_by(leases.RECOVER_SQL, values)
    check(table, leases.RECOVER_SQL, values, job=[PRIMARY_KEY], buffers=40 + 30 * count)


# ---- upkeep


@pytest.mark.parametrize("count", [1, 50, 1000])
def test_a_requeue_finds_its_rows_by_the_primary_key(table, count):
    """R24, R33."""
    parameters = {"ids": table.ids("failed", count)}
    check(table, people.REQUEUE_SQL, parameters, job=[PRIMARY_KEY, JOB_KEY], buffers=40 + 30 * count)
    left = {"ids": parameters["ids"], "statuses": ["failed", "cancelled"]}
    check(table, people.LEFT_OUT_SQL, left, job=[PRIMARY_KEY, JOB_KEY], buffers=40 + 30 * count)
    check(table, people.LOCK_ONE_SQL, {"id": parameters["ids"][0]}, job=[PRIMARY_KEY], buffers=12)


@pytest.mark.parametrize("count", [1, 50, 1000])
def test_what_a_person_holds_or_cancels_is_found_by_the_primary_key(table, count):
    """R26, R33."""
    constants = {"cancel_channel": CANCEL_CHANNEL, "error_class": "a.B", "message": "cancelled"}
    for statement in (people.HOLD_SQL, people.UNHOLD_SQL, people.CANCEL_SQL):
        for status in ("pending", "running"):
            values = used_by(statement, {**constants, "ids": table.ids(status, count)})
            check(table, statement, values, job=[PRIMARY_KEY], buffers=40 + 30 * count)


def test_the_holders_of_keys_are_found_by_their_keys(table):
    """R04, R33: keys stand in an index while their jobs live."""
    parameters = {"task_path": "shop.tasks.send_receipt", "job_keys": [f"key {n}" for n in range(50)]}
    check(table, enqueueing.HOLDERS_SQL, parameters, job=[JOB_KEY], buffers=20 + 8 * 50)


@pytest.mark.parametrize("limit", [10, 1000])
def test_pruning_walks_the_primary_key(table, limit):
    """R32, B130, B140."""
    for after in (0, 5_000):
        parameters = {"after": after, "older_than": 3600.0, "limit": limit}
        check(table, upkeep.PRUNE_SQL, parameters, job=[PRIMARY_KEY], attempts=[ATTEMPTS], buffers=40 + 16 * limit)
    parameters = {"ids": table.ids("done", limit)}
    check(table, upkeep.DELETE_DONE_SQL, parameters, job=[PRIMARY_KEY], attempts=[ATTEMPTS], buffers=40 + 16 * limit)
