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
