"""The example shop in a browser, as its own settings run it: an order, its receipt's job, and the admin."""

import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import psycopg
import pytest
from django.db import connection
from psycopg import sql

from ..helpers import wait_until
from ..settings import ROOT, database_url
from .conftest import press, violations

try:
    from playwright.sync_api import expect
except ImportError:  # the fixture `browser` says what to install, and only where these tests are asked for
    expect = None

MANAGE = ROOT / "example_project/manage.py"

pytestmark = pytest.mark.browser


def test_somebody_orders_and_staff_hold_the_receipt(shop, open_page):
    page = open_page(shop)

    page.goto("/")
    page.get_by_label("Name").fill("Ada")
    page.get_by_label("E-mail").fill("ada@shop.example")
    page.get_by_role("button", name="Place order").click()
    expect(page.get_by_text("The receipt is waiting for a worker.")).to_be_visible()
    order_url = page.url

    page.get_by_role("link", name="Admin").click()
    page.get_by_label("Username").fill("admin")
    page.get_by_label("Password").fill("password")
    page.get_by_role("button", name="Log in").click()
    page.goto(order_url)
    page.get_by_role("link", name=re.compile("Job .* in the admin")).click()
    press(page, "hold", "Hold")

    expect(page.locator(".messagelist")).to_have_text(re.compile("is held"))


def test_a_declined_card_leaves_no_order(shop, open_page):
    page = open_page(shop)
    page.goto("/")
    page.get_by_label("Name").fill("Eve")
    page.get_by_label("E-mail").fill("eve@shop.example")
    page.get_by_label("Test card that is declined").check()

    # The answer's status is 402, which Chromium would report as an error.
    page.route(f"{shop}/", lambda route: route.fulfill(response=route.fetch(), status=200))
    page.get_by_role("button", name="Place order").click()

    expect(page.get_by_text("The card was declined.")).to_be_visible()
    expect(page.get_by_role("cell", name="Eve")).to_have_count(0)


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_axe_finds_nothing_to_complain_about_in_the_shop(shop, open_page, color_scheme):
    page = open_page(shop, color_scheme=color_scheme)

    page.goto("/")
    empty = violations(page)
    page.get_by_label("Name").fill("Ada")
    page.get_by_label("E-mail").fill("ada@shop.example")
    page.get_by_role("button", name="Place order").click()
    expect(page.get_by_role("heading", name="Receipt")).to_be_visible()
    placed = violations(page)
    page.goto("/")

    assert (empty, placed, violations(page)) == ([], [], [])


@pytest.fixture(scope="module")
def shop(django_db_setup, django_db_blocker, tmp_path_factory):
    """Run the shop on a database of its own; return its address."""
    name = f"shop_{os.getpid()}"
    with django_db_blocker.unblock():
        parameters = {**connection.get_connection_params(), "autocommit": True}
    parameters = {key: value for key, value in parameters.items() if key not in ("context", "cursor_factory")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "DATABASE_URL": urlsplit(database_url)._replace(path=f"/{name}").geturl(),
        "DJANGO_SETTINGS_MODULE": "settings",
        "DJANGO_SUPERUSER_PASSWORD": "password",
    }
    log = tmp_path_factory.mktemp("shop") / "server.log"
    with psycopg.connect(**parameters) as server:
        server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            manage(environment, "migrate", "--verbosity=0")
            manage(environment, "createsuperuser", "--noinput", "--username=admin", "--email=admin@shop.example")
            with log.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, MANAGE, "runserver", "--noreload", address],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            try:
                wait_until(lambda: process.poll() is not None or answers(f"http://{address}/"), "the shop")
                assert process.poll() is None, log.read_text()
                yield f"http://{address}"
            finally:
                process.kill()
                process.wait()
        finally:
            server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def manage(environment, *arguments):
    subprocess.run([sys.executable, MANAGE, *arguments], env=environment, check=True)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except urllib.error.URLError:
        return False
