"""
The demo, told from the first order to the last mail, with a SELECT for every number it claims.

Two tables of its own, ``demo_line`` and ``demo_mail``, say what became of each line of the file and what
was in each mail that arrived. They stay until the next run, so that its SELECTs can be repeated by hand.
"""

import csv
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from email import message_from_bytes
from email.header import decode_header, make_header
from email.utils import parseaddr
from pathlib import Path
from textwrap import indent
from typing import Any

from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.urls import resolve, reverse

from django_pgqueue.models import Job
from shop.models import Order
from shop.processes import running_worker
from shop.tasks import send_receipt

from .mail_server import MailServer

ORDERS_FILE = Path(__file__).with_name("orders.csv")
FIELDS = ("name", "email", "item", "total", "card")
DOMAIN = "customer.example"
MISSPELT_DOMAIN = "custmer.example"
RETRY_SECONDS = "0.5"
PATIENCE_SECONDS = 120

TABLES_SQL = """
DROP TABLE IF EXISTS demo_line, demo_mail;
CREATE TABLE demo_line (
    line integer PRIMARY KEY, outcome text NOT NULL, order_id bigint,
    name text, email text, item text, total numeric
);
CREATE TABLE demo_mail (
    file text PRIMARY KEY, order_id bigint, message_id text, subject text,
    name text, email text, body text
);
"""
LINE_SQL = """
INSERT INTO demo_line (line, outcome, order_id, name, email, item, total)
VALUES (%(line)s, %(outcome)s, %(order_id)s, %(name)s, %(email)s, %(item)s, %(total)s)
"""
MAIL_SQL = """
INSERT INTO demo_mail (file, order_id, message_id, subject, name, email, body)
VALUES (%(file)s, %(order_id)s, %(message_id)s, %(subject)s, %(name)s, %(email)s, %(body)s)
"""

ORDERS_IN_FILE_SQL = "SELECT count(*) FROM demo_line"
MALFORMED_SQL = "SELECT count(*) FROM demo_line WHERE outcome = 'malformed'"
ROLLED_BACK_SQL = "SELECT count(*) FROM demo_line WHERE outcome = 'declined'"
PLACED_SQL = "SELECT count(*) FROM shop_order"
PENDING_SQL = (
    "SELECT count(*) FROM django_pgqueue_job WHERE status = 'pending' AND task_path = 'shop.tasks.send_receipt'"
)
ORDER_WITH_JOB_SQL = """
SELECT count(*)
  FROM shop_order AS o
  JOIN django_pgqueue_job AS job ON job.id = o.receipt_id::bigint AND job.args = jsonb_build_array(o.id)
"""
DONE_SQL = """
SELECT count(*)
  FROM django_pgqueue_job
 WHERE status = 'done' AND task_path = 'shop.tasks.send_receipt'
"""
DEAD_LETTERS_SQL = (
    "SELECT count(*) FROM django_pgqueue_job WHERE status = 'failed' AND task_path = 'shop.tasks.send_receipt'"
)
DEAD_LETTER_SQL = """
SELECT id, args, attempts, max_attempts, last_error
  FROM django_pgqueue_job
 WHERE status = 'failed' AND task_path = 'shop.tasks.send_receipt'
"""
LAST_JOB_SQL = """
SELECT job.id, job.status, job.attempts, job.claimed_by
  FROM django_pgqueue_job AS job
  JOIN shop_order AS o ON job.id = o.receipt_id::bigint
 ORDER BY o.id DESC
 LIMIT 1
"""
CRASHED_SQL = "SELECT attempt, outcome, counted, message FROM django_pgqueue_jobattempt WHERE outcome = 'crashed'"
REPEATED_SQL = """
SELECT count(*)
  FROM (SELECT order_id FROM demo_mail GROUP BY order_id, message_id HAVING count(*) = 2) AS repeated
"""
MAILS_SQL = "SELECT count(*) FROM demo_mail"
# The file says what a mail must hold, but the order has the corrected address. Some Python versions lose
# a space where they fold a long name in a header.
RIGHT_MAILS_SQL = """
SELECT count(DISTINCT o.id)
  FROM shop_order AS o
  JOIN demo_line AS line ON line.order_id = o.id AND line.outcome = 'placed'
  JOIN demo_mail AS mail ON mail.order_id = o.id
 WHERE mail.message_id = '<order-' || o.id || '@shop.example>'
   AND mail.subject = 'Receipt for order ' || o.id
   AND mail.email = o.email
   AND replace(mail.name, ' ', '') = replace(line.name, ' ', '')
   AND position('Dear ' || line.name || ',' IN mail.body) > 0
   AND position(line.item || E'\\nTotal: ' || line.total || ' euros' IN mail.body) > 0
"""
ROLLED_BACK_MAILS_SQL = """
SELECT count(*)
  FROM demo_mail AS mail
  JOIN demo_line AS line ON line.outcome = 'declined' AND line.email = mail.email
"""


class DemoFailed(Exception):
    """Something was not as the story says."""


