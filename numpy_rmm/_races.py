"""Marks and checks for the simulated driver's checker of order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from numpy_rmm import _simulator

if TYPE_CHECKING:
    from ctypes import CDLL

    import numpy as np
    from typing_extensions import Buffer


def _checker() -> CDLL | None:
    """The controls of a simulated driver that is in use and checks, or None."""
    from numpy_rmm import _core

    if not _simulator.active and not _core._cuda_driver()["simulated"]:
        return None
    controls = _simulator.controls()
    return controls if controls.nrm_cudasim_checks() else None


def _pieces(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """The parts of an array whose bytes lie side by side."""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        yield array
    elif array.ndim == 1:
        for i in range(len(array)):
            yield array[i : i + 1]
    else:
        for part in array.T if array.strides[0] < array.strides[-1] else array:
            yield from _pieces(part)


def _touch(array: np.ndarray[Any, Any] | Buffer, writes: int) -> None:
    import numpy as np

    controls = _checker()
    if controls is None:
        return
    if not hasattr(array, "__array_interface__"):
        array = np.asarray(memoryview(array))
    for piece in _pieces(np.asarray(array)):
        controls.nrm_cudasim_host_access(piece.ctypes.data, piece.nbytes, writes)


def host_read(array: np.ndarray[Any, Any] | Buffer) -> None:
    """Say that the program reads an array now, for the simulated driver's checker.

    A checker does not see what the CPU does; a test says it where it matters. Does
    nothing where CUDA is not simulated with ``check=True``, so marks can stay in code.

    Parameters
    ----------
    array : numpy.ndarray or buffer
        What is read, strided or not.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> from numpy_rmm.testing import host_read, simulate_cuda
    >>> with simulate_cuda(check=True) as cuda, numpy_rmm.pinned():
    ...     x = np.empty(1 << 20)
    ...     context = cuda.driver.activate()
    ...     stream, source = cuda.driver.create_stream(), cuda.driver.allocate(x.nbytes)
    ...     copy = cuda.driver.cuMemcpyDtoHAsync(
    ...         x.ctypes.data, source, x.nbytes, stream
    ...     )
    ...     host_read(x)  # too early
    ...     len(cuda.races())
    1
    """
    _touch(array, 0)


def host_write(array: np.ndarray[Any, Any] | Buffer) -> None:
    """Say that the program writes an array now. See `host_read`.

    Parameters
    ----------
    array : numpy.ndarray or buffer
        What is written, strided or not.
    """
    _touch(array, 1)


@contextmanager
def assert_no_races() -> Iterator[None]:
    """Fail when the block uses memory in an order that nothing ensures.

    Looks at memory that is handed out again, to the host or to a stream, at work on
    memory that was given back, at work of two streams, and at what `host_read` and
    `host_write` say, and asks of each two whether a wait, an event or the order of a
    stream puts one before the other. What the GPU happens to do first does not matter.

    Raises
    ------
    AssertionError
        Names both sides of each.
    RuntimeError
        CUDA is not simulated with ``check=True``.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> from numpy_rmm.testing import assert_no_races, simulate_cuda
    >>> with simulate_cuda(check=True) as cuda, assert_no_races(), numpy_rmm.pinned():
    ...     x = np.empty(1 << 20)
    ...     context = cuda.driver.activate()
    ...     stream, target = cuda.driver.create_stream(), cuda.driver.allocate(x.nbytes)
    ...     copy = cuda.driver.cuMemcpyHtoDAsync(
    ...         target, x.ctypes.data, x.nbytes, stream
    ...     )
    ...     del x  # the copy may still read it
    ...     y = np.ones(1 << 20)
    """
    controls = _checker()
    if controls is None:
        raise RuntimeError(
            "nobody looks for races: use simulate_cuda(check=True), or "
            "NUMPY_RMM_CUDA_LIBRARY=simulator with NUMPY_RMM_SIMULATED_CHECK=1"
        )
    before = controls.nrm_cudasim_race_count()
    yield
    races = _simulator.texts(
        controls.nrm_cudasim_race_count(), controls.nrm_cudasim_race_text
    )[before:]
    if races:
        raise AssertionError("memory is used out of order:\n  " + "\n  ".join(races))
