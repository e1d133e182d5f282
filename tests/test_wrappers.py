"""The list that a thread keeps of its connections' wrappers."""

import pytest
from django.db import connections

from django_pgqueue.worker import wrappers
from django_pgqueue.worker.cleaning import leave_clean

from .helpers import InThread

pytestmark = pytest.mark.django_db(transaction=True)


def in_a_thread(call):
    return InThread(call).result()


def test_a_thread_has_one_wrapper_for_each_alias_and_another_thread_has_others():
    here, there = (in_a_thread(lambda: list(wrappers.here())) for _ in range(2))

    assert [wrapper.alias for wrapper in here] == list(connections)
    assert not set(map(id, here)) & set(map(id, there))


def test_they_are_looked_up_once():
    assert in_a_thread(lambda: wrappers.here() is wrappers.here())


def test_one_that_a_task_puts_in_the_place_of_another_is_found_when_it_connects_and_closed_after_the_task():
    def scenario():
        seen_by_others = wrappers.here()
        replaced = connections["default"]
        replaced.ensure_connection()
        del connections["default"]
        connections["default"].ensure_connection()
        found = seen_by_others[-1]
        leave_clean(may_keep=False)
        return found is connections["default"], found.connection, replaced.connection, wrappers.here()

    is_found, raw, replaced_raw, afterwards = in_a_thread(scenario)

    assert is_found
    assert (raw, replaced_raw) == (None, None)
    assert [wrapper.alias for wrapper in afterwards] == list(connections), "nothing is kept of what is gone"


def test_one_that_is_dropped_is_replaced():
    def scenario():
        dropped = connections["default"]
        dropped.ensure_connection()
        leave_clean(may_use=False)
        return dropped in wrappers.here(), connections["default"] in wrappers.here()

    assert in_a_thread(scenario) == (False, True)
