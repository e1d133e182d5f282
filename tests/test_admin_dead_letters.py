"""Dead letters by their cause: one page that tells what fails, how often, and since when, and mends it at once."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_pgqueue import managers
from django_pgqueue.admin import dead_letters
from django_pgqueue.models import Job

from .admin_pages import LIST, NOON, act, history, make_attempt, make_job, new_job, rows_of, said, shown_ids, text_of

PAGE = f"{LIST}dead-letters/"

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("in_english")]


def make_letters(count, *, start=NOON, task_path="tests.app.tasks.add", **attempt):
    """Make dead letters of one cause, a minute apart."""
    moments = [start + timedelta(minutes=number) for number in range(count)]
    letters = [make_job("failed", finished_at=moment, task_path=task_path) for moment in moments]
    for letter in letters:
        make_attempt(letter, **attempt)
    return letters


def test_dead_letters_of_one_task_and_one_fingerprint_stand_in_one_row(admin):
    make_letters(3, fingerprint="a", error_class="shop.Declined", message="card 1")
    make_letters(2, fingerprint="b", error_class="builtins.OSError", message="unplugged")
    make_letters(1, fingerprint="a", task_path="tests.app.tasks.nothing", error_class="shop.Declined", message="card 2")
    make_job("done")

    with timezone.override("UTC"):
        rows = rows_of(text_of(admin.get(PAGE)), "pgqueue-groups")

    assert [row[:6] for row in rows] == [
        ["Task", "Error", "Message of the newest", "Jobs", "Newest", "Oldest"],
        ["add", "shop.Declined", "card 1", "3 jobs", "03/01/2026 12:02:30 UTC", "03/01/2026 12:00:30 UTC"],
        ["add", "OSError", "unplugged", "2 jobs", "03/01/2026 12:01:30 UTC", "03/01/2026 12:00:30 UTC"],
        ["nothing", "shop.Declined", "card 2", "1 job", "03/01/2026 12:00:30 UTC", "03/01/2026 12:00:30 UTC"],
    ]


def test_the_last_attempt_says_what_a_job_died_of_and_the_newest_job_gives_the_example(admin):
    old, new = make_letters(2, fingerprint="a", message="earlier")
    make_attempt(old, 2, fingerprint="b", message="of the old one")
    make_attempt(new, 2, fingerprint="b", message="of the new one")

    rows = rows_of(text_of(admin.get(PAGE)), "pgqueue-groups")

    assert [row[2:4] for row in rows[1:]] == [["of the new one", "2 jobs"]]


def test_a_dead_letter_without_attempts_is_shown_and_linked_too(admin):
    job = make_job("failed")
    make_letters(1)

    [group] = [group for group in dead_letters.groups(connection)[0] if not group.error_class]
    response = admin.get(LIST + group.query)

    assert shown_ids(response) == [job.pk]


def test_a_row_leads_to_the_list_of_its_jobs(admin):
    letters = make_letters(2, fingerprint="a", task_path="tests.app.tasks.zwölf & drei")
    make_letters(1, fingerprint="b")

    page = text_of(admin.get(PAGE))
    [link] = [group.query for group in dead_letters.groups(connection)[0] if group.jobs == 2]
    response = admin.get(LIST + link)

    assert f'href="{LIST}{link}"'.replace("&", "&amp;") in page
    assert shown_ids(response) == [letters[1].pk, letters[0].pk]


def test_a_whole_group_is_requeued_after_a_question_in_batches(admin, monkeypatch):
    monkeypatch.setattr(managers, "BATCH_ROWS", 50)
    letters = [new_job("failed") for _ in range(120)]
    for letter in Job.objects.bulk_create(letters):
        make_attempt(letter, fingerprint="a")
    [other] = make_letters(1, fingerprint="b")
    [group, _] = dead_letters.groups(connection)[0]

    asked = admin.post(LIST + group.query, {"action": "requeue", "_selected_action": "0", "select_across": "1"})
    with CaptureQueriesContext(connection) as statements:
        done = act(admin, "requeue", Job(pk=0), query=group.query, select_across="1", confirmed="yes")

    assert "120 jobs will be changed." in " ".join(text_of(asked).split())
    assert said(done) == [("success", "120 jobs were requeued.")]
    assert Job.objects.filter(status="pending").count() == len(history()) == 120
    assert Job.objects.get(pk=other.pk).status == "failed"
    updates = [query["sql"] for query in statements if "UPDATE django_pgqueue_job" in query["sql"]]
    assert len(updates) == 3  # one for each batch


def test_the_page_sends_what_the_question_needs(operator, viewer):
    make_letters(2, fingerprint="a")

    allowed, not_allowed = text_of(operator.get(PAGE)), text_of(viewer.get(PAGE))

    assert 'name="action" value="requeue"' in allowed
    assert 'name="select_across" value="1"' in allowed
    assert 'name="_selected_action" value="0"' in allowed
    assert "2 jobs" in not_allowed
    assert 'name="action"' not in not_allowed


def test_the_page_looks_at_the_newest_dead_letters_only_and_says_so(admin, monkeypatch):
    make_letters(3, fingerprint="old")
    make_letters(2, fingerprint="new", start=NOON + timedelta(days=1))
    all_of_them = text_of(admin.get(PAGE))
    monkeypatch.setattr(dead_letters, "SCANNED_JOBS", 2)

    page = text_of(admin.get(PAGE))

    assert "There are 5 dead letters." in all_of_them
    assert "There are very many dead letters. Shown are the newest 2 of them." in page
    assert [row[3] for row in rows_of(page, "pgqueue-groups")] == ["Jobs", "2 jobs"]


def test_the_page_shows_the_largest_groups_and_says_that_there_are_more(admin, monkeypatch):
    monkeypatch.setattr(dead_letters, "SHOWN_GROUPS", 2)
    for number in range(4):
        make_letters(number + 1, fingerprint=str(number))

    page = text_of(admin.get(PAGE))

    assert [row[3] for row in rows_of(page, "pgqueue-groups")] == ["Jobs", "4 jobs", "3 jobs"]
    assert "There are more groups, which are not shown." in page


def test_the_page_asks_one_statement_of_our_tables_however_many_groups_there_are(admin):
    for number in range(30):
        make_letters(2, fingerprint=str(number))

    with CaptureQueriesContext(connection) as statements:
        admin.get(PAGE)

    assert len([query for query in statements if "django_pgqueue_" in query["sql"]]) == 1
    assert len(statements) <= 5


def test_without_dead_letters_the_page_says_so(admin):
    make_job("done")

    assert "There are 0 dead letters." in text_of(admin.get(PAGE))


def test_nothing_that_a_dead_letter_carries_becomes_markup(admin):
    evil = "</td><script>alert(1)</script>"
    make_letters(1, task_path=f"{evil}.{evil}", error_class=evil, message=evil, fingerprint="\"'<script>")

    page = text_of(admin.get(PAGE))

    assert "<script>" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 3


def test_the_list_leads_to_the_page(viewer):
    assert f'href="{PAGE}"' in text_of(viewer.get(LIST))


def test_only_those_who_may_view_jobs_may_look(make_staff, client):
    blind = make_staff("requeue_job")

    assert blind.get(PAGE).status_code == 403
    assert client.get(PAGE).status_code == 302  # to the login
    assert blind.post(PAGE).status_code == 405


def test_dead_letters_are_read_where_the_backend_keeps_its_jobs(admin, settings, monkeypatch):
    asked = []
    monkeypatch.setattr(dead_letters, "groups", lambda connection: asked.append(connection.alias) or ([], 0))
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": {"DATABASE": "other"}}}

    admin.get(PAGE)

    assert asked == ["other"]
