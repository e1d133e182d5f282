"""Real workers behind a network that loses answers, cuts connections or swallows them: same processes, nothing lost."""

import re

import pytest

from django_pgqueue.models import Job, JobAttempt

from .app.models import Mark
from .app.worker_tasks import fail_once_and_wait, leave_mark, mark_and_wait_for
from .helpers import PATIENCE_SECONDS, here, row, wait_until
from .proxy import Proxy
from .workers import JobInHand, barrier, listener

pytestmark = pytest.mark.django_db(transaction=True)

CLAIM = r"SET status = 'running'"
ENDED_LEASES = "SELECT count(*) FROM django_pgqueue_job WHERE lease_until < clock_timestamp()"
RENEWAL = r"SET lease_until = clock_timestamp\(\)"


def wait_for_status(job_id, status):
    wait_until(lambda: row(job_id, "status") == (status,), f"job {job_id} to be {status}")


@pytest.fixture
def proxy():
    with Proxy.to_database() as proxy:
        yield proxy


@pytest.fixture
def start_behind(start_worker, proxy):
    """Start a worker behind the proxy."""
    return lambda *flags, **environment: start_worker(*flags, DATABASE_URL=proxy.url, **environment).wait_ready()


class TestUnknownOutcomes:
    """R16: the COMMIT has happened, and whoever sent it does not know."""

    def test_a_claim_goes_back_and_its_attempt_does_not_count(self, proxy, start_behind):
        worker = start_behind()
        child = worker.child_pid
        lost = proxy.lose_commit_answer(CLAIM)

        job_id = int(leave_mark.enqueue("claimed in doubt").id)

        lost.wait(PATIENCE_SECONDS)
        wait_for_status(job_id, "done")
        # Claimed, released by the child itself long before the lease ends, and claimed once more.
        assert row(job_id, "attempts", "claim_version") == (1, 3)
        assert Mark.objects.count() == 1
        assert "Released 1 jobs whose claim was never confirmed" in worker.log
        assert worker.child_pid == child
        assert worker.stop() == 0

    def test_what_was_settled_is_settled(self, proxy, start_behind):
        with barrier(61) as lock:
            job_id = int(mark_and_wait_for.enqueue("settled in doubt", 61).id)
            worker = start_behind()
            wait_until(Mark.objects.exists, "the task")
            lost = proxy.lose_commit_answer("'done'")

            lock.release()
            lost.wait(PATIENCE_SECONDS)

        leave_mark.enqueue("next")
        wait_until(lambda: Job.objects.filter(status="done").count() == 2, "the next job")
        assert worker.stop() == 0
        assert row(job_id, "status", "attempts", "claim_version") == ("done", 1, 1)
        assert Mark.objects.filter(note="settled in doubt").count() == 1
        assert not re.search("is lost|Recovered|Released", worker.log)

    def test_a_retry_is_written_once(self, proxy, start_behind):
        """One that waits: were it due at once, the same transaction might claim it again."""
        worker = start_behind()
        lost = proxy.lose_commit_answer("INSERT INTO django_pgqueue_jobattempt")

        job_id = int(fail_once_and_wait.enqueue("retried in doubt").id)

        lost.wait(PATIENCE_SECONDS)
        wait_for_status(job_id, "done")
        assert row(job_id, "attempts") == (2,)
        assert list(JobAttempt.objects.values_list("attempt", "outcome", "counted")) == [(1, "error", True)]
        assert Mark.objects.filter(note="retried in doubt").count() == 2
        assert worker.stop() == 0
        assert "is lost" not in worker.log

    def test_a_renewal_is_sent_again(self, proxy, start_behind):
        with barrier(62) as lock:
            job_id = int(mark_and_wait_for.enqueue("renewed in doubt", 62).id)
            worker = start_behind(LEASE_SECONDS="3")
            wait_until(Mark.objects.exists, "the task")

            for _ in range(3):
                proxy.lose_commit_answer(RENEWAL).wait(PATIENCE_SECONDS)
            renewed = row(job_id, "lease_until")
            wait_until(lambda: row(job_id, "lease_until") > renewed, "the next renewal")
            lock.release()
            wait_for_status(job_id, "done")

        assert row(job_id, "attempts", "claim_version") == (1, 1)
        assert worker.stop() == 0
        assert not re.search("is lost|Recovered", worker.log)


