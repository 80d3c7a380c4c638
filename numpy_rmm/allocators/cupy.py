"""CuPy's memory from numpy_rmm.

::

    import cupy
    from numpy_rmm.allocators.cupy import cupy_pinned_allocator, rmm_cupy_allocator

    cupy.cuda.set_allocator(rmm_cupy_allocator)
    cupy.cuda.set_pinned_memory_allocator(cupy_pinned_allocator)
"""

from __future__ import annotations

import sys
from typing import Any

from numpy_rmm import _core
from numpy_rmm._core import DeviceBuffer, Stream
from numpy_rmm.allocators._library import library

__all__ = ["cupy_pinned_allocator", "rmm_cupy_allocator"]


def _cupy() -> Any:
    return sys.modules.get("cupy") or library("cupy", "cupy-cuda13x")


def rmm_cupy_allocator(nbytes: int) -> Any:
    """Device memory for CuPy, for ``cupy.cuda.set_allocator``.

    Parameters
    ----------
    nbytes : int
        Bytes.

    Returns
    -------
    cupy.cuda.MemoryPointer
        Memory of the current resource of the current device, made on CuPy's current
        stream, behind which it goes back.

    Raises
    ------
    OutOfMemoryError
        When the memory cannot be had.
    ModuleNotFoundError
        When CuPy is not installed.
    """
    cuda = _cupy().cuda
    stream = Stream(cuda.get_current_stream())
    buffer = DeviceBuffer(size=nbytes, stream=stream)
    # Without the number of the device CuPy would ask the driver for it.
    device = cuda.runtime.getDevice()
    memory = cuda.UnownedMemory(buffer.ptr, nbytes, buffer, device)
    return cuda.MemoryPointer(memory, 0)


class _PinnedBlock:
    """Page-locked memory as CuPy holds it."""

    __slots__ = ("mr", "ptr", "size")

    def __init__(self, nbytes: int) -> None:
        self.ptr = 0
        self.size = nbytes
        self.mr = _core._registry_get("pinned")
        self.ptr = self.mr.allocate(nbytes)

    def __del__(self) -> None:
        if self.ptr:
            self.mr.deallocate(self.ptr, self.size)


def cupy_pinned_allocator(nbytes: int) -> Any:
    """Page-locked memory for CuPy, for ``cupy.cuda.set_pinned_memory_allocator``.

    It is of the pool "pinned" of the registry, as large as was asked for (CuPy's own
    pool rounds up to a power of two), and handed out again when the GPU is done.

    Parameters
    ----------
    nbytes : int
        Bytes.

    Returns
    -------
    cupy.cuda.PinnedMemoryPointer

    Raises
    ------
    OutOfMemoryError
        When the memory cannot be page-locked.
    ModuleNotFoundError
        When CuPy is not installed.
    """
    pointer: Any = _cupy().cuda.PinnedMemoryPointer
    return pointer(_PinnedBlock(nbytes), 0)
