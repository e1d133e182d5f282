import os
import sys

import pytest


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--through-pgbouncer",
        action="store_true",
        help="let the workers that tests start connect through PgBouncer in transaction mode",
    )


def pytest_collection_modifyitems(config, items) -> None:
    if config.getoption("--through-pgbouncer"):
        direct = [item for item in items if item.get_closest_marker("direct")]
        items[:] = [item for item in items if item not in direct]
        config.hook.pytest_deselected(items=direct)


@pytest.fixture(autouse=True, scope="session")
def _pooler(request):
    if not request.config.getoption("--through-pgbouncer"):
        yield
        return
    from .pooler import pgbouncer

    request.getfixturevalue("django_db_setup")  # the sessions that it keeps must end before the database does
    with pgbouncer("transaction") as url:
        os.environ["WORKER_DATABASE_URL"] = url
        yield
        del os.environ["WORKER_DATABASE_URL"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Every thread has an owner that joins it."""
    import threading

    before = set(threading.enumerate())
    yield
    # asgiref's executors, which have no name of ours, end when they are collected.
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and not thread.daemon and not thread.name.startswith("ThreadPoolExecutor")
    ]
    assert left == [], f"threads left behind: {left}"


def pytest_report_header() -> str:
    import django

    return f"django {django.__version__}, database {'DATABASE_URL' if os.environ.get('DATABASE_URL') else 'embedded'}"


@pytest.fixture
def start_worker(tmp_path):
    """Start real workers with flags and environment; whatever still runs at the end of the test is killed."""
    from .workers import RunningWorker

    started = []

    def start(*flags, kind=RunningWorker, **environment):
        worker = kind(tmp_path / f"worker-{len(started)}.log", *flags, **environment)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.kill_all()


@pytest.fixture
def in_english(settings):
    """Whatever language the suite runs in: the test states what pages say."""
    settings.LANGUAGE_CODE = "en-us"


@pytest.fixture
def admin(client, admin_user):
    client.force_login(admin_user)
    return client


@pytest.fixture
def make_staff(django_user_model):
    from django.contrib.auth.models import Permission
    from django.test import Client

    def make(*codenames):
        user = django_user_model.objects.create_user("_".join(codenames), is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        client = Client()
        client.force_login(user)
        return client

    return make


@pytest.fixture
def viewer(make_staff):
    return make_staff("view_job")


@pytest.fixture
def operator(make_staff):
    return make_staff("view_job", "requeue_job", "hold_job", "cancel_job")


@pytest.fixture
def switching_often():
    """Threads give way to each other at almost every step."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.00001)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def make_slots():
    """Start so many slots in this process; every job that they were given must have ended with the test."""
    from django_pgqueue.worker.holdings import Holdings
    from django_pgqueue.worker.slots import Slots

    made = []

    def make(count):
        holdings = Holdings.create(500)
        slots = Slots(count, holdings, 0, "default", on_finish=lambda: None)
        slots.start()
        made.append((slots, holdings))
        return slots

    yield make
    for slots, holdings in made:
        slots.stop()
        holdings.close()
