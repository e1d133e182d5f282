"""
Write the endings of claims: succeed, retry, snooze, fail, release.

One statement for each kind of ending, without a join: values travel in arrays beside the ids, and
``array_position`` finds them. That looks at one after the other, so those statements stay below SLICE rows.
Successes are many. All with the same version of the claim, as nearly all have, are one statement, and their results one
JSON object, in which the server finds its way faster. The rows are counted, and read only if there are too few.

A row that may not have been changed is read once more and is one of three things: *busy* (still ours, but
locked by someone), *ours already* (ended as we wrote it, by a COMMIT whose answer was lost), or *lost*.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..exceptions import Interrupted, UnstorableResult
from ..outcomes import Claim, ErrorRecord, Failed, Outcome, Released, Retried, Snoozed, Succeeded, class_path_of
from .bell import ring_for
from .database import ERRORS, Connection, change, fetch, is_lock_conflict, is_refusal

SLICE = 200
SLICE_CHARS = 8_000_000  # of results; two hundred large ones took longer than a statement may
MAX_REFUNDS = 20  # interruptions of one job that cost no attempt
MAX_LAST_ERROR_CHARS = 500

Transaction = Callable[[], AbstractContextManager[Any]]
Outcomes = Sequence[Outcome]
Write = Callable[[Connection, list], Outcomes]  # which returns those that it may not have written

# The empty text keeps the planner from reading the index of all running jobs instead of the primary key.
SUCCEED_SQL = """
UPDATE django_pgqueue_job
   SET status = 'done',
       finished_at = clock_timestamp(),
       lease_until = NULL
 WHERE id = ANY(%(ids)s::bigint[])
   AND claim_version = %(version)s
   AND status || '' = 'running'
"""

SUCCEED_WITH_RESULT_SQL = """
UPDATE django_pgqueue_job
   SET status = 'done',
       finished_at = clock_timestamp(),
       lease_until = NULL,
       return_value = %(results)s::jsonb -> id::text
 WHERE id = ANY(%(ids)s::bigint[])
   AND claim_version = %(version)s
   AND status || '' = 'running'
