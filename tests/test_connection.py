"""A worker's session and its watchdog: nothing that the database is asked is waited for without a limit."""

import threading
import time

import psycopg
import pytest
from django.db import connections

from django_pgqueue.outcomes import Succeeded
from django_pgqueue.statements import claim as claiming
from django_pgqueue.statements.settle import settle
from django_pgqueue.worker import connection as connection_module
from django_pgqueue.worker.connection import Session, _connect_seconds
from django_pgqueue.worker.watchdog import Watchdog

from .helpers import (
    PATIENCE_SECONDS,
    InThread,
    enqueue,
    enqueue_jobs,
    here,
    row,
    sql,
    wait_for_lock_wait,
    wait_until,
    worker_session,
)
from .proxy import Proxy
from .workers import barrier

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def proxy():
    with Proxy.to_database() as proxy:
        too_late = threading.Timer(PATIENCE_SECONDS, proxy.reset)  # what is never broken off fails
        too_late.start()
        try:
            yield proxy
        finally:
            too_late.cancel()
            too_late.join()


@pytest.fixture
def session(proxy):
    """Through the proxy, and watched; the server may take half a second."""
    with proxy.alias() as alias:
        session = Session(alias, "test watched", limit_seconds=0.5)
        watchdog = Watchdog([session])
        watchdog.start()
        yield session
        watchdog.stop()
        session.close()


def ask(session, statement="SELECT 1"):
    with session.round() as connection:
        return sql(connection, statement)


class TestWithoutAnAnswer:
    def test_a_statement_fails_and_the_next_round_has_a_new_connection(self, proxy, session):
        assert ask(session) == [(1,)]
        proxy.go_deaf(new=False)

        with pytest.raises(psycopg.OperationalError, match=r"no answer within 0\.75 s"):
            ask(session)

        assert ask(session) == [(1,)]

    def test_a_commit_fails_too_although_it_has_happened(self, proxy, session):
        job_id = enqueue()
        lost = proxy.lose_commit_answer("priority = 7", silently=True)

        with pytest.raises(psycopg.OperationalError, match="no answer"):
            ask(session, "UPDATE django_pgqueue_job SET priority = 7 RETURNING id")

        assert lost.happened
        assert row(job_id, "priority") == (7,)

    def test_the_rows_of_half_a_transaction_are_free_when_the_server_gives_it_up(self, proxy, session):
        job_id = enqueue()

        with pytest.raises(psycopg.OperationalError, match="no answer"), session.round() as connection:
            sql(connection, "SELECT 1 FROM django_pgqueue_job FOR UPDATE")
            proxy.go_deaf(new=False)
            sql(connection, "SELECT 2")

        here("UPDATE django_pgqueue_job SET priority = 7")  # waits, if need be
        assert row(job_id, "priority") == (7,)

    def test_connecting_takes_no_longer_than_it_may(self, proxy):
        with proxy.alias("impatient", connect_timeout=2) as alias:
            proxy.go_deaf()

            with pytest.raises(psycopg.errors.ConnectionTimeout):
                ask(Session(alias, "test impatient"))

    def test_whoever_looks_can_tell_waiting_from_doing_nothing(self, proxy, session):
        def end_once_it_waits(end):
            wait_until(lambda: session.is_waiting, "the session to wait")
            end()

        assert not session.is_waiting
        proxy.go_deaf()
        looking = InThread(lambda: end_once_it_waits(proxy.reset))
        with pytest.raises(psycopg.OperationalError):
            ask(session)
        looking.result()
        proxy.forward()

        with session.round():
            assert not session.is_waiting
        with barrier(51) as lock:
            looking = InThread(lambda: end_once_it_waits(lock.release))
            ask(session, "SELECT pg_advisory_xact_lock_shared(51)")
            looking.result()


class TestBreakingOff:
    """In two steps: the first time a statement is found overdue, the process itself may have stood still."""

    def wait(self, times):
        """Break off *times* what waits for a lock; return its answer."""
        with worker_session() as session, barrier(52) as lock:
            asking = InThread(lambda: ask(session, "SELECT 'answered' FROM pg_advisory_xact_lock_shared(52)"))
            wait_until(lambda: session._connection is not None, "the connection")
            wait_for_lock_wait(connections["default"], session._connection.info.backend_pid)
            for _ in range(times):
                session.break_off(time.monotonic() + 1_000)
            if times < 2:
                lock.release()
            return asking.result()

    def test_once_lets_an_answer_arrive(self):
        assert self.wait(times=1) == [("answered",)]

    def test_twice_ends_the_wait(self):
        with pytest.raises(psycopg.OperationalError, match="no answer within 15 s"):
            self.wait(times=2)

    def test_an_idle_connection_is_left_alone(self):
        with worker_session() as session:
            assert ask(session) == [(1,)]
            backend = session.connection.info.backend_pid

            for _ in range(3):
                session.break_off(time.monotonic() + 1_000)

            assert ask(session, "SELECT pg_backend_pid()") == [(backend,)]


