"""
Where the other systems are installed: each in a folder of its own, made when it is first asked for.

The folders lie under $BENCH_HOME, else in .venv/benchmarks of this checkout, and may be deleted at any time. A folder
whose list of packages has changed is made anew.
"""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def home() -> Path:
    return Path(os.environ.get("BENCH_HOME") or ROOT / ".venv" / "benchmarks").absolute()


def python_with(name: str, packages: Sequence[str]) -> str:
    """Return the interpreter of the virtual environment *name*, in which *packages* are installed."""

    def install(folder: Path) -> None:
        venv.create(folder, with_pip=True, symlinks=True)
        _run(folder / "bin/python", "-m", "pip", "install", "--disable-pip-version-check", "-qq", *packages)

    version = f"python {sys.version_info.major}.{sys.version_info.minor}"
    return os.fspath(_folder(name, [version, *packages], install) / "bin/python")


def node_with(name: str, packages: Sequence[str]) -> tuple[str, Path]:
    """Return Node and the folder ``node_modules`` with *packages*, among which is the npm package ``node``."""

    def install(folder: Path) -> None:
        folder.mkdir()
        _run("npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", folder, *packages)

    modules = _folder(name, packages, install) / "node_modules"
    return os.fspath(modules / ".bin/node"), modules


def _folder(name: str, packages: Sequence[str], install: Callable[[Path], None]) -> Path:
    folder = home() / name
    wanted = "\n".join(packages)
    made = folder / "packages.txt"
    if not made.exists() or made.read_text() != wanted:
        print(f"Installing {', '.join(packages)} into {folder}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        install(folder)
        made.write_text(wanted)
    return folder


def _run(*command: str | Path) -> None:
    done = subprocess.run([*map(os.fspath, command)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
