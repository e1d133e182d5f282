"""
The names that a child claims under.

Whether a claim was committed whose COMMIT got no answer, nobody knows at that moment. Under a new name the
claims that follow can be told from it, and what the old name still holds, once the database answers, goes back.
"""

import time


class OwnerNames:
    """For the control loop. *base* begins every name, *lease* is how long an old name's claims can last, in seconds."""

    def __init__(self, base: str, lease: float) -> None:
        self._base = base
        self._lease = lease
        self._number = 1
        self._is_claiming = False
        self._old: dict[str, float] = {}  # until when to look for their rows, monotonic

    @property
    def current(self) -> str:
        return f"{self._base}/{self._number}"

    def claiming(self) -> None:
        """A claim is about to be sent under the current name."""
        self._is_claiming = True

    def answered(self) -> None:
        """What was sent is committed or rolled back, for certain."""
        self._is_claiming = False

    def lost_touch(self) -> None:
        """The connection was lost, so that a claim under way may have been committed, or may be yet."""
        if self._is_claiming:
            self._old[self.current] = 0.0
            self._number += 1
            self._is_claiming = False
        # A lease is long enough for the old connection's last statement, from when there is a database again.
        self._old = dict.fromkeys(self._old, time.monotonic() + self._lease)

    def old(self) -> list[str]:
        """Return the names whose rows go back if there are any."""
        now = time.monotonic()
        self._old = {name: until for name, until in self._old.items() if until > now}
        return list(self._old)

    @property
    def has_old(self) -> bool:
        return bool(self._old)
