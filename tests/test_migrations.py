import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.db.migrations.executor import MigrationExecutor

from django_pgqueue.models import Job, JobAttempt, Worker
from django_pgqueue.states import FINISHED, LIVE, Status

from .helpers import claim_one, database_alias, enqueue, here

APP = "django_pgqueue"
MODELS = list(apps.get_app_config(APP).get_models())
LONGEST_NAME = 30


def names():
    """Every index and constraint that the models name."""
    return [rule.name for model in MODELS for rule in (*model._meta.indexes, *model._meta.constraints)]


# ---- the migrations themselves


def test_no_migration_is_missing(db):
    call_command("makemigrations", APP, check=True, dry_run=True, verbosity=0)


@pytest.mark.parametrize("language", ["de", "ar"])
def test_no_migration_is_missing_under_another_language(language):
    done = subprocess.run(
        [sys.executable, "-m", "django", "makemigrations", APP, "--check", "--dry-run"],
        env={**os.environ, "LANGUAGE_CODE": language},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout) == (0, f"No changes detected in app '{APP}'\n"), done.stderr


@pytest.fixture
def empty_schema():
    """An alias whose connection sees an empty schema of the test database."""
    here("CREATE SCHEMA migrating")
    with database_alias("migrating", options="-c search_path=migrating") as elsewhere:
        yield elsewhere
    here("SET client_min_messages = warning; DROP SCHEMA migrating CASCADE; RESET client_min_messages")


def tables():
    return {name for (name,) in here("SELECT tablename FROM pg_tables WHERE schemaname = 'migrating'")}


@pytest.mark.django_db(transaction=True)
def test_all_migrations_can_be_undone_and_done_again(empty_schema):
    latest = MigrationExecutor(empty_schema).loader.graph.leaf_nodes(APP)
    counts = []

    for target in (latest, [(APP, None)], latest):
        MigrationExecutor(empty_schema).migrate(target)
        counts.append(len(tables() - {"django_migrations"}))

    assert counts == [len(MODELS), 0, len(MODELS)]


@pytest.mark.django_db(transaction=True)
def test_no_migration_names_a_schema(empty_schema):
    """The tables of another schema are the same, down to their indexes, and none is elsewhere."""
    MigrationExecutor(empty_schema).migrate(MigrationExecutor(empty_schema).loader.graph.leaf_nodes(APP))

    described = [
        here(
            "SELECT replace(indexdef, schemaname || '.', '') FROM pg_indexes"
            " WHERE schemaname = %s AND tablename LIKE 'django_pgqueue%%' ORDER BY 1",
            [schema],
        )
        for schema in ("public", "migrating")
    ]

    assert described[0] == described[1] != []


def test_every_migration_has_one_for_the_way_back():
    folder = Path(import_module(f"{APP}.migrations").__path__[0])
    modules = [import_module(f"{APP}.migrations.{path.stem}") for path in folder.glob("0*.py")]

    operations = [operation for module in modules for operation in module.Migration.operations]

    assert operations
    assert all(operation.reversible for operation in operations)


# ---- names


def test_every_index_and_constraint_is_named_by_us_within_the_limit():
    assert all(name.startswith("pgqueue_") and len(name) <= LONGEST_NAME for name in names())
    assert len(set(names())) == len(names())


def test_the_database_knows_them_by_these_names(db):
    in_database = {
        name
        for (name,) in here(
            "SELECT conname FROM pg_constraint WHERE conrelid::regclass::text LIKE 'django_pgqueue%%'"
            " UNION SELECT indexname FROM pg_indexes WHERE tablename LIKE 'django_pgqueue%%'"
        )
    }

    assert set(names()) <= in_database


def test_every_table_has_the_apps_name():
    assert {model._meta.db_table for model in MODELS} == {f"{APP}_{model._meta.model_name}" for model in MODELS}


def test_ids_are_big_and_given_by_the_database(db):
    identities = here(
        "SELECT table_name::text, data_type::text, is_identity::text FROM information_schema.columns"
        " WHERE table_name LIKE 'django_pgqueue%%' AND column_name = 'id'"
    )

    assert sorted(identities) == sorted((model._meta.db_table, "bigint", "YES") for model in MODELS)


def test_the_table_of_jobs_is_vacuumed_early(db):
    """R32"""
    [(options,)] = here("SELECT reloptions FROM pg_class WHERE oid = 'django_pgqueue_job'::regclass")

    assert "autovacuum_vacuum_scale_factor=0.01" in options
    assert "autovacuum_analyze_scale_factor=0.05" in options


def test_a_row_written_by_hand_has_the_moments_of_the_clock(db):
    """R02"""
    job = Job.objects.create(backend="default", queue_name="default", task_path="tests.app.tasks.add")
    job.refresh_from_db()

    [(began,)] = here("SELECT now()")
    assert min(job.available_at, job.created_at) > began


# ---- permissions and words


