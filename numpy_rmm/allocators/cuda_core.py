"""Resources of numpy_rmm as memory resources of cuda.core.

::

    from cuda.core import Device
    from numpy_rmm.allocators.cuda_core import memory_resource

    device = Device()
    device.set_current()
    buffer = memory_resource(mr).allocate(1024, stream=device.default_stream)
"""

from __future__ import annotations

import functools
from typing import Any

from numpy_rmm._core import MemoryResource, Stream
from numpy_rmm.allocators._library import library

__all__ = ["memory_resource"]


def memory_resource(mr: MemoryResource) -> Any:
    """A ``cuda.core.MemoryResource`` that allocates of a resource.

    Its buffers go back behind the stream that they were allocated on, or that they are
    closed with, and hold the resource.

    Parameters
    ----------
    mr : MemoryResource
        Of any kind.

    Returns
    -------
    cuda.core.MemoryResource

    Raises
    ------
    TypeError
        For anything else.
    ModuleNotFoundError
        When cuda.core is not installed.
    """
    if not isinstance(mr, MemoryResource):
        raise TypeError(f"mr must be a MemoryResource, not {type(mr).__name__}")
    return _resource_class()(mr)


class _Resource:
    """What of the resource does not need classes of cuda.core."""

    def __init__(self, mr: MemoryResource) -> None:
        self._mr = mr

    @property
    def mr(self) -> MemoryResource:
        """The resource of numpy_rmm."""
        return self._mr

    def allocate(self, size: int, *, stream: Any) -> Any:
        """A ``cuda.core.Buffer`` of `size` bytes, behind `stream`."""
        ptr = self._mr.allocate(size, Stream(stream))
        try:
            return _make_buffer(ptr, size, self, stream)
        except BaseException:
            self._mr.deallocate(ptr, size, Stream(stream))
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        """Give the memory of a buffer back behind `stream`; buffers call it."""
        self._mr.deallocate(int(ptr), size, Stream(stream))

    @property
    def is_device_accessible(self) -> bool:
        return self._mr.kind != "host"

    @property
    def is_host_accessible(self) -> bool:
        return self._mr.kind != "device"

    @property
    def is_managed(self) -> bool:
        return self._mr.kind == "managed"

    @property
    def device_id(self) -> int:
        """Ordinal of the device; -1: of none, or of one that is not known yet."""
        device = self._mr.device
        return -1 if device is None else device

    def __repr__(self) -> str:
        return f"<cuda.core resource over {self._mr!r}>"


def _core() -> Any:
    return library("cuda.core", "cuda-core")


def _make_buffer(ptr: int, size: int, mr: Any, stream: Any) -> Any:
    from_handle = _core().Buffer.from_handle
    if _takes_stream():
        return from_handle(ptr, size, mr=mr, stream=stream)
    return from_handle(ptr, size, mr=mr)


@functools.cache
def _takes_stream() -> bool:
    """Whether a buffer is told its stream when it is made: from cuda.core 1.1 on."""
    from inspect import signature

    return "stream" in signature(_core().Buffer.from_handle).parameters


@functools.cache
def _resource_class() -> type:
    base = _core().MemoryResource
    return type("MemoryResource", (_Resource, base), {"__module__": __name__})
