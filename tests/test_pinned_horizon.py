"""What a claim touches while an old transaction keeps vacuum from working."""

import pytest

from django_pgqueue.statements import claim as claiming
from tests.helpers import second_connection, sql, worker_session

from .test_plans import EXPLAIN, Plan, copy_tables, fill

pytestmark = pytest.mark.django_db


@pytest.fixture
def pinned_table(django_db_setup, django_db_blocker):
    """A session with a table of 20,000 ended and 1,000 pending jobs, beside an old transaction; and the floor."""
    with django_db_blocker.unblock(), worker_session() as session, second_connection() as old:
        connection = session.connection
        copy_tables(connection)
        sql(old, "BEGIN ISOLATION LEVEL REPEATABLE READ")
        sql(old, "SELECT count(*) FROM django_pgqueue_job")
        fill(connection, "pending", 126_000)
        sql(connection, "DELETE FROM django_pgqueue_job WHERE (queue_name, priority) <> ('queue 0', 0)")
        sql(
            connection,
            "UPDATE django_pgqueue_job SET status = 'done', finished_at = now()"
            " WHERE id IN (SELECT id FROM django_pgqueue_job ORDER BY available_at, id LIMIT 20000)",
        )
        sql(connection, "VACUUM ANALYZE django_pgqueue_job")
        [floor] = sql(
            connection,
            "SELECT EXTRACT(EPOCH FROM available_at)::float8, id FROM django_pgqueue_job"
            " WHERE status = 'pending' ORDER BY available_at, id LIMIT 1",
        )
        yield session, floor
        sql(connection, "DROP SCHEMA plans CASCADE")


def test_a_claim_at_its_floor_touches_nothing_that_has_ended_while_vacuum_is_kept_from_working(pinned_table):
    """R33."""
    session, floor = pinned_table
    values = {"queue_names": ["queue 0"], "priorities": [0], "owner": "host:1:a/1", "lease_seconds": 60, "limit": 10}

    def pages(floor_at, floor_id):
        with session.round() as connection:
            parameters = {**values, "floors_at": [floor_at], "floor_ids": [floor_id]}
            plan = Plan(sql(connection, EXPLAIN + claiming.CLAIM_SQL, parameters)[0][0])
            sql(connection, "ROLLBACK")
        return plan.buffers

    assert pages(float("-inf"), 0) > 1_000, "there is nothing to walk over, so this would show nothing"
    assert pages(*floor) < 300
