"""
The claims that a child holds, in memory that the supervisor can read after the child's death.

A file without a name, mapped by both. Each entry is an id, a version and a state, and the state is
written last, so that a reader never takes half an entry for a whole one. What a reader sees twice, or
with an older version, does no harm: whatever it does with a claim is fenced.
"""

import mmap
import os
import struct
import tempfile
from typing import NamedTuple

from ..outcomes import Claim

_ENTRY = struct.Struct("=qqq")  # id, version, state
_STATE_OFFSET = 16
_FREE, _BUFFERED, _STARTED = 0, 1, 2
_STATES = {state: struct.pack("=q", state) for state in (_FREE, _BUFFERED, _STARTED)}


class Held(NamedTuple):
    claim: Claim
    started: bool


class Holdings:
    """A table of claims. One process writes (`add`, `start`, `remove`), another reads (`read`)."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _ENTRY.size * capacity)
        self._free = list(range(capacity - 1, -1, -1))
        self._capacity = capacity

    @classmethod
    def create(cls, capacity: int) -> "Holdings":
        """Make an empty table for up to *capacity* claims."""
        descriptor = _file_without_name()
        try:
            os.truncate(descriptor, _ENTRY.size * capacity)
            return cls(descriptor, capacity)
        except BaseException:
            os.close(descriptor)
            raise

    def add(self, claim: Claim) -> int:
        """Publish *claim* as buffered and return its place."""
        place = self._free.pop()
        offset = place * _ENTRY.size
        self._map[offset : offset + _STATE_OFFSET] = _ENTRY.pack(claim.job_id, claim.version, _FREE)[:_STATE_OFFSET]
        self._write_state(place, _BUFFERED)
        return place

    def start(self, place: int) -> None:
        """Say that the task of the claim at *place* may begin at any moment from now on."""
        self._write_state(place, _STARTED)

    def remove(self, place: int) -> None:
        """Forget the claim at *place*."""
        self._write_state(place, _FREE)
        self._free.append(place)

    def read(self) -> list[Held]:
        """Return the claims held at this moment."""
        entries = _ENTRY.iter_unpack(self._map[: self._capacity * _ENTRY.size])
        return [Held(Claim(job_id, version), state == _STARTED) for job_id, version, state in entries if state != _FREE]

    def close(self) -> None:
        self._map.close()
        os.close(self.descriptor)

    def _write_state(self, place: int, state: int) -> None:
        offset = place * _ENTRY.size + _STATE_OFFSET
        self._map[offset : offset + 8] = _STATES[state]


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):  # Linux; needs no place on a disk, which may be full or read-only
        return os.memfd_create("django_pgqueue holdings")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
