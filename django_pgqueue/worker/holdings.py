"""
What a child and its supervisor tell each other without words: memory that both map, and that outlives the child.

A few moments stand first (see `Vitals`), then how many claims the child holds, then these. Each entry is an id, a
version, a deadline and a state, eight bytes each, and each is written at once. The state is written last, so
that a reader never takes half an entry for a whole one. What a reader sees twice, or with an older version,
does no harm: whatever it does with a claim is fenced.

Moments are seconds of the monotonic clock, which all processes of a machine share; zero is "never".
"""

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

from ..outcomes import Claim

_VITALS = struct.Struct("=dddddd")
_COUNT = _VITALS.size // 8  # where it stands, in words
_HEAD_BYTES = _VITALS.size + 8
_ENTRY = struct.Struct("=qqdq")  # id, version, deadline, state
_ID, _VERSION, _DEADLINE = -3, -2, -1  # where they stand, in words, beside the state
_FREE, _BUFFERED, _STARTED, _FINISHED = 0, 1, 2, 3


class Held(NamedTuple):
    """
    *started*: its task runs. *finished*: it ran, and how it ended is not written yet. Neither: it is buffered.

    *deadline* is the moment at which the task must have ended, zero if there is none.
    """

    claim: Claim
    started: bool
    deadline: float = 0.0
    finished: bool = False


class Vitals(NamedTuple):
    """
    The moments at which each was last true.

    *looped*: the control loop turned. *worked*: it turned, and the database did what was asked.
    *breathed*: the child's interpreter ran another thread. *leased*: until then the claims that the
    supervisor renewed last are certainly the child's; this one the supervisor writes. *rested*: the control loop
    began the look after which it had a free slot and nothing for it; zero if it has found all it wanted since.
    *found*: it began the last look that found a job.
    """

    looped: float
    worked: float
    breathed: float
    leased: float
    rested: float = 0.0
    found: float = 0.0


class Holdings:
    """
    A table of claims. One process writes (`add`, `start`, `limit`, `finish`, `remove`), another reads (`read`).
    The place of a claim is that of its state, in words.

    A vital sign is written by name, by one thread each: ``note(breathed=moment)``.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _offset(capacity))
        self._words = memoryview(self._map).cast("q")
        self._moments = memoryview(self._map).cast("d")
        self._free = [_offset(entry + 1) // 8 - 1 for entry in reversed(range(capacity))]
        self._capacity = capacity

    @classmethod
    def create(cls, capacity: int) -> "Holdings":
        """Make an empty table for up to *capacity* claims."""
        descriptor = _file_without_name()
        try:
            os.truncate(descriptor, _offset(capacity))
            return cls(descriptor, capacity)
        except BaseException:
            os.close(descriptor)
            raise

    def add(self, claim: Claim) -> int:
        """Publish *claim* as buffered and return its place."""
        place = self._free.pop()
        self._words[place + _ID], self._words[place + _VERSION] = claim
        self._moments[place + _DEADLINE] = 0.0
        self._words[_COUNT] = self._capacity - len(self._free)  # first: never less than there are
        self._write_state(place, _BUFFERED)
        return place

    def start(self, place: int) -> None:
        """Say that the task of the claim at *place* may begin at any moment from now on."""
        self._words[place] = _STARTED

    def limit(self, place: int, deadline: float) -> None:
        """Say that the task of the claim at *place* must have ended at the moment *deadline*."""
        self._moments[place + _DEADLINE] = deadline

    def finish(self, place: int) -> None:
        """Say that the task of the claim at *place* is over: what becomes of this process is not its doing."""
        self._words[place] = _FINISHED

    def remove(self, place: int) -> None:
        """Forget the claim at *place*."""
        self._write_state(place, _FREE)
        self._free.append(place)
        self._words[_COUNT] = self._capacity - len(self._free)

    def read(self) -> list[Held]:
        """Return the claims held at this moment."""
        if not self.count():
            return []
        entries = _ENTRY.iter_unpack(self._map[_HEAD_BYTES:])
        return [
            Held(Claim(job_id, version), state == _STARTED, deadline, state == _FINISHED)
            for job_id, version, deadline, state in entries
            if state != _FREE
        ]

    def count(self) -> int:
        """Return how many claims are held at this moment, without a look at each."""
        return self._words[_COUNT]

    def note(self, **moments: float) -> None:
        """Write the vital signs named."""
        for name, moment in moments.items():
            self._moments[Vitals._fields.index(name)] = moment

    def vitals(self) -> Vitals:
        """Return the vital signs as they stand."""
        return Vitals(*_VITALS.unpack(self._map[: _VITALS.size]))

    def close(self) -> None:
        self._words.release()
        self._moments.release()
        self._map.close()
        os.close(self.descriptor)

    def _write_state(self, place: int, state: int) -> None:
        self._words[place] = state


def _offset(entry: int) -> int:
    return _HEAD_BYTES + entry * _ENTRY.size


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):  # Linux; needs no place on a disk, which may be full or read-only
        return os.memfd_create("django_pgqueue holdings")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
