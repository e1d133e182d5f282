"""The table of claims that a child writes and its supervisor reads."""

import os
import tempfile
from pathlib import Path

import pytest

from django_pgqueue.outcomes import Claim
from django_pgqueue.worker import holdings
from django_pgqueue.worker.holdings import Held, Holdings, Vitals

LARGEST = 2**63 - 1


@pytest.fixture
def table():
    table = Holdings.create(3)
    yield table
    table.close()


def test_a_claim_is_read_as_buffered_then_as_started_then_not_at_all(table):
    assert table.read() == []
    place = table.add(Claim(LARGEST, LARGEST - 1))
    assert table.read() == [Held(Claim(LARGEST, LARGEST - 1), started=False)]
    table.start(place)
    assert table.read() == [Held(Claim(LARGEST, LARGEST - 1), started=True)]
    table.remove(place)
    assert table.read() == []


def test_what_one_process_writes_another_reads_after_the_first_has_died(table):
    pid = os.fork()
    if not pid:
        same = Holdings(table.descriptor, 3)
        same.start(same.add(Claim(1, 10)))
        same.add(Claim(2, 20))
        os._exit(0)
    os.waitpid(pid, 0)

    assert table.read() == [Held(Claim(1, 10), started=True), Held(Claim(2, 20), started=False)]


def test_a_place_is_used_again_and_nothing_of_its_last_claim_is_left(table):
    places = [table.add(Claim(number, 1)) for number in (1, 2, 3)]
    table.start(places[1])
    table.remove(places[1])

    assert table.add(Claim(4, 7)) == places[1]

    assert set(table.read()) == {Held(Claim(1, 1), False), Held(Claim(4, 7), False), Held(Claim(3, 1), False)}


def test_a_full_table_refuses_another_claim_and_stays_as_it_is(table):
    for number in range(3):
        table.add(Claim(number, 1))

    with pytest.raises(IndexError):
        table.add(Claim(9, 1))

    assert [held.claim.job_id for held in table.read()] == [0, 1, 2]


def test_how_many_claims_there_are_is_read_without_reading_them(table):
    """R31: whoever wakes one of twenty children asks all of them, each time."""
    reader = Holdings(os.dup(table.descriptor), 3)
    counts = [reader.count()]
    places = []
    for number in range(3):
        places.append(table.add(Claim(number, 1)))
        counts.append(reader.count())
    for place in places:
        table.remove(place)
        counts.append(reader.count())
    reader.close()

    assert counts == [0, 1, 2, 3, 2, 1, 0]


def test_a_claim_is_counted_before_it_is_published_and_until_it_is_forgotten(table, monkeypatch):
    """A child may die between any two writes, and a table that counts none is not read."""
    counts = []
    write_state = table._write_state

    def note(place, state):
        counts.append(table.count())
        write_state(place, state)

    monkeypatch.setattr(table, "_write_state", note)
    place = table.add(Claim(1, 1))
    table.remove(place)

    assert counts == [1, 1]


def test_an_entry_that_is_only_half_written_is_not_read(table, monkeypatch):
    """A child may die between any two writes: what is not whole is not a claim yet, or not any more."""
    place = table.add(Claim(1, 1))
    table.remove(place)
    monkeypatch.setattr(table, "_write_state", lambda place, state: None)  # death comes before the last write

    table.add(Claim(2, 2))

    assert table.read() == []


def test_a_half_read_entry_names_no_claim_that_others_may_hold(table):
    """An id and a version that were never together fit no row, because versions only rise: see `settle`."""
    place = table.add(Claim(1, 9))
    before = bytes(table._map)
    table.remove(place)
    table.add(Claim(2, 3))

    id_ends_at = holdings._offset(0) + 8
    torn = bytes(table._map[:id_ends_at]) + before[id_ends_at:]  # the new id beside the old version
    table._map[: len(torn)] = torn

    # (2, 9) is read; the row of job 2 stands at version 3 and fits only (2, 3).
    assert table.read() == [Held(Claim(2, 9), started=False)]


def test_a_deadline_is_its_claims_and_not_the_next_ones(table):
    place = table.add(Claim(1, 1))
    table.start(place)
    table.limit(place, 1234.5)

    assert table.read() == [Held(Claim(1, 1), started=True, deadline=1234.5)]

    table.remove(place)
    table.add(Claim(2, 1))
    assert table.read() == [Held(Claim(2, 1), started=False)]


def test_a_finished_task_is_neither_running_nor_buffered(table):
    place = table.add(Claim(1, 1))
    table.start(place)
    table.finish(place)

    assert table.read() == [Held(Claim(1, 1), started=False, finished=True)]


def test_vital_signs_are_written_by_name_and_none_touches_another_or_a_claim(table):
    table.add(Claim(1, 1))
    assert table.vitals() == Vitals(0, 0, 0, 0)

    table.note(breathed=3.5)
    table.note(looped=1.5, leased=9.0)

    assert table.vitals() == Vitals(looped=1.5, worked=0, breathed=3.5, leased=9.0)
    assert table.read() == [Held(Claim(1, 1), started=False)]


def test_reading_after_the_end_is_an_error_and_no_other_file_is_read(table):
    closed = Holdings.create(1)
    closed.close()

    with pytest.raises(ValueError, match="released"):
        closed.read()


def test_a_table_needs_no_place_on_a_disk(monkeypatch):
    """A container's may be read-only; and writing to a mapped file on a full one is a SIGBUS."""
    if not hasattr(os, "memfd_create"):
        pytest.skip("this system has no files in memory")
    monkeypatch.setattr(tempfile, "TemporaryFile", None)

    table = Holdings.create(1)

    table.close()


def test_a_thousand_tables_leave_no_descriptor_open():
    before = len(list(Path("/dev/fd").iterdir()))

    for _ in range(1_000):
        Holdings.create(504).close()

    assert len(list(Path("/dev/fd").iterdir())) == before
