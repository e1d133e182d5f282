"""
What ``manage.py runworker`` starts.

    runworker ── supervisor: starts the child, passes signals on, restarts it     (runs no task)
                   │  upkeep: renews the leases of what the child holds, recovers, prunes
                   │  listener: waits for notifications and wakes the child
                   └─ child: control loop ── slots (threads; one event loop for async tasks)

The child is a fresh interpreter. It publishes every claim it holds in memory shared with the supervisor,
before the task may start. So leases are renewed while tasks keep the child busy, and after its death it is
known what had started and what had not.
"""
