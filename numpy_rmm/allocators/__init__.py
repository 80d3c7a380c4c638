"""Memory of numpy_rmm for other libraries: one module for each.

============== ==================================================================
`cupy`         `rmm_cupy_allocator`, `cupy_pinned_allocator`
`numba`        `RMMNumbaManager`, a plugin for Numba's memory management
`torch`        `rmm_torch_allocator`, a pluggable allocator
`cuda_core`    `memory_resource`, a resource of numpy_rmm as one of cuda.core
============== ==================================================================

A module imports its library when something of it is used, not before.
"""

from __future__ import annotations

TYPE_CHECKING = False  # of typing, which need not be imported for it

if TYPE_CHECKING:
    from numpy_rmm.allocators import cuda_core, cupy, numba, torch

__all__ = ["cuda_core", "cupy", "numba", "torch"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'numpy_rmm.allocators' has no attribute {name!r}")
    return import_module(f"numpy_rmm.allocators.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
