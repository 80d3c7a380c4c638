"""The CUDA driver's own calls from Python, of the real library or the simulated one.

The table has their prototypes, the same as the C part declares for itself. `Driver`
looks an entry point up when it is first used, as a driver need not have all of them.
"""

from __future__ import annotations

import ctypes
import operator
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

__all__ = ["CALLS", "TYPES", "Driver", "handle_of"]

# One letter an argument: i int, u unsigned, Q 64 bits, z size_t, p address or handle,
# s text, b unsigned char; capital I, U, Z, P, D: a pointer to one to be filled in.
TYPES: dict[str, Any] = {
    "i": c_int,
    "u": c_uint,
    "Q": c_uint64,
    "z": c_size_t,
    "p": c_void_p,
    "s": c_char_p,
    "b": ctypes.c_ubyte,
    "I": POINTER(c_int),
    "U": POINTER(c_uint),
    "Z": POINTER(c_size_t),
    "P": POINTER(c_void_p),
    "D": POINTER(c_uint64),
    "S": POINTER(c_char_p),
}

# name: (symbol, CUDA version of its prototype, arguments); tests compare it with abi.h.
CALLS = {
    "cuInit": ("cuInit", 2000, "u"),
    "cuDriverGetVersion": ("cuDriverGetVersion", 2020, "I"),
    "cuGetProcAddress": ("cuGetProcAddress_v2", 12000, "sPiQU"),
    "cuGetErrorName": ("cuGetErrorName", 6000, "iS"),
    "cuGetErrorString": ("cuGetErrorString", 6000, "iS"),
    "cuDeviceGet": ("cuDeviceGet", 2000, "Ii"),
    "cuDeviceGetCount": ("cuDeviceGetCount", 2000, "I"),
    "cuDeviceCanAccessPeer": ("cuDeviceCanAccessPeer", 4000, "Iii"),
    "cuDeviceGetName": ("cuDeviceGetName", 2000, "sii"),
    "cuDeviceGetAttribute": ("cuDeviceGetAttribute", 2000, "Iii"),
    "cuDeviceTotalMem": ("cuDeviceTotalMem_v2", 3020, "Zi"),
    "cuDeviceGetPCIBusId": ("cuDeviceGetPCIBusId", 4010, "sii"),
    "cuDevicePrimaryCtxRetain": ("cuDevicePrimaryCtxRetain", 7000, "Pi"),
    "cuDevicePrimaryCtxRelease": ("cuDevicePrimaryCtxRelease_v2", 11000, "i"),
    "cuDevicePrimaryCtxGetState": ("cuDevicePrimaryCtxGetState", 7000, "iUI"),
    "cuDevicePrimaryCtxReset": ("cuDevicePrimaryCtxReset_v2", 11000, "i"),
    "cuCtxCreate": ("cuCtxCreate_v2", 3020, "Pui"),
    "cuCtxDestroy": ("cuCtxDestroy_v2", 4000, "p"),
    "cuCtxGetCurrent": ("cuCtxGetCurrent", 4000, "P"),
    "cuCtxSetCurrent": ("cuCtxSetCurrent", 4000, "p"),
    "cuCtxPushCurrent": ("cuCtxPushCurrent_v2", 4000, "p"),
    "cuCtxPopCurrent": ("cuCtxPopCurrent_v2", 4000, "P"),
    "cuCtxGetDevice": ("cuCtxGetDevice", 2000, "I"),
    "cuCtxGetId": ("cuCtxGetId", 12000, "pD"),
    "cuCtxSynchronize": ("cuCtxSynchronize", 2000, ""),
    "cuCtxRecordEvent": ("cuCtxRecordEvent", 12050, "pp"),
    "cuMemGetInfo": ("cuMemGetInfo_v2", 3020, "ZZ"),
    "cuMemAlloc": ("cuMemAlloc_v2", 3020, "Dz"),
    "cuMemFree": ("cuMemFree_v2", 3020, "Q"),
    "cuMemAddressReserve": ("cuMemAddressReserve", 10020, "DzzQQ"),
    "cuMemAddressFree": ("cuMemAddressFree", 10020, "Qz"),
    "cuMemCreate": ("cuMemCreate", 10020, "DzpQ"),
    "cuMemRelease": ("cuMemRelease", 10020, "Q"),
    "cuMemMap": ("cuMemMap", 10020, "QzzQQ"),
    "cuMemUnmap": ("cuMemUnmap", 10020, "Qz"),
    "cuMemSetAccess": ("cuMemSetAccess", 10020, "Qzpz"),
    "cuMemGetAccess": ("cuMemGetAccess", 10020, "DpQ"),
    "cuMemGetAllocationGranularity": ("cuMemGetAllocationGranularity", 10020, "Zpu"),
    "cuMemPoolCreate": ("cuMemPoolCreate", 11020, "Pp"),
    "cuMemPoolDestroy": ("cuMemPoolDestroy", 11020, "p"),
    "cuMemPoolSetAttribute": ("cuMemPoolSetAttribute", 11020, "pup"),
    "cuMemPoolGetAttribute": ("cuMemPoolGetAttribute", 11020, "pup"),
    "cuMemPoolTrimTo": ("cuMemPoolTrimTo", 11020, "pz"),
    "cuMemGetDefaultMemPool": ("cuMemGetDefaultMemPool", 13000, "Ppu"),
    "cuMemAllocFromPoolAsync": ("cuMemAllocFromPoolAsync", 11020, "Dzpp"),
    "cuMemFreeAsync": ("cuMemFreeAsync", 11020, "Qp"),
    "cuMemAdvise": ("cuMemAdvise_v2", 12020, "QzuQ"),
    "cuMemAllocManaged": ("cuMemAllocManaged", 6000, "Dzu"),
    "cuMemHostAlloc": ("cuMemHostAlloc", 2020, "Pzu"),
    "cuMemFreeHost": ("cuMemFreeHost", 2000, "p"),
    "cuMemHostRegister": ("cuMemHostRegister_v2", 6050, "pzu"),
    "cuMemHostUnregister": ("cuMemHostUnregister", 4000, "p"),
    "cuMemHostGetDevicePointer": ("cuMemHostGetDevicePointer_v2", 3020, "Dpu"),
    "cuMemHostGetFlags": ("cuMemHostGetFlags", 2030, "Up"),
    "cuPointerGetAttribute": ("cuPointerGetAttribute", 4000, "piQ"),
    "cuDeviceGetDefaultMemPool": ("cuDeviceGetDefaultMemPool", 11020, "Pi"),
    "cuMemRangeGetAttribute": ("cuMemRangeGetAttribute", 8000, "pzuQz"),
    "cuMemcpyHtoD": ("cuMemcpyHtoD_v2", 3020, "Qpz"),
    "cuMemcpyDtoH": ("cuMemcpyDtoH_v2", 3020, "pQz"),
    "cuMemcpyDtoD": ("cuMemcpyDtoD_v2", 3020, "QQz"),
    "cuMemcpy": ("cuMemcpy", 4000, "QQz"),
    "cuMemcpyHtoDAsync": ("cuMemcpyHtoDAsync_v2", 3020, "Qpzp"),
    "cuMemcpyDtoHAsync": ("cuMemcpyDtoHAsync_v2", 3020, "pQzp"),
    "cuMemcpyAsync": ("cuMemcpyAsync", 4000, "QQzp"),
    "cuMemcpy2DAsync": ("cuMemcpy2DAsync_v2", 3020, "pp"),
    "cuMemcpy3DAsync": ("cuMemcpy3DAsync_v2", 3020, "pp"),
    "cuMemcpyPeerAsync": ("cuMemcpyPeerAsync", 4000, "QpQpzp"),
    "cuMemcpy3DPeerAsync": ("cuMemcpy3DPeerAsync", 4000, "pp"),
    "cuMemcpyBatchAsync": ("cuMemcpyBatchAsync", 12080, "DDZzpZzZp"),
    "cuMemsetD8": ("cuMemsetD8_v2", 3020, "Qbz"),
    "cuMemsetD8Async": ("cuMemsetD8Async", 3020, "Qbzp"),
    "cuMemPrefetchAsync": ("cuMemPrefetchAsync_v2", 12020, "QzQup"),
    "cuStreamCreate": ("cuStreamCreate", 2000, "Pu"),
    "cuStreamDestroy": ("cuStreamDestroy_v2", 4000, "p"),
    "cuStreamQuery": ("cuStreamQuery", 2000, "p"),
    "cuStreamSynchronize": ("cuStreamSynchronize", 2000, "p"),
    "cuStreamWaitEvent": ("cuStreamWaitEvent", 3020, "ppu"),
    "cuStreamWaitValue32": ("cuStreamWaitValue32_v2", 11070, "pQuu"),
    "cuStreamGetCtx": ("cuStreamGetCtx", 9020, "pP"),
    "cuStreamGetId": ("cuStreamGetId", 12000, "pD"),
    "cuStreamIsCapturing": ("cuStreamIsCapturing", 10000, "pU"),
    "cuStreamBeginCapture": ("cuStreamBeginCapture_v2", 10010, "pu"),
    "cuStreamEndCapture": ("cuStreamEndCapture", 10000, "pP"),
    "cuStreamGetCaptureInfo": ("cuStreamGetCaptureInfo_v3", 12030, "pUDPppZ"),
    "cuUserObjectCreate": ("cuUserObjectCreate", 11030, "Pppuu"),
    "cuUserObjectRelease": ("cuUserObjectRelease", 11030, "pu"),
    "cuGraphRetainUserObject": ("cuGraphRetainUserObject", 11030, "ppuu"),
    "cuGraphInstantiateWithFlags": ("cuGraphInstantiateWithFlags", 11040, "PpQ"),
    "cuGraphLaunch": ("cuGraphLaunch", 10000, "pp"),
    "cuGraphExecDestroy": ("cuGraphExecDestroy", 10000, "p"),
    "cuGraphDestroy": ("cuGraphDestroy", 10000, "p"),
    "cuThreadExchangeStreamCaptureMode": (
        "cuThreadExchangeStreamCaptureMode",
        10010,
        "U",
    ),
    "cuEventCreate": ("cuEventCreate", 2000, "Pu"),
    "cuEventDestroy": ("cuEventDestroy_v2", 4000, "p"),
    "cuEventQuery": ("cuEventQuery", 2000, "p"),
    "cuEventRecord": ("cuEventRecord", 2000, "pp"),
    "cuEventSynchronize": ("cuEventSynchronize", 2000, "p"),
    "cuLaunchHostFunc": ("cuLaunchHostFunc", 10000, "ppp"),
}

