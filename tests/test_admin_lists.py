"""Finding jobs in the admin: tabs, filters and search, none of which looks at more than it must (B119, B121)."""

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_pgqueue.admin import dead_letters, filters, lists
from django_pgqueue.models import Job

from .admin_pages import (
    LIST,
    filter_choices,
    make_attempt,
    make_job,
    make_jobs,
    new_job,
    shown_ids,
    sql_of,
    text_of,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("in_english")]


# Tabs


def test_the_tabs_count_the_jobs_of_each_status(admin):
    make_jobs(3)
    make_job("held")
    make_jobs(2, "failed")

    tabs = tabs_of(admin.get(LIST))

    assert tabs == {
        "All": "",
        "pending": "3",
        "blocked": "0",
        "held": "1",
        "running": "0",
        "done": "0",
        "failed": "2",
        "cancelled": "0",
    }


def test_a_tab_leads_to_its_status_and_keeps_the_other_filters(admin):
    make_jobs(3)

    page = text_of(admin.get(LIST + "?queue=default&status=pending&p=2"))

    assert '<a href="?queue=default&amp;status=held">held</a>' in page
    assert '<a href="?queue=default&amp;status=pending" aria-current="page">pending</a>' in page
    assert '<a href="?queue=default">All</a>' in page


@pytest.mark.parametrize("query", ["queue=default", "task=tests.app.tasks.add", "since=hour", "q=1"])
def test_tabs_have_no_numbers_where_these_would_be_about_other_jobs_than_the_list(admin, query):
    make_jobs(3)

    assert set(tabs_of(admin.get(f"{LIST}?{query}")).values()) == {""}


def test_a_number_that_may_be_too_low_has_a_plus(admin, monkeypatch):
    monkeypatch.setattr(lists, "COUNTED_ROWS", 3)
    monkeypatch.setattr(lists, "NEWEST_ROWS", 6)
    make_jobs(5, "held")
    make_jobs(4, "pending")
    make_job("failed")

    tabs = tabs_of(admin.get(LIST))

    assert tabs["pending"] == "3+"
    assert tabs["failed"] == "1"
    assert tabs["held"] == "1+"  # one of the newest six jobs
    assert tabs["done"] == ""  # nobody knows


def test_all_numbers_come_from_one_statement_of_which_each_part_is_bounded(admin):
    make_job()

    with CaptureQueriesContext(connection) as statements:
        admin.get(LIST)

    [counts] = [sql for sql in map(sql_of, statements) if "count(*)" in sql]
    assert counts.count("FROM django_pgqueue_job") == counts.count("LIMIT") == 4


# Filters


@pytest.mark.parametrize(("since", "found"), [("hour", 1), ("day", 2), ("week", 3)])
def test_jobs_are_found_by_when_they_were_created(admin, since, found):
    ages = [timedelta(days=30), timedelta(days=2), timedelta(hours=2), timedelta(minutes=2)]
    ids = [make_job(created_at=timezone.now() - age).pk for age in ages]

    response = admin.get(f"{LIST}?since={since}")

    assert shown_ids(response) == ids[::-1][:found]


def test_dead_letters_are_found_by_when_they_failed(admin):
    long_ago, now = timezone.now() - timedelta(days=3), timezone.now()
    make_job("failed", created_at=now, finished_at=long_ago)
    late = make_job("failed", created_at=long_ago, finished_at=now)

    response = admin.get(LIST + "?status=failed&since=hour")

    assert shown_ids(response) == [late.pk]
    assert "time of failure" in text_of(response)


@pytest.mark.parametrize("count", [0, 1, 2, 1_000])
def test_the_first_job_of_a_period_is_found_by_halving(count, monkeypatch):
    monkeypatch.setattr(filters, "OUT_OF_ORDER_ROWS", 0)
    now = timezone.now()
    old = [new_job(created_at=now - timedelta(hours=2)) for _ in range(count)]
    young = [new_job(created_at=now) for _ in range(count)]
    ids = [job.pk for job in Job.objects.bulk_create(old + young)]
    Job.objects.filter(pk__in=ids[:count:3]).delete()  # gaps

    first_id = filters._first_id_within(connection, timedelta(hours=1))

    assert list(Job.objects.filter(pk__gte=first_id).order_by("pk").values_list("pk", flat=True)) == ids[count:]


