"""examples/hazard.py runs, and says what it is there to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
ON_A_GPU = os.environ.get("NUMPY_RMM_TEST_GPU") == "1"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(EXAMPLES / arguments[0]), *arguments[1:]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_hazard_does_not_reach_our_arrays(tmp_path: Path) -> None:
    done = run("hazard.py", "--simulator", "--json", str(tmp_path / "hazard.json"),
               "--svg", str(tmp_path / "hazard.svg"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 of 18 wrong" in done.stdout
    outcomes = json.loads((tmp_path / "hazard.json").read_text())["outcomes"]
    assert len(outcomes) == 18
    assert {outcome["wrong_nbytes"] for outcome in outcomes} == {0}
    assert (tmp_path / "hazard.svg").read_text().count("<title>") == 18


def test_the_hazard_shows_where_memory_is_used_again_at_once() -> None:
    done = run("hazard.py", "--simulator", NUMPY_RMM_REUSE="immediate")
    assert done.returncode == 1, done.stderr
    assert "18 of 18 wrong" in done.stdout


def test_the_hazard_names_the_sizes_that_it_knows() -> None:
    done = run("hazard.py", "--simulator", "--sizes", "1 MiB,2 MiB")
    assert done.returncode == 2
    assert "'1 MiB,2 MiB'; known: 64 KiB, 1 MiB, 32 MiB" in done.stderr


def test_without_a_gpu_the_hazard_says_what_it_needs() -> None:
    done = run("hazard.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("A GPU is needed, or --simulator: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.timeout(300)  # it imports what is installed, beside other tests
@pytest.mark.skipif(not ON_A_GPU, reason="needs a GPU (NUMPY_RMM_TEST_GPU=1)")
def test_on_a_gpu_every_installed_library_copies_our_arrays_in_safety() -> None:
    done = run("hazard.py", "--sizes", "64 KiB")
    assert done.returncode == 0, done.stdout + done.stderr
    ours = next(line for line in done.stdout.splitlines() if "numpy_rmm" in line)
    assert " 0 of 6 wrong" in ours
