"""
The admin: cheap to look at, harmless to workers, and honest about what a requeue did.

Covers B119, B120, B121, B124, B126 and B128, and the people's side of R13 and R24.
"""

import re
from datetime import datetime, timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_pgqueue.admin.lists import CappedPaginator
from django_pgqueue.admin.page import time_text
from django_pgqueue.models import Job, Worker

from .admin_pages import (
    LIST,
    NOON,
    cells_of,
    filter_choices,
    history,
    lock_modes,
    locked_elsewhere,
    make_attempt,
    make_job,
    make_jobs,
    page_of,
    requeue_selected,
    rows_of,
    said,
    shown_ids,
    sql_of,
    text_of,
    without_tags,
)

BIG_COLUMNS = ("args", "kwargs", "return_value", "traceback")

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("in_english")]


# The list


def test_the_list_says_what_each_job_is_and_how_it_stands(admin):
    make_job("failed", attempts=2, queue_name="slow", priority=7, last_error="OSError: unplugged")

    page = text_of(admin.get(LIST))

    assert '<span title="tests.app.tasks.add">add</span>' in page
    assert '<span class="pgqueue-state failed">failed</span>' in page
    assert cells_of(page) >= {"slow", "7", "2 of 5", "OSError: unplugged"}


def test_the_list_clips_a_long_error(admin):
    make_job("failed", last_error="x" * 500)

    page = text_of(admin.get(LIST))

    assert "x" * 80 + "…" in page
    assert "x" * 81 not in page


def test_the_list_asks_the_same_few_statements_however_many_jobs_it_shows(admin):  # B120
    admin.get(LIST)
    make_jobs(10)
    with CaptureQueriesContext(
        connection,
    ) as few:
        admin.get(LIST + "?all=")
    make_jobs(90)

    with CaptureQueriesContext(connection) as many:
        page = text_of(admin.get(LIST + "?all="))

    assert page.count('class="action-select"') == 100
    assert len(many) == len(few) <= 10


def test_the_list_asks_few_statements_for_people_with_single_permissions_too(viewer):
    make_jobs(10)

    with CaptureQueriesContext(connection) as statements:
        viewer.get(LIST)

    assert len(statements) <= 10


def test_the_list_reads_no_arguments_results_or_tracebacks(admin):  # B121
    job = make_job("done", args=["a" * 5_000_000], kwargs={"key": "k" * 5_000_000}, return_value="r" * 5_000_000)
    make_attempt(job)

    with CaptureQueriesContext(connection) as statements:
        response = admin.get(LIST)

    assert response.status_code == 200
    assert [column for column in BIG_COLUMNS if any(f'"{column}"' in sql_of(query) for query in statements)] == []


def test_the_list_counts_to_its_limit_and_no_further(admin):  # B119
    make_job()

    with CaptureQueriesContext(connection) as statements:
        admin.get(LIST + "?_facets=True")

    listed = [sql for sql in map(sql_of, statements) if 'FROM "django_pgqueue_job"' in sql]
    assert [sql for sql in listed if "COUNT(" in sql] == []
    assert len([sql for sql in listed if "LIMIT 10000" in sql]) == 1
    assert [sql for sql in listed if "LIMIT" not in sql and '"id" IN (' not in sql] == []


def test_a_count_that_stopped_at_its_limit_says_so(admin, monkeypatch):
    monkeypatch.setattr(CappedPaginator, "limit", 100)
    make_jobs(120)

    page = text_of(admin.get(LIST))

    assert re.search(r"100\+\s+jobs", page)
    assert "Select all 100+ jobs" in page


def test_a_count_that_stopped_stays_a_number_where_digits_are_grouped(admin, monkeypatch, settings):
    settings.USE_THOUSAND_SEPARATOR = True
    monkeypatch.setattr(CappedPaginator, "limit", 1_000)
    make_jobs(1_010)

    page = text_of(admin.get(LIST))

    assert re.search(r"1,000\s+jobs", page)


def test_a_page_behind_the_counted_ones_is_the_last_of_them(admin, monkeypatch):
    monkeypatch.setattr(CappedPaginator, "limit", 100)
    ids = make_jobs(120)

    response = admin.get(LIST + "?p=500")

    assert response.status_code == 200
    assert shown_ids(response) == ids[69:19:-1]


