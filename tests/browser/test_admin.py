"""The admin in a browser: what people see and click, as one who may act and as one who may look."""

import re
from datetime import timedelta

import django
import pytest
from django.utils import timezone

from django_pgqueue.models import Job

from ..admin_pages import LIST, locked_elsewhere, make_attempt, make_job, make_jobs, page_of
from .conftest import press, violations

try:
    from playwright.sync_api import expect
except ImportError:  # the fixture `browser` says what to install, and only where these tests are asked for
    expect = None

DEAD_LETTERS = f"{LIST}dead-letters/"
TRACEBACK = """\
Traceback (most recent call last):
  File "/usr/lib/python3.13/asyncio/runners.py", line 195, in run
    return runner.run(main)
  File "/srv/shop/shop/tasks.py", line 12, in send_receipt
    message.send()
  File "/srv/shop/.venv/lib/python3.13/site-packages/django/core/mail/message.py", line 300, in send
    return self.get_connection(fail_silently).send_messages([self])
  File "/usr/lib/python3.13/socket.py", line 839, in create_connection
    sock.connect(sa)
ConnectionRefusedError: [Errno 111] Connection refused
"""

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_somebody_logs_in_and_meets_the_jobs(live_server, open_page, admin_user):
    make_job("failed")
    page = open_page(live_server.url)

    page.goto(LIST)
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password").fill("password")
    page.get_by_role("button", name="Log in").click()

    expect(page).to_have_title(re.compile("Select job"))
    expect(page.get_by_role("link", name="failed 1")).to_be_visible()


def test_the_tabs_lead_through_the_list(visit):
    make_jobs(3)
    make_job("held")
    page = visit()

    page.goto(LIST)
    page.get_by_role("link", name="held 1").click()

    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    expect(page.locator(".pgqueue-tabs [aria-current=page]")).to_have_text(re.compile("held"))


@pytest.mark.parametrize(
    ("verb", "before", "label", "after", "said"),
    [
        ("requeue", "failed", "Requeue", "pending", "was requeued."),
        ("hold", "pending", "Hold", "held", "is held."),
        ("unhold", "held", "Unhold", "pending", "is no longer held."),
        ("cancel", "pending", "Cancel", "cancelled", "was cancelled."),
    ],
)
def test_a_verb_is_done_on_the_page_of_a_job(visit, verb, before, label, after, said):
    job = make_job(before)
    page = visit()

    page.goto(page_of(job))
    press(page, verb, label)

    expect(page.locator(".messagelist")).to_have_text(re.compile(f"Job {job.pk} {said}"))
    expect(page.locator(".field-status_label .pgqueue-state")).to_have_text(after)
    assert Job.objects.get().status == after


def test_a_job_that_another_transaction_holds_is_said_to_be_busy(visit):
    job = make_job("failed")
    page = visit()

    page.goto(page_of(job))
    with locked_elsewhere(job):
        press(page, "requeue", "Requeue")
        expect(page.locator(".messagelist")).to_have_text(re.compile(f"Job {job.pk} is busy"))

    assert Job.objects.get().status == "failed"


@pytest.mark.parametrize(("verb", "after"), [("hold", "held"), ("cancel", "cancelled")])
def test_a_verb_is_done_to_selected_jobs(visit, verb, after):
    ids = make_jobs(3)
    page = visit()

    page.goto(LIST)
    for job_id in ids[:2]:
        page.locator(f'input[name="_selected_action"][value="{job_id}"]').check()
    page.get_by_label("Action:").select_option(verb)
    page.get_by_role("button", name=re.compile("^(Go|Run)")).first.click()

    expect(page.locator(".messagelist")).to_have_text(re.compile("^\\s*2 jobs"))
    assert Job.objects.filter(status=after).count() == 2


def test_all_that_match_the_filter_are_requeued_after_a_question(visit):
    make_jobs(60, "failed")
    make_jobs(2)
    page = visit()

    page.goto(LIST + "?status=failed")
    page.locator("#action-toggle").check()
    page.get_by_role("button", name="Select all 60 jobs").click()
    page.get_by_label("Action:").select_option("requeue")
    page.get_by_role("button", name=re.compile("^(Go|Run)")).first.click()
    expect(page.get_by_text("60 jobs will be changed.")).to_be_visible()
    page.get_by_role("button", name="Yes, I\u2019m sure").click()

    expect(page.locator(".messagelist")).to_have_text(re.compile("60 jobs were requeued."))
    assert Job.objects.filter(status="pending").count() == 62


