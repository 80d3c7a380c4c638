"""A handler that calls malloc and nothing more: what NumPy users write first.

It loses what NumPy's default does for large arrays (it asks for huge pages), and shows
what that costs. Made with ctypes, so each call also takes the interpreter's lock: about
a microsecond, which only arrays of many megabytes do not notice.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, c_char, c_size_t, c_uint8, c_void_p
from typing import Any

_libc = ctypes.CDLL(None)
for _name, _arguments in {
    "malloc": [c_size_t],
    "calloc": [c_size_t, c_size_t],
    "realloc": [c_void_p, c_size_t],
    "free": [c_void_p],
}.items():
    getattr(_libc, _name).argtypes = _arguments
    getattr(_libc, _name).restype = None if _name == "free" else c_void_p

_Malloc = CFUNCTYPE(c_void_p, c_void_p, c_size_t)
_Calloc = CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_size_t)
_Realloc = CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t)
_Free = CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)


class _Handler(ctypes.Structure):
    """NumPy's ``PyDataMem_Handler``, version 1."""

    _fields_ = [
        ("name", c_char * 127),
        ("version", c_uint8),
        ("context", c_void_p),
        ("malloc", _Malloc),
        ("calloc", _Calloc),
        ("realloc", _Realloc),
        ("free", _Free),
    ]


_handler = _Handler(
    b"malloc",
    1,
    None,
    _Malloc(lambda _, nbytes: _libc.malloc(nbytes)),
    _Calloc(lambda _, n, nbytes: _libc.calloc(n, nbytes)),
    _Realloc(lambda _, old, nbytes: _libc.realloc(old, nbytes)),
    _Free(lambda _, old, nbytes: _libc.free(old)),
)


def capsule() -> Any:
    """The handler in the capsule that NumPy and ``numpy_rmm.use_handler`` take."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [c_void_p, ctypes.c_char_p, c_void_p]
    return new(ctypes.addressof(_handler), b"mem_handler", None)
