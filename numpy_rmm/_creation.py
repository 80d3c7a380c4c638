"""Arrays in page-locked memory, at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from numpy_rmm import _core, _handlers

__all__ = ["empty_like_pinned", "empty_pinned", "zeros_like_pinned", "zeros_pinned"]

P = ParamSpec("P")
Shape = int | tuple[int, ...]
Order = Literal["C", "F"]
KeepOrder = Literal["C", "F", "A", "K"]


def _make(
    function: Callable[P, NDArray[Any]], *args: P.args, **kwargs: P.kwargs
) -> NDArray[Any]:
    handler = _handlers._resolve("pinned", 0, None)
    previous = _core._exchange_handler(handler)
    try:
        return function(*args, **kwargs)
    finally:
        _core._exchange_handler(previous)


def empty_pinned(
    shape: Shape, dtype: DTypeLike = float, order: Order = "C"
) -> NDArray[Any]:
    """A new page-locked array that is not filled, at any size.

    Parameters
    ----------
    shape : int or tuple of int
        Of the array.
    dtype : data-type
        Of its elements.
    order : {'C', 'F'}
        Row-major or column-major.

    Returns
    -------
    numpy.ndarray
        Of the given shape. Like all of the pool "pinned" it gets ordinary memory when
        page-locking is exhausted; :func:`is_pinned` tells.

    Raises
    ------
    CudaUnavailableError
        When no CUDA device can be expected here.

    Examples
    --------
    >>> import numpy_rmm
    >>> from numpy_rmm.testing import simulate_cuda
    >>> with simulate_cuda():  # in place of a GPU
    ...     numpy_rmm.is_pinned(numpy_rmm.empty_pinned((2, 3)))
    True
    """
    return _make(np.empty, shape, dtype, order)


def zeros_pinned(
    shape: Shape, dtype: DTypeLike = float, order: Order = "C"
) -> NDArray[Any]:
    """A new page-locked array of zeros, at any size; see :func:`empty_pinned`."""
    return _make(np.zeros, shape, dtype, order)


def empty_like_pinned(
    a: ArrayLike,
    dtype: DTypeLike | None = None,
    order: KeepOrder = "K",
    subok: bool = True,
    shape: Shape | None = None,
) -> NDArray[Any]:
    """A new page-locked array like another one, not filled, at any size.

    Parameters
    ----------
    a : array_like
        Shape and data-type are taken from it.
    dtype : data-type, optional
        In place of that of `a`.
    order : {'C', 'F', 'A', 'K'}
        'K' is the order of `a`, as near as can be.
    subok : bool
        Whether a subclass of ndarray is kept.
    shape : int or tuple of int, optional
        In place of that of `a`.

    Returns
    -------
    numpy.ndarray
        See :func:`empty_pinned`.

    Raises
    ------
    CudaUnavailableError
        When no CUDA device can be expected here.
    """
    return _make(np.empty_like, a, dtype, order, subok, shape)


def zeros_like_pinned(
    a: ArrayLike,
    dtype: DTypeLike | None = None,
    order: KeepOrder = "K",
    subok: bool = True,
    shape: Shape | None = None,
) -> NDArray[Any]:
    """A new page-locked array of zeros like another one; see
    :func:`empty_like_pinned`."""
    return _make(np.zeros_like, a, dtype, order, subok, shape)
