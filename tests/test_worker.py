"""Workers as a person starts them: real processes, real signals."""

import os
import re
import signal

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.utils import timezone

from django_pgqueue.models import Job, JobAttempt, Worker

from .app.models import Mark
from .app.worker_tasks import (
    added_since,
    async_leave_mark,
    async_mark_and_sleep,
    atomic_enqueue_next,
    enqueue_another,
    exit_process,
    fail,
    fail_at_once_and_retry,
    fail_once,
    kill_own_process,
    leave_mark,
    mark_and_wait_for,
    say,
    wait_until_cancelled,
)
from .helpers import enqueue, expire_lease, make_due, row, second_connection, wait_until
from .workers import barrier, is_alive

pytestmark = pytest.mark.django_db(transaction=True)


def wait_for_mark(note, count=1):
    wait_until(lambda: Mark.objects.filter(note=note).count() >= count, f"mark {note!r}")


def wait_for_status(job_id, status):
    wait_until(lambda: row(job_id, "status") == (status,), f"job {job_id} to be {status}")


class TestRunning:
    def test_a_worker_runs_what_is_enqueued_while_it_is_idle(self, start_worker):
        worker = start_worker().wait_ready()

        result = leave_mark.enqueue("hello")

        wait_for_mark("hello")
        wait_for_status(int(result.id), "done")
        assert worker.stop() == 0
        assert row(int(result.id), "attempts", "claim_version", "lease_until") == (1, 1, None)
        assert not JobAttempt.objects.exists()

    @pytest.mark.direct("hears of the job by a notification")
    def test_a_notification_wakes_an_idle_worker_long_before_it_polls(self, start_worker):
        """R31"""
        start_worker(POLL_SECONDS="600").wait_ready()
        leave_mark.enqueue("first")
        wait_for_mark("first")

        for number in range(20):
            leave_mark.enqueue(f"again {number}")
            wait_for_mark(f"again {number}")

    def test_polling_alone_finds_jobs_that_nobody_announced(self, start_worker):
        """R31"""
        start_worker(POLL_SECONDS="0.2").wait_ready()

        job_id = enqueue(task_path="tests.app.worker_tasks.leave_mark", args='["quiet"]', run_after=None)
        # Pending again without a notification, as after a lost one.
        wait_for_status(job_id, "done")
        with connections["default"].cursor() as cursor:
            cursor.execute(
                "UPDATE django_pgqueue_job SET status = 'pending', finished_at = NULL, attempts = 0 WHERE id = %s",
                [job_id],
            )

        wait_for_mark("quiet", 2)

    @pytest.mark.direct("hears of the job by a notification")
    def test_a_worker_wakes_up_for_a_job_that_becomes_due(self, start_worker):
        """R03, R31"""
        start_worker(POLL_SECONDS="600").wait_ready()
        later = leave_mark.using(run_after=timezone.now() + timezone.timedelta(seconds=2)).enqueue("later")
        leave_mark.enqueue("sooner")

        wait_for_mark("later")
        job = Job.objects.get(pk=later.id)
        assert job.started_at >= job.available_at

    def test_jobs_that_jobs_enqueue_are_part_of_a_burst(self, start_worker):
        enqueue_another.enqueue("child of a job")

        code = start_worker("--burst").wait()

        assert code == 0
        assert Mark.objects.get().note == "child of a job"

    def test_jobs_that_atomic_jobs_enqueue_are_part_of_a_burst(self, start_worker):
        """The loop does not settle those, and must hear all the same that they have ended."""
        atomic_enqueue_next.enqueue(20)

        assert start_worker("--burst", POLL_SECONDS="600").wait() == 0

        assert set(Job.objects.values_list("status", flat=True)) == {"done"}
        assert Job.objects.count() == 21

    def test_a_burst_waits_for_a_due_job_that_someone_holds(self, start_worker):
        """R10: nothing to claim is not the same as an empty queue."""
        job_id = int(leave_mark.enqueue("held").id)
        with second_connection() as other, other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT 1 FROM django_pgqueue_job WHERE id = %s FOR UPDATE", [job_id])
            leave_mark.enqueue("free")

            worker = start_worker("--burst", POLL_SECONDS="0.1")
            wait_for_mark("free")
            assert worker.process.poll() is None
            cursor.execute("COMMIT")

        assert worker.wait() == 0
        assert Job.objects.filter(status="done").count() == 2

    def test_a_burst_leaves_future_jobs_alone(self, start_worker):
        leave_mark.using(run_after=timezone.now() + timezone.timedelta(hours=1)).enqueue("tomorrow")

        assert start_worker("--burst").wait() == 0

        assert row(Job.objects.get().pk, "status", "attempts") == ("pending", 0)

    def test_async_tasks_run_in_the_same_worker(self, start_worker):
        for number in range(10):
            async_leave_mark.enqueue(f"async {number}")

        assert start_worker("--burst").wait() == 0

        assert Mark.objects.count() == 10
        assert set(Job.objects.values_list("status", "attempts")) == {("done", 1)}

    def test_only_the_chosen_queues_are_served(self, start_worker):
        leave_mark.using(queue_name="email").enqueue("email")
        leave_mark.using(queue_name="slow").enqueue("slow")
        leave_mark.enqueue("default")

        assert start_worker("--burst", "--queue", "email").wait() == 0
        assert set(Mark.objects.values_list("note", flat=True)) == {"email"}
        assert start_worker("--burst", "--exclude-queue", "slow").wait() == 0
        assert set(Mark.objects.values_list("note", flat=True)) == {"email", "default"}
        assert start_worker("--burst").wait() == 0
        assert Mark.objects.count() == 3

    def test_jobs_of_a_queue_that_was_removed_from_the_settings_are_not_stranded(self, start_worker):
        enqueue(task_path="tests.app.worker_tasks.leave_mark", args='["old queue"]', queue_name="removed-since")

        assert start_worker("--burst").wait() == 0

        assert Mark.objects.get().note == "old queue"

    def test_higher_priority_runs_first_and_equals_in_the_order_of_enqueueing(self, start_worker):
        """R05"""
        for priority in (-100, 0, 100, 1, -1, 0):
            leave_mark.using(priority=priority).enqueue(f"{priority}")

        assert start_worker("--burst", "--concurrency", "1").wait() == 0

        assert list(Mark.objects.order_by("pk").values_list("note", flat=True)) == ["100", "1", "0", "0", "-1", "-100"]

    def test_two_workers_share_many_jobs_and_run_each_once(self, start_worker):
        for number in range(400):
            leave_mark.enqueue(f"{number}")

        workers = [start_worker("--burst", "--concurrency", "8") for _ in range(2)]

        assert [worker.wait() for worker in workers] == [0, 0]
        assert Mark.objects.count() == 400 == Mark.objects.values("note").distinct().count()
        assert set(Job.objects.values_list("status", "attempts", "claim_version")) == {("done", 1, 1)}
        assert [worker.warnings for worker in workers] == [[], []]

    @pytest.mark.slow
    def test_two_workers_run_20_000_jobs_exactly_once_each_and_have_nothing_to_warn_of(self, start_worker):
        leave_mark.enqueue_many([[f"{number}"] for number in range(20_000)])

        workers = [start_worker("--burst", "--concurrency", "8", CONN_MAX_AGE="600") for _ in range(2)]

        assert [worker.process.wait(300) for worker in workers] == [0, 0]
        assert Mark.objects.count() == 20_000 == Mark.objects.values("note").distinct().count()
        assert set(Job.objects.values_list("status", "attempts", "claim_version")) == {("done", 1, 1)}
        assert len(set(Mark.objects.values_list("made_by", flat=True))) == 2
        assert all(level not in worker.log for worker in workers for level in ("WARNING", "ERROR", "lost"))

    def test_the_worker_reports_itself_and_says_goodbye(self, start_worker):
        worker = start_worker("--queue", "email").wait_ready()

        [seen] = wait_until(lambda: list(Worker.objects.all()), "the worker's row")

        assert (seen.process_id, seen.queues, seen.concurrency) == (worker.process.pid, "email", 4)
        assert worker.stop() == 0
        assert not Worker.objects.exists()


