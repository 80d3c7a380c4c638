"""PyTorch's memory from numpy_rmm.

::

    import torch
    from numpy_rmm.allocators.torch import rmm_torch_allocator

    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)

before PyTorch has allocated anything on a device; or, at any time, for a part of a
program, where PyTorch's own caching allocator then works over numpy_rmm::

    pool = torch.cuda.MemPool(rmm_torch_allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        ...
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from numpy_rmm import _core
from numpy_rmm.allocators._library import library

__all__ = ["rmm_torch_allocator"]

TYPE_CHECKING = False  # of typing, which need not be imported for it

if TYPE_CHECKING:
    rmm_torch_allocator: Any = None

# c10::detail::torchCheckFail(const char *, const char *, uint32_t, const char *)
_THROW = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"
# c10::cuda::CUDACachingAllocator::allocator
_CURRENT = "_ZN3c104cuda20CUDACachingAllocator9allocatorE"

# Of torch's allocator, and the functions of _core that serve it.
_HOOKS = {
    "set_record_stream_fn": "nrm_torch_record_stream",
    "set_reset_fn": "nrm_torch_empty_cache",
}


def __getattr__(name: str) -> Any:
    if name == "rmm_torch_allocator":
        return _allocator()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@functools.cache
def _allocator() -> Any:
    """A ``torch.cuda.memory.CUDAPluggableAllocator`` over the current resources.

    Memory is of the current resource of its device, in the order of PyTorch's streams,
    and goes back to the resource that it came from. ``Tensor.record_stream`` and
    ``torch.cuda.empty_cache`` are heard. Memory that cannot be had is a RuntimeError,
    or in a ``MemPool`` PyTorch's own ``OutOfMemoryError``.
    """
    memory = library("torch.cuda.memory", "torch")
    path = _core.__file__
    allocator = memory.CUDAPluggableAllocator(
        path, "nrm_torch_allocate", "nrm_torch_deallocate"
    )
    ours = ctypes.CDLL(path)
    for setter, function in _HOOKS.items():
        # Older versions of PyTorch have no such hook: then it does nothing there.
        set_hook = getattr(allocator.allocator(), setter, None)
        if set_hook is not None:
            set_hook(_address(ours, function))
    _tell_of_errors(Path(library("torch", "torch").__file__).parent / "lib")
    return allocator


def _tell_of_errors(libraries: Path) -> None:
    """Finds what PyTorch throws with, and where it says which allocator is its current
    one: neither is documented, so either may be missing."""
    throw, current = 0, 0
    try:
        throw = _address(ctypes.CDLL(str(libraries / "libc10.so")), _THROW)
        loaded = ctypes.CDLL(str(libraries / "libc10_cuda.so"))
        current = ctypes.addressof(ctypes.c_void_p.in_dll(loaded, _CURRENT))
    except (OSError, AttributeError, ValueError):
        pass  # nrm_torch_allocate then does without
    _core._torch_errors(throw, current)


def _address(loaded: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0
