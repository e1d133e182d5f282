"""
The system's Chromium, driven by Playwright; nothing is downloaded.

Every page fails its test when the browser reports an error, a breach of the Content-Security-Policy among
them, or asks another host for anything.
"""

import os
import shutil
from pathlib import Path

import pytest

FLAGS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]
WCAG_AA = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}


# Of the package, not of the session: while Playwright runs, this thread has a running event loop, which other
# tests must not meet.
@pytest.fixture(scope="package")
def browser():
    playwright_api = pytest.importorskip("playwright.sync_api", reason="pip install '.[browser]'")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not path:
        pytest.skip("no Chromium: apt-get install chromium, or set CHROMIUM")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with pytest.MonkeyPatch.context() as patch, playwright_api.sync_playwright() as playwright:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS + as_root)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """Open pages of a site, each with a visitor of its own; what they report is looked at when the test ends."""
    contexts, problems = [], []

    def open_page(base_url, *, session=None, color_scheme="light", **options):
        context = browser.new_context(
            base_url=base_url, locale="en-GB", timezone_id="UTC", color_scheme=color_scheme, **options
        )
        contexts.append(context)
        if session is not None:
            context.add_cookies([{"name": "sessionid", "value": session, "url": base_url}])
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: problems.extend(_foreign(request.url, base_url)))
        page.route("**/favicon.ico", lambda route: route.fulfill(status=204))
        page.set_default_timeout(10_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def visit(open_page, live_server, django_user_model):
    """Open the admin as somebody with the permissions *codenames*, or as one who may do everything."""
    from django.contrib.auth.models import Permission
    from django.test import Client

    def visit(*codenames, **options):
        number = django_user_model.objects.count()
        user = django_user_model.objects.create_user(f"somebody {number}", is_staff=True, is_superuser=not codenames)
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        client = Client()
        client.force_login(user)
        return open_page(live_server.url, session=client.cookies["sessionid"].value, **options)

    return visit


@pytest.fixture(autouse=True)
def _in_english_and_utc(settings):
    settings.LANGUAGE_CODE = "en-us"
    settings.TIME_ZONE = "UTC"


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Instead of the check of that name: Playwright's threads end with it."""


@pytest.fixture
def take(request):
    """Take a screenshot for the docs, where ``make screenshots`` asks for them."""
    directory = os.environ.get("SCREENSHOTS")

    def take(page, name, height):
        if directory:
            clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height}
            page.screenshot(path=Path(directory) / f"{name}.png", clip=clip)

    return take


def violations(page):
    """What axe finds on *page* against WCAG 2.1 AA: the rule, and the elements that break it."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options=WCAG_AA).response["violations"]
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]


def press(page, verb, label):
    """Run *verb* on the page of a job: from the page's actions on Django 6.1, and before that by a button."""
    from django_pgqueue.admin.verbs import ACTIONS_ARE_ON_PAGES

    if ACTIONS_ARE_ON_PAGES:
        page.get_by_label("Action:").select_option(verb)
        page.get_by_role("button", name="Run").click()
    else:
        page.get_by_role("button", name=label).click()


def _foreign(url, base_url):
    return [] if url.startswith((base_url, "data:")) else [f"a request to {url}"]
