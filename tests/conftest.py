import gc
import os

import pytest


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Every thread has an owner that joins it."""
    import threading

    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    if left:
        gc.collect()  # the executors of asgiref end when they are collected
        for thread in left:
            thread.join(1)
    names = [thread.name for thread in left if thread.is_alive()]
    assert names == [], f"threads left behind: {names}"


def pytest_report_header() -> str:
    import django

    return f"django {django.__version__}, database {'DATABASE_URL' if os.environ.get('DATABASE_URL') else 'embedded'}"


@pytest.fixture
def start_worker(tmp_path):
    """Start real workers with flags and environment; whatever still runs at the end of the test is killed."""
    from .workers import RunningWorker

    started = []

    def start(*flags, **environment):
        worker = RunningWorker(tmp_path / f"worker-{len(started)}.log", *flags, **environment)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.kill_all()
