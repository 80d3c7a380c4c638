"""What Numba is told of our arrays; only ever used where Numba is loaded.

Numba types each argument at each launch (``_numba_type_``) and then makes of it what
it reads address, shape and strides of. For ours that would be a DLPack capsule and a
view over it. They have these attributes themselves, so Numba is told to take them as
they are: it asks ``numba.cuda.dispatcher.wrap_arg``, where hints of its own pass
through. That name is private: where it is gone, ours go the way of DLPack.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from numpy_rmm._core import DeviceArray, DeviceBuffer, DeviceScalar, _bytes_of_buffer

__all__ = ["array_type"]


@functools.cache
def array_type(dtype: np.dtype[Any], ndim: int, layout: str) -> object:
    """The type of an array in Numba's words; AttributeError where it is not loaded."""
    if "numba.cuda" not in sys.modules:
        raise AttributeError("_numba_type_: numba.cuda is not imported")
    try:
        support = import_module("numba.cuda.np.numpy_support")
        types = import_module("numba.cuda.types")
    except ModuleNotFoundError:  # Numba's own CUDA target, before numba-cuda
        support = import_module("numba.np.numpy_support")
        types = import_module("numba.types")
    _take_as_they_are()
    found: object = types.Array(support.from_dtype(dtype), ndim, layout)
    return found


def _take_as_they_are() -> None:
    dispatcher = sys.modules.get("numba.cuda.dispatcher")
    original = getattr(dispatcher, "wrap_arg", None)
    if original is None or hasattr(original, "_numpy_rmm"):
        return
    wrapped: Any = _wrapper(original)
    wrapped._numpy_rmm = True
    dispatcher.wrap_arg = wrapped  # type: ignore[union-attr]


def _wrapper(original: Callable[..., object]) -> Callable[..., object]:
    def wrap_arg(value: Any, *args: Any, **kwargs: Any) -> object:
        kind = type(value)
        if kind is DeviceArray:
            return value
        if kind is DeviceScalar:
            return value[...]
        if kind is DeviceBuffer:
            return _bytes_of_buffer(value)
        return original(value, *args, **kwargs)

    return wrap_arg
