"""
The verbs in the admin: who may, what is asked before, and what is said after.

Covers B123, B124 and the people's side of R13, R24 and R26.
"""

import time

import pytest
from django.contrib.admin.models import CHANGE
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_pgqueue import managers
from django_pgqueue.admin import lists
from django_pgqueue.admin import verbs as admin_verbs
from django_pgqueue.models import Job

from .admin_pages import (
    LIST,
    act,
    actions_of,
    history,
    locked_elsewhere,
    make_attempt,
    make_job,
    make_jobs,
    offered,
    page_of,
    press,
    rows_of,
    said,
    sql_of,
    text_of,
    waiting_at_most,
)

# Each verb: a status that it takes, the status that follows, and what is said of one job, of many, in the history.
VERBS = {
    "requeue": ("failed", "pending", "was requeued", "were requeued", "Requeued."),
    "hold": ("pending", "held", "is held", "are held", "Held."),
    "unhold": ("held", "pending", "is no longer held", "are no longer held", "Unheld."),
    "cancel": ("pending", "cancelled", "was cancelled", "were cancelled", "Cancelled."),
}
REFUSALS = {
    "requeue": "neither failed nor cancelled",
    "hold": "not pending",
    "unhold": "not held",
    "cancel": "neither pending nor held nor running",
}
PERMISSIONS = {"requeue": "requeue_job", "hold": "hold_job", "unhold": "hold_job", "cancel": "cancel_job"}

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("in_english")]
each_verb = pytest.mark.parametrize("verb", VERBS)


# On the page of one job


@each_verb
def test_a_verb_changes_the_job_of_its_page_and_leaves_an_entry_in_its_history(admin, admin_user, verb):  # R24, R26
    before, after, done, _, entry = VERBS[verb]
    job, other = make_job(before), make_job(before)

    response = press(admin, verb, job)

    assert said(response) == [("success", f"Job {job.pk} {done}.")]
    assert response.request["PATH_INFO"] == page_of(job)
    assert [Job.objects.get(pk=each.pk).status for each in (job, other)] == [after, before]
    assert history() == [(job.pk, f"add {job.pk}", admin_user.pk, CHANGE, entry)]
    assert entry in text_of(admin.get(f"{LIST}{job.pk}/history/"))


def test_a_requeued_job_has_fresh_attempts(admin):
    job = make_job("failed", attempts=5)

    press(admin, "requeue", job)

    job.refresh_from_db()
    assert (job.attempts, job.finished_at) == (0, None)


@pytest.mark.parametrize(
    ("verb", "status"),
    [*((verb, "done") for verb in VERBS), *((verb, "running") for verb in VERBS if verb != "cancel")],
)
def test_a_job_in_another_status_is_left_as_it_is(admin, verb, status):
    job = make_job(status)

    response = admin.post(f"{LIST}{job.pk}/{verb}/", follow=True)

    assert said(response) == [("warning", f"Job {job.pk} was left as it is: {REFUSALS[verb]}.")]
    assert Job.objects.get().status == status
    assert history() == []


@pytest.mark.parametrize(
    ("status", "verbs"),
    [
        ("pending", {"hold", "cancel"}),
        ("held", {"unhold", "cancel"}),
        ("failed", {"requeue"}),
        ("cancelled", {"requeue"}),
        ("running", {"cancel"}),
        ("done", set()),
    ],
)
def test_a_page_offers_the_verbs_that_its_job_is_in_a_state_for(operator, status, verbs):
    job = make_job(status)

    assert offered(operator, job) == verbs


def test_a_running_job_is_cancelled_and_it_is_said_that_its_task_is_being_stopped(admin):  # R26
    job = make_job("running")

    response = press(admin, "cancel", job)

    assert said(response) == [
        ("success", f"Job {job.pk} was running. It was cancelled, and its task is being stopped.")
    ]
    assert Job.objects.get().status == "cancelled"
    assert [entry[-1] for entry in history()] == ["Cancelled."]
    [attempt] = rows_of(text_of(admin.get(page_of(job))), "pgqueue-attempts")[1:]
    assert attempt[1:4] == [
        "cancelled counted",
        "django_pgqueue.exceptions.TaskCancelled The job was cancelled while this attempt was running.",
        "host-a",
    ]