class TestMeanwhile:
    def test_it_is_when_the_statement_is_with_the_server(self):
        """
        Otherwise this would wait for ever: the statement ends by what is done meanwhile.

        It is no part of the wait, which may be broken off, and during which nobody asks whether the loop turns.
        """
        done = []
        with worker_session() as session, barrier(81) as lock:

            def let_go():
                wait_for_lock_wait(connections["default"], connection.info.backend_pid)
                done.append(session.is_waiting)
                lock.release()

            with session.round() as connection, connection.meanwhile(let_go):
                connection.execute("SELECT pg_advisory_lock(81)")
                connection.execute("SELECT pg_advisory_unlock(81)")

        assert done == [False]

    def test_what_follows_it_is_waited_for(self):
        with worker_session() as session, session.single() as connection, barrier(82) as lock:
            with connection.meanwhile(lambda: None):
                statement = InThread(lambda: connection.execute("SELECT pg_advisory_lock(82)"))
                wait_until(lambda: session.is_waiting, "the wait")
                wait_for_lock_wait(connections["default"], connection.info.backend_pid)
            assert session.is_waiting
            lock.release()
            statement.result()

    def test_a_statement_that_fails_has_its_meanwhile_too(self):
        done = []
        with worker_session() as session, session.single() as connection:
            with pytest.raises(psycopg.errors.DivisionByZero), connection.meanwhile(lambda: done.append(1)):
                connection.execute("SELECT 1 / 0")

            assert connection.execute("SELECT 2").fetchone() == (2,)
        assert done == [1]

    def test_without_a_statement_there_is_none(self):
        done = []
        with worker_session() as session, session.single() as connection:
            with connection.meanwhile(lambda: done.append(1)):
                pass
            connection.execute("SELECT 1")
        assert done == []

    def test_a_statement_larger_than_a_network_takes_at_once_is_sent_first(self):
        """The server begins when it has all of it."""
        large = f"SELECT length('{'x' * 20_000_000}'), pg_sleep(0.5)"
        begun = "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT length(%%'"

        def wait_for_server():
            wait_until(lambda: here(begun), "the server to begin")

        with worker_session() as session, session.single() as connection, connection.meanwhile(wait_for_server):
            assert connection.execute(large).fetchone()[0] == 20_000_000


class TestPrepared:
    """R33: what is planned longer than it runs; but arrays of fences must be seen when they are planned."""

    def run_some(self, session):
        for _ in range(3):
            with session.round() as connection:
                bands = claiming.due(claiming.sweep(connection, ["default"]))
                jobs = claiming.claim(connection, bands, "worker/1", 1, 60)
                settle(connection, [Succeeded(job.claim) for job in jobs])
        return {statement for (statement,) in sql(session.connection, "SELECT statement FROM pg_prepared_statements")}

    def test_claims_and_looks_are_prepared_in_a_session_of_the_worker_s_own(self):
        enqueue_jobs(3)

        with worker_session() as session:
            prepared = self.run_some(session)

        assert len(prepared) == 2
        assert all("lease_until" in statement or "RECURSIVE" in statement for statement in prepared)

    @pytest.mark.parametrize("count", [0, 1, 10])
    @pytest.mark.parametrize("names", [None, ["default"]], ids=["all queues", "named"])
    def test_looks_are_not_planned_again_and_again(self, names, count):
        """R33: whatever is known, the plan is the same, and takes longer to find than the jobs."""
        enqueue_jobs(count)

        with worker_session() as session:
            for _ in range(20):
                known = [claiming.Part("default", priority) for priority in range(count)]
                claiming.sweep_parts(session.connection, known, names)
            plans = sql(session.connection, "SELECT custom_plans, generic_plans FROM pg_prepared_statements")

        assert plans == [(5, 15)]

    def test_nothing_is_prepared_behind_a_pooler(self, monkeypatch):
        monkeypatch.setattr(connection_module, "is_pooled", lambda connection: True)
        enqueue_jobs(3)

        with worker_session() as session:
            assert self.run_some(session) == set()


class TestLimits:
    def test_behind_a_pooler_a_round_has_limits_of_its_own_whatever_the_session_has(self, monkeypatch):
        """Case B39"""
        monkeypatch.setattr(connection_module, "is_pooled", lambda connection: True)
        with worker_session() as session:
            for setting in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
                sql(session.connection, f"SET {setting} = '1ms'")

            assert ask(session, _SHOW_LIMITS) == [("10s", "500ms", "10s")]

    @pytest.mark.parametrize(
        ("session_limit", "round_limit", "expected"),
        [(5.0, None, "5s"), (5.0, 2.0, "2s"), (5.0, 9.0, "5s"), (60.0, None, "10s")],
    )
    def test_the_shortest_limit_counts(self, session_limit, round_limit, expected):
        session = Session("default", "test", session_limit)

        with session.round(round_limit) as connection:
            assert sql(connection, _SHOW_LIMITS) == [(expected, "500ms", expected)]

        session.close()

    @pytest.mark.parametrize(
        ("parameters", "limit", "seconds"),
        [
            ({"connect_timeout": 10}, 10.0, 10),
            ({"connect_timeout": "3"}, 10.0, 3),
            ({"connect_timeout": 0}, 10.0, 10),
            ({"connect_timeout": 60, "host": "one"}, 10.0, 10),
            ({"connect_timeout": 10, "host": "one,two"}, 10.0, 5),
            ({"connect_timeout": 10, "hostaddr": "10.0.0.1,10.0.0.2,10.0.0.3"}, 10.0, 3),
            ({"connect_timeout": 10, "host": ",".join("abcdefghijkl")}, 10.0, 2),
            ({"connect_timeout": 10, "host": "one"}, 3.75, 3),
            ({"connect_timeout": 10, "host": "one"}, 0.25, 2),
        ],
    )
    def test_all_hosts_together_have_a_limit(self, parameters, limit, seconds):
        assert _connect_seconds(parameters, limit) == seconds


_SHOW_LIMITS = """
SELECT current_setting('statement_timeout'), current_setting('lock_timeout'),
       current_setting('idle_in_transaction_session_timeout')
"""
