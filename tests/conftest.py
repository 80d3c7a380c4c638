"""Fixtures for all tests: CUDA, and contexts that end as they began.

`cuda` is the simulated driver, or the real one where NUMPY_RMM_TEST_GPU=1: tests that
use it hold on both. What only the simulator can do takes `simulator`.
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from benchmark_runs import BENCHMARKS, command
from builds import release_build
from numpy_rmm import Stream, mr
from numpy_rmm.testing import Driver, SimulatedCuda, simulate_cuda

ON_GPU = os.environ.get("NUMPY_RMM_TEST_GPU") == "1"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def simulator() -> Iterator[SimulatedCuda]:
    """A simulated machine with one device."""
    if ON_GPU:
        pytest.skip("needs the simulated driver")
    with simulate_cuda() as machine:
        yield machine
        numpy_rmm._core._exchange_handler(None)
        numpy_rmm._core._reset_device_resources()
        gc.collect()  # an exception that a test caught keeps its frames in a cycle
        # A pool may outlive the driver in a fixture, and would wait for it in vain.
        numpy_rmm.trim()


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> Driver:
    """The calls of a CUDA driver that works here."""
    if ON_GPU:
        return Driver()
    machine: SimulatedCuda = request.getfixturevalue("simulator")
    return machine.driver


@pytest.fixture
def driver(cuda: Driver) -> Driver:
    """With the primary context current, which on a GPU is never let go of again."""
    cuda.activate()
    return cuda


@pytest.fixture
def pool() -> mr.PoolMemoryResource:
    """A pool of device memory that is nobody's current resource."""
    return mr.PoolMemoryResource(mr.CudaMemoryResource())


@pytest.fixture
def stream() -> Stream:
    """That does not wait for the default stream, nor it for this one."""
    return Stream(flags=1)


@pytest.fixture
def nothing_stays_locked(request: pytest.FixtureRequest) -> Iterator[None]:
    """When the test is over no pin has anything page-locked any more."""
    uses_cuda = {"cuda", "simulator"} & set(request.fixturenames)
    machine: SimulatedCuda | None = None
    if uses_cuda and not ON_GPU:
        machine = request.getfixturevalue("simulator")
    yield
    gc.collect()

    def n_left() -> int:
        nbytes: int = numpy_rmm.info()["system"]["page_locked_by_pin_nbytes"]
        return nbytes + (machine.outstanding()["registrations"][0] if machine else 0)

    for _ in range(100):
        if n_left() == 0:
            break
        numpy_rmm.trim()
        time.sleep(0.01)
    assert n_left() == 0
    if machine is not None:
        assert machine.faults() == []


@pytest.fixture
def counted(cuda: Driver) -> Iterator[mr.MemoryResource]:
    """The current resource of the first device, which counts."""
    cuda.activate()
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    resource = mr.StatisticsResourceAdaptor(pool)
    mr.set_per_device_resource(0, resource)
    yield resource
    mr.set_per_device_resource(0, None)


@pytest.fixture
def base(cuda: Driver) -> Iterator[mr.MemoryResource]:
    """Where the memory comes from in the end: what it has is counted."""
    cuda.activate()
    yield mr.CudaMemoryResource()
    mr.set_current_device_resource(None)
    gc.collect()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out what is marked slow, unless -m speaks of it."""
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


def pytest_collection_finish() -> None:
    """Most tests collect garbage, some several times: of what they made themselves, not
    of all that pytest has made of them."""
    gc.collect()
    gc.freeze()


# ---- handlers ------------------------------------------------------------------------

HOST_NAMES = ["host", "host_direct", "huge_pages"]
CUDA_NAMES = ["pinned", "pinned_direct", "managed", "managed_direct"]


@pytest.fixture(params=[*HOST_NAMES, *CUDA_NAMES])
def handler_name(request: pytest.FixtureRequest) -> str:
    """Every built-in name that can back a handler."""
    name: str = request.param
    if name in CUDA_NAMES:
        request.getfixturevalue("cuda")
    return name


@pytest.fixture
def handler(handler_name: str) -> Iterator[numpy_rmm.Handler]:
    """A handler over each of them that serves every size, set in the test's context."""
    threshold = 0 if handler_name.startswith("pinned") else None
    with numpy_rmm.use_handler(handler_name, threshold=threshold) as handler:
        yield handler


@pytest.fixture(autouse=True)
def numpy_default() -> Iterator[None]:
    """Each test begins and ends under NumPy's default handler, with nothing to warn
    of."""
    numpy_rmm.reset_handler(scope="process")
    yield
    numpy_rmm._core._reset_device_resources()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        numpy_rmm.reset_handler(scope="process")


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """Runs a program in a process of its own, under the simulator unless on a GPU."""

    def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(code))
        if not ON_GPU:
            environ.setdefault("NUMPY_RMM_CUDA_LIBRARY", "simulator")
        return subprocess.run(
            # From 3.12 on os.fork warns where a driver has threads, ours or not.
            [sys.executable, "-W", "ignore:This process:DeprecationWarning", script],
            env={**os.environ, **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


@pytest.fixture
def pattern() -> Callable[..., np.ndarray]:
    """Makes bytes that do not repeat in step with any power of two."""

    def make(nbytes: int, seed: int = 0) -> np.ndarray:
        period = ((np.arange(251) * 31 + seed) % 251).astype(np.uint8)
        return np.resize(period, nbytes)

    return make


# ---- benchmarks ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def nrm_bench() -> Path:
    """The C program, built as the suites build it, in a build that is here anyway."""
    done = command(
        "-c",
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import _compile; "
        f"from pathlib import Path; "
        f"print(_compile.program(Path({str(release_build())!r})))",
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports what lies in benchmarks/, and forgets it afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(BENCHMARKS) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]