"""

RETRY_SQL = f"""
WITH ended AS (
    UPDATE django_pgqueue_job
       SET status = 'pending',
           available_at = clock_timestamp()
               + make_interval(secs => (%(delays)s::float8[])[array_position(%(ids)s::bigint[], id)]),
           lease_until = NULL,
           last_error = (%(summaries)s::text[])[array_position(%(ids)s::bigint[], id)]
     WHERE id = ANY(%(ids)s::bigint[])
       AND (id::text || ':' || claim_version || ':' || status) = ANY(%(fences)s::text[])
    RETURNING id, claim_version, attempts, claimed_by, claimed_at, queue_name, available_at
), recorded AS (
    INSERT INTO django_pgqueue_jobattempt (
        job_id, claim_version, attempt, outcome, counted,
        error_class, fingerprint, message, traceback, worker, started_at, ended_at
    )
    SELECT id, claim_version, attempts, (%(endings)s::text[])[array_position(%(ids)s::bigint[], id)], true,
           (%(error_classes)s::text[])[array_position(%(ids)s::bigint[], id)],
           (%(fingerprints)s::text[])[array_position(%(ids)s::bigint[], id)],
           (%(messages)s::text[])[array_position(%(ids)s::bigint[], id)],
           (%(tracebacks)s::text[])[array_position(%(ids)s::bigint[], id)],
           claimed_by, claimed_at, clock_timestamp()
      FROM ended
), rung AS ({ring_for("ended")})
SELECT id, (SELECT count(*) FROM rung) FROM ended
"""

# No attempt was used, so none is recorded; how often it happened is counted on the job.
SNOOZE_SQL = f"""
WITH ended AS (
    UPDATE django_pgqueue_job
       SET status = 'pending',
           available_at = clock_timestamp()
               + make_interval(secs => (%(delays)s::float8[])[array_position(%(ids)s::bigint[], id)]),
           attempts = attempts - 1,
           snoozes = snoozes + 1,
           lease_until = NULL
     WHERE id = ANY(%(ids)s::bigint[])
       AND (id::text || ':' || claim_version || ':' || status) = ANY(%(fences)s::text[])
    RETURNING id, queue_name, available_at
), rung AS ({ring_for("ended")})
SELECT id, (SELECT count(*) FROM rung) FROM ended
"""

FAIL_SQL = """
WITH ended AS (
    UPDATE django_pgqueue_job
       SET status = 'failed',
           finished_at = clock_timestamp(),
           lease_until = NULL,
           last_error = (%(summaries)s::text[])[array_position(%(ids)s::bigint[], id)]
     WHERE id = ANY(%(ids)s::bigint[])
       AND (id::text || ':' || claim_version || ':' || status) = ANY(%(fences)s::text[])
    RETURNING id, claim_version, attempts, claimed_by, claimed_at
), recorded AS (
    INSERT INTO django_pgqueue_jobattempt (
        job_id, claim_version, attempt, outcome, counted,
        error_class, fingerprint, message, traceback, worker, started_at, ended_at
    )
    SELECT id, claim_version, attempts, (%(endings)s::text[])[array_position(%(ids)s::bigint[], id)], true,
           (%(error_classes)s::text[])[array_position(%(ids)s::bigint[], id)],
           (%(fingerprints)s::text[])[array_position(%(ids)s::bigint[], id)],
           (%(messages)s::text[])[array_position(%(ids)s::bigint[], id)],
           (%(tracebacks)s::text[])[array_position(%(ids)s::bigint[], id)],
           claimed_by, claimed_at, clock_timestamp()
      FROM ended
)
SELECT id FROM ended
"""

# The attempt had not begun, or could not: it is refunded and leaves no record. The version rises, so that
# whatever still holds the claim can no longer end it.
RELEASE_SQL = f"""
WITH released AS (
    UPDATE django_pgqueue_job
       SET status = 'pending',
           claim_version = claim_version + 1,
           attempts = attempts - 1,
           started_at = CASE WHEN attempts > 1 THEN started_at END,
           available_at = GREATEST(available_at, clock_timestamp() + make_interval(secs => %(delay)s::float8)),
           last_error = COALESCE(NULLIF(%(reason)s::text, ''), last_error),
           lease_until = NULL
     WHERE id = ANY(%(ids)s::bigint[])
       AND (id::text || ':' || claim_version || ':' || status) = ANY(%(fences)s::text[])
    RETURNING id, queue_name, available_at
), rung AS ({ring_for("released")})
SELECT id, (SELECT count(*) FROM rung) FROM released
"""

# The attempt had begun. It is recorded, and refunded unless that has happened %(refunds)s times already: a
# job that outlasts every grace period must come to an end, too. Nobody but the holder of a claim adds
# attempts, so that what the snapshot counts is true of every row that passes the fence.
INTERRUPT_SQL = f"""
WITH exhausted AS MATERIALIZED (
    SELECT job_id AS id
      FROM django_pgqueue_jobattempt
     WHERE job_id = ANY(%(ids)s::bigint[])
       AND NOT counted
     GROUP BY job_id
    HAVING count(*) >= %(refunds)s
), released AS (
    UPDATE django_pgqueue_job
       SET status = CASE WHEN id = ANY(ARRAY(SELECT id FROM exhausted)) AND attempts >= max_attempts
                         THEN 'failed' ELSE 'pending' END,
           finished_at = CASE WHEN id = ANY(ARRAY(SELECT id FROM exhausted)) AND attempts >= max_attempts
                              THEN clock_timestamp() END,
           claim_version = claim_version + 1,
           attempts = CASE WHEN id = ANY(ARRAY(SELECT id FROM exhausted)) THEN attempts ELSE attempts - 1 END,
           available_at = GREATEST(available_at, clock_timestamp() + make_interval(secs => %(delay)s::float8)),
           last_error = %(message)s,
           lease_until = NULL
     WHERE id = ANY(%(ids)s::bigint[])
       AND (id::text || ':' || claim_version || ':' || status) = ANY(%(fences)s::text[])
    RETURNING id, claim_version - 1 AS claim_version, attempts, claimed_by, claimed_at,
              queue_name, CASE WHEN status = 'pending' THEN available_at END AS available_at,
              id = ANY(ARRAY(SELECT id FROM exhausted)) AS counted
), recorded AS (
    INSERT INTO django_pgqueue_jobattempt (
        job_id, claim_version, attempt, outcome, counted,
        error_class, fingerprint, message, traceback, worker, started_at, ended_at
    )
    SELECT id, claim_version, CASE WHEN counted THEN attempts ELSE attempts + 1 END, 'released', counted,
           %(error_class)s, '', %(message)s, '', claimed_by, claimed_at, clock_timestamp()
      FROM released
), rung AS ({ring_for("released")})
SELECT id, (SELECT count(*) FROM rung) FROM released
"""

MISSING_SQL = """
SELECT id, claim_version, status
  FROM django_pgqueue_job
 WHERE id = ANY(%(ids)s::bigint[])
