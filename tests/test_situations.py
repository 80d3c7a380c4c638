"""The hazard with captures, graphs, endless kernels and devices, without a GPU.

The situations are those that tests/gpu/test_situations.py plays with the libraries on a
real one; here the simulated driver's own calls do it.
"""

from __future__ import annotations

import pytest

import situations
from libraries import MODES, DriverCopies
from numpy_rmm.testing import SimulatedCuda, simulate_cuda

OPERATIONS = ["H2D", "D2H"]


@pytest.fixture
def library(simulator: SimulatedCuda) -> DriverCopies:
    simulator.driver.activate()
    return DriverCopies(simulator.driver)


@pytest.fixture(autouse=True)
def few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU there are a hundred."""
    monkeypatch.setattr(situations, "N_LAUNCHES", 3)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_graph_may_be_launched_when_its_array_is_dead(
    library: DriverCopies, operation: str
) -> None:
    found = situations.graph_after_the_array(library, operation)
    assert found.wrong == 0
    assert found.n_returned == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_same_graph_with_immediate_reuse_has_wrong_bytes(
    library: DriverCopies, operation: str
) -> None:
    found = situations.graph_after_the_array(library, operation, reuse="immediate")
    assert found.wrong > 0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_a_capture_in_another_thread_goes_on(
    library: DriverCopies, mode: str, operation: str
) -> None:
    assert situations.capture_beside(library, operation, mode).wrong == 0


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "play",
    [
        situations.finished_copy_of_ours,
        situations.pool_dies,
        situations.kernel_without_end,
    ],
)
def test_no_byte_is_wrong(library: DriverCopies, play: object, operation: str) -> None:
    assert play(library, operation).wrong == 0  # type: ignore[operator]


def test_a_device_may_be_activated_later() -> None:
    with simulate_cuda(devices=2) as machine:
        machine.driver.activate()
        assert situations.device_activated_later(machine.driver).wrong == 0