def test_the_newest_job_comes_first_and_the_address_cannot_ask_for_another_order(admin):
    ids = make_jobs(3)

    responses = [admin.get(LIST), admin.get(LIST + "?o=1"), admin.get(LIST + "?o=-4.5")]

    assert [shown_ids(response) for response in responses] == [ids[::-1]] * 3


def test_of_dead_letters_the_last_to_fail_comes_first(admin):
    late = make_job("failed", finished_at=NOON)
    early = make_job("failed", finished_at=NOON - timedelta(hours=1))
    make_job("done")

    response = admin.get(LIST + "?status=failed")

    assert shown_ids(response) == [late.pk, early.pk]


@pytest.mark.parametrize(
    "query", ["status=cancelled", "queue=slow", "task=tests.app.tasks.other", "q=tests.app.tasks.other"]
)
def test_a_filter_or_search_keeps_the_jobs_it_names(admin, query):
    make_job("failed")
    wanted = make_job("cancelled", queue_name="slow", task_path="tests.app.tasks.other")

    response = admin.get(f"{LIST}?{query}")

    assert shown_ids(response) == [wanted.pk]


def test_a_search_for_an_id_finds_exactly_that_job(admin):
    ids = make_jobs(30)

    with CaptureQueriesContext(connection) as statements:
        response = admin.get(f"{LIST}?q={ids[2]}")

    assert shown_ids(response) == [ids[2]]
    # A column as text is what no index serves; the sweep has arrays of texts.
    assert [sql for sql in map(sql_of, statements) if "::text" in sql.replace("::text[]", "")] == []


@pytest.mark.parametrize(
    "query",
    [
        f"q={2**70}",
        f"q={2**63 - 1}",
        f"q={'9' * 5_000}",
        "q=%C2%B2",
        "q=-1",
        "q=no.such.task",
        "status=nonsense",
        "queue=%00",
        "task=%00",
    ],
)
def test_a_senseless_filter_or_search_finds_nothing(admin, query):
    make_job()

    response = admin.get(f"{LIST}?{query}")

    assert response.status_code == 200
    assert shown_ids(response) == []


def test_the_filters_offer_every_status_all_known_queues_and_tasks_and_what_is_asked_for(admin):
    make_job("pending", queue_name="unconfigured", task_path="gone.tasks.removed")
    make_job("done", queue_name="forgotten")

    choices = filter_choices(admin.get(LIST + "?queue=asked"))

    assert choices["status"] == ["All", "pending", "blocked", "held", "running", "done", "failed", "cancelled"]
    assert choices["queue"] == ["All", "asked", "default", "email", "slow", "unconfigured"]
    assert {"add", "removed"} <= set(choices["task"])


def test_tasks_of_the_same_name_are_offered_by_their_paths(admin):
    make_job(task_path="one.tasks.mail")
    make_job(task_path="two.tasks.mail")

    choices = filter_choices(admin.get(LIST))

    assert {"one.tasks.mail", "two.tasks.mail"} <= set(choices["task"])


def test_no_statement_of_the_list_removes_duplicates(admin):
    make_job()

    with CaptureQueriesContext(connection) as statements:
        admin.get(LIST + "?status=done&queue=default&task=tests.app.tasks.add")

    assert [sql for sql in map(sql_of, statements) if "DISTINCT" in sql or "GROUP BY" in sql] == []


# The page of one job


def test_the_page_shows_arguments_and_result_as_readable_json(admin):
    job = make_job("done", args=[1, "zwölf"], kwargs={"deep": {"key": None}}, return_value={"sum": [1, 2]})

    page = text_of(admin.get(page_of(job)))

    assert "[\n  1,\n  &quot;zwölf&quot;\n]" in page
    assert "{\n  &quot;deep&quot;: {\n    &quot;key&quot;: null\n  }\n}" in page
    assert "{\n  &quot;sum&quot;: [\n    1,\n    2\n  ]\n}" in page


def test_the_page_tells_a_result_of_none_from_no_result(admin):
    done, pending = make_job("done"), make_job("pending")

    pages = [text_of(admin.get(page_of(job))) for job in (done, pending)]

    assert [">null</pre>" in page for page in pages] == [True, False]