"""

LOCK_SQL = """
SELECT id
  FROM django_pgqueue_job
 WHERE id = ANY(%(ids)s::bigint[])
 ORDER BY id
   FOR NO KEY UPDATE SKIP LOCKED
"""

# Where a row may stand, at the same version, after an ending that was written already.
_STANDS_AS_WRITTEN = {
    Succeeded: ("done",),
    Retried: ("pending", "held", "cancelled"),  # a person may have set it aside since
    Snoozed: ("pending", "held", "cancelled"),
    Failed: ("failed",),
    Released: (),  # releases raise the version
}

INTERRUPTED_TEXT = "The worker stopped before the task had finished."
REFUSED_TEXT = "The database refused to store how this attempt ended; the worker's log has the reason."


@dataclass(slots=True)
class Settlement:
    """
    What became of the outcomes given to `settle`.

    *settled* are written (one that was refused stands here as the `Failed` that replaced it), *busy* are
    to be tried again, of *lost* the claims are no longer ours and nothing was changed.
    """

    settled: list[Outcome] = field(default_factory=list)
    busy: list[Outcome] = field(default_factory=list)
    lost: list[Outcome] = field(default_factory=list)
    refused: list[tuple[Outcome, BaseException]] = field(default_factory=list)

    def add(self, other: "Settlement") -> None:
        self.settled += other.settled
        self.busy += other.busy
        self.lost += other.lost
        self.refused += other.refused


def settle(connection: Connection, outcomes: Outcomes) -> Settlement:
    """
    Write *outcomes* in the transaction that is open; of two for one job, an old and a new claim, each by itself.

    Raises whatever the database raises; the transaction is then broken and nothing is written. Call `settle_carefully`
    next, which finds the culprit.
    """
    settlement = Settlement()
    for part in _one_for_each_job(outcomes):
        settlement.add(_settle_distinct(connection, part))
    return settlement


def _one_for_each_job(outcomes: Iterable[Outcome]) -> Iterable[list[Outcome]]:
    """Yield *outcomes* in parts: a statement finds its values, and we what it wrote, by the job's id alone."""
    rest = list(outcomes)
    while rest:
        part: dict[int, Outcome] = {}
        later = [outcome for outcome in rest if part.setdefault(outcome.claim.job_id, outcome) is not outcome]
        yield list(part.values())
        rest = later


def _settle_distinct(connection: Connection, outcomes: Outcomes) -> Settlement:
    missing = [outcome for write, part in _statements_for(outcomes) for outcome in write(connection, part)]
    if not missing:
        return Settlement(settled=list(outcomes))
    ids = set(_ids(missing))
    settlement = Settlement(settled=[outcome for outcome in outcomes if outcome.claim.job_id not in ids])
    _classify(connection, missing, settlement)
    return settlement


def settle_carefully(connection: Connection, outcomes: Outcomes, transaction: Transaction) -> Settlement:
    """
    Write *outcomes* after `settle` has failed, so that one bad row costs only itself.

    *transaction* opens a transaction, or a savepoint in one. Rows that others hold are passed over and
    come back as busy. An outcome that the database refuses is found by halving, and the job fails with
    a fixed text. Raises what is not about single rows: a lost connection, a missing table.
    """
    try:
        with transaction():
            free = {job_id for (job_id,) in fetch(connection, LOCK_SQL, {"ids": _ids(outcomes)})}
            settlement = settle(connection, [outcome for outcome in outcomes if outcome.claim.job_id in free])
            if len(free) < len(outcomes):
                _classify(connection, [outcome for outcome in outcomes if outcome.claim.job_id not in free], settlement)
            return settlement
    except (*ERRORS, UnicodeEncodeError) as error:
        if is_lock_conflict(error):
            return Settlement(busy=list(outcomes))
        if not is_refusal(error):
            raise
        if len(outcomes) == 1:
            return _replace_refused(connection, outcomes[0], error, transaction)
    half = len(outcomes) // 2
    settlement = settle_carefully(connection, outcomes[:half], transaction)
    settlement.add(settle_carefully(connection, outcomes[half:], transaction))
    return settlement