class TestCut:
    def test_connections_that_are_refused_for_a_while_cost_neither_a_process_nor_a_job(
        self, proxy, start_behind, tmp_path
    ):
        """Case B32"""
        worker = start_behind(LEASE_SECONDS="6")
        child = worker.child_pid
        in_hand = JobInHand(tmp_path)

        proxy.refuse()
        in_hand.finish()
        worker.wait_for_log("The database is not available")
        proxy.forward()

        leave_mark.enqueue("after")
        wait_until(lambda: Job.objects.filter(status="done").count() == 2, "both jobs")
        in_hand.must_have_run_once()
        assert worker.child_pid == child
        assert worker.stop() == 0
        assert worker.log.count("is not available") == 1
        assert worker.log.count("answers again") == 1
        assert "lost" not in worker.log

    @pytest.mark.slow
    def test_a_job_whose_lease_ended_while_nobody_could_renew_it_is_not_run_a_second_time(self, start_worker, tmp_path):
        """The worker that is back first leaves the others a moment."""
        with Proxy.to_database() as its_network, Proxy.to_database() as network_of_another:
            worker = start_worker(DATABASE_URL=its_network.url, LEASE_SECONDS="6").wait_ready()
            in_hand = JobInHand(tmp_path)
            other = start_worker(DATABASE_URL=network_of_another.url, LEASE_SECONDS="6").wait_ready()
            its_network.refuse()
            network_of_another.refuse()
            wait_until(lambda: here(ENDED_LEASES) == [(1,)], "the lease to end")

            network_of_another.forward()
            other.wait_for_log("The database answers again")
            its_network.forward()
            wait_until(lambda: here(ENDED_LEASES) == [(0,)], "the lease to be renewed")
            assert row(in_hand.id, "status", "claim_version") == ("running", 1)

            in_hand.finish()
            wait_for_status(in_hand.id, "done")
            in_hand.must_have_run_once()
            assert worker.stop() == other.stop() == 0
        assert "Recovered" not in worker.log + other.log


@pytest.mark.slow
class TestHalfOpen:
    """Nothing arrives any more, and no kernel says so: only limits of our own help."""

    def test_a_claim_that_was_never_answered_goes_back(self, proxy, start_behind):
        worker = start_behind()
        child = worker.child_pid
        lost = proxy.lose_commit_answer(CLAIM, silently=True)

        job_id = int(leave_mark.enqueue("swallowed").id)

        lost.wait(PATIENCE_SECONDS)
        wait_for_status(job_id, "done")
        assert row(job_id, "attempts", "claim_version") == (1, 3)
        assert Mark.objects.count() == 1
        assert worker.child_pid == child
        assert worker.stop() == 0

    def test_a_worker_with_a_job_in_hand_comes_back(self, proxy, start_behind, tmp_path):
        worker = start_behind(LEASE_SECONDS="12", POLL_SECONDS="600")
        child = worker.child_pid
        in_hand = JobInHand(tmp_path)
        [deaf, *_] = wait_until(listener, "a listener")

        proxy.go_deaf()
        in_hand.finish()
        leave_mark.enqueue("unheard")
        worker.wait_for_log("The database is not available")
        proxy.forward()

        wait_until(lambda: Job.objects.filter(status="done").count() == 2, "both jobs")
        in_hand.must_have_run_once()
        # The listener, too, has a connection that works: nothing else would wake anybody for ten minutes.
        wait_until(lambda: (listener() or (deaf,))[0] != deaf, "the new listener")
        leave_mark.enqueue("heard")
        wait_until(lambda: Job.objects.filter(status="done").count() == 3, "the job that was announced")
        assert worker.child_pid == child
        assert worker.stop() == 0
        assert "lost" not in worker.log
        assert len(worker.log.splitlines()) < 15
