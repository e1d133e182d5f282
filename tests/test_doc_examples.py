"""The examples of docs/idempotency.md and docs/locking.md, run as they stand there."""

import re
import sys
import threading
import types
from contextlib import suppress
from functools import partial

import django
import psycopg
import pytest
from django.core import mail
from django.db import InternalError, OperationalError, connection, transaction
from django.test.utils import isolate_apps

from django_pgqueue import registry
from django_pgqueue.models import Job, JobAttempt
from django_pgqueue.outcomes import Succeeded
from django_pgqueue.testing import run_jobs
from django_pgqueue.worker import attempt

from .documents import ROOT, blocks
from .helpers import InThread, claim_one, expire_lease, make_due, pid_of, row, second_connection, sql, wait_for_waiter

pytestmark = pytest.mark.django_db(transaction=True)
PACKAGE = "tests.app.shop"  # a package of an installed app, as tasks must have


class Payments(types.ModuleType):
    """The other side: it remembers what it was asked, and knows idempotency keys."""

    def __init__(self):
        super().__init__(f"{PACKAGE}.payments")
        self.charged = {}
        self.gifts = []
        self.before_gift = lambda: None

    def charge(self, cents, *, idempotency_key):
        return self.charged.setdefault(idempotency_key, cents)

    def send_gift(self, order_id):
        self.before_gift()
        self.gifts.append(order_id)


@pytest.fixture
def shop(request, monkeypatch, settings):
    """The package that the files of a document make, with its tables; the document is the class's."""
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    monkeypatch.setattr(registry, "_found", {})
    package = types.ModuleType(PACKAGE)
    package.__path__ = []
    package.payments = Payments()
    files = {"payments": package.payments}
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    with isolate_apps("tests.app") as apps:
        for block in blocks(ROOT / "docs" / request.cls.document, "python"):
            if block.file_name is None:
                continue
            name = block.file_name.removeprefix("shop/").removesuffix(".py")
            if name not in files:
                files[name] = types.ModuleType(f"{PACKAGE}.{name}")
                setattr(package, name, files[name])
            monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", files[name])
            files[name].__package__ = PACKAGE
            exec(compile(block.text, block.place, "exec"), vars(files[name]))
        models = list(apps.get_models())
        with connection.schema_editor() as editor:
            for model in models:
                editor.create_model(model)
        yield package
        with connection.schema_editor() as editor:
            for model in reversed(models):
                editor.delete_model(model)


def run_twice(task, *args):
    """Enqueue a job, run it, lose how it has ended, as a crash does, and let it run again; return both values."""
    job_id = int(task.using(queue_name="default").enqueue(*args).id)
    claimed = claim_one()
    first = attempt.run(claimed, None)
    assert isinstance(first.outcome, Succeeded), first.error
    expire_lease(job_id)
    Job.objects.recover()
    make_due(job_id)
    second = next(result for result in run_jobs() if result.id == str(job_id))
    assert (second.status, second.attempts) == ("SUCCESSFUL", 2)
    return first.outcome.result, second.return_value


class TestIdempotency:
    document = "idempotency.md"

    @pytest.fixture
    def order(self, shop):
        customer = shop.models.Customer.objects.create(email="ada@example.com")
        return shop.models.Order.objects.create(customer=customer, total_cents=4200)

    def test_an_invoice_is_written_once(self, shop, order):
        """R27"""
        run_twice(shop.tasks.write_invoice, order.pk)

        assert shop.models.Invoice.objects.get().total_cents == 4200

    def test_points_are_awarded_once(self, shop, order):
        run_twice(shop.tasks.award_points, order.pk)

        order.customer.refresh_from_db()
        assert order.customer.points == 42
        assert shop.models.PointEntry.objects.count() == 1

    def test_a_status_moves_once(self, shop, order):
        changed = run_twice(shop.tasks.pack, order.pk)

        order.refresh_from_db()
        assert order.status == "packed"
        assert changed == ("1", 0)

    def test_a_voucher_keeps_its_code(self, shop, order):
        first, second = run_twice(shop.tasks.send_voucher, order.pk)

        assert first == f'"{second}"'
        assert len(mail.outbox) == 2
        assert {message.extra_headers["Message-ID"] for message in mail.outbox} == {
            f"<voucher-{order.pk}@shop.example>"
        }
        assert len({message.body for message in mail.outbox}) == 1

    def test_a_payment_is_made_once(self, shop, order):
        run_twice(shop.tasks.charge, order.pk)

        assert shop.payments.charged == {f"charge-order-{order.pk}": 4200}

    def test_a_gift_is_sent_once(self, shop, order):
        run_twice(shop.tasks.send_gift, order.pk)

        assert shop.payments.gifts == [order.pk]

    def test_two_runs_that_overlap_both_check_before_either_acts(self, shop, order):
        with Overlap(shop, shop.tasks.send_gift_twice, order):
            shop.tasks.send_gift_twice.call(order.pk)

        assert shop.payments.gifts == [order.pk] * 2

    def test_a_lock_lets_the_second_run_see_what_the_first_has_done(self, shop, order):
        with Overlap(shop, shop.tasks.send_gift, order) as first:
            second = InThread(lambda: shop.tasks.send_gift.call(order.pk))
            wait_for_waiter(first.process_id)

        second.result()
        assert shop.payments.gifts == [order.pk]

    def test_a_crash_after_one_attempt_of_one_leaves_a_dead_letter_and_a_doubt(self, shop, order):
        job_id = int(shop.tasks.send_gift_once.enqueue(order.pk).id)
        attempt.run(claim_one(), None)
        expire_lease(job_id)

        Job.objects.recover()

        assert row(job_id, "status") == ("failed",)
        assert JobAttempt.objects.get().error_class == "django_pgqueue.exceptions.ClaimExpired"
        assert shop.payments.gifts == [order.pk]  # it had been sent, which the row cannot tell

    def test_what_a_task_enqueues_with_its_effect_is_enqueued_once(self, shop, order):
        run_twice(shop.tasks.pack_and_send_voucher, order.pk)

        assert Job.objects.filter(task_path=f"{PACKAGE}.tasks.send_voucher").count() == 1


