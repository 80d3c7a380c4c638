"""Hooks on the graph captures of PyTorch and CuPy; neither is imported for them.

A record of an event on a whole context breaks every capture in it, and nobody can see
from outside that a non-blocking stream is captured. So the calls that begin and end a
capture are wrapped where all ways to them meet: in the base class of
``torch.cuda.CUDAGraph``, which ``torch.cuda.graph``, ``make_graphed_callables`` and
compiled models go through, and in that of CuPy's streams. A wrapped call announces the
capture before it begins, as ``numpy_rmm.stream_capture()`` does, and names the stream:
arrays that die meanwhile belong to the graph.

A library that comes later is seen at the first import after its class is there. Both
import many modules of their own after it, so that is before any program can capture;
and the loaders of modules, which belong to others, are left alone.
"""

from __future__ import annotations

import sys
import weakref
from _thread import allocate_lock, get_ident
from functools import wraps

import numpy_rmm._core as _core  # whose absence has a name then

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["hooked", "install", "watch"]

_PER_THREAD = 2  # a handle that means another stream in each thread

hooked: dict[str, str] = {}
"""Where the hooks are: by library, the class."""

_open: dict[tuple[int, int], weakref.ref[Any] | None] = {}
"""The captures that go on, by stream, with whatever takes the stream's end with it."""


# ---- a capture -----------------------------------------------------------------------


def _key_of(handle: int) -> tuple[int, int]:
    return handle, get_ident() if handle == _PER_THREAD else 0


def _close(key: tuple[int, int], reference: object = None) -> None:
    """The capture is over; of a reference that has died, unless another is there."""
    if reference is not None and _open.get(key) is not reference:
        return
    if _open.pop(key, _open) is not _open:
        _core._capture_disown_frees(key[0])
        _core._capture_end()


def _note(handle: int, owner: object, dies_with_it: bool) -> None:
    """A capture has begun and is announced."""
    key = _key_of(handle)
    _close(key)  # of a stream that was destroyed before its capture ended
    _open[key] = (
        weakref.ref(owner, lambda dead: _close(key, dead)) if dies_with_it else None
    )
    _core._capture_own_frees(handle)


def _end_unless_on(key: tuple[int, int]) -> None:
    """An attempt to end it in the wrong thread, or on another stream, ends nothing."""
    if key in _open and not _core._stream_is_captured(key[0]):
        _close(key)


# ---- the libraries -------------------------------------------------------------------


class _Torch:
    """`capture_end` of later versions calls two halves of it in its place."""

    module = "torch._C"
    classes = ("_CUDAGraph",)
    begin = "capture_begin"
    ends = ("capture_end", "capture_end_pre")

    @staticmethod
    def handle_of(graph: object) -> int:
        """Of the stream that it captures, or that must be current when it ends."""
        stream = sys.modules["torch"].cuda.current_stream()
        handle: int = stream.cuda_stream
        return handle

    @staticmethod
    def takes_capture_along(graph: object) -> bool:
        return True  # nobody else can end it


class _Cupy:
    """Both kinds of stream inherit the two methods of one class."""

    module = "cupy.cuda.stream"
    classes = ("Stream", "ExternalStream")
    begin = "begin_capture"
    ends = ("end_capture",)

    @staticmethod
    def handle_of(stream: Any) -> int:
        handle: int = stream.ptr
        return handle

    @staticmethod
    def takes_capture_along(stream: object) -> bool:
        return hasattr(type(stream), "__del__")  # it destroys its stream


_waiting: dict[str, type[_Torch] | type[_Cupy]] = {"torch": _Torch, "cupy": _Cupy}
_installing = allocate_lock()


def _begins(begin: Callable[..., Any], seam: type[_Torch] | type[_Cupy]) -> Any:
    @wraps(begin)
    def announced(self: object, *args: object, **kwargs: object) -> object:
        _core._stream_is_captured(seam.handle_of(self))  # so the driver is loaded
        _core._capture_begin()
        try:
            result: object = begin(self, *args, **kwargs)
        except BaseException:
            _core._capture_end()
            raise
        _note(seam.handle_of(self), self, seam.takes_capture_along(self))
        return result

    return announced


def _ends(end: Callable[..., Any], seam: type[_Torch] | type[_Cupy]) -> Any:
    @wraps(end)
    def withdrawn(self: object, *args: object, **kwargs: object) -> object:
        key = _key_of(seam.handle_of(self))
        try:
            result: object = end(self, *args, **kwargs)
        finally:
            _end_unless_on(key)
        return result

    return withdrawn


def _defining_class(module: object, name: str, method: str) -> type | None:
    """The class that a method of the named one comes from."""
    found = getattr(module, name, None)
    bases = found.__mro__ if isinstance(found, type) else ()
    return next((base for base in bases if method in vars(base)), None)


def _hook(seam: type[_Torch] | type[_Cupy]) -> list[str]:
    """The classes that were hooked; none when the module is not that far."""
    module = sys.modules.get(seam.module)
    found = [_defining_class(module, name, seam.begin) for name in seam.classes]
    if module is None or None in found:
        return []
    names = []
    for cls in dict.fromkeys(found):
        setattr(cls, seam.begin, _begins(getattr(cls, seam.begin), seam))
        for end in seam.ends:
            if end in vars(cls):
                setattr(cls, end, _ends(getattr(cls, end), seam))
        names.append(f"{cls.__module__}.{cls.__qualname__}")  # type: ignore[union-attr]
    return names


def install() -> None:
    """Hook the libraries that are imported and have no hooks yet."""
    for library, seam in list(_waiting.items()):
        if seam.module not in sys.modules or not _installing.acquire(blocking=False):
            continue
        try:
            names = _hook(seam) if library in _waiting else []
        except (AttributeError, TypeError) as error:  # its classes are sealed
            names = [f"none: {error}"]
        finally:
            _installing.release()
        if names:
            hooked[library] = ", ".join(names)
            del _waiting[library]


class _Watch:
    """A finder of modules that finds none, and looks what has come meanwhile."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Nothing: the finders after this one are asked."""
        if _waiting:
            install()


def watch() -> None:
    """Hook what is imported already, and look out for the rest."""
    install()
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