def test_the_page_clips_huge_values_and_says_so(admin):
    job = make_job("done", args=["a" * 300_000], return_value="r" * 300_000)

    page = text_of(admin.get(page_of(job)))

    assert len(page) < 100_000
    assert page.count("Shown are the first 20,000 of 300,0") == 2


def test_the_page_tells_what_happened_and_when_in_the_zone_it_names(admin):
    job = make_job(
        "running",
        created_at=NOON,
        available_at=NOON + timedelta(seconds=1),
        started_at=NOON + timedelta(seconds=2),
        claimed_at=NOON + timedelta(seconds=3),
        lease_until=NOON + timedelta(seconds=63),
    )

    with timezone.override("Asia/Kolkata"):
        page = text_of(admin.get(page_of(job)))

    assert rows_of(page, "pgqueue-timeline") == [
        ["Event", "Time"],
        ["Created", "03/01/2026 17:30:30 IST"],
        ["Available", "03/01/2026 17:30:31 IST"],
        ["First attempt started", "03/01/2026 17:30:32 IST"],
        ["Last claimed", "03/01/2026 17:30:33 IST"],
        ["Lease ends, unless renewed", "03/01/2026 17:31:33 IST"],
    ]
    assert '<time datetime="2026-03-01T17:30:30+05:30"' in page


def test_the_page_shows_every_attempt_the_newest_first(admin):
    job = make_job("done", attempts=2, claimed_by="host-b", claimed_at=NOON, finished_at=NOON + timedelta(minutes=2))
    make_attempt(job, 1, attempt=1, counted=True, message="first")
    make_attempt(job, 2, attempt=2, counted=False, outcome="released", error_class="x.Interrupted", message="second")

    with timezone.override("UTC"):
        rows = rows_of(text_of(admin.get(page_of(job))), "pgqueue-attempts")

    assert [row[:3] for row in rows] == [
        ["Attempt", "Outcome", "Error"],
        ["2", "succeeded counted", ""],
        ["2", "released refunded", "x.Interrupted second"],
        ["Traceback of attempt 2 Traceback: …"],
        ["1", "error counted", "builtins.OSError first"],
        ["Traceback of attempt 1 Traceback: …"],
    ]
    assert rows[1][3:] == ["host-b", "03/01/2026 12:00:30 UTC", "03/01/2026 12:02:30 UTC", "0:02:00"]
    assert rows[4][3:] == ["host-a", "03/01/2026 12:00:30 UTC", "03/01/2026 12:00:31 UTC", "1.500 s"]


def test_the_page_of_a_job_with_very_many_attempts_shows_the_newest_and_says_so(admin):
    job = make_job("failed", attempts=40)
    for number in range(1, 41):
        make_attempt(job, number, attempt=number)

    with CaptureQueriesContext(connection) as statements:
        page = text_of(admin.get(page_of(job)))

    assert [number for number in range(1, 41) if f"Traceback of attempt {number}<" in page] == list(range(16, 41))
    assert "There are older attempts, which are not shown." in page
    assert len(statements) <= 10


def test_nothing_that_a_job_carries_becomes_markup(admin):
    evil = "</pre><script>alert(1)</script>"
    job = make_job(
        "failed",
        args=[evil],
        kwargs={evil: evil},
        task_path=f"{evil}.{evil}",
        queue_name=evil,
        last_error=evil,
        claimed_by=evil,
        attempts=1,
    )
    make_attempt(job, error_class=evil, message=evil, traceback=evil, worker=evil)
    Worker.objects.create(name=evil, hostname=evil, process_id=1, queues=evil, concurrency=1)

    pages = [
        text_of(admin.get(address))
        for address in (LIST, LIST + f"?queue={evil}&task={evil}", page_of(job), "/admin/django_pgqueue/worker/")
    ]

    assert [page.count("<script>") for page in pages] == [0, 0, 0, 0]
    assert pages[2].count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 9


def test_our_pages_work_under_a_strict_content_security_policy(admin):
    job = make_job("failed", attempts=1)
    make_attempt(job)

    pages = [text_of(admin.get(address)) for address in (LIST, page_of(job))]

    inline = re.compile(
        r"<style|<script(?![^>]*\ssrc=)(?![^>]*application/json)|<[^>]*\s(?:style|on\w+)=", re.IGNORECASE
    )
    assert [inline.findall(page) for page in pages] == [[], []]
    assert all('href="/static/django_pgqueue/admin.css"' in page for page in pages)


