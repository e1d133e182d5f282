"""Job keys: a second enqueue with the key of a live job makes no second job (R04)."""

import pytest
from django.db import connection, transaction

from django_pgqueue.compat import InvalidTask, task_enqueued
from django_pgqueue.models import Job
from django_pgqueue.outcomes import ErrorRecord, Failed, Succeeded
from django_pgqueue.testing import run_jobs

from .app.models import Mark
from .app.tasks import add, nothing
from .app.worker_tasks import leave_mark
from .helpers import InThread, claim_of, claim_one, second_connection, wait_for_lock_wait

KEY = "send-receipt:order-123"


@pytest.mark.django_db
class TestOneKey:
    def test_a_second_enqueue_returns_the_live_job_and_inserts_nothing(self):
        """R04"""
        first = add.using(job_key=KEY).enqueue(1, 2)

        second = add.using(job_key=KEY).enqueue(3, 4)

        assert (first.created, second.created) == (True, False)
        assert (second.id, second.args, second.status) == (first.id, [1, 2], "READY")
        assert Job.objects.count() == 1

    def test_the_callers_transaction_goes_on(self):
        """R04, case B95"""
        nothing.using(job_key=KEY).enqueue()

        with transaction.atomic():
            Mark.objects.create(note="before")
            nothing.using(job_key=KEY).enqueue()
            Mark.objects.create(note="after")

        assert Mark.objects.count() == 2
        assert Job.objects.count() == 1

    def test_only_a_job_that_was_made_is_signalled(self):
        seen = []
        receiver = lambda task_result, **kwargs: seen.append(task_result.id)  # noqa: E731
        task_enqueued.connect(receiver)
        try:
            first = nothing.using(job_key=KEY).enqueue()
            nothing.using(job_key=KEY).enqueue()
        finally:
            task_enqueued.disconnect(receiver)

        assert seen == [first.id]

    def test_a_running_job_holds_its_key(self):
        """Case B104"""
        first = nothing.using(job_key=KEY).enqueue()
        claim_one()

        assert nothing.using(job_key=KEY).enqueue().id == first.id

    @pytest.mark.parametrize("ending", ["done", "failed", "cancelled"])
    def test_a_job_that_has_ended_holds_no_key(self, ending):
        """Case B102"""
        first = nothing.using(job_key=KEY).enqueue()
        if ending == "cancelled":
            Job.objects.cancel()
        else:
            claim = claim_of(claim_one())
            error = ErrorRecord.plain(ValueError, "no")
            Job.objects.settle([Succeeded(claim) if ending == "done" else Failed(claim, error)])

        second = nothing.using(job_key=KEY).enqueue()

        assert second.created
        assert second.id != first.id

    def test_the_same_key_of_another_task_is_another_key(self):
        """Case B103"""
        add.using(job_key="1").enqueue(1, 2)

        other = nothing.using(job_key="1").enqueue()

        assert other.created
        assert Job.objects.count() == 2

    def test_the_queue_is_no_part_of_the_key(self):
        """Case B103"""
        first = nothing.using(job_key="1", queue_name="email").enqueue()

        assert nothing.using(job_key="1", queue_name="slow").enqueue().id == first.id

    def test_keys_are_compared_as_they_are_written(self):
        """Cases B98, B99"""
        keys = ["1", "1.0", "true", "a:bc", "ab:c", "A:bc", "a:bc "]

        results = [nothing.using(job_key=key).enqueue() for key in keys]

        assert all(result.created for result in results)

    @pytest.mark.parametrize("key", ["", "x" * 256, "a\x00b", "\ud800", 5, b"key"])
    def test_a_key_that_cannot_be_stored_is_refused_before_any_sql(self, key):
        """Case B56"""
        with pytest.raises(InvalidTask, match="job_key must be text"):
            nothing.using(job_key=key)

    def test_a_savepoint_that_is_rolled_back_gives_the_key_back(self):
        with transaction.atomic():
            sid = transaction.atomic()
            with pytest.raises(ZeroDivisionError), sid:
                nothing.using(job_key=KEY).enqueue()
                _ = 1 / 0
            again = nothing.using(job_key=KEY).enqueue()

        assert again.created

    def test_run_jobs_frees_the_key(self):
        leave_mark.using(job_key=KEY).enqueue("first")
        run_jobs()

        assert leave_mark.using(job_key=KEY).enqueue("second").created


