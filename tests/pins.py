"""What the tests of pin() share: what the driver says of an address."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import numpy_rmm
from numpy_rmm.testing import Driver

KIB, MIB = 1 << 10, 1 << 20
PORTABLE = 1  # a flag of cuMemHostRegister


def pinned_nbytes() -> int:
    nbytes: int = numpy_rmm.info()["system"]["page_locked_by_pin_nbytes"]
    return nbytes


def address_of(thing: Any) -> int:
    return np.frombuffer(thing, np.uint8).ctypes.data


def attribute(driver: Driver, number: int, address: int) -> int | None:
    """A pointer attribute; None: the driver does not know the address."""
    value = ctypes.c_uint64()
    result = driver.cuPointerGetAttribute(ctypes.byref(value), number, address)
    return value.value if result == 0 else None


def is_locked(driver: Driver, address: int) -> bool:
    memory_type = attribute(driver, 2, address)
    return memory_type is not None and memory_type & 0xFFFFFFFF == 1


def locked_range(driver: Driver, address: int) -> tuple[int | None, int | None]:
    return attribute(driver, 11, address), attribute(driver, 12, address)
