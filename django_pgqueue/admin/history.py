"""Who did what to which job, in the admin's own history."""

from collections.abc import Iterable
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import connections, router

from ..models import Job

# What LogEntry.objects.log_actions() writes, one entry for each job, at a fraction of its cost: a person may
# change half a million jobs in one request.
HISTORY_SQL = """
INSERT INTO django_admin_log (
    action_time, user_id, content_type_id, object_id, object_repr, action_flag, change_message
)
SELECT clock_timestamp(), %(user_id)s, %(content_type_id)s, entry.object_id, entry.object_repr,
       %(action_flag)s, %(message)s
  FROM unnest(%(object_ids)s::text[], %(object_reprs)s::text[]) AS entry(object_id, object_repr)
"""


def log_many(user_id: Any, database: str, job_ids: Iterable[int], message: str) -> None:
    """Write that user *user_id* has changed the jobs with *job_ids*, which stand in *database*."""
    jobs = Job.objects.using(database).filter(pk__in=job_ids).order_by("pk")
    connection = connections[router.db_for_write(LogEntry)]
    if connection.vendor != "postgresql":
        LogEntry.objects.log_actions(user_id, jobs.only("task_path"), CHANGE, message)
        return
    rows = jobs.values_list("pk", "task_path")
    parameters = {
        "user_id": user_id,
        "content_type_id": ContentType.objects.get_for_model(Job, for_concrete_model=False).pk,
        "action_flag": CHANGE,
        "message": message,
        "object_ids": [str(pk) for pk, _ in rows],
        "object_reprs": [Job.title(pk, task_path)[:200] for pk, task_path in rows],
    }
    with connection.cursor() as cursor:
        cursor.execute(HISTORY_SQL, parameters)