class TestFailing:
    def test_a_failed_attempt_is_retried_and_logged_as_a_warning(self, start_worker):
        """R23"""
        result = fail_once.enqueue("twice")

        worker = start_worker("--burst")
        assert worker.wait() == 0
        # With a backoff of zero, the retry was due at once.

        assert Mark.objects.filter(note="twice").count() == 2
        assert row(int(result.id), "status", "attempts") == ("done", 2)
        assert re.search(r"WARNING .*fail_once.* failed in attempt 1 of 3", worker.log)

    def test_a_short_backoff_is_not_stretched_to_the_next_poll(self, start_worker):
        """R03, R23"""
        result = fail_once.enqueue("soon again")

        start_worker(POLL_SECONDS="600").wait_ready()

        wait_for_status(int(result.id), "done")
        assert row(int(result.id), "attempts") == (2,)

    def test_a_dead_letter_is_logged_as_an_error_with_its_traceback(self, start_worker):
        """R24"""
        result = fail.enqueue("no way out")

        worker = start_worker("--burst")

        assert worker.wait() == 0
        assert row(int(result.id), "status", "attempts", "last_error") == ("failed", 1, "ValueError: no way out")
        assert re.search(r"ERROR .*failed for good in attempt 1 of 1: ValueError: no way out", worker.log)
        assert "Traceback (most recent call last)" in worker.log

    def test_a_job_that_retries_at_once_does_not_starve_those_behind_it(self, start_worker):
        """R25, case B71"""
        fail_at_once_and_retry.enqueue("hot")
        for number in range(20):
            leave_mark.enqueue(f"{number}")

        start_worker("--concurrency", "1").wait_ready()
        wait_for_mark("hot", 4)

        notes = list(Mark.objects.order_by("pk").values_list("note", flat=True))
        third_run = [place for place, note in enumerate(notes) if note == "hot"][2]
        assert {f"{number}" for number in range(20)} <= set(notes[:third_run])

    def test_a_task_that_exits_ends_its_attempt_and_not_the_worker(self, start_worker):
        exit_process.enqueue(7)
        leave_mark.enqueue("after it")

        worker = start_worker("--burst", "--concurrency", "1")

        assert worker.wait() == 0
        assert Mark.objects.get().note == "after it"
        assert "died" not in worker.log

    def test_text_in_any_script_is_logged_by_a_worker_in_an_ascii_world(self, start_worker):
        """Case B55"""
        text = "\N{FISH} שלום"
        result = say.using().enqueue(text)

        worker = start_worker("--burst", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")

        assert worker.wait() == 0
        job = Job.objects.get(pk=result.id)
        assert (job.args, job.last_error) == ([text], f"ValueError: {text}")


class TestStopping:
    def test_sigterm_lets_running_jobs_finish_and_claims_no_more(self, start_worker):
        with barrier(11) as lock:
            running = mark_and_wait_for.enqueue("running", 11)
            worker = start_worker("--concurrency", "1").wait_ready()
            wait_for_mark("running")
            waiting = [leave_mark.enqueue(f"waiting {number}") for number in range(5)]

            worker.signal(signal.SIGTERM)
            worker.wait_for_log("Stopping")
            lock.release()

            assert worker.wait() == 0
        assert row(int(running.id), "status") == ("done",)
        assert {row(int(job.id), "status", "attempts") for job in waiting} == {("pending", 0)}

    def test_a_job_that_outlasts_the_grace_period_goes_back_with_its_attempt(self, start_worker):
        with barrier(12):
            result = mark_and_wait_for.enqueue("stuck", 12)
            worker = start_worker("--grace", "0.5").wait_ready()
            wait_for_mark("stuck")

            assert worker.stop() == 0

            wait_for_status(int(result.id), "pending")
            assert row(int(result.id), "attempts", "claim_version") == (0, 2)
            [attempt] = JobAttempt.objects.all()
            assert (attempt.outcome, attempt.counted) == ("released", False)

    def test_an_async_task_is_cancelled_at_the_end_of_the_grace_period(self, start_worker):
        result = async_mark_and_sleep.enqueue("endless")
        worker = start_worker("--grace", "0.2").wait_ready()
        wait_for_mark("endless")

        assert worker.stop() == 0

        assert row(int(result.id), "status", "attempts") == ("pending", 0)
        assert "was interrupted and goes back" in worker.log

    def test_nothing_of_the_worker_is_left_behind(self, start_worker):
        worker = start_worker().wait_ready()
        child = worker.child_pid

        assert worker.stop() == 0

        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)

    def test_a_child_whose_supervisor_was_killed_stops_by_itself(self, start_worker):
        worker = start_worker().wait_ready()
        child = worker.child_pid

        worker.signal(signal.SIGKILL)

        wait_until(lambda: not is_alive(child), "the child's end")


