"""Forks beside page-locked memory, on a real GPU: see forks.py, which this runs.

NUMPY_RMM_FORK_JSON names a file that all figures are written to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ON_GPU = os.environ.get("NUMPY_RMM_TEST_GPU") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU, reason="needs a GPU: NUMPY_RMM_TEST_GPU=1 on a machine with one"
    ),
    pytest.mark.timeout(600),
]

PROGRAM = Path(__file__).with_name("forks.py")
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = Path(
        os.environ.get("NUMPY_RMM_FORK_JSON")
        or tmp_path_factory.mktemp("forks") / "forks.json"
    )
    done = subprocess.run(
        [sys.executable, PROGRAM, "--json", path],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert path.exists(), done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def rows(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    errors = [row for row in report["rows"] if "error" in row]
    assert errors == []
    return {(row["part"], row["row"]): row for row in report["rows"]}


def test_idle_memory_does_not_slow_a_fork_down(rows: Any) -> None:
    nothing, idle = rows["fork", "nothing"], rows["fork", "idle"]
    assert idle["nbytes"] == 4 * GIB
    assert idle["seconds"][0] <= 2 * nothing["seconds"][0]


@pytest.mark.parametrize("name", ["idle", "kept", "busy", "live_dontfork"])
def test_the_child_has_little_more(rows: Any, name: str) -> None:
    assert rows["fork", name]["rss"] < rows["fork", "nothing"]["rss"] + 200 * MIB


def test_a_live_array_is_copied(rows: Any) -> None:
    """Otherwise nothing was locked, and the tests above prove nothing."""
    live = rows["fork", "live"]
    assert live["own"] >= live["nbytes"]


@pytest.mark.parametrize("name", ["ordinary", "live", "shared"])
def test_forked_workers_read_a_large_array(rows: Any, name: str) -> None:
    """They compare what they read themselves; a copy in each is what it may cost."""
    row = rows["workers", name]
    assert row["nbytes"] == GIB
    assert (row["own"] >= 4 * GIB) == (name == "live")


def test_all_is_as_documented(report: dict[str, Any]) -> None:
    assert report["problems"] == []
