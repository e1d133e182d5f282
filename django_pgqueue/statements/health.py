"""What monitoring asks: which workers live, and how they are. How long jobs wait, a `claim.sweep` says."""

from typing import NamedTuple

from .database import Connection, fetch

# A handful of rows, so no index serves this. A worker of an earlier release says neither what it serves nor
# when it turned.
LIVE_WORKERS_SQL = """
SELECT name, hostname, backend, serves,
       EXTRACT(EPOCH FROM clock_timestamp() - turned_at)::float8
  FROM django_pgqueue_worker
 WHERE seen_at > clock_timestamp() - make_interval(secs => %(seen_within)s::float8)
   AND (backend = %(backend)s OR backend IS NULL)
 ORDER BY turned_at NULLS FIRST, name
"""


class LiveWorker(NamedTuple):
    """*turned_for* is how many seconds ago the slowest of its control loops last turned."""

    name: str
    hostname: str
    backend: str | None
    serves: dict[str, list[str]] | None
    turned_for: float | None


def live_workers(connection: Connection, backend: str, seen_within: float) -> list[LiveWorker]:
    """Return the workers of *backend* that reported in the last *seen_within* seconds, the slowest first."""
    rows = fetch(connection, LIVE_WORKERS_SQL, {"backend": backend, "seen_within": seen_within})
    return [LiveWorker(*row) for row in rows]