class TestDying:
    def test_a_task_that_kills_its_process_is_counted_as_crashed(self, start_worker):
        """R25: a poison job ends as a dead letter, and the jobs beside it keep their attempts."""
        poison = kill_own_process.enqueue("poison")
        start_worker("--concurrency", "1").wait_ready()
        wait_for_mark("poison")
        others = [leave_mark.enqueue(f"beside {number}") for number in range(20)]

        wait_until(lambda: row(int(poison.id), "status", "attempts") == ("pending", 1), "the first death")
        make_due(int(poison.id))
        wait_for_status(int(poison.id), "failed")

        wait_for_mark("beside 19")
        wait_until(lambda: Job.objects.filter(status="done").count() == 20, "the others")
        assert {row(int(job.id), "attempts") for job in others} == {(1,)}
        attempts = JobAttempt.objects.filter(job_id=int(poison.id))
        assert {(a.outcome, a.counted, a.error_class) for a in attempts} == {
            ("crashed", True, "django_pgqueue.exceptions.WorkerCrashed")
        }
        assert "SIGKILL" in attempts[0].message

    def test_the_jobs_of_a_worker_that_lost_power_come_back_when_their_leases_end(self, start_worker):
        """R18, R19, case B01"""
        with barrier(14):
            result = mark_and_wait_for.enqueue("power cut", 14)
            first = start_worker().wait_ready()
            wait_for_mark("power cut")
            first.kill_all()
        expire_lease(int(result.id))

        second = start_worker(LEASE_SECONDS="3")
        second.wait_for_log("Recovered 1 jobs")
        make_due(int(result.id))

        wait_for_status(int(result.id), "done")
        assert row(int(result.id), "attempts") == (2,)
        assert Mark.objects.filter(note="power cut").count() == 2
        [lost] = JobAttempt.objects.all()
        assert (lost.outcome, lost.error_class) == ("lost", "django_pgqueue.exceptions.ClaimExpired")

    def test_a_long_job_keeps_its_lease_with_two_workers_watching(self, start_worker):
        """R18, case B08: many leases long, run once."""
        with barrier(15) as lock:
            result = mark_and_wait_for.enqueue("long", 15)
            workers = [start_worker(LEASE_SECONDS="1").wait_ready() for _ in range(2)]
            wait_for_mark("long")
            leases = {row(int(result.id), "lease_until")}
            wait_until(lambda: leases.add(row(int(result.id), "lease_until")) or len(leases) > 8, "eight renewals")

            lock.release()
            wait_for_status(int(result.id), "done")

        assert row(int(result.id), "attempts", "claim_version") == (1, 1)
        assert Mark.objects.filter(note="long").count() == 1
        assert all("Recovered" not in worker.log for worker in workers)

    def test_a_task_hears_that_its_claim_was_lost_and_its_end_changes_nothing(self, start_worker):
        """R14, R18, R21"""
        with barrier(16) as lock:
            result = wait_until_cancelled.enqueue("robbed", 16)
            worker = start_worker(LEASE_SECONDS="1").wait_ready()
            wait_for_mark("robbed")
            Job.objects.filter(pk=result.id).update(claim_version=7, claimed_by="another worker")

            worker.wait_for_log(rf"claim of job {result.id} \(version 1\) is lost")
            lock.release()

            wait_for_mark("robbed cancelled")
            assert worker.stop() == 0
        assert row(int(result.id), "status", "claim_version", "claimed_by") == ("running", 7, "another worker")


