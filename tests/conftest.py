import os

import pytest


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Every thread has an owner that joins it."""
    import threading

    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]
    assert left == [], f"threads left behind: {left}"


def pytest_report_header() -> str:
    import django

    return f"django {django.__version__}, database {'DATABASE_URL' if os.environ.get('DATABASE_URL') else 'embedded'}"
