"""Hearing of jobs: over what connections notifications arrive, and what a worker does where they cannot."""

import threading
import time
from urllib.parse import urlsplit

import pytest

from django_pgqueue.models import Job
from django_pgqueue.statements.database import CANCEL_CHANNEL
from django_pgqueue.worker import connection as connection_module
from django_pgqueue.worker import doorbell as doorbells
from django_pgqueue.worker import listener as listener_module
from django_pgqueue.worker.holdings import Vitals
from django_pgqueue.worker.listener import Listener
from django_pgqueue.worker.watchdog import Watchdog

from .app.models import Mark
from .app.worker_tasks import leave_mark
from .helpers import (
    PATIENCE_SECONDS,
    database_alias,
    enqueue,
    here,
    second_connection,
    sql,
    wait_until,
    worker_config,
)
from .pooler import pgbouncer
from .proxy import Proxy
from .test_doorbell import in_flight
from .workers import listener

pytestmark = pytest.mark.django_db(transaction=True)

WARNING = "Notifications do not arrive"
DEAF = {"POLL_SECONDS": "600"}  # so that nothing but a notification finds a job in the time of a test


def run_by_notification(*notes):
    for note in notes:
        leave_mark.enqueue(note)
        wait_until(lambda note=note: Mark.objects.filter(note=note).exists(), f"mark {note!r}")


@pytest.mark.direct("its sessions are looked at in the server")
class TestDirectly:
    def test_a_listener_whose_backend_was_ended_hears_again(self, start_worker):
        """Case B32: without it the worker would be deaf for ever."""
        worker = start_worker(**DEAF).wait_ready()
        for number in range(3):
            pid, _, _ = wait_until(listener, "a listener")
            here("SELECT pg_terminate_backend(%s)", [pid])
            wait_until(lambda pid=pid: (listener() or (pid,))[0] != pid, "another listener")

            run_by_notification(f"first {number}", f"second {number}")

        assert worker.stop() == 0
        assert WARNING not in worker.log

    def test_a_listener_is_idle_and_keeps_no_notification_from_being_forgotten(self, start_worker):
        """Case B45"""
        worker = start_worker(**DEAF).wait_ready()
        wait_until(listener, "a listener")
        with second_connection() as other:
            for _ in range(20):
                sql(other, "SELECT count(pg_notify('django_pgqueue', 'x' || n)) FROM generate_series(1, 1000) AS n")
        run_by_notification("after them")

        wait_until(lambda: (listener() or ())[1:] == ("idle", True), "the listener to be idle")
        assert here("SELECT pg_notification_queue_usage()")[0][0] < 0.01
        assert worker.stop() == 0

    def test_djangos_pool_is_no_pooler_to_a_worker(self, start_worker):
        worker = start_worker(POOL="1", **DEAF).wait_ready()
        wait_until(listener, "a listener")

        run_by_notification("first", "second")

        assert worker.stop() == 0
        assert WARNING not in worker.log


class Resting:
    """A child that has always just looked, and has a free slot still."""

    was_told_to_stop = False

    def vitals(self):
        now = time.monotonic()
        return Vitals(looped=now, worked=now, breathed=now, leased=0.0, rested=now)


class Listening(Listener):
    """A listener in this process, behind *proxy*, and watched."""

    def __init__(self, proxy):
        self._proxy = proxy
        self.woken = threading.Event()
        self._told_to_check = threading.Event()
        super().__init__(
            worker_config(database="proxied"),
            children=lambda: [Resting()],
            wake=self.woken.set,
            look=list,
            check_claims=self._told_to_check.set,
        )
        self._watchdog = Watchdog(self.sessions)
        self._watchdog.start()
        self.start()

    def run(self):
        with self._proxy.alias("proxied"):  # of this thread
            super().run()

    def end(self):
        self.stop()
        self.join(PATIENCE_SECONDS)
        self._watchdog.stop()

    @property
    def sleeps(self):
        """Whether it has all locks that it needs."""
        return not self._doorbell._lacks_locks

    def must_hear(self):
        """It hears, by a connection that leads, whatever others the server still has."""
        wait_until(lambda: here(f"NOTIFY {CANCEL_CHANNEL}") or self._told_to_check.is_set(), "a cancellation to arrive")
        wait_until(lambda: (listener() or (0,))[0] == newest_listener(), "it to lead")
        wait_until(lambda: self.sleeps, "it to sleep")
        self.woken.clear()
        enqueue()
        assert self.woken.wait(PATIENCE_SECONDS)


def newest_listener():
    found = here(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'pgqueue listener%' ORDER BY backend_start DESC LIMIT 1"
    )
    return found[0][0] if found else None