class TestDeploying:
    def test_jobs_that_a_worker_of_before_does_not_know_wait_for_one_that_does(self, start_worker):
        """Case B151, R12: they say why, cost no attempt, and are warned of once."""
        before = start_worker(BEFORE_THE_DEPLOY="1").wait_ready()
        added_since.enqueue_many([[f"{number}"] for number in range(20)])
        reason = "UnknownTask: 'tests.app.worker_tasks.added_since' is not a task there."
        wait_until(lambda: Job.objects.filter(last_error=reason).count() == 20, "all to have been met")
        assert set(Job.objects.values_list("status", "attempts")) == {("pending", 0)}

        since = start_worker().wait_ready()
        assert before.stop() == 0
        Job.objects.filter(status="pending").update(available_at=timezone.now())
        wait_until(lambda: Job.objects.filter(status="done").count() == 20, "all to be done")

        assert set(Job.objects.values_list("status", "attempts")) == {("done", 1)}
        assert Mark.objects.count() == 20 == Mark.objects.values("note").distinct().count()
        assert before.log.count("cannot be run here") == 1
        assert since.stop() == 0


class TestCancelling:
    @pytest.mark.direct("hears of the cancellation by a notification")
    def test_a_worker_hears_at_once_that_a_job_it_runs_was_cancelled(self, start_worker):
        """R26: it would renew the lease a few minutes later."""
        with barrier(18) as lock:
            unwanted = wait_until_cancelled.enqueue("unwanted", 18)
            beside = mark_and_wait_for.enqueue("beside", 18)
            worker = start_worker(LEASE_SECONDS="600").wait_ready()
            wait_until(lambda: waiting_for(18) == 2, "both tasks to wait")
            wait_until(a_worker_listens, "a worker to listen")

            assert Job.objects.get(pk=unwanted.id).cancel().running

            worker.wait_for_log(rf"Job {unwanted.id} was cancelled; its task is being ended")
            # Nobody has let it go.
            wait_until(lambda: waiting_for(18) == 1, "the cancelled task to end")
            lock.release()
            wait_for_status(int(beside.id), "done")
            assert worker.stop() == 0
        assert "is lost" not in worker.log
        assert row(int(unwanted.id), "status", "claim_version") == ("cancelled", 2)
        [attempt] = JobAttempt.objects.all()
        assert (attempt.job_id, attempt.outcome) == (int(unwanted.id), "cancelled")


