"""Who queues copies: the CUDA driver itself, PyTorch, CuPy, numba and cuda.core.

Each `Library` copies between arrays and device memory of its own without waiting, on a
stream of each kind, in the way that its documentation shows.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import numpy_rmm
from numpy_rmm.testing import Driver

FILL_BYTE = 251

_LEGACY, _LEGACY_BY_NAME, _PER_THREAD = 0, 1, 2  # stream handles
_BLOCKING, _NON_BLOCKING = 0, 1  # flags of cuStreamCreate


def address_of(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


@dataclass
class Lane:
    """A stream, as the driver and as a library know it."""

    handle: int
    native: Any
    driver: Driver
    is_owned: bool = False

    def close(self) -> None:
        """Destroys a stream of our own; work that is pending goes on."""
        if self.is_owned:
            self.is_owned = False
            self.driver.check(self.driver.cuStreamDestroy(self.handle))


MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


class Graph:
    """What a capture has become."""

    def launch(self, lane: Lane) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """It is gone, and what it held may come back."""
        raise NotImplementedError


class DriverGraph(Graph):
    """One of the driver's calls."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.executable = driver, ctypes.c_void_p()

    def instantiate(self, graph: ctypes.c_void_p) -> None:
        self.driver.check(
            self.driver.cuGraphInstantiateWithFlags(
                ctypes.byref(self.executable), graph, 0
            )
        )
        self.driver.check(self.driver.cuGraphDestroy(graph))

    def launch(self, lane: Lane) -> None:
        handle = ctypes.c_void_p(lane.handle)
        self.driver.check(self.driver.cuGraphLaunch(self.executable, handle))

    def close(self) -> None:
        self.driver.check(self.driver.cuGraphExecDestroy(self.executable))


class NativeGraph(Graph):
    """One of a library: `launch_on` launches it on a stream of it."""

    def __init__(self) -> None:
        self.launch_on: Callable[[Any], object] | None = None

    def launch(self, lane: Lane) -> None:
        assert self.launch_on is not None
        self.launch_on(lane.native)

    def close(self) -> None:
        self.launch_on = None  # which has the last reference


class Library:
    """Something that copies between arrays and a device without waiting.

    Device memory is whatever the library makes; `address` says where it is.
    """

    name: str
    operations: tuple[str, ...] = ("H2D", "D2H")
    captures_are_noticed = False  # by hooks: nothing need be announced or noted

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def open(self, stream: str) -> Lane:
        """A stream of one of the `STREAMS`."""
        handles = {"legacy": _LEGACY, "per-thread": _PER_THREAD}
        if stream in handles:
            handle = handles[stream]
            return Lane(handle, self.wrap(handle), self.driver)
        flags = _BLOCKING if stream == "blocking" else _NON_BLOCKING
        handle = self.driver.create_stream(flags)
        return Lane(handle, self.wrap(handle), self.driver, is_owned=True)

    def wrap(self, handle: int) -> Any:
        """The library's object of a stream that the driver made."""
        return handle

    def device(self, nbytes: int, lane: Lane) -> Any:
        raise NotImplementedError

    def address(self, device: Any) -> int:
        address: int = device.__cuda_array_interface__["data"][0]
        return address

    def queue(self, operation: str, device: Any, array: np.ndarray, lane: Lane) -> Any:
        """Queues the copy and returns the device memory that it is from or to."""
        raise NotImplementedError

    @contextmanager
    def captured(self, lane: Lane, mode: str) -> Iterator[Graph]:
        """What is queued inside is a graph when the block has been left.

        With the driver's calls, as a library that has none of its own does it: they are
        announced, and a copy must be noted.
        """
        graph, handle = DriverGraph(self.driver), ctypes.c_void_p(lane.handle)
        result, found = 0, ctypes.c_void_p()
        with numpy_rmm.stream_capture():
            self.driver.check(self.driver.cuStreamBeginCapture(handle, MODES[mode]))
            try:
                yield graph
            finally:
                result = self.driver.cuStreamEndCapture(handle, ctypes.byref(found))
            self.driver.check(result)
        graph.instantiate(found)


