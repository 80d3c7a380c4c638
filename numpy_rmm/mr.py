"""Memory resources: where memory comes from, and how it is handed out again.

>>> import numpy_rmm
>>> pool = numpy_rmm.mr.PoolMemoryResource(numpy_rmm.mr.HostMemoryResource())
>>> pool.kind, pool.upstream.kind
('host', 'host')
"""

from __future__ import annotations

from numpy_rmm import _core
from numpy_rmm._core import (
    DEFAULT_STREAM,
    AlignedResourceAdaptor,
    ArenaMemoryResource,
    BinningMemoryResource,
    CallbackMemoryResource,
    CudaAsyncManagedMemoryResource,
    CudaAsyncMemoryResource,
    CudaAsyncViewMemoryResource,
    CudaMemoryResource,
    FailureCallbackResourceAdaptor,
    FixedSizeMemoryResource,
    HostMemoryResource,
    LimitingResourceAdaptor,
    LoggingResourceAdaptor,
    ManagedMemoryResource,
    MemoryResource,
    PinnedHostMemoryResource,
    PoolMemoryResource,
    PrefetchResourceAdaptor,
    SamHeadroomMemoryResource,
    StatisticsResourceAdaptor,
    SystemMemoryResource,
    TrackingResourceAdaptor,
    UpstreamResourceAdaptor,
    available_device_memory,
    get_current_device_resource,
    get_per_device_resource,
    set_current_device_resource,
    set_per_device_resource,
)
from numpy_rmm._reinitialize import is_initialized

DeviceMemoryResource = MemoryResource  # as RMM calls the root class
_flush_logs = _core._log_drain  # the same

__all__ = [
    "DEFAULT_STREAM",
    "AlignedResourceAdaptor",
    "ArenaMemoryResource",
    "BinningMemoryResource",
    "CallbackMemoryResource",
    "CudaAsyncManagedMemoryResource",
    "CudaAsyncMemoryResource",
    "CudaAsyncViewMemoryResource",
    "CudaMemoryResource",
    "DeviceMemoryResource",
    "FailureCallbackResourceAdaptor",
    "FixedSizeMemoryResource",
    "HostMemoryResource",
    "LimitingResourceAdaptor",
    "LoggingResourceAdaptor",
    "ManagedMemoryResource",
    "MemoryResource",
    "PinnedHostMemoryResource",
    "PoolMemoryResource",
    "PrefetchResourceAdaptor",
    "SamHeadroomMemoryResource",
    "StatisticsResourceAdaptor",
    "SystemMemoryResource",
    "TrackingResourceAdaptor",
    "UpstreamResourceAdaptor",
    "available_device_memory",
    "get_current_device_resource",
    "get_current_device_resource_type",
    "get_per_device_resource",
    "get_per_device_resource_type",
    "is_initialized",
    "set_current_device_resource",
    "set_per_device_resource",
]


def get_current_device_resource_type() -> type[MemoryResource]:
    """The type of the current resource of the current device.

    Examples
    --------
    >>> from numpy_rmm import mr
    >>> from numpy_rmm.testing import simulate_cuda
    >>> with simulate_cuda():
    ...     mr.get_current_device_resource_type().__name__
    'PoolMemoryResource'
    """
    return type(get_current_device_resource())


def get_per_device_resource_type(device: int) -> type[MemoryResource]:
    """The type of the current resource of a device.

    Parameters
    ----------
    device : int
        Ordinal.

    Returns
    -------
    type

    Raises
    ------
    CudaUnavailableError
        When no CUDA device can be expected here.

    Examples
    --------
    See :func:`get_current_device_resource_type`.
    """
    return type(get_per_device_resource(device))
