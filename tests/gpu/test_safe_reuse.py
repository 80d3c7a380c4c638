"""The hazard with the asynchronous copies of PyTorch, CuPy and numba, on a real GPU.

Each row runs the program of `hazards` on every kind of stream, with the library's own
copies; tests/test_safe_reuse.py has the driver's.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import hazards
import numpy_rmm
from hazards import KINDS, MIB, Case, held
from numpy_rmm.testing import Driver

pytestmark = [
    pytest.mark.gpu,
    # Of the libraries; ours are RuntimeWarnings and stay errors.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROW = ("library", "kind", "operation", "room", "nbytes")


def rows(reuse: str) -> list[Any]:
    return [
        pytest.param(
            library,
            *row,
            id="-".join(
                [library.name, *row[:3], numpy_rmm._core._format_nbytes(row[3])]
            ),
        )
        for library in hazards.PYTHON_LIBRARIES
        for row in hazards.rows(library, reuse, hazards.SIZES)
    ]


@pytest.fixture
def driver() -> Driver:
    if os.environ.get("NUMPY_RMM_TEST_GPU") != "1":
        pytest.skip("needs a GPU: set NUMPY_RMM_TEST_GPU=1 on a machine that has one")
    driver = Driver()
    driver.activate()
    if not hazards.has_managed(driver):
        pytest.skip("the CPU cannot touch managed memory while this device works")
    return driver


def library_or_skip(library: type[hazards.Library], driver: Driver) -> hazards.Library:
    if not hazards.is_installed(library.name):
        pytest.skip(f"{library.name} is not installed")
    return library(driver)


def outcomes(user: hazards.Library, **case: Any) -> dict[str, hazards.Outcome]:
    cases = {stream: Case(stream=stream, **case) for stream in hazards.STREAMS}
    if not all(map(hazards.fits, cases.values())):
        pytest.skip("too little memory")
    return {stream: hazards.run(user, case) for stream, case in cases.items()}


@pytest.mark.parametrize(ROW, rows("context"))
def test_no_byte_is_wrong(
    driver: Driver,
    library: type[hazards.Library],
    kind: str,
    operation: str,
    room: str,
    nbytes: int,
) -> None:
    found = outcomes(
        library_or_skip(library, driver),
        kind=kind,
        reuse="context",
        room=room,
        nbytes=nbytes,
        operation=operation,
    )
    assert {
        stream: outcome.wrong for stream, outcome in found.items()
    } == dict.fromkeys(hazards.STREAMS, 0)
    assert all(outcome.n_fresh > 0 for outcome in found.values())
    assert all(
        outcome.comes_back or outcome.waited or room == "waiting"
        for outcome in found.values()
    )
    if kind == "pinned":
        assert not any(outcome.waited for outcome in found.values())


@pytest.mark.parametrize(ROW, rows("immediate"))
def test_the_same_program_with_immediate_reuse_has_wrong_bytes(
    driver: Driver,
    library: type[hazards.Library],
    kind: str,
    operation: str,
    room: str,
    nbytes: int,
) -> None:
    found = outcomes(
        library_or_skip(library, driver),
        kind=kind,
        reuse="immediate",
        room=room,
        nbytes=nbytes,
        operation=operation,
    )
    # Where a library or the driver waits in a call on managed memory is no hazard.
    right = [
        stream
        for stream, outcome in found.items()
        if outcome.wrong == 0 and not (outcome.waited and kind == "managed")
    ]
    assert right == []


def test_one_array_with_a_finished_and_a_pending_copy(driver: Driver) -> None:
    """What our own finished copy says of the array says nothing of PyTorch's.

    Of a pinned one: PyTorch's copies of managed memory wait in the call.
    """
    user = library_or_skip(hazards.TorchCopies, driver)
    raw = hazards.DriverCopies(driver)
    pool = hazards.make_pool("pinned", "context", "full", MIB)
    handler = numpy_rmm.use_handler(pool).handler
    array = handler.run(np.empty, MIB, np.uint8)
    array[:] = hazards.pattern(MIB)
    slow, fast = user.open("non-blocking"), raw.open("non-blocking")
    theirs, ours = user.device(MIB, slow), raw.device(MIB, fast)
    with held(driver, slow.handle):
        user.queue("H2D", theirs, array, slow)
        raw.queue("H2D", ours, array, fast)
        driver.check(driver.cuStreamSynchronize(fast.handle))
        del array
        fresh = [handler.run(np.full, MIB, 255, np.uint8) for _ in range(2)]
        with pytest.raises(MemoryError):
            handler.run(np.empty, MIB, np.uint8)
    copy = np.frombuffer(driver.read(user.address(theirs), MIB), np.uint8)
    assert hazards.count_wrong(copy, hazards.pattern(MIB)) == 0
    assert all(hazards.count_wrong(other, 255) == 0 for other in fresh)
    fast.close()


@pytest.mark.parametrize("kind", KINDS)
def test_training_data_of_torch_arrives(driver: Driver, kind: str) -> None:
    """The loop that people write: a batch, ``cuda(non_blocking=True)``, the next."""
    user = library_or_skip(hazards.TorchCopies, driver)
    torch = user.torch
    pool = hazards.make_pool(kind, "context", "below", MIB)
    with numpy_rmm.use_handler(pool):
        batches = []
        for turn in range(1000):
            batch = np.full(MIB, turn % 251, np.uint8)
            batches.append(torch.from_numpy(batch).cuda(non_blocking=True))
    torch.cuda.synchronize()
    wrong = [
        turn
        for turn, batch in enumerate(batches)
        if not bool((batch == turn % 251).all())
    ]
    assert wrong == []
    if kind == "pinned":  # copies from managed memory migrate pages and take longer
        assert pool.statistics().reserved_bytes <= 128 * MIB
