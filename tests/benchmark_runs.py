"""What the tests of the benchmarks share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
Record = dict[str, Any]


def command(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def run_suite(path: Path, suite: str, *options: str | Path, **environ: str) -> Record:
    words = [BENCHMARKS / "run.py", suite, "--quick", "--rounds", "1"]
    done = command(*words, "--json", path, *options, **environ)
    assert done.returncode == 0, done.stderr
    record: Record = json.loads(path.read_text())
    record["printed"] = done.stdout
    return record


def cases(record: Record) -> Iterator[tuple[Record, Record]]:
    for table in record["tables"]:
        for case in table["cases"]:
            yield table, case


def table_of(key: str, name: str, **ways: float) -> Record:
    suite_name, _, key = key.partition("/")
    found = {
        way: {"median": value, "p99": 2 * value, "extra": {"times_one_thread": value}}
        for way, value in ways.items()
    }
    case = {"name": name, "ways": found, "failed": {}}
    return {"suite": suite_name, "key": key, "cases": [case], "not_measured": {}}


def shared_library(code: str, folder: Path) -> Path:
    source, library = folder / "library.c", folder / "liblibrary.so"
    source.write_text(code)
    build = ["cc", "-shared", "-fPIC", "-fno-builtin", "-o", library, source]
    subprocess.run(build, check=True)
    return library
