"""
Run a task and write its ending in one transaction: for effects in the jobs' own database, exactly once.

Everything happens on the task's own connection, so what the task writes to that database is committed with
the job's "done", or not at all. The claim is looked at when the transaction begins, without a lock, and
settled last: the row is locked for a moment only. A claim that has been lost meanwhile rolls everything back.

Read Committed whatever the project's default: at stricter levels a lease that was renewed since the
transaction began would make the last statement fail, every time.
"""

import logging
from collections.abc import Callable

from django.db import connections, transaction

from ..exceptions import ClaimLost, TransactionEnded
from ..outcomes import Claim, Succeeded
from ..statements import leases
from ..statements.database import execute, fetch
from ..statements.settle import settle

logger = logging.getLogger("django_pgqueue")

# The moment at which it began tells a transaction from the next on the same connection.
BEGAN_SQL = "SELECT transaction_timestamp()"

# Whoever holds the row longer than this costs the job an attempt: what it did is rolled back.
BEFORE_SETTLING_SQL = "SELECT transaction_timestamp(), set_config('lock_timeout', '30s', true)"


def atomically(
    database: str, claim: Claim, perform: Callable[[], Succeeded], before_settling: Callable[[], object] = bool
) -> Succeeded:
    """
    Return the outcome of *perform*, committed with everything that it did on *database*.

    Whatever *perform* or the commit raises goes on, and nothing of it has happened, unless the answer to the
    COMMIT was lost: then the row tells, and `settle` reads it. Raises ``ClaimLost`` when the claim is not
    ours. After the commit an error of an ``on_commit`` hook is only logged.
    """
    is_committed = False

    def note_commit() -> None:
        nonlocal is_committed
        is_committed = True

    connection = connections[database]
    if not connection.get_autocommit():  # as DATABASES may have it: then the block would commit nothing
        connection.rollback()  # of what setting up the connection has begun
        connection.set_autocommit(True)
    try:
        with transaction.atomic(using=database, durable=True):
            transaction.on_commit(note_commit, using=database)  # the first to be called
            execute(connection, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            began = fetch(connection, BEGAN_SQL, {})[0][0]
            _check(claim, leases.standing(connection, [claim]))
            outcome = perform()
            before_settling()
            if fetch(connection, BEFORE_SETTLING_SQL, {})[0][0] != began:
                raise TransactionEnded("An atomic task must not end its transaction by itself.")
            _check(claim, {written.claim.job_id for written in settle(connection, [outcome]).settled})
    except Exception:
        if not is_committed:
            raise
        logger.exception("A function that job %s gave to on_commit() failed; the job is done.", claim.job_id)
    return outcome


def _check(claim: Claim, held: set[int]) -> None:
    if claim.job_id not in held:
        raise ClaimLost