def test_the_question_leads_back_to_the_filtered_list(visit):
    make_jobs(60, "failed")
    page = visit()
    page.goto(LIST + "?status=failed")
    page.locator("#action-toggle").check()
    page.get_by_label("Action:").select_option("requeue")
    page.get_by_role("button", name=re.compile("^(Go|Run)")).first.click()

    page.get_by_role("button", name="No, take me back").click()

    expect(page).to_have_url(re.compile(re.escape(LIST + "?status=failed") + "$"))
    assert Job.objects.filter(status="failed").count() == 60


def test_a_whole_group_of_dead_letters_is_requeued(visit):
    make_groups()
    page = visit()

    page.goto(LIST)
    page.get_by_role("link", name="Dead letters by cause").click()
    page.locator("tr", has_text="ConnectionRefusedError").get_by_role("button", name="Requeue").click()
    expect(page.get_by_text("5 jobs will be changed.")).to_be_visible()
    page.get_by_role("button", name="Yes, I\u2019m sure").click()

    expect(page.locator(".messagelist")).to_have_text(re.compile("5 jobs were requeued."))
    assert Job.objects.filter(status="failed").count() == 2


def test_somebody_who_may_only_look_sees_everything_and_no_button(visit):
    [job, *_] = make_groups()
    page = visit("view_job")

    for address in (LIST, page_of(job), DEAD_LETTERS):
        page.goto(address)
        expect(page.locator("#content h1")).to_be_visible()
        assert page.locator("#content button, #content select[name$=action]").all_inner_texts() == []
        assert page.locator('#content input[type="submit"]:not([value="Search"])').count() == 0

    page.goto(page_of(job))
    expect(page.get_by_text("[Errno 111] Connection refused").first).to_be_visible()


@pytest.mark.skipif(django.VERSION < (6, 1), reason="axe looks at Django's markup too, which is clean since 6.1")
@pytest.mark.parametrize("color_scheme", ["light", "dark"])
@pytest.mark.parametrize("codenames", [(), ("view_job", "view_worker")], ids=["everything", "looking"])
def test_axe_finds_nothing_to_complain_about(visit, color_scheme, codenames):
    dead_letter = make_groups()[0]
    running, done = [make_job(status) for status in ("running", "done")]
    page = visit(*codenames, color_scheme=color_scheme)
    addresses = [
        LIST,
        f"{LIST}?status=failed&since=week&error=builtins.ConnectionRefusedError",
        DEAD_LETTERS,
        page_of(dead_letter),
        page_of(running),
        page_of(done),
    ]

    found = {}
    for address in addresses:
        page.goto(address)
        found[address] = violations(page)
    if not codenames:
        page.goto(DEAD_LETTERS)
        page.get_by_role("button", name="Requeue").first.click()
        expect(page.get_by_text("5 jobs will be changed.")).to_be_visible()
        found["the question"] = violations(page)
        page.get_by_role("button", name="Yes, I\u2019m sure").click()
        expect(page.locator(".messagelist")).to_be_visible()
        found["the messages"] = violations(page)

    assert {address: each for address, each in found.items() if each} == {}


def test_dark_pages_take_their_colours_from_the_admin(visit):
    job = make_job("failed")
    page = visit(color_scheme="dark")

    page.goto(page_of(job))

    def colour(property_name):
        return page.locator(".field-status_label .pgqueue-state").evaluate(
            "(element, name) => getComputedStyle(element)[name]", property_name
        )

    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 18, 18)"
    assert colour("color") == page.evaluate("getComputedStyle(document.body).color")


def make_groups():
    """Make seven dead letters of two causes; return them."""
    moment = timezone.now() - timedelta(hours=3)
    jobs = [
        make_job("failed", attempts=5, task_path="shop.tasks.send_receipt", last_error="…", finished_at=moment)
        for _ in range(7)
    ]
    for job in jobs[:5]:
        make_attempt(
            job,
            5,
            attempt=5,
            error_class="builtins.ConnectionRefusedError",
            fingerprint="a",
            message="[Errno 111] Connection refused",
            traceback=TRACEBACK,
        )
    for job in jobs[5:]:
        make_attempt(job, 5, attempt=5, error_class="shop.payments.Declined", fingerprint="b", message="card expired")
    return jobs