class TestDatabase:
    def test_a_worker_whose_connections_were_ended_goes_on_with_the_same_processes(self, start_worker):
        worker = start_worker().wait_ready()
        leave_mark.enqueue("before")
        wait_for_mark("before")
        child = worker.child_pid

        with connections["default"].cursor() as cursor:
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE application_name LIKE 'pgqueue%%' AND datname = current_database()"
            )
            assert cursor.fetchone()[0] >= 3
        leave_mark.enqueue("after")

        wait_for_mark("after")
        wait_until(lambda: Job.objects.filter(status="done").count() == 2, "both to be done")
        assert worker.child_pid == child
        assert worker.stop() == 0

    @pytest.mark.direct("tells its sessions apart in the server")
    def test_an_outcome_in_hand_is_written_after_the_connection_came_back(self, start_worker):
        """R16"""
        with barrier(17) as lock:
            result = mark_and_wait_for.enqueue("in hand", 17)
            worker = start_worker().wait_ready()
            wait_for_mark("in hand")
            with connections["default"].cursor() as cursor:
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name LIKE 'pgqueue child%%' AND datname = current_database()"
                )

            lock.release()
            wait_for_status(int(result.id), "done")

        assert row(int(result.id), "attempts", "claim_version") == (1, 1)
        assert Mark.objects.filter(note="in hand").count() == 1
        assert worker.stop() == 0

    def test_a_worker_started_before_migrate_says_so_once_and_waits(self, start_worker):
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER TABLE django_pgqueue_job RENAME TO not_yet_there")
        try:
            worker = start_worker()
            worker.wait_for_log("Run 'manage.py migrate'")
        finally:
            with connections["default"].cursor() as cursor:
                cursor.execute("ALTER TABLE not_yet_there RENAME TO django_pgqueue_job")

        worker.wait_ready()
        leave_mark.enqueue("migrated")
        wait_for_mark("migrated")
        assert worker.stop() == 0
        assert worker.log.count("manage.py migrate") == 1
        assert "The database answers again" in worker.log

    def test_a_worker_started_before_the_database_waits_and_stops_when_asked(self, start_worker):
        worker = start_worker(DATABASE_URL="postgres://nobody@127.0.0.1:1/nowhere")
        worker.wait_for_log("The database is not available")

        assert worker.stop() == 0

    def test_old_done_jobs_are_deleted_and_the_others_stay(self, start_worker):
        """R32"""
        done = int(leave_mark.enqueue("old").id)
        assert start_worker("--burst").wait() == 0
        kept = [int(fail.enqueue("kept").id), enqueue(priority=-100, queue_name="unserved")]
        with connections["default"].cursor() as cursor:
            cursor.execute("UPDATE django_pgqueue_job SET finished_at = finished_at - interval '8 days'")
            cursor.execute("UPDATE django_pgqueue_job SET created_at = created_at - interval '9 days'")

        worker = start_worker("--queue", "default").wait_ready()

        wait_until(lambda: not Job.objects.filter(pk=done).exists(), "the old job to be deleted")
        assert set(Job.objects.values_list("pk", flat=True)) == set(kept)
        assert worker.stop() == 0


