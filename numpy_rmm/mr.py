"""Memory resources: where memory comes from, and how it is handed out again.

>>> import numpy_rmm
>>> pool = numpy_rmm.mr.PoolMemoryResource(numpy_rmm.mr.HostMemoryResource())
>>> pool.kind, pool.upstream.kind
('host', 'host')
"""

from __future__ import annotations

from numpy_rmm._core import (
    DEFAULT_STREAM,
    AlignedResourceAdaptor,
    ArenaMemoryResource,
    BinningMemoryResource,
    CallbackMemoryResource,
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
    StatisticsResourceAdaptor,
    TrackingResourceAdaptor,
    available_device_memory,
    get_current_device_resource,
    get_per_device_resource,
    set_current_device_resource,
    set_per_device_resource,
)

DeviceMemoryResource = MemoryResource  # as RMM calls the root class

__all__ = [
    "DEFAULT_STREAM",
    "AlignedResourceAdaptor",
    "ArenaMemoryResource",
    "BinningMemoryResource",
    "CallbackMemoryResource",
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
    "StatisticsResourceAdaptor",
    "TrackingResourceAdaptor",
    "available_device_memory",
    "get_current_device_resource",
    "get_per_device_resource",
    "set_current_device_resource",
    "set_per_device_resource",
]
