"""What the tests of the admin share: jobs in any state, rows that others hold, and what a page says."""

import re
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from django.contrib.admin.models import LogEntry
from django.db import connection

from django_pgqueue.admin.verbs import ACTIONS_ARE_ON_PAGES
from django_pgqueue.models import Job, JobAttempt

from .helpers import second_connection

LIST = "/admin/django_pgqueue/job/"
NOON = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)


def new_job(status="pending", **columns):
    if status == "running":
        columns = {"claimed_by": "host-a", "claimed_at": NOON, "lease_until": NOON, "attempts": 1} | columns
    if status in ("done", "failed", "cancelled"):
        columns = {"finished_at": NOON} | columns
    defaults = {"backend": "default", "queue_name": "default", "task_path": "tests.app.tasks.add"}
    return Job(status=status, **defaults | columns)


def make_job(status="pending", using="default", **columns):
    job = new_job(status, **columns)
    job.save(using=using)
    return job


def make_jobs(count, status="pending"):
    return [job.pk for job in Job.objects.bulk_create([new_job(status) for _ in range(count)])]


def make_attempt(job, claim_version=1, **columns):
    defaults = {
        "attempt": 1,
        "outcome": "error",
        "counted": True,
        "error_class": "builtins.OSError",
        "fingerprint": "f",
        "message": "unplugged",
        "traceback": "Traceback: …",
        "worker": "host-a",
        "started_at": NOON,
        "ended_at": NOON + timedelta(seconds=1.5),
    }
    return JobAttempt.objects.create(job=job, claim_version=claim_version, **defaults | columns)


@contextmanager
def locked_elsewhere(*jobs):
    """Hold the rows of *jobs* in a transaction of another connection."""
    with second_connection() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT id FROM django_pgqueue_job WHERE id = ANY(%s) FOR UPDATE", [[job.pk for job in jobs]])
        yield


@contextmanager
def waiting_at_most(seconds):
    """End a wait for a lock, which would be a fault, before the test run ends it."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{seconds}s'")
        yield
        cursor.execute("RESET lock_timeout")


def lock_modes():
    """The kinds of locks that this transaction holds on our tables; row locks need more than AccessShareLock."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT DISTINCT mode FROM pg_locks JOIN pg_class ON pg_class.oid = relation "
            "WHERE pid = pg_backend_pid() AND relname IN ('django_pgqueue_job', 'django_pgqueue_jobattempt')"
        )
        return {mode for (mode,) in cursor.fetchall()}


def requeue_selected(client, *jobs, **options):
    return act(client, "requeue", *jobs, **options)


def act(client, verb, *jobs, query="", select_across="0", **data):
    """Run an action of the list on *jobs*; with confirmed="yes", as the page that asks first does it."""
    data = {"action": verb, "_selected_action": [job.pk for job in jobs], "select_across": select_across} | data
    if "confirmed" not in data:
        data["index"] = 0
    return client.post(LIST + query, data, follow=True)


def press(client, verb, job, *, filters=""):
    """Run a verb on the page of *job*: by its action on Django 6.1, and before that by its button."""
    if ACTIONS_ARE_ON_PAGES:
        data = {"CHANGE_FORM-action": verb, "_selected_action": job.pk, "index": 0}
        return client.post(page_of(job) + filters, data, follow=True)
    return client.post(f"{LIST}{job.pk}/{verb}/{filters}", follow=True)


def offered(client, job):
    """The verbs that the page of *job* offers."""
    response = client.get(page_of(job))
    if ACTIONS_ARE_ON_PAGES:
        form = response.context["action_form"]
        return {name for name, _label in form.fields["action"].choices if name} if form else set()
    return set(re.findall(rf'method="post" action="{LIST}{job.pk}/(\w+)/', text_of(response)))


def actions_of(client):
    """The verbs that the list offers, with what it calls them."""
    form = client.get(LIST).context["action_form"]
    return {name: str(label) for name, label in form.fields["action"].choices if name} if form else {}


def page_of(job):
    return f"{LIST}{job.pk}/change/"


def text_of(response):
    assert response.status_code == 200
    return response.content.decode()


def sql_of(query):
    return query["sql"]


def said(response):
    return [(message.level_tag, str(message)) for message in response.context["messages"]]


def history():
    entries = LogEntry.objects.order_by("pk")
    return [
        (int(entry.object_id), entry.object_repr, entry.user_id, entry.action_flag, entry.change_message)
        for entry in entries
    ]


def shown_ids(response):
    return [job.pk for job in response.context["cl"].result_list]


def filter_choices(response):
    changelist = response.context["cl"]
    return {
        spec.parameter_name: [str(choice["display"]) for choice in spec.choices(changelist)]
        for spec in changelist.filter_specs
    }


def cells_of(page):
    return {without_tags(cell) for cell in re.findall(r"<td.*?</td>", page, re.DOTALL)}


def rows_of(page, table_class):
    """The texts of the cells of one table, row by row."""
    [table] = re.findall(rf'<table class="{table_class}">.*?</table>', page, re.DOTALL)
    return [
        [without_tags(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
    ]


def without_tags(markup):
    return " ".join(re.sub(r"<[^>]*>", " ", markup).split())
