"""The captures of the real PyTorch and CuPy are noticed; the stand-ins of
tests/test_capture_hooks.py say what else there is to the hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import numpy_rmm
from libraries import MODES, CupyCopies, Library, TorchCopies, is_installed
from numpy_rmm.testing import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

NBYTES = 1 << 20
PLACES = {"torch": "torch._C._CUDAGraph", "cupy": "cupy.cuda.stream._BaseStream"}


@pytest.fixture
def driver() -> Driver:
    if os.environ.get("NUMPY_RMM_TEST_GPU") != "1":
        pytest.skip("needs a GPU: set NUMPY_RMM_TEST_GPU=1 on a machine that has one")
    driver = Driver()
    driver.activate()
    return driver


@pytest.fixture(params=[TorchCopies, CupyCopies], ids=lambda library: library.name)
def library(request: pytest.FixtureRequest, driver: Driver) -> Library:
    if not is_installed(request.param.name):
        pytest.skip(f"{request.param.name} is not installed")
    made: Library = request.param(driver)
    return made


@contextmanager
def busy(driver: Driver) -> Iterator[int]:
    """A stream whose work stays pending, so that epochs would have to be closed."""
    stream = driver.create_stream()
    with driver.held(stream):
        yield stream
    driver.check(driver.cuStreamDestroy(stream))


def churn(driver: Driver, target: int, stream: int) -> None:
    """Page-locked arrays that die in use."""
    for value in range(40):
        array = np.full(NBYTES, value, np.uint8)
        driver.check(driver.cuMemcpyAsync(target, array.ctypes.data, NBYTES, stream))


def test_the_hooks_are_where_all_ways_meet(library: Library) -> None:
    hooks = numpy_rmm.info()["cuda"]["capture_hooks"]
    assert hooks[library.name] == PLACES[library.name]


@pytest.mark.parametrize("mode", MODES)
def test_arrays_may_come_and_go_during_a_capture(
    library: Library, driver: Driver, mode: str
) -> None:
    pool = numpy_rmm.mr.PoolMemoryResource(numpy_rmm.mr.PinnedHostMemoryResource())
    lane, target = library.open("non-blocking"), driver.allocate(NBYTES)
    device = library.device(NBYTES, lane)
    with numpy_rmm.use_handler(pool), busy(driver) as stream:
        staged = np.full(NBYTES, 7, np.uint8)
        with library.captured(lane, mode) as graph:
            library.queue("H2D", device, staged, lane)
            churn(driver, target, stream)
    graph.launch(lane)
    driver.check(driver.cuCtxSynchronize())
    assert set(driver.read(library.address(device), NBYTES)) == {7}
    graph.close()
    driver.check(driver.cuMemFree(target))


def test_the_context_manager_of_torch_is_noticed(driver: Driver) -> None:
    if not is_installed("torch"):
        pytest.skip("torch is not installed")
    library = TorchCopies(driver)
    torch = library.torch
    device = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    target, other_stream = driver.allocate(NBYTES), driver.create_stream()
    graph = torch.cuda.CUDAGraph()
    with numpy_rmm.pinned(), torch.cuda.graph(graph):
        device.copy_(torch.from_numpy(np.full(NBYTES, 7, np.uint8)), non_blocking=True)
        churn(driver, target, other_stream)
    others = [numpy_rmm.empty_pinned(NBYTES, np.uint8) for _ in range(20)]
    for other in others:
        other.fill(9)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((device == 7).all())
    driver.check(driver.cuMemFree(target))
