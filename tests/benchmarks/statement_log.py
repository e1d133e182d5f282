"""How long statements took, as the server itself has logged it."""

import json
import re
import time
from datetime import datetime

from .server import Databases

# What the private server needs for it. The values of parameters are many and are not looked at.
SETTINGS = {
    "logging_collector": "on",
    "log_destination": "jsonlog",
    "log_directory": "statements",
    "log_filename": "all.log",
    "log_rotation_age": "0",
    "log_rotation_size": "0",
    "log_timezone": "UTC",
    "log_parameter_max_length": "0",
}
DURATION = re.compile(r"duration: ([\d.]+) ms  (statement|parse|bind|execute)")


class StatementLog:
    """The log of what sessions do in *database* that begin from now on. Empty unless the server is private."""

    def __init__(self, databases: Databases, database: str) -> None:
        self._file = databases.directory / "server/data/statements/all.json"
        self._database = database
        self._offset = 0
        if self._file.exists():
            self._offset = self._file.stat().st_size
            databases.value("postgres", f"ALTER DATABASE {database} SET log_min_duration_statement = 0")

    def milliseconds(self, mark: str, since: int, until: int) -> list[float]:
        """Return how long each statement took with *mark* in its text, between two moments of the monotonic clock."""
        if not self._file.exists():
            return []
        clocks_apart = time.time() - time.monotonic()
        begin, end = since / 1e9 + clocks_apart, until / 1e9 + clocks_apart
        found = []
        before: dict[int, float] = {}  # of the session's statement that is parsed and bound, and not executed yet
        with self._file.open(encoding="utf-8", errors="replace") as lines:
            lines.seek(self._offset)
            for line in lines:
                entry = json.loads(line)
                if entry.get("dbname") != self._database or mark not in entry.get("message", "").lower():
                    continue
                if not (told := DURATION.match(entry["message"])):
                    continue
                took = before.pop(entry["pid"], 0.0) + float(told[1])
                if told[2] in ("parse", "bind"):
                    before[entry["pid"]] = took
                elif begin <= _seconds(entry["timestamp"]) <= end:
                    found.append(took)
        return found


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp.replace(" UTC", "+00:00")).timestamp()
