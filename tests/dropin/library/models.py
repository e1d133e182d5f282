from django.db import models


class Loan(models.Model):
    title = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.title


class Event(models.Model):
    """A signal of the framework, as a receiver has seen it."""

    signal = models.CharField(max_length=20)
    task_name = models.CharField(max_length=100)
    result_id = models.CharField(max_length=64)
    status = models.CharField(max_length=20)

    def __str__(self) -> str:
        return f"{self.signal} {self.task_name}"
