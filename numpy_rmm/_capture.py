"""Telling of stream captures, which nobody can see from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numpy_rmm import _core

__all__ = ["stream_capture"]

P = ParamSpec("P")
R = TypeVar("R")


class stream_capture:
    """Tell that a stream is captured into a CUDA graph inside this block.

    Enter it before the capture begins, and leave it when the capture has ended; it
    nests, and can be entered again. Meanwhile no event is recorded on a whole context,
    which would invalidate the capture, and pools of device memory ask whether a stream
    is being captured: what is allocated or freed on it then belongs to the graph until
    the graph and all that was instantiated from it are destroyed. Streams of other
    libraries are asked about without it, and captures by PyTorch and CuPy announce
    themselves. It decorates functions, too; generators are refused, as their blocks end
    whenever their consumers are done.

    Examples
    --------
    >>> import numpy_rmm
    >>> with numpy_rmm.stream_capture():
    ...     pass  # begin, work, end
    """

    __slots__ = ("_entered",)

    def __init__(self) -> None:
        self._entered: list[None] = []

    def __enter__(self) -> None:
        _core._capture_begin()
        self._entered.append(None)

    def __exit__(self, *exception: object) -> None:
        try:
            self._entered.pop()
        except IndexError:
            raise RuntimeError("stream_capture is left, but was not entered") from None
        _core._capture_end()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        from numpy_rmm._decorate import check_function, run_inside

        check_function(function, "would keep its capture announced; enter it inside")
        return run_inside(self, function)
