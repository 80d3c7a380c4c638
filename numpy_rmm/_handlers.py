"""Handlers: which memory new arrays get, and where that holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Literal, NamedTuple, Never, ParamSpec, TypeVar

from numpy_rmm import _core
from numpy_rmm._core import Handler, MemoryResource

__all__ = [
    "assert_active",
    "host",
    "managed",
    "pinned",
    "reset_handler",
    "set_handler",
    "use_handler",
]

P = ParamSpec("P")
R = TypeVar("R")
Size = int | str
Fallback = str | MemoryResource | Literal[False] | None

# ---- from arguments to a handler -----------------------------------------------------


def _resource(name: str, role: str) -> MemoryResource:
    if not _core._registry_contains(name):
        known = ", ".join(map(repr, _core._registry_names()))
        raise ValueError(f"unknown {role} {name!r}; known names: {known}")
    if _core._registry_needs_cuda(name):
        _core._cuda_expect()
    return _core._registry_get(name)


def _auto() -> str:
    """The best name here: page-locked where a device can be expected."""
    try:
        _core._cuda_expect()
    except _core.CudaUnavailableError:
        return "host"
    return "pinned"


def _default_fallback(resource: MemoryResource) -> MemoryResource | None:
    policy = _core._option_get("on_exhausted")
    has_one = _core._has_fallback(resource)
    if has_one is None and policy == "host":
        has_one = resource.kind != "host"
    elif has_one is None:
        has_one = policy != "error" and resource.name == "pinned"
    return _core._registry_get("host") if has_one else None


def _fallback(resource: MemoryResource, fallback: Fallback) -> MemoryResource | None:
    if fallback is None:
        return _default_fallback(resource)
    if fallback is False:
        return None
    if isinstance(fallback, str):
        return _resource(fallback, "fallback")
    if not isinstance(fallback, MemoryResource):
        raise TypeError(
            "fallback must be a name, a MemoryResource of host memory, False or None, "
            f"not {type(fallback).__name__}"
        )
    return fallback


def _resolve(
    handler: object,
    threshold: Size | None,
    fallback: Fallback,
    *,
    for_process: bool = False,
) -> Handler:
    """The Handler that the arguments stand for; nothing has changed when it raises."""
    if isinstance(handler, str):
        handler = _resource(_auto() if handler == "auto" else handler, "handler")
    if isinstance(handler, MemoryResource):
        second = _fallback(handler, fallback)
        return _core._make_handler(handler, threshold, second, for_process)
    if threshold is not None or fallback is not None:
        raise TypeError("threshold and fallback go with a name or a MemoryResource")
    if handler is None:
        return _core._default_handler()
    if not isinstance(handler, Handler):
        return _core._handler_from_capsule(handler)
    if for_process and handler.resource is not None:
        return _core._make_handler(
            handler.resource, handler.threshold, handler.fallback, for_process
        )
    return handler


# ---- setting -------------------------------------------------------------------------


def _check_scope(scope: str) -> None:
    if scope not in ("context", "process"):
        raise ValueError(f"scope must be 'context' or 'process', not {scope!r}")


def set_handler(
    handler: object = "auto",
    *,
    scope: Literal["context", "process"] = "context",
    threshold: Size | None = None,
    fallback: Fallback = None,
) -> Handler:
    """Set where the memory of new arrays comes from.

    Parameters
    ----------
    handler : str, Handler, MemoryResource, capsule or None
        A name of :data:`registry`; "auto" stands for "pinned" where a CUDA device can
        be expected and for "host" elsewhere. None: NumPy's default. A capsule named
        "mem_handler" may be another library's.
    scope : {'context', 'process'}
        'context' is NumPy's own rule: asyncio tasks and ``asyncio.to_thread`` begin
        with a copy, new threads with NumPy's default. 'process': this context and every
        ``threading.Thread`` started from now on; threads that run already, asyncio
        tasks that are alive, ``_thread`` and threads born in C are not reached
        (``info()["process_scope"]`` tells).
    threshold : int or str, optional
        Of a pinned handler: arrays of fewer bytes get ordinary memory. None: the option
        ``pinned_threshold`` (64 KiB); 0: every array is page-locked.
    fallback : str, MemoryResource, False or None
        Host memory for when the resource is exhausted or cannot work. None: "host" for
        "pinned", none for the others (the option ``on_exhausted`` says so). False:
        none.

    Returns
    -------
    Handler
        The previous handler of this context.

    Raises
    ------
    TypeError, ValueError
        For an unknown name, a capsule of another name, a resource that cannot back
        arrays, or a threshold of a handler that is not pinned; the old handler stays.
    CudaUnavailableError
        When `handler` needs CUDA and no device can be expected here.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> before = numpy_rmm.set_handler("host")
    >>> numpy_rmm.array_info(np.zeros(1000)).resource is numpy_rmm.registry["host"]
    True
    >>> _ = numpy_rmm.set_handler(before)
    """
    _core._show_warnings(2)
    _check_scope(scope)
    new = _resolve(handler, threshold, fallback, for_process=scope == "process")
    if scope == "process":
        from numpy_rmm import _process_scope

        if new == _core._default_handler():
            _process_scope.uninstall()
        else:
            _process_scope.install(new)
    return _core._exchange_handler(new)


def reset_handler(*, scope: Literal["context", "process"] = "context") -> None:
    """Go back to NumPy's default memory; arrays that live keep theirs.

    Parameters
    ----------
    scope : {'context', 'process'}
        'process': new threads, too, begin with NumPy's default again.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.reset_handler()
    >>> numpy_rmm.get_handler().name
    'default_allocator'
    """
    set_handler(None, scope=scope)


def assert_active(handler: object = None) -> None:
    """Check that the current context has a handler of this package.

    New threads, and notebook cells under some kernels, begin without the handler that
    was set elsewhere.

    Parameters
    ----------
    handler : str, Handler, MemoryResource, capsule or None
        The handler that must be active; None: any of this package.

    Raises
    ------
    RuntimeError
        When the context has another handler.

    Examples
    --------
    >>> import numpy_rmm
    >>> with numpy_rmm.use_handler("host"):
    ...     numpy_rmm.assert_active("host")
    """
    current = _core.get_handler()
    if handler is None:
        if current.resource is not None:
            return
        expected = "a handler of numpy_rmm"
    else:
        wanted = _resolve(handler, None, None)
        if current == wanted or (
            isinstance(handler, str | MemoryResource)
            and current.resource is not None
            and current.resource is wanted.resource
        ):
            return
        expected = f"the handler {wanted.name!r}"
    raise RuntimeError(
        f"this context should have {expected}, but has {current.name!r}: handlers "
        "belong to a context, and new threads begin without one (scope='process' "
        "reaches them)"
    )


# ---- scopes --------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One `with` block that is open in a context."""

    scope: use_handler
    previous: Handler
    n_failures: int  # of the handler, when the block was entered


