"""RMM's names for what is here, and the script that runs RMM's own tests with them.

With NUMPY_RMM_RMM_CHECKOUT, a folder with RMM's source, those run too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPAT = Path(__file__).with_name("compat")
RUN = COMPAT / "run.py"
CHECKOUT = os.environ.get("NUMPY_RMM_RMM_CHECKOUT")


def python(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """From a folder with nothing to import, and as if no pytest ran."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=COMPAT,
        env=environ,
    )


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return python(RUN, *arguments)


def test_the_package_is_renames_only() -> None:
    lines = [path.read_text().count("\n") for path in (COMPAT / "rmm").rglob("*.py")]
    assert sum(lines) <= 60


PROGRAM = """
import os, sys
os.environ["NUMPY_RMM_CUDA_LIBRARY"] = "simulator"
sys.path.insert(0, sys.argv[1])
import numpy_rmm, rmm, rmm.mr, rmm.statistics
from rmm.mr import CudaMemoryResource, get_current_device_resource
from rmm.pylibrmm.cuda_stream_pool import CudaStreamPool
from rmm.pylibrmm.device_buffer import DeviceBuffer, to_device
from rmm.pylibrmm.logger import level_enum
from rmm.pylibrmm.memory_resource._memory_resource import PoolMemoryResource
from rmm.pylibrmm.stream import DEFAULT_STREAM, Stream
assert rmm.DeviceBuffer is DeviceBuffer is numpy_rmm.DeviceBuffer
assert CudaStreamPool is numpy_rmm.StreamPool
assert type(get_current_device_resource()) is CudaMemoryResource
assert type(to_device(b"abc")) is DeviceBuffer
assert rmm.pylibrmm.stream.Stream is Stream
"""


def test_the_names_lead_here() -> None:
    done = python("-c", PROGRAM, COMPAT)
    assert done.returncode == 0, done.stderr


TESTS = {
    "conftest.py": "import rmm\n",
    "test_helpers.py": "from numba import cuda\n",
    "test_one.py": "import rmm\ndef test_good(): rmm.DeviceBuffer(size=5)\n",
    "test_two.py": "import test_helpers\n",
    "test_three.py": "import pytest\ntorch = pytest.importorskip('torch')\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What looks like RMM's source, with one test that can run here."""
    folder = tmp_path / "python" / "rmm" / "rmm" / "tests"
    folder.mkdir(parents=True)
    for name, text in TESTS.items():
        (folder / name).write_text(text)
    settings = tmp_path / "python" / "rmm" / "pyproject.toml"
    settings.write_text('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n')
    return tmp_path


def test_what_cannot_run_here_is_left_out(checkout: Path) -> None:
    done = run(checkout)
    assert "left out: test_two.py wants numba" in done.stdout
    assert "left out: test_three.py wants torch" in done.stdout
    assert "1 of 1 passed, 100.0%" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failure_that_is_not_listed_is_one(checkout: Path) -> None:
    path = checkout / "python/rmm/rmm/tests/test_one.py"
    path.write_text(path.read_text() + "def test_bad(): assert 1 == 2\n")
    done = run(checkout)
    assert done.returncode == 1
    assert "failed: test_one.py::test_bad: assert 1 == 2" in done.stdout


def test_what_is_listed_must_fail(checkout: Path) -> None:
    path = checkout / "python/rmm/rmm/tests/test_callback_memory_resource.py"
    name = "test_callback_mr_error"
    good = "import pytest\n@pytest.mark.parametrize('x', ['Exception-RuntimeError'])\n"
    good += f"def {name}(x): "
    path.write_text(good + "pass\n")
    done = run(checkout)
    assert done.returncode == 1
    assert (
        f"passed, and README.md says that it fails: {path.name}::{name}" in done.stdout
    )
    path.write_text(good + "raise Exception\n")
    done = run(checkout)
    assert f"known: {path.name}::{name}" in done.stdout


def test_a_folder_without_tests_is_no_checkout(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert "is no checkout of RMM" in done.stderr


@pytest.mark.skipif(CHECKOUT is None, reason="NUMPY_RMM_RMM_CHECKOUT is not set")
def test_rmms_own_tests_pass() -> None:
    gpu = ["--gpu"] if os.environ.get("NUMPY_RMM_TEST_GPU") == "1" else []
    done = run(str(CHECKOUT), *gpu)
    assert done.returncode == 0, done.stdout + done.stderr