def test_where_all_jobs_are_older_than_the_period_none_is_looked_at(admin):
    ids = make_jobs(3)
    Job.objects.update(created_at=timezone.now() - timedelta(days=1))

    assert filters._first_id_within(connection, timedelta(hours=1)) <= ids[-1] + 1
    assert shown_ids(admin.get(LIST + "?since=hour")) == []


def test_a_period_is_looked_for_through_the_primary_key(admin):
    make_jobs(3)

    with CaptureQueriesContext(connection) as statements:
        admin.get(LIST + "?since=hour")

    lists_and_counts = [sql for sql in map(sql_of, statements) if '"created_at" >=' in sql]
    assert len(lists_and_counts) == 2
    assert all('"id" >= ' in sql for sql in lists_and_counts)


def test_dead_letters_are_found_by_the_error_that_their_last_attempt_ended_with(admin):
    first, second, third = [make_job("failed") for _ in range(3)]
    make_attempt(first, 1, error_class="shop.Declined")
    make_attempt(first, 2, error_class="builtins.OSError", fingerprint="b")
    make_attempt(second, 1, error_class="shop.Declined")
    make_attempt(third, 1, error_class="shop.Declined", fingerprint="c")

    by_class = admin.get(LIST + "?status=failed&error=shop.Declined")
    by_fingerprint = admin.get(LIST + "?status=failed&fingerprint=c")
    by_both = admin.get(LIST + "?status=failed&fingerprint=c&error=builtins.OSError")

    assert sorted(shown_ids(by_class)) == [second.pk, third.pk]
    assert shown_ids(by_fingerprint) == [third.pk]
    assert shown_ids(by_both) == []
    assert filter_choices(by_class)["error"] == ["All", "OSError", "shop.Declined"]
    assert "error" not in filter_choices(admin.get(LIST))


def test_errors_are_looked_for_among_the_newest_dead_letters_only(admin, monkeypatch):
    monkeypatch.setattr(dead_letters, "SCANNED_JOBS", 2)
    now = timezone.now()
    jobs = [make_job("failed", finished_at=now + timedelta(seconds=number)) for number in range(4)]
    for job in jobs:
        make_attempt(job)

    response = admin.get(LIST + "?status=failed&error=builtins.OSError")

    assert shown_ids(response) == [jobs[3].pk, jobs[2].pk]


@pytest.mark.parametrize(
    "query",
    [
        "since=century",
        "since=%00",
        "error=nonsense",
        "error=%00",
        "fingerprint=",
        "fingerprint=%00",
        "q=key:",
        "q=key:x",
    ],
)
def test_a_senseless_value_finds_nothing(admin, query):
    job = make_job("failed")
    make_attempt(job)

    response = admin.get(f"{LIST}?{query}")

    assert response.status_code == 200
    assert shown_ids(response) == []


# Search


@pytest.mark.parametrize("term", ["order-7", "key:order-7", "key:123"])
def test_a_job_is_found_by_its_key(admin, term):
    make_job(job_key="order-70")
    wanted = make_job(job_key=term.removeprefix("key:"))

    assert shown_ids(admin.get(LIST, {"q": term})) == [wanted.pk]


def test_the_list_asks_few_statements_whatever_it_is_filtered_by(admin):  # B120
    make_attempt(make_job("failed"))
    query = (
        "?status=failed&since=week&queue=default&task=tests.app.tasks.add&error=builtins.OSError&q=tests.app.tasks.add"
    )
    admin.get(LIST + query)

    with CaptureQueriesContext(connection) as statements:
        response = admin.get(LIST + query)

    assert response.status_code == 200
    assert len(statements) <= 10


def tabs_of(response):
    """The label of each tab and its number."""
    [tabs] = re.findall(r'<nav class="pgqueue-tabs".*?</nav>', text_of(response), re.DOTALL)
    links = re.findall(r"<a [^>]*>([^<]*?) ?(?:<span[^>]*>([^<]*)</span>)?</a>", tabs)
    return dict(links)