def test_of_many_cancelled_jobs_those_that_were_running_are_counted(admin):  # R26
    jobs = [make_job("pending"), make_job("held"), make_job("running"), make_job("running")]

    response = act(admin, "cancel", *jobs, make_job("done"))

    assert said(response) == [
        ("success", "4 jobs were cancelled."),
        ("success", "2 of them were running; their tasks are being stopped."),
        ("warning", f"1 job was left as it is: {REFUSALS['cancel']}."),
    ]
    assert Job.objects.filter(status="cancelled").count() == len(history()) == 4


def test_after_a_verb_the_way_back_to_the_filtered_list_is_kept(admin):
    job = make_job("failed")
    filters = "?_changelist_filters=status%3Dfailed"

    by_page = press(admin, "requeue", job, filters=filters)
    by_address = admin.post(f"{LIST}{job.pk}/requeue/{filters}")

    assert by_page.redirect_chain == [(page_of(job) + filters, 302)]
    assert by_address.url == page_of(job) + filters


@each_verb
@pytest.mark.django_db(transaction=True)
def test_a_job_that_another_transaction_holds_is_busy_at_once(admin, verb):  # R13
    before = VERBS[verb][0]
    job = make_job(before)

    with locked_elsewhere(job), waiting_at_most(seconds=10):
        began = time.monotonic()
        responses = [press(admin, verb, job), admin.post(f"{LIST}{job.pk}/{verb}/", follow=True)]
        took = time.monotonic() - began

    assert [said(response) for response in responses] == [
        [("warning", f"Job {job.pk} is busy: another transaction holds it at this moment. Try again.")]
    ] * 2
    assert took < 5
    assert Job.objects.get().status == before
    assert history() == []


def test_a_job_whose_key_is_held_is_not_requeued_and_the_reason_is_given(admin):
    job = make_job("failed", job_key="order-1")
    make_job("pending", job_key="order-1")

    response = press(admin, "requeue", job)

    assert said(response) == [
        (
            "warning",
            f"Job {job.pk} was left as it is: another job with its key “order-1” has not finished yet. "
            "Let that one finish, or cancel it, and try again.",
        )
    ]
    assert Job.objects.get(pk=job.pk).status == "failed"
    assert history() == []


# On selected jobs


@each_verb
@pytest.mark.django_db(transaction=True)
def test_of_many_jobs_the_busy_ones_and_those_of_another_status_are_counted_and_left(admin, admin_user, verb):  # R13
    before, after, _, done, entry = VERBS[verb]
    busy = [make_job(before), make_job(before)]
    free = [make_job(before) for _ in range(3)]
    finished = make_job("done")

    with locked_elsewhere(*busy), waiting_at_most(seconds=10):
        began = time.monotonic()
        response = act(admin, verb, *busy, *free, finished)
        took = time.monotonic() - began

    assert said(response) == [
        ("success", f"3 jobs {done}."),
        ("warning", "2 jobs are busy: other transactions hold them at this moment. Try again."),
        ("warning", f"1 job was left as it is: {REFUSALS[verb]}."),
    ]
    assert took < 5
    assert set(Job.objects.filter(status=after)) == set(free)
    assert history() == [(job.pk, f"add {job.pk}", admin_user.pk, CHANGE, entry) for job in free]


def test_of_many_jobs_those_whose_key_is_held_are_counted_and_left(admin):  # B123
    keyed = [make_job("failed", job_key=f"order-{number}") for number in range(5)]
    for job in keyed:
        make_job("pending", job_key=job.job_key)
    free = [make_job("failed") for _ in range(15)]

    response = act(admin, "requeue", *keyed, *free)

    assert said(response) == [
        ("success", "15 jobs were requeued."),
        (
            "warning",
            "5 jobs were left as they are: others with their keys have not finished yet, or were requeued just now.",
        ),
    ]
    assert {Job.objects.get(pk=job.pk).status for job in keyed} == {"failed"}
    assert len(history()) == 15