class _DeviceMemory:
    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.driver = driver
        self.address = driver.allocate(nbytes)

    def __del__(self) -> None:
        self.driver.cuMemFree(self.address)


class DriverCopies(Library):
    """Raw calls of the driver. "fill" writes to a managed array as a kernel would."""

    name = "driver"
    operations = ("H2D", "D2H", "fill")

    def device(self, nbytes: int, lane: Lane) -> Any:
        return _DeviceMemory(self.driver, nbytes)

    def address(self, device: Any) -> int:
        address: int = device.address
        return address

    def queue(self, operation: str, device: Any, array: np.ndarray, lane: Lane) -> Any:
        cuda, host = self.driver, address_of(array)
        if operation == "H2D":
            result = cuda.cuMemcpyAsync(device.address, host, array.nbytes, lane.handle)
        elif operation == "D2H":
            result = cuda.cuMemcpyAsync(host, device.address, array.nbytes, lane.handle)
        else:
            result = cuda.cuMemsetD8Async(host, FILL_BYTE, array.nbytes, lane.handle)
        cuda.check(result)
        return device


class TypedDriverCopies(DriverCopies):
    """The driver's calls that name a direction, as most C programs use them."""

    name = "driver, typed"
    operations = ("H2D", "D2H")

    def queue(self, operation: str, device: Any, array: np.ndarray, lane: Lane) -> Any:
        cuda, host = self.driver, address_of(array)
        if operation == "H2D":
            result = cuda.cuMemcpyHtoDAsync(
                device.address, host, array.nbytes, lane.handle
            )
        else:
            result = cuda.cuMemcpyDtoHAsync(
                host, device.address, array.nbytes, lane.handle
            )
        cuda.check(result)
        return device


def _import(name: str) -> Any:
    """A library, whatever it warns of while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


class TorchCopies(Library):
    """PyTorch's ``non_blocking=True`` on its own streams and on foreign ones."""

    name = "torch"
    captures_are_noticed = True
    operations = ("H2D", "D2H", "cuda()")

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.torch = _import("torch")
        self.torch.zeros(1, device="cuda")

    def open(self, stream: str) -> Lane:
        made = {
            "legacy": self.torch.cuda.default_stream,
            "non-blocking": self.torch.cuda.Stream,
        }
        if stream not in made:
            return super().open(stream)
        native = made[stream]()
        return Lane(native.cuda_stream, native, self.driver)

    def wrap(self, handle: int) -> Any:
        return self.torch.cuda.ExternalStream(handle)

    def device(self, nbytes: int, lane: Lane) -> Any:
        # The second one goes back to PyTorch's cache for this stream, where cuda()
        # finds it: no allocation of the driver's stands between the hold and the copy.
        with self.torch.cuda.stream(lane.native):
            tensors = [
                self.torch.zeros(nbytes, dtype=self.torch.uint8, device="cuda")
                for _ in range(2)
            ]
        self.torch.cuda.synchronize()
        return tensors[0]

    def queue(self, operation: str, device: Any, array: np.ndarray, lane: Lane) -> Any:
        host = self.torch.from_numpy(array)
        with self.torch.cuda.stream(lane.native):
            if operation == "cuda()":
                return host.cuda(non_blocking=True)
            if operation == "H2D":
                device.copy_(host, non_blocking=True)
            else:
                host.copy_(device, non_blocking=True)
        return device

    @contextmanager
    def captured(self, lane: Lane, mode: str) -> Iterator[Graph]:
        graph, native = NativeGraph(), self.torch.cuda.CUDAGraph()

        def replay(stream: Any) -> None:
            with self.torch.cuda.stream(stream):
                native.replay()

        with self.torch.cuda.stream(lane.native):
            native.capture_begin(capture_error_mode=mode)
            try:
                yield graph
            finally:
                native.capture_end()
        graph.launch_on = replay


