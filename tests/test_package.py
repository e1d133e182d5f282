"""What is built from this tree, and what a project gets that installs it. Needs a package index."""

import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from .documents import ROOT
from .projects import Project, follow_quickstart

pytestmark = pytest.mark.slow
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def new_venv(directory, *requirements):
    """Make a virtual environment in which *requirements* are installed; return the folder of its programs."""
    venv.create(directory, with_pip=True, symlinks=True)
    programs = directory / "bin"
    pip = Project(directory, {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}, programs)
    pip.run("python", "-m", "pip", "install", "-qq", *map(str, requirements))
    pip.run("python", "-m", "pip", "check")
    return programs


# Of the session, since pytest-django runs the one test that has a database apart from the others.
@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder with the sdist, and the wheel that was built from it."""
    directory = tmp_path_factory.mktemp("built")
    programs = new_venv(tmp_path_factory.mktemp("build-env"), "build")
    Project(ROOT, {}, programs).run("python", "-m", "build", "--outdir", str(directory))
    return directory


@pytest.fixture(scope="session")
def wheel(built):
    [path] = built.glob("*.whl")
    return path


def files_of(directory):
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / directory).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    dist_info = {name for name in names if ".dist-info/" in name}

    assert names - dist_info == files_of("django_pgqueue")
    assert {name.partition("/")[2] for name in dist_info} == {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE"}


@pytest.mark.parametrize(
    "pattern",
    [
        "django_pgqueue/py.typed",
        "django_pgqueue/locale/de/LC_MESSAGES/django.mo",
        "django_pgqueue/management/commands/runworker.py",
        "django_pgqueue/migrations/0001_initial.py",
        "django_pgqueue/static/django_pgqueue/*.css",
        "django_pgqueue/templates/admin/django_pgqueue/*/*.html",
    ],
)
def test_the_wheel_has_what_is_not_imported_by_name(wheel, pattern):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    assert [name for name in names if Path(name).match(pattern)]


def test_the_sdist_has_what_is_needed_to_test_it(built):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}

    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "PKG-INFO", ".gitignore"}
    assert wanted <= names
    assert files_of("tests") | files_of("docs") | files_of("django_pgqueue") <= names
    assert {name.partition("/")[0] for name in names} - wanted == {
        "django_pgqueue",
        "docs",
        "example_project",
        "tests",
    }


def test_the_wheel_says_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        lines = archive.read(name).decode().splitlines()

    needed = {line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")}
    always = {requirement for requirement in needed if "extra ==" not in requirement}
    assert {f"Name: {METADATA['name']}", f"Version: {METADATA['version']}", "License-Expression: BSD-3-Clause"} <= {
        *lines
    }
    assert {requirement.split(";")[0].split(">")[0] for requirement in always} == {"django", "django-tasks", "psycopg"}


@pytest.mark.django_db
def test_a_project_in_a_clean_environment_runs_jobs_with_the_wheel(wheel, tmp_path):
    programs = new_venv(tmp_path / "clean-env", wheel, "psycopg[binary]")
    (tmp_path / "site").mkdir()

    project = follow_quickstart(tmp_path / "site", programs)

    assert project.run("python", "manage.py", "check").startswith("System check identified no issues")
    where = project.run("python", "-c", "import django_pgqueue; print(django_pgqueue.__file__)")
    assert where.startswith(str(programs.parent))
    assert sys.version_info[:2] == (3, 11) or "django-tasks" not in project.run("python", "-m", "pip", "freeze")