def test_selected_jobs_that_are_gone_by_now_are_no_success(admin):
    response = act(admin, "requeue", Job(pk=1), Job(pk=2**70))

    assert said(response) == [("warning", "0 jobs were requeued.")]


def test_the_list_offers_every_verb_for_the_selected_jobs(operator):
    make_job()

    assert actions_of(operator) == {
        "requeue": "Requeue selected jobs",
        "hold": "Hold selected jobs",
        "unhold": "Unhold selected jobs",
        "cancel": "Cancel selected jobs",
    }


# What is asked first


@each_verb
def test_before_all_that_match_the_filter_are_changed_their_number_is_shown(admin, verb):
    before = VERBS[verb][0]
    ids = make_jobs(3, before)
    make_job(before, queue_name="slow")
    make_jobs(2, "done")

    response = act(admin, verb, Job(pk=ids[0]), query="?queue=default", select_across="1")

    page = " ".join(text_of(response).split())
    assert said(response) == []
    assert "<p> 3 jobs will be changed. " in page
    assert '<th scope="row">Queue</th> <td>default</td>' in page
    assert '<th scope="row">Jobs that match</th> <td>5</td>' in page
    assert '<th scope="row">Jobs that will be changed</th> <td>3</td>' in page
    assert Job.objects.filter(status=before).count() == 4
    assert history() == []


def test_the_question_names_the_search_and_escapes_it(admin):
    response = act(admin, "cancel", Job(pk=1), query="?status=held&q=<b>", select_across="1")

    page = " ".join(text_of(response).split())
    assert '<th scope="row">Status</th> <td>held</td>' in page
    assert '<th scope="row">Search</th> <td>&lt;b&gt;</td>' in page


def test_where_nothing_would_change_the_question_has_no_yes(admin):
    make_jobs(3, "done")

    page = text_of(act(admin, "requeue", Job(pk=1), select_across="1"))

    assert "0 jobs will be changed." in " ".join(page.split())
    assert "Yes, I\u2019m sure" not in page
    assert f'href="{LIST}"' in page


def test_the_numbers_of_a_question_stop_at_their_limit(admin, monkeypatch):
    monkeypatch.setattr(lists.capped_count, "__defaults__", (10,))
    make_jobs(12, "failed")

    with CaptureQueriesContext(connection) as statements:
        page = text_of(act(admin, "requeue", Job(pk=1), select_across="1"))

    assert page.count("10+") == 3
    assert [sql for sql in map(sql_of, statements) if "COUNT(" in sql and "LIMIT" not in sql] == []


def test_a_few_selected_jobs_are_changed_without_a_question_and_more_of_them_with_one(admin, monkeypatch):
    monkeypatch.setattr(admin_verbs, "UNCONFIRMED_JOBS", 2)
    jobs = [make_job("failed") for _ in range(5)]

    few = act(admin, "requeue", *jobs[:2])
    many = act(admin, "requeue", *jobs[2:])
    confirmed = act(admin, "requeue", *jobs[2:], confirmed="yes")

    assert said(few) == [("success", "2 jobs were requeued.")]
    assert said(many) == []
    assert all(f'name="_selected_action" value="{job.pk}"' in text_of(many) for job in jobs[2:])
    assert said(confirmed) == [("success", "3 jobs were requeued.")]


@pytest.mark.parametrize("yes", ["1", "on", "true", "2"])
def test_whatever_django_takes_for_all_that_match_is_asked_about(admin, yes):
    make_jobs(3, "failed")

    response = act(admin, "requeue", Job(pk=1), select_across=yes)

    assert said(response) == []
    assert Job.objects.filter(status="failed").count() == 3


def test_all_that_match_the_filter_are_changed_in_batches_once_that_is_confirmed(admin, monkeypatch):  # B124
    monkeypatch.setattr(managers, "BATCH_ROWS", 50)
    ids = make_jobs(120, "failed")
    others = [make_job("cancelled"), make_job("failed", queue_name="slow")]
    query = "?status=failed&queue=default"

    with CaptureQueriesContext(connection) as statements:
        response = act(admin, "requeue", Job(pk=ids[0]), query=query, select_across="1", confirmed="yes")

    assert said(response) == [("success", "120 jobs were requeued.")]
    assert response.redirect_chain == [(LIST + query, 302)]
    assert set(Job.objects.filter(status="pending").values_list("pk", flat=True)) == set(ids)
    assert [entry[0] for entry in history()] == ids
    assert [Job.objects.get(pk=job.pk).status for job in others] == ["cancelled", "failed"]
    # Three batches: statements that grow with batches, not with rows.
    assert len(statements) < 60


