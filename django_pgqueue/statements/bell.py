"""
Ring for workers that sleep, and only for those.

PostgreSQL makes all transactions that notify commit one after the other, so that a notification for every
enqueue would be paid by everyone who commits. A worker that is about to sleep therefore holds a session's
advisory lock, exclusive; who makes jobs pending tries the same lock *shared, for the transaction*, in the
statement that does so, and notifies where the try fails. Who got it holds it to the end of the transaction:
nobody falls asleep while jobs are in flight of which nobody was told. Who falls asleep looks for jobs
once more when the lock is there, and then all that is missed would have rung.

Locks have two numbers: the OID of the jobs' table as the `search_path` finds it, so that queues in other
schemas are other locks, and a place below. One lock for each of 64 groups of queues, and one for all
workers that wait for jobs of more queues than they can name.
"""

from typing import Literal

from .database import CHANNEL

Notify = Literal["asleep", "always", "never"]  # whom an enqueue notifies: the option NOTIFY

ANY_KEY = 64  # of workers of all queues, of all but some, or of many

TABLE = "'django_pgqueue_job'::regclass::oid::int"
KEY = "hashtext(queue_name) & 63"

# Of a row with *queue_name* and *available_at*. A worker that sleeps looks by itself before anything becomes due
# that is further away. One group's lock is enough to know that someone sleeps, and then the other is not needed.
RING_IF_ASLEEP = f"""
CASE WHEN available_at < clock_timestamp() + interval '60 s'
      AND NOT (pg_try_advisory_xact_lock_shared({TABLE}, {KEY})
               AND pg_try_advisory_xact_lock_shared({TABLE}, {ANY_KEY}))
     THEN pg_notify('{CHANNEL}', queue_name) END
"""

# The same where the option NOTIFY is at hand.
RING = f"""
CASE WHEN %(notify)s::text <> 'never'
      AND available_at < clock_timestamp() + interval '60 s'
      AND (%(notify)s::text = 'always'
           OR NOT (pg_try_advisory_xact_lock_shared({TABLE}, {KEY})
                   AND pg_try_advisory_xact_lock_shared({TABLE}, {ANY_KEY})))
     THEN pg_notify('{CHANNEL}', queue_name) END
"""