def _replace_refused(
    connection: Connection, outcome: Outcome, error: BaseException, transaction: Transaction
) -> Settlement:
    replacement = Failed(outcome.claim, ErrorRecord.plain(UnstorableResult, REFUSED_TEXT))
    settlement = Settlement(refused=[(outcome, error)])
    if outcome == replacement:  # even this is refused: the lease will run out, and recovery count the attempt
        settlement.lost.append(outcome)
    else:
        settlement.add(settle_carefully(connection, [replacement], transaction))
    return settlement


def _classify(connection: Connection, missing: Outcomes, settlement: Settlement) -> None:
    """Read the rows of those that are *missing*, and sort their outcomes into *settlement*."""
    found = {row[0]: (row[1], row[2]) for row in fetch(connection, MISSING_SQL, {"ids": _ids(missing)})}
    for outcome in missing:
        version, status = found.get(outcome.claim.job_id, (None, None))
        if version == outcome.claim.version and status == "running":
            settlement.busy.append(outcome)
        elif version == outcome.claim.version and status in _STANDS_AS_WRITTEN[type(outcome)]:
            settlement.settled.append(outcome)
        elif version == outcome.claim.version and status == "done":
            # Nobody but the owner ends a claim as done: the COMMIT of an atomic task, which got no answer.
            settlement.settled.append(Succeeded(outcome.claim))
        else:
            settlement.lost.append(outcome)


def _statements_for(outcomes: Outcomes) -> list[tuple[Write, list]]:
    """Return the functions to call, each with its share of *outcomes*; those with values in slices."""
    of: dict[type[Outcome], list] = {Succeeded: [], Retried: [], Snoozed: [], Failed: [], Released: []}
    for outcome in outcomes:
        of[type(outcome)].append(outcome)
    calls: list[tuple[Write, list]] = []
    for alike in _by_version(of[Succeeded]):
        if plain := [outcome for outcome in alike if outcome.result is None]:
            calls.append((_succeed, plain))
        with_result = [outcome for outcome in alike if outcome.result is not None]
        parts = _slices(with_result, lambda outcome: len(outcome.result), most=len(with_result))
        calls += [(_succeed_with_result, part) for part in parts]
    calls += [(_retry, part) for part in _slices(of[Retried])]
    calls += [(_snooze, part) for part in _slices(of[Snoozed])]
    calls += [(_fail, part) for part in _slices(of[Failed])]
    released = sorted(of[Released], key=_release_group)
    for (started, *_), group in groupby(released, key=_release_group):
        calls.append((_interrupt if started else _release, list(group)))
    return calls


def _by_version(outcomes: list[Succeeded]) -> Iterable[list[Succeeded]]:
    parts: dict[int, list[Succeeded]] = {}
    for outcome in outcomes:
        parts.setdefault(outcome.claim.version, []).append(outcome)
    return parts.values()


def _slices(outcomes: list, size: Callable[[Any], int] = lambda outcome: 0, most: int = SLICE) -> Iterable[list]:
    """Cut *outcomes* into parts of up to *most*, and of no more than SLICE_CHARS unless one alone is larger."""
    part: list = []
    chars = 0
    for outcome in outcomes:
        chars += size(outcome)
        if len(part) == most or (part and chars > SLICE_CHARS):
            yield part
            part, chars = [], size(outcome)
        part.append(outcome)
    if part:
        yield part


def _release_group(outcome: Released) -> tuple[bool, float, str]:
    return outcome.started, outcome.delay_seconds, outcome.reason