@pytest.mark.django_db(transaction=True)
def test_a_batch_is_requeued_with_its_history_or_not_at_all():
    make_jobs(3, "failed")

    with pytest.raises(ZeroDivisionError):
        Job.objects.all().requeue(lambda ids: 1 / 0)

    assert set(Job.objects.values_list("status", flat=True)) == {"failed"}


# Who may


@pytest.mark.parametrize("status", ["pending", "held", "running", "failed", "cancelled"])
def test_people_who_may_only_view_see_everything_and_no_verb(viewer, status):
    job = make_job(status, attempts=1, args=["argument"], last_error="the error")
    make_attempt(job, traceback="the traceback")

    page, jobs = text_of(viewer.get(page_of(job))), text_of(viewer.get(LIST))
    causes = text_of(viewer.get(f"{LIST}dead-letters/"))

    assert all(text in page for text in ("&quot;argument&quot;", "the error", "the traceback"))
    assert offered(viewer, job) == set(actions_of(viewer)) == set()
    for markup in (page, jobs, causes):
        # Logging out, the list's own empty form, and the page's form without a button are all that may be sent.
        assert not any(f'value="{verb}"' in markup or f"/{verb}/" in markup for verb in VERBS)
        assert 'name="action"' not in markup


@each_verb
def test_a_verb_without_its_permission_is_forbidden_on_every_way(viewer, verb):
    before = VERBS[verb][0]
    job = make_job(before)
    selection = {"action": verb, "_selected_action": [job.pk]}

    responses = [
        viewer.post(f"{LIST}{job.pk}/{verb}/"),
        viewer.post(page_of(job), {"CHANGE_FORM-action": verb, "_selected_action": job.pk, "index": 0}),
        viewer.post(LIST, {**selection, "index": 0}),
        viewer.post(LIST, {**selection, "index": 0, "select_across": 1}),
        viewer.post(LIST, {**selection, "select_across": 1, "confirmed": "yes"}),
    ]

    assert [response.status_code for response in responses] == [403] * 5
    assert Job.objects.get().status == before
    assert history() == []


@each_verb
def test_the_permission_of_a_verb_is_enough_for_it_and_for_no_other(make_staff, verb):
    before, after = VERBS[verb][:2]
    client = make_staff("view_job", PERMISSIONS[verb])
    allowed = {name for name in VERBS if PERMISSIONS[name] == PERMISSIONS[verb]}
    first, second = make_job(before), make_job(before)

    assert set(actions_of(client)) == allowed
    assert verb in offered(client, first) <= allowed
    press(client, verb, first)
    act(client, verb, second)
    refused = [client.post(f"{LIST}{first.pk}/{other}/").status_code for other in VERBS if other not in allowed]

    assert {job.status for job in Job.objects.all()} == {after}
    assert set(refused) == {403}


def test_one_may_not_change_what_one_may_not_view(make_staff):
    job = make_job("failed")
    blind = make_staff("requeue_job")

    response = blind.post(f"{LIST}{job.pk}/requeue/")

    assert response.status_code == 403
    assert Job.objects.get().status == "failed"


@each_verb
def test_a_link_or_a_foreign_form_changes_nothing(admin_user, verb):
    before = VERBS[verb][0]
    job = make_job(before)
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(admin_user)

    responses = [
        strict.get(f"{LIST}{job.pk}/{verb}/"),
        strict.post(f"{LIST}{job.pk}/{verb}/"),
        strict.post(page_of(job), {"CHANGE_FORM-action": verb, "_selected_action": job.pk, "index": 0}),
        strict.post(LIST, {"action": verb, "_selected_action": [job.pk], "index": 0}),
    ]

    assert [response.status_code for response in responses] == [405, 403, 403, 403]
    assert Job.objects.get().status == before
