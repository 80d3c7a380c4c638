"""The library with the simulated driver: where it is, its controls and their tables.

`numpy_rmm.testing` makes machines of it, and the checks for leaks and races ask it what
has happened on the one that is in use.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy_rmm.testing import SimulatedCuda

__all__ = [
    "ATTRIBUTES",
    "LEAKABLE",
    "OUTSTANDING",
    "Area",
    "Config",
    "active",
    "controls",
    "current",
    "find_library",
    "texts",
]

# Tests compare the numbers with abi.h.
ATTRIBUTES = {
    "multiprocessor_count": 16,
    "integrated": 18,
    "can_map_host_memory": 19,
    "compute_mode": 20,
    "pci_bus_id": 33,
    "pci_device_id": 34,
    "async_engine_count": 40,
    "unified_addressing": 41,
    "pci_domain_id": 50,
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "managed_memory": 83,
    "pageable_memory_access": 88,
    "concurrent_managed_access": 89,
    "can_use_host_pointer_for_registered_mem": 91,
    "host_register_supported": 99,
    "pageable_memory_access_uses_host_page_tables": 100,
    "direct_managed_mem_access_from_host": 101,
    "virtual_memory_management_supported": 102,
    "read_only_host_register_supported": 113,
    "memory_pools_supported": 115,
    "mempool_supported_handle_types": 119,
    "host_numa_id": 134,
}

# What the simulator counts, in the order of its own enumeration.
OUTSTANDING = (
    "registrations",
    "host_allocations",
    "managed_allocations",
    "device_allocations",
    "streams",
    "events",
    "operations",
    "graphs",
    "reservations",
    "physical",
    "mappings",
    "pools",
    "pool_allocations",
    "advice",
)
# of them, those that a program has to give back
LEAKABLE = (*OUTSTANDING[:4], *OUTSTANDING[8:11], "pool_allocations")

active: list[SimulatedCuda] = []  # the machines of nested uses, the innermost last


class Config(ctypes.Structure):
    """What a machine is like (`nrm_cudasim_config`)."""

    _fields_ = [
        ("size", c_size_t),
        ("devices", c_int),
        ("driver", c_int),
        ("init_result", c_int),
        ("manual", c_int),
        ("memory_nbytes", c_uint64),
        ("page_locked_nbytes", c_uint64),
        ("seed", c_uint64),
        ("check", c_int),
    ]


class Area(ctypes.Structure):
    """Memory that a kernel touches."""

    _fields_ = [("start", c_size_t), ("nbytes", c_size_t), ("writes", c_int)]


def find_library() -> Path:
    """The library's path: beside the extension, or where a build directory has it."""
    from numpy_rmm import _core

    folder = Path(_core.__file__).resolve().parent
    places = [folder, folder.parent / "cudasim"]
    for place in places:
        path = place / "libnumpy_rmm_cudasim.so"
        if path.exists():
            return path
    looked = " and ".join(map(str, places))
    raise FileNotFoundError(f"libnumpy_rmm_cudasim.so was not found in {looked}")


@functools.cache
def controls() -> ctypes.CDLL:
    """The library, with the prototypes of its control calls."""
    library = ctypes.CDLL(str(find_library()))
    library.nrm_cudasim_reset.argtypes = [POINTER(Config)]
    library.nrm_cudasim_set_attribute.argtypes = [c_int, c_int, c_int]
    library.nrm_cudasim_set_sticky.argtypes = [c_int, c_int]
    library.nrm_cudasim_fail.argtypes = [c_char_p, c_uint64, c_int, c_uint64]
    library.nrm_cudasim_error_code.argtypes = [c_char_p]
    library.nrm_cudasim_hold_stream.argtypes = [c_void_p]
    library.nrm_cudasim_release_stream.argtypes = [c_void_p]
    library.nrm_cudasim_step.argtypes = [c_void_p]
    library.nrm_cudasim_call_count.argtypes = [c_char_p]
    library.nrm_cudasim_call_count.restype = c_uint64
    library.nrm_cudasim_log_read.argtypes = [POINTER(c_uint64), c_char_p, c_size_t]
    library.nrm_cudasim_log_clear.restype = None
    library.nrm_cudasim_fault_count.restype = c_uint64
    library.nrm_cudasim_fault_text.argtypes = [c_uint64, c_char_p, c_size_t]
    library.nrm_cudasim_launch.argtypes = [c_void_p, POINTER(Area), c_size_t]
    library.nrm_cudasim_race_count.restype = c_uint64
    library.nrm_cudasim_race_text.argtypes = [c_uint64, c_char_p, c_size_t]
    library.nrm_cudasim_host_access.argtypes = [c_void_p, c_size_t, c_int]
    library.nrm_cudasim_outstanding.argtypes = [
        c_int,
        POINTER(c_uint64),
        POINTER(c_uint64),
    ]
    return library


def current() -> SimulatedCuda | None:
    """The machine that is in use, if there is one."""
    return active[-1] if active else None


def texts(count: int, read: Callable[..., int]) -> list[str]:
    """What a control tells one by one; it keeps the first ones only."""
    found = []
    text = ctypes.create_string_buffer(1024)
    for index in range(count):
        if read(index, text, len(text)) != 0:
            found.append(f"{count - index} more")
            break
        found.append(text.value.decode())
    return found
