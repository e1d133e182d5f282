"""The benchmarks themselves: they answer in the agreed form, and make no figure of a run that lost or doubled a job."""

import json
import os
import subprocess
import sys

import pytest
from django.db import connection
from psycopg.conninfo import make_conninfo

from .benchmarks import __main__ as benchmarks
from .benchmarks.systems import PEERS, System, Variant
from .workers import ROOT

SLOPPY_WORKER = """
import signal, sys
from tests.benchmarks.record import record
for number in {numbers}:
    record(number)
signal.pause()
"""


@pytest.fixture
def server(transactional_db):
    """The suite's server, for --server."""
    parameters = connection.get_connection_params()
    return make_conninfo(
        **{name: parameters[name] for name in ("host", "port", "user", "password") if name in parameters}
    )


def databases_of_benchmarks():
    with connection.cursor() as cursor:
        cursor.execute("SELECT datname FROM pg_database WHERE datname LIKE 'pgqueue_bench_%'")
        return cursor.fetchall()


def test_a_drain_answers_in_the_agreed_form_and_leaves_nothing_behind(server, tmp_path):
    answer = tmp_path / "drain.json"
    words = ("drain", "--server", server, "--jobs", "200", "--runs", "1", "--variants", "sync-1", "--json", answer)

    subprocess.run([sys.executable, "-m", "tests.benchmarks", *words, "--data", tmp_path], cwd=ROOT, check=True)

    run = json.loads(answer.read_text())
    ours = next(result for result in run["results"] if result["system"] == "django_pgqueue")
    assert (run["benchmark"], ours["variant"], ours["runs"], ours["jobs"]) == ("drain", "sync-1", 1, 200)
    assert ours["jobs_per_s"] > 0
    assert {"cpu", "cores", "postgresql", "settings"} <= run["machine"].keys()
    assert [path.name for path in tmp_path.iterdir()] == ["drain.json"]
    assert databases_of_benchmarks() == []


class Sloppy(System):
    """A system without tables, whose worker records what it is told to."""

    name = "sloppy"
    variants = {"careless": Variant()}
    waiting_sql = "SELECT 0"
    numbers = ""

    def driver(self):
        return [sys.executable, "-c", "print('{}')"]

    def worker_commands(self, variant):
        return [[sys.executable, "-c", SLOPPY_WORKER.format(numbers=self.numbers)]]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ("[*range(49), 7]", "1 of 50 jobs were lost."),
        ("[*range(50), 7]", "50 jobs were run 51 times."),
    ],
    ids=["lost", "doubled"],
)
def test_a_run_that_lost_or_doubled_a_job_is_an_error(server, tmp_path, monkeypatch, numbers, words):
    monkeypatch.setitem(PEERS, "sloppy", Sloppy)
    monkeypatch.setattr(Sloppy, "numbers", numbers)
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    answer = tmp_path / "drain.json"
    flags = ["--server", server, "--jobs", "50", "--variants", "careless", "--data", os.fspath(tmp_path)]

    code = benchmarks.main(["drain", "--peers", "sloppy", *flags, "--json", os.fspath(answer)])

    [result] = json.loads(answer.read_text())["results"]
    assert code == 1
    assert result == {"system": "sloppy", "variant": "careless", "runs": 0, "error": words}


def test_a_report_tells_figures_errors_and_goals(tmp_path):
    machine = {"cpu": "a cpu", "cores": 2, "memory_gb": 8, "system": "Linux", "postgresql": "18", "python": "3.13"}
    machine |= {"django": "6.1", "psycopg": "3.3", "fdatasync_per_s": 1_000, "settings": {"fsync": "on"}}
    ours = {"system": "django_pgqueue", "variant": "sync-1", "runs": 3, "jobs_per_s": 41_234.5}
    ours["each"] = {"jobs_per_s": [40_000, 41_234.5, 43_000]}
    other = {"system": "graphile-worker", "variant": "async-1", "runs": 1, "jobs_per_s": 50_000, "each": {}}
    failed = {"system": "pgqueuer", "variant": "async-1", "runs": 0, "error": "1 of 50 jobs were lost."}
    file = tmp_path / "drain.json"
    file.write_text(json.dumps({"benchmark": "drain", "machine": machine, "results": [ours, other, failed]}))

    text = benchmarks.report([file], tmp_path / "plots")

    assert "| django_pgqueue | sync-1 | 41,234 (40,000 to 43,000) | 3 |" in text
    assert "| pgqueuer | async-1 | an error | 0 |" in text
    assert "| drain | sync-1 | jobs/s, over graphile-worker async-1 | 0.825 **missed** | ≥ 0.9 |" in text
    assert "<svg" in (tmp_path / "plots" / "drain.svg").read_text()
