from django.dispatch import receiver

from .framework import task_enqueued, task_finished, task_started
from .models import Event


def note(signal, task_result):
    Event.objects.create(
        signal=signal, task_name=task_result.task.name, result_id=task_result.id, status=task_result.status
    )


@receiver(task_enqueued)
def note_enqueued(sender, task_result, **kwargs):
    note("enqueued", task_result)


@receiver(task_started)
def note_started(sender, task_result, **kwargs):
    note("started", task_result)


@receiver(task_finished)
def note_finished(sender, task_result, **kwargs):
    note("finished", task_result)