class Story:
    """The demo; its files go to *directory*, its words to *say*."""

    def __init__(self, directory: Path, say: Callable[[str], Any]) -> None:
        self.directory = directory
        self.mail_directory = directory / "mail"
        self.log = directory / "worker.log"
        self.say = say
        self.counts: dict[str, int | float] = {}

    def tell(self) -> None:
        """Run the demo. Raises `DemoFailed` where it does not go as told."""
        began = time.monotonic()
        self._start_afresh()
        self._place_orders()
        with MailServer(self.mail_directory, DOMAIN) as mail_server:
            environment = {
                "EMAIL_HOST": mail_server.host,
                "EMAIL_PORT": str(mail_server.port),
                "RECEIPT_RETRY_SECONDS": RETRY_SECONDS,
            }
            last = Order.objects.order_by("pk").last()
            assert last is not None
            mail_server.slow_goodbye_to = last.pk
            with running_worker("--processes", "2", log=self.log, **environment) as worker:
                self._send_receipts(worker, last)
                self._kill_a_process(worker, last, mail_server)
                self._requeue_the_dead_letter(worker)
        self._expect(worker.returncode, 0, "exit code of the worker")
        self._check_mails()
        self.counts["seconds"] = round(time.monotonic() - began, 1)
        self._write_counts()

    def _start_afresh(self) -> None:
        logging.getLogger("django.request").setLevel(logging.ERROR)  # a declined card is no news here
        call_command("migrate", verbosity=0)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.mail_directory.mkdir(parents=True)
        with connection.cursor() as cursor:
            cursor.execute(TABLES_SQL)
            cursor.execute("SHOW server_version")
            server_version = cursor.fetchone()[0]
        orders, _ = Order.objects.all().delete()
        Job.objects.filter(task_path=send_receipt.module_path).delete()
        self.say(f"PostgreSQL {server_version}. The shop is empty: {orders} orders of earlier runs were deleted.")

    def _place_orders(self) -> None:
        self._headline("Orders and their jobs commit together, or not at all")
        client = Client(SERVER_NAME="localhost")
        for line in _read_orders():
            if line.problem:
                self.say(f"{ORDERS_FILE.name}, line {line.number}, is skipped: {line.problem}.")
                _record(line, "malformed")
            else:
                outcome, order_id = _place_order(client, line)
                _record(line, outcome, order_id)
        self.say("Every other line was sent to the shop's order page. Some cards were declined after the order")
        self.say("and its job had been written; the rollback took both.")
        in_file = self._count("orders_in_file", ORDERS_IN_FILE_SQL)
        malformed = self._count("malformed", MALFORMED_SQL, 1)
        rolled_back = self._count("rolled_back", ROLLED_BACK_SQL)
        placed = self._count("placed", PLACED_SQL, in_file - malformed - rolled_back)
        pending = self._select(PENDING_SQL)
        if pending < placed:
            raise DemoFailed(
                "Another worker takes the jobs of this database. Stop it (make run?), then run the demo again."
            )
        self._expect(pending, placed, "pending jobs")
        self._expect(self._select(ORDER_WITH_JOB_SQL), placed, "orders with their own job")

    def _send_receipts(self, worker: subprocess.Popen[bytes], last: Order) -> None:
        self._headline("A worker of two processes runs the jobs; an SMTP server on this machine takes the mails")
        self._wait_for(worker, but_for=last)
        self._expect(self._select(DONE_SQL), self.counts["placed"] - 2, "done jobs")
        self.say(f"One address is misspelt ({MISSPELT_DOMAIN}), and the mail server refuses it every time. When its")
        self.say("attempts were used up, the job became a dead letter:")
        self._count("dead_letters_before", DEAD_LETTERS_SQL, 1)
        self._show(DEAD_LETTER_SQL)

    def _kill_a_process(self, worker: subprocess.Popen[bytes], last: Order, mail_server: MailServer) -> None:
        self._headline("A process dies at the worst moment, and a mail goes out twice")
        if not mail_server.is_waiting.wait(PATIENCE_SECONDS):
            raise DemoFailed(f"The receipt for {last} did not arrive.\n{self._end_of_log()}")
        self.say(f"The server has accepted the receipt for {last} and does not say goodbye. The mail is out;")
        self.say("that its job is done is not written yet:")
        self._show(LAST_JOB_SQL)
        job = Job.objects.get(pk=last.receipt_id)
        process_id = int(str(job.claimed_by).split(":")[1])
        os.kill(process_id, signal.SIGKILL)
        self.say(f"Process {process_id} is killed. Its worker notices, starts another, and lets the job run again,")
        self.say("because nobody can know whether it had done its work:")
        self._wait_for(worker)
        self._show(LAST_JOB_SQL)
        self._show(CRASHED_SQL)
        self.say("That is what 'at least once' means. The two mails carry the same Message-ID, by which many mail")
        self.say("programs show only one.")

    def _requeue_the_dead_letter(self, worker: subprocess.Popen[bytes]) -> None:
        self._headline("The cause is fixed, and the dead letter requeued")
        for order in Order.objects.filter(email__endswith=f"@{MISSPELT_DOMAIN}"):
            order.email = order.email.replace(MISSPELT_DOMAIN, DOMAIN)
            order.save()
            self.say(f"The address of {order} is now {order.email}.")
        report = Job.objects.filter(task_path=send_receipt.module_path, status="failed").requeue()
        self._expect(report.changed, 1, "requeued jobs")
        self._wait_for(worker)
        self._count("dead_letters_after", DEAD_LETTERS_SQL, 0)
        self._count("jobs_done", DONE_SQL, self.counts["placed"])

    def _check_mails(self) -> None:
        self._headline("Every committed order has its mail, and no other has one")
        for path in sorted(self.mail_directory.glob("*.eml")):
            _record_mail(path)
        placed = self.counts["placed"]
        self._count("repeated", REPEATED_SQL, 1)
        self._count("mails", MAILS_SQL, placed + 1)
        self._expect(self._select(RIGHT_MAILS_SQL), placed, "orders with the right mail")
        self._expect(self._select(ROLLED_BACK_MAILS_SQL), 0, "mails of orders that were rolled back")

    def _write_counts(self) -> None:
        text = json.dumps(self.counts, indent=2)
        (self.directory / "demo.json").write_text(text + "\n")
        self.say("")
        self.say(f"All as it should be, in {self.counts['seconds']} s. .demo holds demo.json, mail/ and worker.log.")

    def _wait_for(self, worker: subprocess.Popen[bytes], but_for: Order | None = None) -> None:
        """Wait until every job has ended, but for the receipt of the order *but_for*."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        unfinished = Job.objects.filter(task_path=send_receipt.module_path, finished_at=None)
        if but_for is not None:
            unfinished = unfinished.exclude(pk=but_for.receipt_id)
        while unfinished.exists():
            if worker.poll() is not None:
                raise DemoFailed(f"The worker ended with exit code {worker.returncode}.\n{self._end_of_log()}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"Jobs are unfinished after {PATIENCE_SECONDS} s.\n{self._end_of_log()}")
            time.sleep(0.05)

    def _end_of_log(self) -> str:
        if not self.log.exists():  # the worker has not been started yet
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"The end of {self.log}:", *lines[-20:]])

    def _headline(self, text: str) -> None:
        self.say("")
        self.say(f"== {text}")

    def _count(self, name: str, sql: str, expected: float | None = None) -> int:
        """Show what *sql* counts and keep it for demo.json under *name*."""
        answer = self._select(sql)
        self.counts[name] = answer
        if expected is not None:
            self._expect(answer, expected, name)
        return answer

    def _select(self, sql: str) -> int:
        (answer,) = self._show(sql)[0]
        return int(answer)

    def _show(self, sql: str) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            rows = cursor.fetchall()
        self.say(indent(f"{sql.strip()};", "  "))
        for row in rows:
            self.say("  -> " + " | ".join(str(value) for value in row))
        return rows

    def _expect(self, actual: float, expected: float, what: str) -> None:
        if actual != expected:
            raise DemoFailed(f"{what}: {actual}, but there should be {expected}.\n{self._end_of_log()}")


@dataclass
class Line:
    """One line of the file: an order, or the problem with it."""

    number: int
    order: dict[str, str]
    problem: str = ""


def _read_orders() -> Iterator[Line]:
    with ORDERS_FILE.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        next(reader)  # the header
        for values in reader:
            order = dict(zip(FIELDS, values, strict=False))
            yield Line(reader.line_num, order, _problem(values))


def _problem(values: list[str]) -> str:
    if len(values) != len(FIELDS):
        return f"it has {len(values)} fields, not {len(FIELDS)}"
    total = values[FIELDS.index("total")]
    try:
        Decimal(total)
    except InvalidOperation:
        return f"{total!r} is not an amount"
    return ""


def _place_order(client: Client, line: Line) -> tuple[str, int | None]:
    """Send the order to the shop's page; return what became of it, and the order's id if there is one."""
    response = client.post(reverse("shop"), line.order)
    if response.status_code == 302:
        return "placed", resolve(response.headers["Location"]).kwargs["order_id"]
    if response.status_code == 402:
        return "declined", None
    raise DemoFailed(f"{ORDERS_FILE.name}, line {line.number}: the shop answered {response.status_code}.")


def _record(line: Line, outcome: str, order_id: int | None = None) -> None:
    order = dict.fromkeys(FIELDS) if line.problem else line.order
    with connection.cursor() as cursor:
        cursor.execute(LINE_SQL, {**order, "line": line.number, "outcome": outcome, "order_id": order_id})


def _record_mail(path: Path) -> None:
    mail = message_from_bytes(path.read_bytes())
    name, email = parseaddr(mail["To"])
    content = mail.get_payload(decode=True)
    assert isinstance(content, bytes), "a receipt has one part"
    row = {
        "file": path.name,
        "order_id": int(mail["X-Order"]),
        "message_id": mail["Message-ID"],
        "subject": mail["Subject"],
        "name": str(make_header(decode_header(name))),
        "email": email,
        "body": content.decode("utf-8").replace("\r\n", "\n"),
    }
    with connection.cursor() as cursor:
        cursor.execute(MAIL_SQL, row)
