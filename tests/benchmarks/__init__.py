"""
What the queue costs, beside others and beside what PostgreSQL itself can do, on one private, durable server.

    python -m tests.benchmarks drain --peers graphile-worker,pgqueuer,django-tasks-db --json drain.json

docs/benchmarks.md has the method and the results. Reading order: `server`, `systems` (who is measured, and how it is
run), `record` (what is counted), `bench` (turns, medians, checks), then a module for each benchmark.
"""
