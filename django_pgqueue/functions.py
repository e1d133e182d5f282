"""Database functions that models and migrations name."""

from django.db import models


class ClockTimestamp(models.Func):
    """The database's clock at this moment; ``now()`` would be the start of a perhaps long transaction."""

    function = "clock_timestamp"
    output_field = models.DateTimeField()