def _succeed(connection: Connection, outcomes: list[Succeeded]) -> Outcomes:
    return _change_all(connection, SUCCEED_SQL, _claims_alike(outcomes), outcomes)


def _succeed_with_result(connection: Connection, outcomes: list[Succeeded]) -> Outcomes:
    results = "{" + ",".join([f'"{outcome.claim.job_id}":{outcome.result}' for outcome in outcomes]) + "}"
    return _change_all(connection, SUCCEED_WITH_RESULT_SQL, {**_claims_alike(outcomes), "results": results}, outcomes)


def _retry(connection: Connection, outcomes: list[Retried]) -> Outcomes:
    delays = [outcome.delay_seconds for outcome in outcomes]
    return _change_each(connection, RETRY_SQL, {**_claims(outcomes), **_errors(outcomes), "delays": delays}, outcomes)


def _snooze(connection: Connection, outcomes: list[Snoozed]) -> Outcomes:
    delays = [outcome.delay_seconds for outcome in outcomes]
    return _change_each(connection, SNOOZE_SQL, {**_claims(outcomes), "delays": delays}, outcomes)


def _fail(connection: Connection, outcomes: list[Failed]) -> Outcomes:
    return _change_each(connection, FAIL_SQL, {**_claims(outcomes), **_errors(outcomes)}, outcomes)


def _release(connection: Connection, outcomes: list[Released]) -> Outcomes:
    delay, reason = outcomes[0].delay_seconds, outcomes[0].reason[:MAX_LAST_ERROR_CHARS]
    return _change_each(connection, RELEASE_SQL, {**_claims(outcomes), "delay": delay, "reason": reason}, outcomes)


def _interrupt(connection: Connection, outcomes: list[Released]) -> Outcomes:
    parameters = {
        **_claims(outcomes),
        "delay": outcomes[0].delay_seconds,
        "refunds": MAX_REFUNDS,
        "error_class": class_path_of(Interrupted),
        "message": INTERRUPTED_TEXT,
    }
    return _change_each(connection, INTERRUPT_SQL, parameters, outcomes)


def _change_all(connection: Connection, sql: str, parameters: dict[str, Any], outcomes: Outcomes) -> Outcomes:
    """Run *sql*, which returns nothing, and return none of *outcomes* if it has changed all their rows, else all."""
    return () if change(connection, sql, parameters) == len(outcomes) else outcomes


def _change_each(connection: Connection, sql: str, parameters: dict[str, Any], outcomes: Outcomes) -> Outcomes:
    """Run *sql*, which returns the ids of the rows it has changed, and return the other *outcomes*."""
    changed = {row[0] for row in fetch(connection, sql, parameters)}
    return [outcome for outcome in outcomes if outcome.claim.job_id not in changed]


# Literals of arrays, because the driver would look at each element of a list, and for what to quote in it.


def _claims(outcomes: Outcomes) -> dict[str, Any]:
    return {"ids": _ids_of(outcomes), "fences": f"{{{','.join(fences([outcome.claim for outcome in outcomes]))}}}"}


def _claims_alike(outcomes: Sequence[Succeeded]) -> dict[str, Any]:
    """Like `_claims`, of claims that all have the same version."""
    return {"ids": _ids_of(outcomes), "version": outcomes[0].claim.version}


def _ids_of(outcomes: Outcomes) -> str:
    return f"{{{','.join([str(outcome.claim.job_id) for outcome in outcomes])}}}"


def _errors(outcomes: Sequence[Retried | Failed]) -> dict[str, list[str]]:
    errors = [outcome.error for outcome in outcomes]
    return {
        "endings": [outcome.ending for outcome in outcomes],
        "summaries": [error.summary[:MAX_LAST_ERROR_CHARS] for error in errors],
        "error_classes": [error.class_path for error in errors],
        "fingerprints": [error.fingerprint for error in errors],
        "messages": [error.message for error in errors],
        "tracebacks": [error.traceback for error in errors],
    }


def _ids(outcomes: Iterable[Outcome]) -> list[int]:
    return [outcome.claim.job_id for outcome in outcomes]


def fences(claims: Iterable[Claim]) -> list[str]:
    """Return what the rows of *claims* look like while the claims hold."""
    return [f"{job_id}:{version}:running" for job_id, version in claims]
