"""The machine that a figure comes from."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import django
import psycopg

from .server import Databases, memory_bytes

SHOWN_SETTINGS = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "shared_preload_libraries")


def describe(databases: Databases) -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_at_start": round(os.getloadavg()[0], 2),
        "fdatasync_per_s": _fdatasyncs(databases.directory),
        "python": platform.python_version(),
        "django": django.get_version(),
        "psycopg": psycopg.__version__,
        "postgresql": databases.value("postgres", "SHOW server_version"),
        "settings": {name: databases.value("postgres", f"SHOW {name}") for name in SHOWN_SETTINGS},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _fdatasyncs(directory: Path, seconds: float = 0.5) -> int:
    """How often a second 8 kB reach the disk on which the server's files are: the bound of one commit after another."""
    path = directory / "fdatasync"
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    count, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        os.pwrite(file, b"x" * 8192, 0)
        os.fdatasync(file)
        count += 1
    os.close(file)
    path.unlink()
    return int(count / seconds)
