"""
Every statement that changes a job, as a constant beside the function that runs it: a connection in, rows out.

A connection is anything with a DB-API ``cursor()`` from psycopg 3: Django's wrapper, in the caller's
transaction, or a worker's own. Names are unqualified, so ``search_path`` decides the schema. The
functions begin and end no transaction; `managers` and the worker do.

Two rules hold throughout. A claim is ended only through a *fence*, the text ``id:version:status`` compared
with an array: no planner can turn that into a join or move it to a partial index, which made a plain
``status = 'running'`` eight times slower. And statements for many rows lock them with SKIP LOCKED, or
in the order of their ids, so that they never wait for each other in a circle.
"""