class TestLocking:
    document = "locking.md"

    @pytest.fixture
    def seats(self, shop):
        shop.models.Seat.objects.bulk_create([shop.models.Seat() for _ in range(3)])
        return shop.seats

    @pytest.fixture
    def holder(self, seats):
        """A second connection that holds the first seat's row."""
        with second_connection() as holder:
            sql(holder, "BEGIN")
            sql(holder, "SELECT id FROM app_seat WHERE id = 1 FOR UPDATE")
            yield holder

    def test_one_who_waits_sees_what_the_other_has_done(self, seats, holder):
        """R13"""
        second = InThread(lambda: seats.take(1, "second"))
        wait_for_waiter(pid_of(holder))

        sql(holder, "UPDATE app_seat SET taken_by = 'first' WHERE id = 1")
        sql(holder, "COMMIT")

        assert second.result() is False

    def test_one_who_does_not_wait_is_told_and_may_go_on(self, shop, seats, holder):
        """R13"""
        with transaction.atomic():
            with pytest.raises(seats.SeatBusy):
                seats.take_or_say_busy(1, "clerk")
            seats.take_or_say_busy(2, "clerk")

        assert list(shop.models.Seat.objects.filter(taken_by="clerk").values_list("pk", flat=True)) == [2]

    def test_inside_of_atomic_the_transaction_is_broken(self, shop, holder):
        with transaction.atomic():
            with suppress(OperationalError):
                shop.models.Seat.objects.select_for_update(nowait=True).get(pk=1)

            with pytest.raises(InternalError) as caught:
                shop.models.Seat.objects.count()

            transaction.set_rollback(True)
        assert caught.value.__cause__.sqlstate == "25P02"

    def test_one_who_waits_for_a_while_gives_up(self, seats, holder):
        """R13"""
        before = sql(connection, "SHOW lock_timeout")

        with pytest.raises(OperationalError) as caught:
            seats.take_within(1, "impatient", 50)

        assert caught.value.__cause__.sqlstate == "55P03"
        assert sql(connection, "SHOW lock_timeout") == before != [("50ms",)]

    def test_one_who_takes_any_passes_over_what_is_locked(self, seats, holder):
        """R13"""
        assert [seats.take_any("first"), seats.take_any("second"), seats.take_any("third")] == [2, 3, None]

    def test_swaps_in_both_directions_do_not_deadlock(self, shop, seats):
        shop.models.Seat.objects.filter(pk=1).update(taken_by="Ada")
        with second_connection() as holder:
            sql(holder, "BEGIN")
            sql(holder, "SELECT id FROM app_seat WHERE id = 1 FOR UPDATE")
            swaps = [InThread(lambda: seats.swap(1, 2)), InThread(lambda: seats.swap(2, 1))]
            wait_for_waiter(pid_of(holder))
            sql(holder, "COMMIT")

        for swap in swaps:
            swap.result()
        assert shop.models.Seat.objects.get(taken_by="Ada").pk == 1

    def test_the_two_sessions_come_to_what_their_comments_say(self):
        """R07, R10, R13"""
        waiting = []
        with second_connection() as one, second_connection() as two:
            sessions = {"A": one, "B": two}

            for block in blocks(ROOT / "docs" / self.document, "sql"):
                name, said = SESSION.match(block.text).groups()
                run = partial(outcome, sessions[name], block.text)
                if said.startswith("waits, then "):
                    waiting.append((InThread(run), said.removeprefix("waits, then ")))
                    wait_for_waiter(pid_of(one))
                    continue
                assert (block.place, run()) == (block.place, said or "answers: nothing")
                if "COMMIT" in block.text:
                    assert [second.result() for second, _ in waiting] == [then for _, then in waiting]
                    waiting.clear()


SESSION = re.compile(r"-- session ([AB]) ?(.*)")


def outcome(connection, text):
    """Run *text* and return what its last statement came to, in the words of the page."""
    try:
        with connection.connection.cursor() as cursor:
            cursor.execute(text)
            while cursor.nextset():
                pass
            rows = cursor.fetchall() if cursor.description else []
    except psycopg.Error as error:
        return f"fails: {error.sqlstate}"
    return f"answers: {', '.join(str(value) for (value,) in rows) or 'nothing'}"


class Overlap:
    """A first run of *task* in a thread that has begun its effect, and goes on when the block ends."""

    def __init__(self, shop, task, order):
        self._shop, self._task, self._order = shop, task, order
        self._has_begun, self._may_end = threading.Event(), threading.Event()
        self.process_id = None

    def __enter__(self):
        self._shop.payments.before_gift = self._stop
        self._first = InThread(lambda: self._task.call(self._order.pk))
        assert self._has_begun.wait(30)
        self._shop.payments.before_gift = lambda: None
        return self

    def _stop(self):
        connection.ensure_connection()
        self.process_id = connection.connection.info.backend_pid
        self._has_begun.set()
        assert self._may_end.wait(30)

    def __exit__(self, *error):
        self._may_end.set()
        self._first.result()
