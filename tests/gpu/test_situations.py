"""Captures, graphs, kernels without end and devices, with the libraries on a GPU."""

from __future__ import annotations

import ctypes
import os

import pytest

import hazards
import situations
from libraries import MODES, PYTHON_LIBRARIES, DriverCopies, Library
from numpy_rmm.testing import Driver
from situations import LONGEST_CALL

pytestmark = [
    pytest.mark.gpu,
    # Of the libraries; ours are RuntimeWarnings and stay errors.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

OPERATIONS = ["H2D", "D2H"]


@pytest.fixture
def driver() -> Driver:
    if os.environ.get("NUMPY_RMM_TEST_GPU") != "1":
        pytest.skip("needs a GPU: set NUMPY_RMM_TEST_GPU=1 on a machine that has one")
    driver = Driver()
    driver.activate()
    return driver


@pytest.fixture(
    params=[DriverCopies, *PYTHON_LIBRARIES], ids=lambda library: library.name
)
def library(request: pytest.FixtureRequest, driver: Driver) -> Library:
    kind: type[Library] = request.param
    if kind in PYTHON_LIBRARIES and not hazards.is_installed(kind.name):
        pytest.skip(f"{kind.name} is not installed")
    return kind(driver)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_a_graph_may_be_launched_when_its_array_is_dead(
    library: Library, mode: str, operation: str
) -> None:
    found = situations.graph_after_the_array(library, operation, mode)
    assert found.wrong == 0
    assert found.n_returned == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_same_graph_with_immediate_reuse_has_wrong_bytes(
    library: Library, operation: str
) -> None:
    found = situations.graph_after_the_array(library, operation, reuse="immediate")
    assert found.wrong > 0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_a_capture_in_another_thread_goes_on(
    library: Library, mode: str, operation: str
) -> None:
    assert situations.capture_beside(library, operation, mode).wrong == 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_finished_copy_of_ours_says_nothing_of_theirs(
    library: Library, operation: str
) -> None:
    assert situations.finished_copy_of_ours(library, operation).wrong == 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_pool_may_die_while_their_copy_is_pending(
    library: Library, operation: str
) -> None:
    assert situations.pool_dies(library, operation).wrong == 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_beside_a_kernel_without_end_only_the_first_call_waits(
    library: Library, operation: str
) -> None:
    found = situations.in_a_fresh_process(library, operation)
    assert found.wrong == 0
    assert found.slowest <= LONGEST_CALL


def test_a_device_may_be_activated_later(driver: Driver) -> None:
    n_devices = ctypes.c_int()
    driver.check(driver.cuDeviceGetCount(ctypes.byref(n_devices)))
    if n_devices.value < 2:
        pytest.skip("needs two GPUs")
    assert situations.device_activated_later(driver).wrong == 0
