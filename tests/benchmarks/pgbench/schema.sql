CREATE TABLE job (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_name varchar(128) NOT NULL DEFAULT 'default',
    task_path varchar(512) NOT NULL DEFAULT 'tests.benchmarks.project.tasks.noop',
    args jsonb NOT NULL DEFAULT '[]',
    kwargs jsonb NOT NULL DEFAULT '{}',
    status varchar(16) NOT NULL DEFAULT 'pending',
    priority smallint NOT NULL DEFAULT 0,
    available_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempts int NOT NULL DEFAULT 0,
    claimed_by varchar(255),
    claimed_at timestamptz,
    finished_at timestamptz
);
CREATE INDEX job_pending ON job (queue_name, priority DESC, available_at, id) WHERE status = 'pending';
CREATE INDEX job_running ON job (claimed_at) WHERE status = 'running';
