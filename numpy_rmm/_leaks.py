"""The check that a block of code gives back what it allocates."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from numpy_rmm import _simulator

if TYPE_CHECKING:
    from numpy_rmm.mr import MemoryResource

__all__ = ["assert_no_leaks"]


def _resources() -> dict[int, MemoryResource]:
    """All live resources: those of the registry that can work here, and all others."""
    import numpy_rmm
    from numpy_rmm.mr import MemoryResource

    found = {}
    for name in numpy_rmm.registry:
        try:
            resource = numpy_rmm.registry[name]
        except numpy_rmm.CudaUnavailableError:
            continue
        found[id(resource)] = resource
    for thing in gc.get_objects():
        if isinstance(thing, MemoryResource):
            found[id(thing)] = thing
    return found


def _in_use(resource: MemoryResource) -> tuple[int, int]:
    statistics = resource.statistics()
    return (statistics.current_bytes, statistics.current_count)


def _settle() -> None:
    """Give back what nobody uses and what is only kept for later."""
    import numpy_rmm

    gc.collect()
    numpy_rmm.trim()


def _leaks_of_resources(before: dict[int, tuple[int, int]]) -> Iterator[str]:
    for key, resource in _resources().items():
        nbytes, count = _in_use(resource)
        nbytes_before, count_before = before.get(key, (0, 0))
        if nbytes > nbytes_before or count > count_before:
            yield (
                f"{resource!r}: {nbytes - nbytes_before} bytes in "
                f"{count - count_before} allocations"
            )


def _leaks_of_driver(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
) -> Iterator[str]:
    for what in _simulator.LEAKABLE:
        (count, nbytes), (count_before, nbytes_before) = after[what], before[what]
        if count > count_before:
            yield (
                f"the driver: {count - count_before} more {what} "
                f"({nbytes - nbytes_before} bytes)"
            )


@contextmanager
def assert_no_leaks() -> Iterator[None]:
    """Fail when memory allocated in the block is still in use after it.

    Compares the live bytes and allocations of every resource, and, where CUDA is
    simulated, what the driver holds. Garbage is collected and the pools are trimmed
    before, so that memory which is only kept for later does not count.

    Raises
    ------
    AssertionError
        Names each resource that has more in use than before, and by how much.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> from numpy_rmm.testing import assert_no_leaks
    >>> with assert_no_leaks(), numpy_rmm.host():
    ...     x = np.empty(1000)
    ...     del x
    """
    _settle()
    resources = _resources()  # kept, so that no new one gets the id of an old one
    in_use = {key: _in_use(resource) for key, resource in resources.items()}
    machine = _simulator.current()
    held = {} if machine is None else machine.outstanding()
    yield
    _settle()
    leaks = [*_leaks_of_resources(in_use)]
    if machine is not None and _simulator.current() is machine:
        leaks += _leaks_of_driver(held, machine.outstanding())
    if leaks:
        raise AssertionError("memory is still in use:\n  " + "\n  ".join(leaks))