class TestHalfOpen:
    """The network swallows a connection without a word, at each of the moments at which something is asked."""

    @pytest.fixture
    def proxy(self):
        with Proxy.to_database() as proxy:
            yield proxy

    @pytest.fixture
    def listen(self, proxy, monkeypatch):
        monkeypatch.setattr(connection_module, "ROUND_LIMIT_SECONDS", 0.2)
        monkeypatch.setattr(listener_module, "CHECK_SECONDS", 0.1)
        monkeypatch.setattr(listener_module, "PROBE_SECONDS", 0.2)
        monkeypatch.setattr(doorbells, "WAIT_SECONDS", 0.1)
        monkeypatch.setattr(doorbells, "ANSWER_SECONDS", 0.2)
        started = []

        def listen():
            started.append(Listening(proxy))
            return started[-1]

        yield listen
        for each in started:
            each.end()

    @pytest.mark.parametrize(
        "statement",
        [
            r"SELECT pg_backend_pid\(\)$",
            "SET default_transaction_isolation",
            r"set_config\('statement_timeout'",
            "LISTEN",
            "SET tcp_keepalives_idle",
            "SELECT pid, backend_start",
            "pg_try_advisory_lock",
            "^SELECT 1$",
        ],
    )
    def test_when_a_statement_is_not_answered(self, proxy, listen, statement):
        lost = proxy.lose_commit_answer(statement, silently=True)

        listening = listen()
        lost.wait(PATIENCE_SECONDS)

        listening.must_hear()

    @pytest.mark.parametrize("statement", ["LISTEN .*_probe_", "NOTIFY .*_probe_", "UNLISTEN"])
    def test_while_it_tries_out_whether_notifications_arrive(self, proxy, listen, monkeypatch, statement):
        monkeypatch.setattr(connection_module, "is_pooled", lambda connection: True)
        lost = proxy.lose_commit_answer(statement, silently=True)

        listening = listen()
        lost.wait(PATIENCE_SECONDS)

        listening.must_hear()

    def test_when_the_end_of_a_lost_session_is_not_answered(self, proxy, listen):
        listening = listen()
        wait_until(listener, "it to lead")
        lost = proxy.lose_commit_answer("pg_terminate_backend", silently=True)

        proxy.reset()
        lost.wait(PATIENCE_SECONDS)

        listening.must_hear()

    @pytest.mark.parametrize("statement", ["SET lock_timeout = '0", r"pg_advisory_lock\("])
    def test_while_it_waits_for_enqueues_in_flight(self, proxy, listen, statement):
        with in_flight():
            lost = proxy.lose_commit_answer(statement, silently=True)
            listening = listen()
            wait_until(lambda: lost.happened or waits_for_a_lock(), "it to wait")
        lost.wait(PATIENCE_SECONDS)

        listening.must_hear()

    def test_while_a_lock_is_held_that_was_waited_for(self, proxy, listen):
        with in_flight():
            listening = listen()
            wait_until(waits_for_a_lock, "it to wait")
        wait_until(lambda: listening.sleeps, "it to sleep")
        before = newest_listener()

        proxy.go_deaf(new=False, name="pgqueue bell")
        wait_until(lambda: newest_listener() not in (None, before), "it to notice")

        listening.must_hear()

    def test_while_nothing_is_asked_and_nobody_can_connect(self, proxy, listen):
        listening = listen()
        wait_until(listener, "it to lead")
        before = proxy.accepted

        proxy.go_deaf()
        wait_until(lambda: proxy.accepted > before, "another try")
        proxy.forward()

        listening.must_hear()


def waits_for_a_lock():
    return here(
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'pgqueue bell%' AND wait_event_type = 'Lock'"
    )


@pytest.mark.pgbouncer
class TestThroughPgBouncer:
    def test_in_session_mode_notifications_arrive(self, start_worker):
        with pgbouncer("session") as url:
            worker = start_worker(DATABASE_URL=url, **DEAF).wait_ready()
            wait_until(listener, "a listener")

            run_by_notification("first", "second")

            assert worker.stop() == 0
            assert WARNING not in worker.log

    @pytest.mark.parametrize("binding", [{}, {"SERVER_SIDE_BINDING": "1"}], ids=["client binding", "server binding"])
    def test_in_transaction_mode_there_is_one_warning_and_each_job_runs_once(self, start_worker, binding):
        """Case B48"""
        with pgbouncer("transaction") as url:
            workers = [start_worker(DATABASE_URL=url, **binding).wait_ready() for _ in range(2)]
            for worker in workers:
                worker.wait_for_log(WARNING)
            assert listener() is None  # a session that is given to others must not hold a lock
            leave_mark.enqueue_many([[f"{number}"] for number in range(200)])
            wait_until(lambda: not Job.objects.exclude(status="done").exists(), "all jobs")
            here(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            leave_mark.enqueue("after")
            wait_until(lambda: Mark.objects.filter(note="after").exists(), "the job after")

            assert [worker.stop() for worker in workers] == [0, 0]
        assert Mark.objects.count() == 201
        assert set(Job.objects.values_list("status", "attempts")) == {("done", 1)}
        assert [worker.log.count(WARNING) for worker in workers] == [1, 1]

    def test_it_is_tried_out_again_without_another_warning(self, monkeypatch, caplog):
        tries = []

        def try_three_times(connection):
            tries.append(can_hear(connection))
            if len(tries) == 3:
                listener.stop()
            return tries[-1]

        monkeypatch.setattr("django_pgqueue.worker.listener.PROBE_AGAIN_SECONDS", 0.0)
        monkeypatch.setattr("django_pgqueue.worker.listener.PROBE_SECONDS", 0.2)
        with pgbouncer("transaction") as url, database_alias("pooled") as pooled:
            address = urlsplit(url)
            pooled.settings_dict.update(HOST=address.hostname, PORT=address.port)
            listener = Listener(
                worker_config(database="pooled"), children=list, wake=list, look=list, check_claims=list
            )
            can_hear = listener._can_hear
            listener._can_hear = try_three_times
            listener.run()

        assert tries == [False] * 3
        assert caplog.text.count(WARNING) == 1