_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_PORTABLE_AND_MAPPED = 3


def handle_of(stream: Any) -> int:
    """The driver's handle of a stream, which may also be an object of some library."""
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    return operator.index(getattr(stream, "ptr", stream))


class Driver:
    """The CUDA driver's own calls, of the real library or of the simulated one.

    Every entry point is an attribute that takes and returns what the C function does, a
    result code included: ``driver.cuStreamSynchronize(stream)``. The methods below make
    the objects that tests need and raise where a call fails. All work in the current
    context of the calling thread; `activate` makes one current.

    Parameters
    ----------
    path : str or path, optional
        The library to open. By default ``libcuda.so.1``.

    Raises
    ------
    OSError
        The library does not exist or is no CUDA driver of version 12.0 or later.

    Examples
    --------
    >>> from numpy_rmm.testing import simulate_cuda
    >>> with simulate_cuda() as cuda:  # Driver() is the real one's
    ...     driver = cuda.driver
    ...     context, stream = driver.activate(), driver.create_stream()
    ...     driver.cuStreamSynchronize(stream)
    0
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = "libcuda.so.1" if path is None else str(path)
        self._library = ctypes.CDLL(self.path)
        try:
            self._find = self._library.cuGetProcAddress_v2
        except AttributeError:
            raise OSError(f"{self.path} is no CUDA driver of 12.0 or later") from None
        self._find.argtypes = [TYPES[letter] for letter in CALLS["cuGetProcAddress"][2]]
        self._lock = threading.Lock()
        self._n_held = 0  # streams
        self._flags: list[c_void_p] = []  # that nothing waits for any more

    def __repr__(self) -> str:
        return f"Driver({self.path!r})"

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in CALLS:
            raise AttributeError(f"the driver's call {name!r} is not declared here")
        _, version, arguments = CALLS[name]
        address = c_void_p()
        self._find(name.encode(), byref(address), version, 0, None)
        if address.value is None:
            raise AttributeError(f"{self.path} has no {name}")
        prototype = ctypes.CFUNCTYPE(c_int, *(TYPES[letter] for letter in arguments))
        function = prototype(address.value)
        setattr(self, name, function)
        return function

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *CALLS})

    def error_name(self, result: int) -> str:
        """The name of a result code, as ``"CUDA_ERROR_NOT_READY"``."""
        name = c_char_p()
        self.cuGetErrorName(result, byref(name))
        return str(result) if name.value is None else name.value.decode()

    def check(self, result: int) -> None:
        """Raise RuntimeError with the error's name unless `result` is 0."""
        if result != 0:
            raise RuntimeError(self.error_name(result))

    def activate(self, device: int = 0) -> int:
        """Initialise the driver, retain a device's primary context and make it current.

        Returns the context's handle. Each call is to be undone by one of
        ``cuDevicePrimaryCtxRelease``.
        """
        context = c_void_p()
        self.check(self.cuInit(0))
        self.check(self.cuDevicePrimaryCtxRetain(byref(context), device))
        self.check(self.cuCtxSetCurrent(context))
        return context.value or 0

    def create_stream(self, flags: int = _NON_BLOCKING) -> int:
        """The handle of a new stream, by default one that does not block."""
        stream = c_void_p()
        self.check(self.cuStreamCreate(byref(stream), flags))
        return stream.value or 0

    def create_event(self, flags: int = _DISABLE_TIMING) -> int:
        """The handle of a new event, by default one without a time."""
        event = c_void_p()
        self.check(self.cuEventCreate(byref(event), flags))
        return event.value or 0

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` bytes of device memory, for ``cuMemFree``."""
        address = c_uint64()
        self.check(self.cuMemAlloc(byref(address), nbytes))
        return address.value

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes at a device address. Waits for the legacy stream."""
        buffer = ctypes.create_string_buffer(nbytes)
        self.check(self.cuMemcpyDtoH(buffer, address, nbytes))
        return buffer.raw

    def is_done(self, event: int) -> bool:
        """Whether the work that an event covers is done."""
        result = self.cuEventQuery(event)
        if self.error_name(result) == "CUDA_ERROR_NOT_READY":
            return False
        self.check(result)
        return True

    @contextmanager
    def held(self, stream: object) -> Iterator[None]:
        """Keep a stream's later work from running until the block is left.

        The stream waits for a word of page-locked memory, which works on every driver.
        That is freed when no stream is held any more: the driver's free waits for all
        of them.
        """
        flag = c_void_p()
        address = c_uint64()
        self.check(self.cuMemHostAlloc(byref(flag), 4096, _PORTABLE_AND_MAPPED))
        word = c_uint.from_address(flag.value or 0)
        word.value = 0
        with self._lock:
            self._n_held += 1
        try:
            self.check(self.cuMemHostGetDevicePointer(byref(address), flag, 0))
            self.check(self.cuStreamWaitValue32(handle_of(stream), address, 1, 0))
            yield
        finally:
            word.value = 1
            result = self.cuStreamSynchronize(handle_of(stream))
            self._free_flags(flag)
            self.check(result)

    def _free_flags(self, flag: c_void_p) -> None:
        with self._lock:
            self._n_held -= 1
            self._flags.append(flag)
            spent = self._flags if self._n_held == 0 else []
            self._flags = self._flags if self._n_held else []
        for each in spent:
            self.check(self.cuMemFreeHost(each))
