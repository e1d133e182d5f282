"""
What ``manage.py runworker`` starts.

    runworker ── supervisor: starts children, passes signals on, replaces the dead    (runs no task)
                   │  upkeep: renews the leases of what the children hold, recovers, prunes
                   │  listener: waits for notifications and wakes a child
                   ├─ child 1: control loop ── slots (threads; one event loop for async tasks)
                   └─ child N …

A child is a fresh interpreter. It publishes every claim it holds in memory shared with the supervisor,
before the task may start. So leases are renewed while tasks keep a child busy, and after its death it is
known what had started and what had not.
"""