class CupyCopies(Library):
    """CuPy's ``set`` and ``get(blocking=False)``; in a capture its copies of bytes."""

    name = "cupy"
    captures_are_noticed = True
    captures = False

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.cupy = _import("cupy")
        self.cupy.zeros(1)

    def open(self, stream: str) -> Lane:
        streams = self.cupy.cuda.Stream
        if stream == "legacy":
            return Lane(_LEGACY, streams.null, self.driver)
        if stream == "per-thread":
            return Lane(_PER_THREAD, streams.ptds, self.driver)
        if stream in ("blocking", "non-blocking"):
            native = streams(non_blocking=stream == "non-blocking")
            return Lane(native.ptr, native, self.driver)
        return super().open(stream)

    def wrap(self, handle: int) -> Any:
        return self.cupy.cuda.ExternalStream(handle)

    def device(self, nbytes: int, lane: Lane) -> Any:
        return self.cupy.zeros(nbytes, self.cupy.uint8)

    def queue(self, operation: str, device: Any, array: np.ndarray, lane: Lane) -> Any:
        if self.captures:  # where CuPy refuses the two
            ends = (device.data.ptr, array.ctypes.data)
            copy = self.cupy.cuda.runtime.memcpyAsync
            if operation == "H2D":
                copy(*ends, array.nbytes, 1, lane.native.ptr)
            else:
                copy(*reversed(ends), array.nbytes, 2, lane.native.ptr)
        elif operation == "H2D":
            device.set(array, stream=lane.native)
        else:
            device.get(stream=lane.native, out=array, blocking=False)
        return device

    @contextmanager
    def captured(self, lane: Lane, mode: str) -> Iterator[Graph]:
        graph = NativeGraph()
        lane.native.begin_capture(mode=MODES[mode])
        self.captures = True
        native = None
        try:
            yield graph
        finally:
            self.captures = False
            native = lane.native.end_capture()
        graph.launch_on = native.launch
        del native


class NumbaCopies(Library):
    """numba's ``copy_to_device`` and ``copy_to_host`` with a stream."""

    name = "numba"

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        if not hasattr(np, "row_stack"):  # numba-cuda 0.30 looks for it
            np.row_stack = np.vstack  # type: ignore[attr-defined]  # noqa: NPY201
        self.cuda = _import("numba.cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.cuda.current_context()

    def wrap(self, handle: int) -> Any:
        if handle == _LEGACY:
            return self.cuda.legacy_default_stream()
        if handle == _PER_THREAD:
            return self.cuda.per_thread_default_stream()
        return self.cuda.external_stream(handle)

    def device(self, nbytes: int, lane: Lane) -> Any:
        return self.cuda.device_array(nbytes, np.uint8)

    def queue(self, operation: str, device: Any, array: np.ndarray, lane: Lane) -> Any:
        if operation == "H2D":
            device.copy_to_device(array, stream=lane.native)
        else:
            device.copy_to_host(array, stream=lane.native)
        return device


class CudaCoreCopies(Library):
    """cuda.core's ``Buffer.copy_from`` and ``copy_to`` with buffers of both sides."""

    name = "cuda.core"

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        core = _import("cuda.core")
        # Before its first version all of it was experimental.
        self.core = (
            core if hasattr(core, "Buffer") else _import(f"{self.name}.experimental")
        )
        self.core.Device(0).set_current()

    def wrap(self, handle: int) -> Any:
        return self.core.Stream.from_handle(handle or _LEGACY_BY_NAME)

    def device(self, nbytes: int, lane: Lane) -> Any:
        memory = _DeviceMemory(self.driver, nbytes)
        return self.buffer(memory.address, nbytes, memory)

    def buffer(self, address: int, nbytes: int, owner: object) -> Any:
        return self.core.Buffer.from_handle(address, nbytes, owner=owner)

    def address(self, device: Any) -> int:
        return int(device.handle)

    def queue(self, operation: str, device: Any, array: np.ndarray, lane: Lane) -> Any:
        host = self.buffer(address_of(array), array.nbytes, array)
        if operation == "H2D":
            device.copy_from(host, stream=lane.native)
        else:
            device.copy_to(host, stream=lane.native)
        return device


RAW_LIBRARIES: tuple[type[Library], ...] = (DriverCopies, TypedDriverCopies)
PYTHON_LIBRARIES: tuple[type[Library], ...] = (
    TorchCopies,
    CupyCopies,
    NumbaCopies,
    CudaCoreCopies,
)
