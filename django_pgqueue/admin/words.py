"""The verbs in words: what a button, a question, a message and the history say about each of them."""

from typing import Any, NamedTuple

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from ..statements import people
from ..states import Status


class Words(NamedTuple):
    """
    One verb. *name* is that of the method which does it, of an action here, of a queryset and of a job.

    *done* and *left* are plurals over ``count``, and so is *running*, of the jobs that were running; those
    that end in *one* take an ``id``.
    """

    name: str
    permission: str
    takes: tuple[Status, ...]
    button: Any
    title: Any
    effect: Any
    done: Any
    done_one: Any
    left: Any
    left_one: Any
    history: Any
    running: Any = None
    running_one: Any = None


REQUEUE = Words(
    name="requeue",
    permission="requeue",
    takes=people.REQUEUE.takes,
    button=_("Requeue"),
    title=_("Requeue jobs"),
    effect=_(
        "Failed and cancelled jobs become pending again: with fresh attempts, available at once, in their old queue. "
        "What their tasks have already done is done again."
    ),
    done=ngettext_lazy("%(count)d job was requeued.", "%(count)d jobs were requeued.", "count"),
    done_one=_("Job %(id)d was requeued."),
    left=ngettext_lazy(
        "%(count)d job was left as it is: neither failed nor cancelled.",
        "%(count)d jobs were left as they are: neither failed nor cancelled.",
        "count",
    ),
    left_one=_("Job %(id)d was left as it is: neither failed nor cancelled."),
    history=_("Requeued."),
)
HOLD = Words(
    name="hold",
    permission="hold",
    takes=people.HOLD.takes,
    button=_("Hold"),
    title=_("Hold jobs"),
    effect=_("Pending jobs are set aside: no worker runs them until somebody unholds them."),
    done=ngettext_lazy("%(count)d job is held.", "%(count)d jobs are held.", "count"),
    done_one=_("Job %(id)d is held."),
    left=ngettext_lazy(
        "%(count)d job was left as it is: not pending.", "%(count)d jobs were left as they are: not pending.", "count"
    ),
    left_one=_("Job %(id)d was left as it is: not pending."),
    history=_("Held."),
)
UNHOLD = Words(
    name="unhold",
    permission="hold",
    takes=people.UNHOLD.takes,
    button=_("Unhold"),
    title=_("Unhold jobs"),
    effect=_("Held jobs become pending again, and run when they are due."),
    done=ngettext_lazy("%(count)d job is no longer held.", "%(count)d jobs are no longer held.", "count"),
    done_one=_("Job %(id)d is no longer held."),
    left=ngettext_lazy(
        "%(count)d job was left as it is: not held.", "%(count)d jobs were left as they are: not held.", "count"
    ),
    left_one=_("Job %(id)d was left as it is: not held."),
    history=_("Unheld."),
)
CANCEL = Words(
    name="cancel",
    permission="cancel",
    takes=people.CANCEL.takes,
    button=_("Cancel job"),
    title=_("Cancel jobs"),
    effect=_(
        "Pending and held jobs end without running. Running ones are stopped: what their tasks have done by then is "
        "not undone, unless they are atomic. A cancelled job can be requeued."
    ),
    done=ngettext_lazy("%(count)d job was cancelled.", "%(count)d jobs were cancelled.", "count"),
    done_one=_("Job %(id)d was cancelled."),
    left=ngettext_lazy(
        "%(count)d job was left as it is: neither pending nor held nor running.",
        "%(count)d jobs were left as they are: neither pending nor held nor running.",
        "count",
    ),
    left_one=_("Job %(id)d was left as it is: neither pending nor held nor running."),
    history=_("Cancelled."),
    running=ngettext_lazy(
        "%(count)d of them was running; its task is being stopped.",
        "%(count)d of them were running; their tasks are being stopped.",
        "count",
    ),
    running_one=_("Job %(id)d was running. It was cancelled, and its task is being stopped."),
)
VERBS = {verb.name: verb for verb in (REQUEUE, HOLD, UNHOLD, CANCEL)}

BUSY_ONE = _("Job %(id)d is busy: another transaction holds it at this moment. Try again.")
BUSY = ngettext_lazy(
    "%(count)d job is busy: another transaction holds it at this moment. Try again.",
    "%(count)d jobs are busy: other transactions hold them at this moment. Try again.",
    "count",
)
KEY_HELD_ONE = _(
    "Job %(id)d was left as it is: another job with its key “%(job_key)s” has not finished yet. "
    "Let that one finish, or cancel it, and try again."
)
KEY_HELD = ngettext_lazy(
    "%(count)d job was left as it is: another job with its key has not finished yet, or was requeued just now.",
    "%(count)d jobs were left as they are: others with their keys have not finished yet, or were requeued just now.",
    "count",
)
