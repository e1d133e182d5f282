"""
What a child and its supervisor tell each other without words: memory that both map, and that outlives the child.

A few moments stand first (see `Vitals`), then the claims that the child holds. Each entry is an id, a
version, a deadline and a state, and the state is written last, so that a reader never takes half an entry
for a whole one. What a reader sees twice, or with an older version, does no harm: whatever it does with a
claim is fenced.

Moments are seconds of the monotonic clock, which all processes of a machine share; zero is "never".
"""

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

from ..outcomes import Claim

_VITALS = struct.Struct("=dddd")
_VITAL = struct.Struct("=d")
_ENTRY = struct.Struct("=qqdq")  # id, version, deadline, state
_DEADLINE_OFFSET = 16
_STATE_OFFSET = 24
_FREE, _BUFFERED, _STARTED, _FINISHED = 0, 1, 2, 3
_STATES = {state: struct.pack("=q", state) for state in (_FREE, _BUFFERED, _STARTED, _FINISHED)}


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
    supervisor renewed last are certainly the child's; this one the supervisor writes.
    """

    looped: float
    worked: float
    breathed: float
    leased: float


class Holdings:
    """
    A table of claims. One process writes (`add`, `start`, `limit`, `finish`, `remove`), another reads (`read`).

    A vital sign is written by name, by one thread each: ``note(breathed=moment)``.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _VITALS.size + _ENTRY.size * capacity)
        self._free = list(range(capacity - 1, -1, -1))
        self._capacity = capacity

    @classmethod
    def create(cls, capacity: int) -> "Holdings":
        """Make an empty table for up to *capacity* claims."""
        descriptor = _file_without_name()
        try:
            os.truncate(descriptor, _VITALS.size + _ENTRY.size * capacity)
            return cls(descriptor, capacity)
        except BaseException:
            os.close(descriptor)
            raise

    def add(self, claim: Claim) -> int:
        """Publish *claim* as buffered and return its place."""
        place = self._free.pop()
        offset = _offset(place)
        entry = _ENTRY.pack(claim.job_id, claim.version, 0.0, _FREE)
        self._map[offset : offset + _STATE_OFFSET] = entry[:_STATE_OFFSET]
        self._write_state(place, _BUFFERED)
        return place

    def start(self, place: int) -> None:
        """Say that the task of the claim at *place* may begin at any moment from now on."""
        self._write_state(place, _STARTED)

    def limit(self, place: int, deadline: float) -> None:
        """Say that the task of the claim at *place* must have ended at the moment *deadline*."""
        offset = _offset(place) + _DEADLINE_OFFSET
        self._map[offset : offset + _VITAL.size] = _VITAL.pack(deadline)

    def finish(self, place: int) -> None:
        """Say that the task of the claim at *place* is over: what becomes of this process is not its doing."""
        self._write_state(place, _FINISHED)

    def remove(self, place: int) -> None:
        """Forget the claim at *place*."""
        self._write_state(place, _FREE)
        self._free.append(place)

    def read(self) -> list[Held]:
        """Return the claims held at this moment."""
        entries = _ENTRY.iter_unpack(self._map[_VITALS.size : _offset(self._capacity)])
        return [
            Held(Claim(job_id, version), state == _STARTED, deadline, state == _FINISHED)
            for job_id, version, deadline, state in entries
            if state != _FREE
        ]

    def note(self, **moments: float) -> None:
        """Write the vital signs named."""
        for name, moment in moments.items():
            offset = Vitals._fields.index(name) * _VITAL.size
            self._map[offset : offset + _VITAL.size] = _VITAL.pack(moment)

    def vitals(self) -> Vitals:
        """Return the vital signs as they stand."""
        return Vitals(*_VITALS.unpack(self._map[: _VITALS.size]))

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)

    def _write_state(self, place: int, state: int) -> None:
        offset = _offset(place) + _STATE_OFFSET
        self._map[offset : offset + 8] = _STATES[state]


def _offset(place: int) -> int:
    return _VITALS.size + place * _ENTRY.size


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):  # Linux; needs no place on a disk, which may be full or read-only
        return os.memfd_create("django_pgqueue holdings")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
