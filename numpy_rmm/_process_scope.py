"""A handler for a whole process, as far as NumPy's handlers can be that.

NumPy keeps its handler in a context variable, and a new thread begins with an empty
context. So each thread that ``threading`` starts is given the handler before its first
Python frame, by wrapping one method of ``threading.Thread``; profile and trace
functions are left to whoever set them. What is not reached is told by :func:`report`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from numpy_rmm import _core
from numpy_rmm._core import Handler

__all__ = ["install", "report", "uninstall"]

# Up to 3.13 a thread runs in the context that its bootstrap begins with; from 3.14 on
# in one that is made when it is started.
METHOD = "_bootstrap_inner" if sys.version_info < (3, 14) else "start"

_lock = threading.Lock()
_handler: Handler | None = None
_original: Callable[[Any], None] | None = None
_missed: list[str] = []
_n_started = 0


def _renew_lock() -> None:
    """In a forked child, where the thread that held it may be gone."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def install(handler: Handler) -> None:
    """Every thread started from now on begins with `handler`."""
    global _handler, _missed, _n_started
    here = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not here]
    with _lock:
        _handler = handler
        _missed = [thread.name for thread in others]
        _n_started = 0
        _patch()


def uninstall() -> None:
    """New threads begin with NumPy's default again."""
    global _handler, _original
    with _lock:
        _handler = None
        if getattr(threading.Thread, METHOD) is _wrapper and _original is not None:
            setattr(threading.Thread, METHOD, _original)
            _original = None


def report() -> dict[str, Any]:
    """What was reached, and what was not."""
    if _handler is None:
        return {"handler": None, "reached": [], "not_reached": []}
    plural = "" if _n_started == 1 else "s"
    return {
        "handler": _handler.name,
        "reached": [
            "the context that set it",
            f"{_n_started} thread{plural} started since",
        ],
        "not_reached": [
            *(f"thread {name!r}, which ran already" for name in _missed),
            "asyncio tasks that were alive when it was set",
            "threads made by _thread or in C",
        ],
    }


def _patch() -> None:
    global _original
    if _original is None:
        _original = getattr(threading.Thread, METHOD)
        functools.update_wrapper(_wrapper, _original)
        setattr(threading.Thread, METHOD, _wrapper)


def _wrapper(thread: Any) -> None:
    handler, original = _handler, _original
    if handler is not None:
        _give(thread, handler)
    assert original is not None
    original(thread)


if sys.version_info < (3, 14):

    def _give(thread: threading.Thread, handler: Handler) -> None:
        _set_unless_set(handler)

else:

    def _give(thread: threading.Thread, handler: Handler) -> None:
        # A context that the program made for the thread is the program's.
        if thread._context is None:
            import contextvars

            inherits = sys.flags.thread_inherit_context
            context = contextvars.copy_context() if inherits else contextvars.Context()
            context.run(_set_unless_set, handler)
            thread._context = context


def _set_unless_set(handler: Handler) -> None:
    """A handler that the thread inherited from a scope stays."""
    global _n_started
    if _core.get_handler() == _core._default_handler():
        _core._exchange_handler(handler)
    with _lock:
        _n_started += 1
