"""Telling of stream captures, which nobody can see from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from numpy_rmm import _core

__all__ = ["stream_capture"]


@contextmanager
def stream_capture() -> Iterator[None]:
    """Tell that a stream is captured into a CUDA graph inside this block.

    Enter it before the capture begins, and leave it when the capture has ended; it
    nests. Meanwhile no event is recorded on a whole context, which would invalidate
    the capture, and pools of device memory ask whether a stream is being captured: what
    is allocated or freed on it then belongs to the graph until the graph and all that
    was instantiated from it are destroyed. Streams of other libraries are asked about
    without it, and captures by PyTorch and CuPy announce themselves.

    Yields
    ------
    None

    Examples
    --------
    >>> import numpy_rmm
    >>> with numpy_rmm.stream_capture():
    ...     pass  # begin, work, end
    """
    _core._capture_begin()
    try:
        yield
    finally:
        _core._capture_end()