_entries: ContextVar[tuple[_Entry, ...]] = ContextVar("numpy_rmm_entries", default=())


class use_handler:
    """Set the handler inside a ``with`` block or a function, and put back what was.

    The same object can be entered again, nested, and in several threads and tasks at a
    time. As a decorator of a coroutine function it is entered inside the coroutine.
    Generators would leak it to whoever consumes them: they are refused, and
    ``Handler.run`` is the way. A MemoryError that leaves the block says why in a note.

    Parameters
    ----------
    handler, threshold, fallback
        As for :func:`set_handler`.

    Raises
    ------
    TypeError, ValueError, CudaUnavailableError
        As :func:`set_handler`, when the object is made.

    Warns
    -----
    RuntimeWarning
        When the block is left in another context or thread, or while somebody else's
        handler is set: that is left as it is.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> with numpy_rmm.use_handler("host") as handler:
    ...     x = np.arange(10)
    >>> numpy_rmm.get_handler_name(x) == handler.name
    True
    >>> @numpy_rmm.use_handler("huge_pages")
    ... def load():
    ...     return np.zeros(4_000_000)  # float64: 32 MB
    >>> numpy_rmm.array_info(load()).resource.name
    'huge_pages'
    """

    def __init__(
        self,
        handler: object,
        *,
        threshold: Size | None = None,
        fallback: Fallback = None,
    ) -> None:
        self._handler = _resolve(handler, threshold, fallback)

    @property
    def handler(self) -> Handler:
        """What the block sets."""
        return self._handler

    def __enter__(self) -> Handler:
        _core._show_warnings(2)
        n_failures = self._handler._failures
        previous = _core._exchange_handler(self._handler)
        _entries.set((*_entries.get(), _Entry(self, previous, n_failures)))
        return self._handler

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entry = self._pop()
        if entry is not None and self._handler._failures != entry.n_failures:
            _explain(error)
        if error is None:
            _core._show_warnings(2)

    def _pop(self) -> _Entry | None:
        """Leave the newest block of this scope in this context, if it has one."""
        entries = _entries.get()
        i = len(entries) - 1
        while i >= 0 and entries[i].scope is not self:
            i -= 1
        if i < 0:
            _warn("it was entered in another context or thread")
            return None
        entry, above = entries[i], entries[i + 1 :]
        if above:
            # A generator leaves a block that its consumer has opened others over: what
            # they will put back is what was before this block, not its handler.
            below = above[0]._replace(previous=entry.previous)
            above = (below, *above[1:])
        _entries.set((*entries[:i], *above))
        if not above and _core.get_handler() == self._handler:
            _core._exchange_handler(entry.previous)
        else:
            _warn("the context has got another handler since it was entered")
        return entry

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        from numpy_rmm._decorate import check_function, run_inside

        check_function(
            function,
            "would leave its handler set in whoever consumes it; call what it does by "
            "Handler.run",
        )
        return run_inside(self, function)

    def __repr__(self) -> str:
        return f"use_handler({self._handler!r})"


