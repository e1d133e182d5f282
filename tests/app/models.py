from django.db import models


class Mark(models.Model):
    """An effect that a task leaves: one row each time it runs."""

    note = models.CharField(max_length=200)
    made_by = models.CharField(max_length=200, blank=True)

    def __str__(self) -> str:
        return self.note