@pytest.mark.parametrize("object_id", ["x", "", "0", "-1", str(2**63), str(2**70), "9" * 5_000, "1.5", "_00", "7/8"])
@pytest.mark.parametrize("page", ["change", "history", "delete", "requeue"])
def test_a_malformed_id_leads_away(admin, object_id, page):  # B128
    address = f"{LIST}{object_id}/{page}/"

    response = admin.post(address) if page == "requeue" else admin.get(address)

    assert response.status_code in (302, 403, 404)
    assert (response.status_code == 403) <= (page == "delete")


def test_jobs_are_not_added_edited_or_deleted_by_hand(admin):
    job = make_job("failed")

    responses = [
        admin.get(LIST + "add/"),
        admin.post(LIST + "add/", {}),
        admin.post(page_of(job), {"status": "pending"}),
        admin.post(f"{LIST}{job.pk}/delete/", {"post": "yes"}),
    ]
    admin.post(LIST, {"action": "delete_selected", "_selected_action": [job.pk], "post": "yes"})

    assert [response.status_code for response in responses] == [403] * 4
    assert Job.objects.get().status == "failed"


@pytest.mark.django_db(transaction=True)
def test_looking_locks_no_rows(admin):  # B126
    job = make_job("failed", attempts=1)
    make_attempt(job)

    with transaction.atomic():
        for address in (LIST, LIST + "?status=failed&queue=default", page_of(job), f"{LIST}{job.pk}/history/"):
            assert admin.get(address).status_code == 200
        modes = lock_modes()

    assert modes == {"AccessShareLock"}


@pytest.mark.django_db(transaction=True)
def test_looking_waits_for_no_worker(admin):
    job = make_job("failed")

    with locked_elsewhere(job):
        responses = [admin.get(LIST), admin.get(page_of(job))]

    assert [response.status_code for response in responses] == [200, 200]


# Where jobs are in another database, and where times have no zone


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_jobs_are_looked_at_and_requeued_where_the_backend_keeps_them(admin, settings):
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": {"DATABASE": "other"}}}
    here = make_job("failed", id=1)
    make_job("pending", using="other", queue_name="there", id=1)
    first, second = [make_job("failed", using="other", id=number) for number in (2, 3)]

    listed = admin.get(LIST)
    one = admin.post(f"{LIST}{first.pk}/requeue/", follow=True)
    many = requeue_selected(admin, second)

    assert shown_ids(listed) == [3, 2, 1]
    assert "there" in filter_choices(listed)["queue"]
    assert said(one) == [("success", "Job 2 was requeued.")]
    assert said(many) == [("success", "1 job was requeued.")]
    assert set(Job.objects.using("other").values_list("status", flat=True)) == {"pending"}
    assert [entry[0] for entry in history()] == [2, 3]
    here.refresh_from_db()
    assert here.status == "failed"


def test_times_without_a_zone_are_those_of_the_projects_zone(settings):
    settings.TIME_ZONE = "Europe/Berlin"
    settings.USE_TZ = False

    text = without_tags(time_text(datetime(2026, 7, 1, 12)))

    assert text == "07/01/2026 12:00:00 CEST"


# Workers


def test_workers_are_listed_and_not_edited(admin):
    moments = {"started_at": NOON, "seen_at": NOON, "turned_at": NOON - timedelta(seconds=7)}
    worker = Worker.objects.create(
        name="host:42:1", hostname="host", process_id=42, queues="email", concurrency=4, **moments
    )
    address = reverse("admin:django_pgqueue_worker_change", args=[worker.pk])

    with timezone.override("UTC"):
        page = text_of(admin.get("/admin/django_pgqueue/worker/"))
    responses = [admin.get(address), admin.post(address, {"name": "x"}), admin.get(f"{address}../delete/")]

    assert cells_of(page) >= {"host", "email", "4", "03/01/2026 12:00:30 UTC", "03/01/2026 12:00:23 UTC"}
    assert [response.status_code for response in responses] == [200, 403, 403]
