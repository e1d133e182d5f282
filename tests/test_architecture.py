"""What the code may know of itself, read from the code: imports point down, and some names stand in one place only."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import django_pgqueue

PACKAGE = "django_pgqueue"
ROOT = Path(django_pgqueue.__file__).parent
MAX_LINES = 450

# From the top to the bottom. A module may import from its own layer and from those below.
LAYERS = [
    ("backend", "admin", "checks", "testing", "health", "apps", "management", "migrations"),
    ("worker",),
    ("results",),
    ("models", "managers"),
    ("statements",),
    ("registry", "tasks"),
    ("payload", "conf", "states", "compat", "functions"),
    ("outcomes", "backoff", "exceptions"),
]
HEIGHT = {name: -place for place, names in enumerate(LAYERS) for name in names}


def module_name(path: Path) -> str:
    parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
FRONT = PACKAGE  # the package's own __init__, which imports what users import


def imports(name: str) -> Iterator[str]:
    """Yield every module that *name* imports, wherever in its code, but for those that only type checkers import."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _walk_run_time(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                member = f"{base}.{alias.name}"
                yield member if member in MODULES or not base.startswith(PACKAGE) else base


def _walk_run_time(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and child in node.body:
            continue
        yield from _walk_run_time(child)


def inside(name: str) -> list[str]:
    """The modules of this package that *name* imports."""
    return [imported for imported in imports(name) if imported in MODULES and imported != FRONT]


def layer(name: str) -> str:
    return name.split(".")[1]


def names_of(*layers: str) -> list[str]:
    return [name for name in MODULES if name != FRONT and layer(name) in layers]


def test_every_module_has_its_layer():
    assert [name for name in MODULES if name != FRONT and layer(name) not in HEIGHT] == []


def test_imports_point_down():
    upward = [
        f"{name} imports {imported}"
        for name in MODULES
        if name != FRONT
        for imported in inside(name)
        if HEIGHT[layer(imported)] > HEIGHT[layer(name)]
    ]

    assert upward == []


def test_no_two_modules_want_each_other():
    graph = {name: set(inside(name)) - {name} for name in MODULES}

    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, naming them

    assert len(order) == len(MODULES)


def test_nothing_imports_the_front():
    assert [name for name in MODULES if FRONT in imports(name)] == []


def test_plain_helpers_know_nothing_of_django():
    django = [
        f"{name} imports {imported}"
        for name in names_of("outcomes", "backoff", "exceptions")
        for imported in imports(name)
        if imported.split(".")[0] in ("django", "django_tasks", "psycopg")
    ]

    assert django == []


def test_what_is_imported_while_apps_load_knows_nothing_of_the_app_registry():
    registry = [
        f"{name} imports {imported}"
        for name in names_of("payload", "conf", "states", "compat", "functions", "statements")
        for imported in imports(name)
        if imported.startswith("django.apps")
    ]

    assert registry == []


@pytest.mark.parametrize(
    ("imported", "reader"), [("django.conf", "conf"), ("django.tasks", "compat"), ("django_tasks", "compat")]
)
def test_some_modules_are_imported_in_one_place_only(imported, reader):
    importers = {name for name in MODULES for module in imports(name) if f"{module}.".startswith(f"{imported}.")}

    assert importers - {f"{PACKAGE}.{reader}"} == set()


def test_only_compat_knows_that_there_are_two_frameworks():
    named = [
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in ("django.tasks", "django_tasks")
    ]

    assert set(named) == {f"{PACKAGE}.compat"}


def test_no_module_has_grown_too_long():
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}

    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