@pytest.mark.django_db
class TestManyKeys:
    def test_duplicates_and_held_keys_give_the_ids_of_the_jobs_that_hold_them(self):
        """Case B101"""
        held = {f"key {number}": int(nothing.using(job_key=f"key {number}").enqueue().id) for number in range(5)}
        keys = [f"key {number}" for number in range(90)] + [f"key {number}" for number in range(10, 20)]

        ids = nothing.enqueue_many([[]] * 100, job_keys=keys)

        assert Job.objects.count() == 90
        assert len(ids) == 100
        assert ids[:5] == [held[key] for key in keys[:5]]
        assert ids[90:] == ids[10:20]
        assert dict(zip(keys, ids, strict=True)) == dict(Job.objects.values_list("job_key", "id"))

    def test_of_two_calls_with_one_key_the_first_counts(self):
        [first, second] = add.enqueue_many([[1, 1], [2, 2]], job_keys=["k", "k"])

        assert first == second
        assert Job.objects.get().args == [1, 1]

    def test_calls_without_a_key_are_inserted_each(self):
        ids = add.enqueue_many([[1, 1], [2, 2], [3, 3], [4, 4]], job_keys=[None, "k", None, "k"])

        assert len(set(ids)) == 3
        assert ids[1] == ids[3]
        assert [Job.objects.get(pk=job_id).args for job_id in ids] == [[1, 1], [2, 2], [3, 3], [2, 2]]

    def test_keys_that_do_not_fit_the_calls_are_refused_before_any_sql(self, django_assert_num_queries):
        with django_assert_num_queries(0):
            with pytest.raises(ValueError, match="2 calls and 1 job_keys"):
                nothing.enqueue_many([[], []], job_keys=["k"])
            with pytest.raises(ValueError, match="Key 1 must be text"):
                nothing.enqueue_many([[], []], job_keys=["k", ""])
            with pytest.raises(ValueError, match="pass job_keys"):
                nothing.using(job_key="k").enqueue_many([[], []])


@pytest.mark.django_db(transaction=True)
class TestTwoCallers:
    def test_an_uncommitted_holder_is_waited_for_and_found(self):
        """R04"""
        waiting, holder_id = self.enqueue_behind_an_uncommitted_holder(end="COMMIT")

        result = waiting.result()

        assert (result.created, int(result.id)) == (False, holder_id)
        assert Job.objects.count() == 1

    def test_the_key_of_a_holder_that_rolls_back_is_taken(self):
        """R04"""
        waiting, holder_id = self.enqueue_behind_an_uncommitted_holder(end="ROLLBACK")

        result = waiting.result()

        assert result.created
        assert int(result.id) != holder_id
        assert Job.objects.count() == 1

    def test_a_bulk_waits_and_finds_as_well(self):
        waiting, holder_id = self.enqueue_behind_an_uncommitted_holder(end="COMMIT", bulk=True)

        ids = waiting.result()

        assert ids[1] == holder_id
        assert Job.objects.count() == 3

    def test_two_bulks_with_the_same_keys_in_opposite_order_do_not_deadlock(self):
        """Case B136"""
        keys = [f"{number}" for number in range(200)]
        for _ in range(5):
            Job.objects.all().delete()

            one = InThread(lambda: nothing.enqueue_many([[]] * 200, job_keys=keys))
            two = InThread(lambda: nothing.enqueue_many([[]] * 200, job_keys=keys[::-1]))

            assert one.result() == two.result()[::-1]
            assert Job.objects.count() == 200

    def test_a_holder_that_ends_while_it_is_waited_for_frees_the_key(self):
        first = nothing.using(job_key=KEY).enqueue()
        claim = claim_of(claim_one())
        with second_connection() as other, other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(
                "UPDATE django_pgqueue_job SET status = 'done', lease_until = NULL, finished_at = now() WHERE id = %s",
                [claim.job_id],
            )
            waiting, process_id = self.enqueue_in_thread(lambda: nothing.using(job_key=KEY).enqueue())
            wait_for_lock_wait(connection, process_id())

            cursor.execute("COMMIT")

        result = waiting.result()
        assert result.created
        assert result.id != first.id

    def enqueue_behind_an_uncommitted_holder(self, end, bulk=False):
        with second_connection() as other, other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(
                "INSERT INTO django_pgqueue_job (backend, queue_name, task_path, args, kwargs, status, priority,"
                " attempts, max_attempts, claim_version, job_key)"
                " VALUES ('default', 'default', %s, '[]', '{}', 'pending', 0, 0, 5, 0, %s) RETURNING id",
                [nothing.module_path, KEY],
            )
            [(holder_id,)] = cursor.fetchall()
            enqueue = (
                (lambda: nothing.enqueue_many([[]] * 3, job_keys=["a", KEY, "z"]))
                if bulk
                else (lambda: nothing.using(job_key=KEY).enqueue())
            )
            waiting, process_id = self.enqueue_in_thread(enqueue)
            wait_for_lock_wait(connection, process_id())
            cursor.execute(end)
        return waiting, holder_id

    def enqueue_in_thread(self, enqueue):
        """Start *enqueue* in a thread; return it and a call that waits for its backend's process id."""
        from queue import Queue

        ids = Queue()

        def act():
            connection.ensure_connection()
            ids.put(connection.connection.info.backend_pid)
            return enqueue()

        return InThread(act), lambda: ids.get(timeout=30)
