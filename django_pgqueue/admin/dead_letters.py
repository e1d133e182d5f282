"""
Dead letters by their cause: those of one task whose last attempts ended with errors of one fingerprint.

A page of its own shows the groups; the list shows the jobs of a group, by the filters that its link carries.
Both look at the newest SCANNED_JOBS dead letters and no further, and say so. A verb for a whole group is the
list's own verb for all that match these filters, with its question first.
"""

from datetime import datetime
from typing import NamedTuple
from urllib.parse import urlencode

from django.utils.safestring import SafeString
from django.utils.text import Truncator

from ..statements.database import Connection, fetch
from ..states import Status
from . import page

SCANNED_JOBS = 10_000
RECENT_JOBS = 1_000  # where the error filter looks for classes
SHOWN_GROUPS = 100
SHOWN_MESSAGE_CHARS = 200
UNKNOWN = "unknown"  # the fingerprint of a dead letter that has no attempts

# The attempt that ended a job is its last. The joins are lateral so that each attempt is found by its index,
# and the message is read for one job of each group only.
GROUPS_SQL = """
WITH newest AS MATERIALIZED (
    SELECT id, task_path, finished_at
      FROM django_pgqueue_job
     WHERE status = 'failed'
     ORDER BY finished_at DESC, id DESC
     LIMIT %(scanned)s
), ended AS (
    SELECT newest.id, newest.task_path, newest.finished_at, COALESCE(last.fingerprint, %(unknown)s) AS fingerprint
      FROM newest
      LEFT JOIN LATERAL (
          SELECT fingerprint
            FROM django_pgqueue_jobattempt
           WHERE job_id = newest.id
           ORDER BY claim_version DESC
           LIMIT 1
      ) AS last ON TRUE
), grouped AS (
    SELECT task_path,
           fingerprint,
           count(*) AS jobs,
           max(finished_at) AS last_at,
           min(finished_at) AS first_at,
           (array_agg(id ORDER BY finished_at DESC, id DESC))[1] AS example_id
      FROM ended
     GROUP BY task_path, fingerprint
     ORDER BY count(*) DESC, max(finished_at) DESC, task_path, fingerprint
     LIMIT %(groups)s
)
SELECT task_path,
       fingerprint,
       COALESCE(example.error_class, '') AS error_class,
       COALESCE(example.message, '') AS message,
       jobs,
       last_at,
       first_at,
       (SELECT count(*) FROM newest) AS scanned
  FROM grouped
  LEFT JOIN LATERAL (
      SELECT error_class, message
        FROM django_pgqueue_jobattempt
       WHERE job_id = grouped.example_id
       ORDER BY claim_version DESC
       LIMIT 1
  ) AS example ON TRUE
 ORDER BY jobs DESC, last_at DESC, task_path, fingerprint
"""

IDS_SQL = """
SELECT newest.id
  FROM (
    SELECT id
      FROM django_pgqueue_job
     WHERE status = 'failed'
     ORDER BY finished_at DESC, id DESC
     LIMIT %(scanned)s
  ) AS newest
  LEFT JOIN LATERAL (
      SELECT error_class, fingerprint
        FROM django_pgqueue_jobattempt
       WHERE job_id = newest.id
       ORDER BY claim_version DESC
       LIMIT 1
  ) AS last ON TRUE
 WHERE (%(error_class)s::text IS NULL OR last.error_class = %(error_class)s)
   AND (%(fingerprint)s::text IS NULL OR COALESCE(last.fingerprint, %(unknown)s) = %(fingerprint)s)
"""

ERROR_CLASSES_SQL = """
SELECT last.error_class
  FROM (
    SELECT id
      FROM django_pgqueue_job
     WHERE status = 'failed'
     ORDER BY finished_at DESC, id DESC
     LIMIT %(recent)s
  ) AS newest
  CROSS JOIN LATERAL (
      SELECT error_class
        FROM django_pgqueue_jobattempt
       WHERE job_id = newest.id
       ORDER BY claim_version DESC
       LIMIT 1
  ) AS last
 GROUP BY last.error_class
"""


class Group(NamedTuple):
    """Dead letters of one cause. *last_at* and *first_at* are when the newest and the oldest of them failed."""

    task_path: str
    fingerprint: str
    error_class: str
    message: str
    jobs: int
    last_at: datetime
    first_at: datetime

    @property
    def task_name(self) -> str:
        return self.task_path.rpartition(".")[2]

    @property
    def short_error_class(self) -> str:
        return self.error_class.removeprefix("builtins.")

    @property
    def short_message(self) -> str:
        return Truncator(self.message).chars(SHOWN_MESSAGE_CHARS)

    @property
    def last(self) -> SafeString:
        return page.time_text(self.last_at)

    @property
    def first(self) -> SafeString:
        return page.time_text(self.first_at)

    @property
    def query(self) -> str:
        """The filters by which the list shows these jobs."""
        values = {"status": Status.FAILED.value, "task": self.task_path, "fingerprint": self.fingerprint}
        return f"?{urlencode(values)}"


def groups(connection: Connection) -> tuple[list[Group], int]:
    """Return up to SHOWN_GROUPS + 1 groups of the newest dead letters, the largest first, and how many those are."""
    parameters = {"scanned": SCANNED_JOBS, "groups": SHOWN_GROUPS + 1, "unknown": UNKNOWN}
    rows = fetch(connection, GROUPS_SQL, parameters)
    return [Group(*row[:-1]) for row in rows], rows[0][-1] if rows else 0


def ids_with(connection: Connection, *, error_class: str | None = None, fingerprint: str | None = None) -> list[int]:
    """Return the ids of those of the newest dead letters that ended with such an error."""
    parameters = {
        "scanned": SCANNED_JOBS,
        "error_class": error_class,
        "fingerprint": fingerprint,
        "unknown": UNKNOWN,
    }
    return [job_id for (job_id,) in fetch(connection, IDS_SQL, parameters)]


def error_classes(connection: Connection) -> list[str]:
    """Return the classes of the errors that the newest dead letters ended with."""
    return [error_class for (error_class,) in fetch(connection, ERROR_CLASSES_SQL, {"recent": RECENT_JOBS})]