class TestStartingWrongly:
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--backend", "nope"], "no backend 'nope'"),
            (["--backend", "immediate"], "needs PgQueueBackend"),
            (["--queue", "emial"], "has no 'emial'"),
            (["--concurrency", "0"], "from 1 to 1000"),
            (["--grace", "-1"], "from 0 to 86400"),
        ],
    )
    def test_a_wrong_flag_is_refused_with_what_to_do(self, flags, message):
        with pytest.raises(CommandError, match=message):
            call_command("runworker", *flags)

    def test_both_names_of_the_command_show_help_with_defaults_and_examples(self, capsys):
        for name in ("runworker", "pgqueue_worker"):
            with pytest.raises(SystemExit):
                call_command(name, "--help")
            text = capsys.readouterr().out
            assert "default: 4" in text
            assert "examples:" in text

    def test_a_child_that_cannot_start_ends_the_worker_with_one_clear_message(self, start_worker):
        """Case B28"""
        worker = start_worker(BREAK_CHILD="1")

        assert worker.wait() == 1
        assert worker.log.count("giving up") == 1


def waiting_for(key):
    """Count the tasks that wait for the advisory lock *key*."""
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted", [key]
        )
        return cursor.fetchone()[0]


def a_worker_listens():
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgqueue listener%'"
            " AND datname = current_database() AND query !~ 'SET|LISTEN' AND state = 'idle'"
        )
        return cursor.fetchone()[0]
