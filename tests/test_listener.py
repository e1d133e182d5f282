"""Hearing of jobs: over what connections notifications arrive, and what a worker does where they cannot."""

from urllib.parse import urlsplit

import pytest

from django_pgqueue.models import Job
from django_pgqueue.worker.listener import Listener

from .app.models import Mark
from .app.worker_tasks import leave_mark
from .helpers import database_alias, here, second_connection, sql, wait_until, worker_config
from .pooler import pgbouncer
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
