"""What the tests of handlers share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy_rmm

DEFAULT = "default_allocator"


def current() -> str:
    return numpy_rmm.get_handler().name


def in_thread(function):  # type: ignore[no-untyped-def]
    """What a function returns, or raises, in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