def test_only_what_a_person_may_do_is_a_permission():
    assert {model._meta.default_permissions for model in MODELS} == {("view",)}
    assert {model: [name for name, _ in model._meta.permissions] for model in MODELS if model._meta.permissions} == {
        Job: ["requeue_job", "cancel_job", "hold_job"]
    }


def test_every_word_that_people_see_can_be_translated():
    def is_lazy(text):
        return not text or hasattr(text, "__proxy__") or type(text).__name__ == "__proxy__"

    words = [
        (model._meta.model_name, getattr(field, "name", ""), text)
        for model in MODELS
        for field in model._meta.fields
        for text in (field.verbose_name, field.help_text)
    ]
    words += [(model._meta.model_name, "", model._meta.verbose_name) for model in MODELS]
    words += [(model._meta.model_name, "", model._meta.verbose_name_plural) for model in MODELS]

    assert [word for word in words if not is_lazy(word[-1])] == []


# ---- what the database refuses


def refused(constraint):
    return pytest.raises(IntegrityError, match=f'constraint "{constraint}"')


def update(job_id, **changes):
    with transaction.atomic():
        Job.objects.filter(pk=job_id).update(**changes)


@pytest.mark.parametrize("status", ["", "PENDING", "unknown", "succeeded"])
def test_a_status_that_does_not_exist_is_refused(db, status):
    """R02"""
    with refused("pgqueue_job_(status|finished_at)"):
        update(enqueue(), status=status)


@pytest.mark.parametrize("priority", [-101, 101, 32_767])
def test_a_priority_beyond_100_is_refused(db, priority):
    """R05"""
    with refused("pgqueue_job_priority"):
        update(enqueue(), priority=priority)


@pytest.mark.parametrize("changes", [{"attempts": -1}, {"max_attempts": 0}, {"max_attempts": -1}])
def test_impossible_attempts_are_refused(db, changes):
    with refused("pgqueue_job_attempts"):
        update(enqueue(), **changes)


@pytest.mark.parametrize("status", FINISHED)
def test_a_finished_job_has_a_moment_of_its_end(db, status):
    with refused("pgqueue_job_finished_at"):
        update(enqueue(), status=status)


@pytest.mark.parametrize("status", LIVE)
def test_a_live_job_has_none(db, status):
    job_id = enqueue()
    claim_one()
    [(now,)] = here("SELECT now()")
    lease = {} if status == Status.RUNNING else {"lease_until": None}

    with refused("pgqueue_job_finished_at"):
        update(job_id, status=status, finished_at=now, **lease)


@pytest.mark.parametrize("missing", ["lease_until", "claimed_by", "claimed_at"])
def test_a_running_job_has_an_owner_and_a_lease(db, missing):
    job_id = enqueue()
    claim_one()

    with refused("pgqueue_job_lease"):
        update(job_id, **{missing: None})


@pytest.mark.parametrize("status", ["pending", "blocked", "held", "done", "failed", "cancelled"])
def test_no_other_job_has_a_lease(db, status):
    job_id = enqueue()
    claim_one()
    [(now,)] = here("SELECT now()")

    with refused("pgqueue_job_lease"):
        update(job_id, status=status, finished_at=now if status in FINISHED else None)


def test_a_key_belongs_to_one_live_job_of_a_task(db):
    first, second, third = (enqueue() for _ in range(3))
    update(first, job_key="order-1")
    [(now,)] = here("SELECT now()")

    with refused("pgqueue_job_key"):
        update(second, job_key="order-1")
    update(second, job_key="order-1", task_path="tests.app.tasks.echo")
    update(first, status="failed", finished_at=now)
    update(third, job_key="order-1")


def test_one_claim_has_one_record(db):
    job_id = enqueue()
    record = {
        **{"job_id": job_id, "claim_version": 1, "attempt": 1, "outcome": "error", "counted": True},
        **{"error_class": "E", "fingerprint": "f", "message": "", "traceback": "", "worker": "w"},
    }
    [(now,)] = here("SELECT now()")
    JobAttempt.objects.create(**record, started_at=now, ended_at=now)

    with pytest.raises(IntegrityError, match='"pgqueue_attempt_claim"'), transaction.atomic():
        JobAttempt.objects.create(**record, started_at=now, ended_at=now)


def test_a_workers_name_is_its_own(db):
    Worker.objects.create(name="w", hostname="h", process_id=1, queues="*", concurrency=1)

    with pytest.raises(IntegrityError, match='"pgqueue_worker_name"'), transaction.atomic():
        Worker.objects.create(name="w", hostname="h", process_id=2, queues="*", concurrency=1)


def test_deleting_a_job_deletes_its_records(db):
    job_id = enqueue()
    here(
        "INSERT INTO django_pgqueue_jobattempt (job_id, claim_version, attempt, outcome, counted, error_class,"
        " fingerprint, message, traceback, worker, started_at, ended_at)"
        " VALUES (%s, 1, 1, 'error', true, '', '', '', '', '', now(), now())",
        [job_id],
    )

    Job.objects.filter(pk=job_id).delete()

    assert not JobAttempt.objects.exists()
    connection.check_constraints()