def _warn(why: str) -> None:
    current = _core.get_handler()
    warnings.warn(
        f"use_handler is left, but {why}: the handler that is set here, "
        f"{current.name!r}, stays",
        RuntimeWarning,
        stacklevel=4,
    )


def _explain(error: BaseException | None) -> None:
    last = _core.last_error()
    if isinstance(error, MemoryError) and last is not None:
        error.add_note(f"numpy_rmm: {last.message}")


def pinned(
    *not_arrays: Never, threshold: Size | None = None, fallback: Fallback = None
) -> use_handler:
    """Page-lock new arrays: ``use_handler("pinned", ...)``.

    Parameters
    ----------
    threshold : int or str, optional
        Arrays of fewer bytes get ordinary memory; None: the option
        ``pinned_threshold`` (64 KiB); 0: every array is page-locked.
    fallback : str, MemoryResource, False or None
        As for :func:`set_handler`.

    Raises
    ------
    CudaUnavailableError
        When no CUDA device can be expected here.
    TypeError
        When it is called with an array.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> from numpy_rmm.testing import simulate_cuda
    >>> with simulate_cuda(), numpy_rmm.pinned():  # in place of a GPU
    ...     numpy_rmm.memory_kind(np.empty(1 << 20))
    'pinned'
    """
    if not_arrays:
        raise TypeError(
            "pinned() page-locks new arrays, made inside `with pinned():` or in a "
            "function under @pinned(); to page-lock an existing array where it is, "
            "use pin(array)"
        )
    return use_handler("pinned", threshold=threshold, fallback=fallback)


def managed() -> use_handler:
    """Give new arrays managed memory: ``use_handler("managed")``.

    Raises
    ------
    CudaUnavailableError
        When no CUDA device can be expected here.
    """
    return use_handler("managed")


def host() -> use_handler:
    """Give new arrays pooled host memory: ``use_handler("host")``.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> with numpy_rmm.host():
    ...     x = np.zeros(1000)
    >>> numpy_rmm.array_info(x).alignment >= 64
    True
    """
    return use_handler("host")
