"""Numba's memory from numpy_rmm, by Numba's interface for such plugins (version 1).

Set ``NUMBA_CUDA_MEMORY_MANAGER=numpy_rmm.allocators.numba``, or before Numba makes a
context::

    from numba import cuda
    from numpy_rmm.allocators.numba import RMMNumbaManager

    cuda.set_memory_manager(RMMNumbaManager)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from numpy_rmm import _core
from numpy_rmm._core import DeviceBuffer, MemoryResource
from numpy_rmm.allocators._library import library

__all__ = ["RMMNumbaManager"]

TYPE_CHECKING = False  # of typing, which need not be imported for it

if TYPE_CHECKING:
    RMMNumbaManager: Any = None


def __getattr__(name: str) -> Any:
    # Numba reads the second name where the environment variable names this module.
    if name in ("RMMNumbaManager", "_numba_memory_manager"):
        return _manager_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _finalizer(
    allocations: MutableMapping[int, object], key: int, owner: object
) -> Callable[[], None]:
    """What Numba calls at the end of an allocation.

    By then the context may have been reset, and the address be another allocation's.
    """
    known = weakref.ref(owner)

    def finalize() -> None:
        found = allocations.get(key)
        if found is not None and found is known():
            del allocations[key]

    return finalize


class _HostBlock:
    """Memory of a resource, until nobody refers to it."""

    __slots__ = ("__weakref__", "memory", "mr", "ptr", "size")

    memory: Any
    """Numba's object of it, where what its `own` returns refers to that weakly."""

    def __init__(self, mr: MemoryResource, size: int) -> None:
        self.ptr = 0
        self.size = size
        self.mr = mr
        self.ptr = mr.allocate(size)

    def __del__(self) -> None:
        if self.ptr:
            self.mr.deallocate(self.ptr, self.size)


class _Allocations:
    """What of the manager does not need Numba's classes."""

    context: Any
    allocations: MutableMapping[int, object]

    def initialize(self) -> None:
        """Nothing needs to be done in a context before memory of it is asked for."""

    def memalloc(self, size: int) -> Any:
        """Memory of the current resource of the current device, on the default stream.

        Numba names no stream: what uses the memory on others is ordered by the program,
        as with memory of its own.
        """
        buffer = DeviceBuffer(size=size)
        finalizer = self._keep(buffer.ptr, buffer) if size else None
        driver = _driver()
        address = driver.binding.CUdeviceptr(buffer.ptr)
        context = weakref.proxy(self.context)
        return driver.MemoryPointer(context, address, size, finalizer=finalizer)

    def memhostalloc(
        self, size: int, mapped: bool = False, portable: bool = False, wc: bool = False
    ) -> Any:
        """Page-locked memory of the pool "pinned", which every context may use.

        It is handed out again when the GPU is done with it. Write-combined memory is
        Numba's own.
        """
        if wc or size == 0:
            return super().memhostalloc(size, mapped, portable, wc)  # type: ignore[misc]
        block = _HostBlock(_core._registry_get("pinned"), size)
        driver, finalizer = _driver(), self._keep(block.ptr, block)
        kind = driver.MappedMemory if mapped else driver.PinnedMemory
        context = weakref.proxy(self.context)
        memory = kind(context, block.ptr, size, finalizer=finalizer)
        block.memory = memory if mapped else None
        return memory.own()

    def memallocmanaged(self, size: int, attach_global: bool) -> Any:
        """Managed memory of the pool "managed"; attached to the host alone: Numba's."""
        if not attach_global or size == 0:
            return super().memallocmanaged(size, attach_global)  # type: ignore[misc]
        block = _HostBlock(_core._registry_get("managed"), size)
        driver, finalizer = _driver(), self._keep(block.ptr, block)
        address = driver.binding.CUdeviceptr(block.ptr)
        context = weakref.proxy(self.context)
        block.memory = driver.ManagedMemory(context, address, size, finalizer=finalizer)
        return block.memory.own()

    def get_memory_info(self) -> Any:
        """Raise NotImplementedError, as RMM does: memory may come from a pool."""
        raise NotImplementedError

    @property
    def interface_version(self) -> int:
        return 1

    def _keep(self, key: int, owner: object) -> Callable[[], None]:
        # Numba's base class makes the dictionary and clears it when a context is reset.
        self.allocations[key] = owner
        return _finalizer(self.allocations, key, owner)


def _driver() -> Any:
    return library("numba.cuda.cudadrv.driver", "numba-cuda")


_DOC = """Numba's memory of numpy_rmm: of devices, page-locked and managed.

What ``get_ipc_handle`` returns names the block of the driver that the memory lies in.
Memory of a pool that maps its segments (the option ``segments``) has no such handle:
the driver refuses with CUDA_ERROR_INVALID_VALUE.
"""


@functools.cache
def _manager_class() -> type:
    cuda = library("numba.cuda", "numba-cuda")
    bases = (_Allocations, cuda.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager)
    return type("RMMNumbaManager", bases, {"__module__": __name__, "__doc__": _DOC})
