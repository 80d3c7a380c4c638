"""DLPack: what other libraries are handed, and who keeps the memory meanwhile.

Capsules are looked into by ctypes, with the layout of the specification; where NumPy
can take one, it does.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from ctypes import (
    Structure,
    c_char_p,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from dlpack_structures import Tensor
from numpy_rmm import DeviceBuffer, Stream, mr
from numpy_rmm.testing import Driver, SimulatedCuda

pytestmark = pytest.mark.usefixtures("driver")

NBYTES = 1 << 16


class Plain(Structure):
    _fields_ = [("tensor", Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class Versioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = [ctypes.py_object, c_char_p]
USED = {
    b"dltensor": b"used_dltensor",
    b"dltensor_versioned": b"used_dltensor_versioned",
}


def look(capsule: object) -> Any:
    """What a capsule holds. The capsule lives as long as what is returned."""
    is_versioned = "dltensor_versioned" in repr(capsule)
    name = b"dltensor_versioned" if is_versioned else b"dltensor"
    kind = Versioned if is_versioned else Plain
    held = kind.from_address(_pointer(capsule, name))
    held.capsule = capsule
    return held


def take(capsule: object) -> Callable[[], None]:
    """Takes the tensor as a consumer does; what is returned lets go of it, without the
    interpreter's lock."""
    is_versioned = "dltensor_versioned" in repr(capsule)
    name = b"dltensor_versioned" if is_versioned else b"dltensor"
    held = look(capsule)
    deleter = ctypes.CFUNCTYPE(None, c_void_p)(held.deleter)
    _rename(capsule, USED[name])
    address = ctypes.addressof(held)
    del held
    return lambda: deleter(address)


def buffer_of(kind: str, size: int = 100) -> DeviceBuffer:
    return DeviceBuffer(size=size, mr=numpy_rmm.registry[kind])


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_a_capsule(max_version: tuple[int, int] | None) -> None:
    buffer = DeviceBuffer(size=100)
    capsule = buffer.__dlpack__(max_version=max_version)
    held = look(capsule)
    if max_version is not None and max_version >= (1, 0):
        assert (held.major, held.minor, held.flags) == (1, 0, 0)
    else:
        assert isinstance(held, Plain)
    tensor = held.tensor
    assert tensor.data == buffer.ptr
    assert (
        (tensor.device_type, tensor.device_id) == buffer.__dlpack_device__() == (2, 0)
    )
    assert (tensor.code, tensor.bits, tensor.lanes) == (1, 8, 1)
    assert (tensor.n_dims, tensor.shape[0], tensor.strides[0]) == (1, 100, 1)
    assert tensor.byte_offset == 0


def test_no_bytes() -> None:
    tensor = look(DeviceBuffer().__dlpack__(stream=5)).tensor
    assert tensor.data is None
    assert tensor.shape[0] == 0


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_capsule_that_nobody_takes(
    max_version: tuple[int, int] | None, pool: mr.MemoryResource
) -> None:
    buffer = DeviceBuffer(size=100, mr=pool)
    dead = weakref.ref(buffer)
    capsule = buffer.__dlpack__(max_version=max_version)
    del buffer
    assert dead() is not None
    del capsule
    assert dead() is None
    assert pool.statistics().current_count == 0


@pytest.mark.parametrize("max_version", [None, (1, 0)])
@pytest.mark.parametrize("where", ["here", "thread"])
def test_a_tensor_keeps_the_memory(
    max_version: tuple[int, int] | None, where: str, pool: mr.MemoryResource
) -> None:
    buffer = DeviceBuffer(size=100, mr=pool)
    let_go = take(buffer.__dlpack__(max_version=max_version))
    del buffer
    gc.collect()
    assert pool.statistics().current_count == 1
    if where == "here":
        let_go()
    else:
        thread = threading.Thread(target=let_go)
        thread.start()
        thread.join()
    assert pool.statistics().current_count == 0


def test_a_buffer_does_not_move_under_a_tensor() -> None:
    buffer = DeviceBuffer(size=100)
    capsule, other = buffer.__dlpack__(), buffer.__dlpack__()
    address = buffer.ptr
    for call in (buffer.resize, buffer.reserve):
        with pytest.raises(BufferError, match="2 arrays and DLPack tensors"):
            call(101)
    buffer.resize(50)
    assert buffer.ptr == address
    del capsule, other
    buffer.resize(101)


# ---- where it is ---------------------------------------------------------------------

SHOWN = [
    ("device", None, (2, 0)),
    ("device", (2, 0), (2, 0)),
    ("managed", None, (2, 0)),
    ("managed", (13, 0), (13, 0)),
    ("managed", (1, 0), (1, 0)),
    ("pinned", None, (3, 0)),
    ("pinned", (2, 0), (2, 0)),
    ("pinned", (1, 0), (1, 0)),
]
NOT_SHOWN = [
    ("device", (1, 0)),
    ("device", (2, 1)),
    ("device", (13, 0)),
    ("managed", (3, 0)),
    ("pinned", (13, 0)),
    ("pinned", (3, 1)),
    ("device", (4, 0)),
]


@pytest.mark.parametrize(("kind", "asked", "shown"), SHOWN)
def test_where_memory_is_shown(
    kind: str, asked: tuple[int, int] | None, shown: tuple[int, int]
) -> None:
    buffer = buffer_of(kind)
    tensor = look(buffer.__dlpack__(dl_device=asked)).tensor
    assert (tensor.device_type, tensor.device_id) == shown
    if asked is None:
        assert buffer.__dlpack_device__() == shown


@pytest.mark.parametrize(("kind", "asked"), NOT_SHOWN)
def test_where_it_is_not(kind: str, asked: tuple[int, int]) -> None:
    with pytest.raises(BufferError, match=f"{kind} memory of device 0 cannot be shown"):
        buffer_of(kind).__dlpack__(dl_device=asked)


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_numpy_takes_what_the_host_can_read(kind: str) -> None:
    buffer = buffer_of(kind, 5)
    buffer.copy_from_host(b"abcde")
    capsule = buffer.__dlpack__(max_version=(1, 0), dl_device=(1, 0))

    class Holder:
        def __dlpack__(self, **more: object) -> object:
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    array = np.from_dlpack(Holder())  # type: ignore[arg-type]
    assert array.ctypes.data == buffer.ptr
    assert array.tobytes() == b"abcde"


def test_numpy_takes_page_locked_memory_by_itself() -> None:
    buffer = buffer_of("pinned", 5)
    array = np.from_dlpack(buffer)
    assert array.ctypes.data == buffer.ptr
    del buffer
    array[:] = 3
    assert array.__dlpack_device__()[0] == 3


# ---- order ---------------------------------------------------------------------------


@pytest.mark.parametrize("as_handle", [int, np.uint64])
def test_the_consumers_stream_waits(
    driver: Driver, stream: Stream, as_handle: Callable[[int], Any]
) -> None:
    consumer = Stream(flags=1)
    buffer = DeviceBuffer(size=NBYTES, stream=stream)
    event = driver.create_event()
    with driver.held(stream):
        buffer.__dlpack__(stream=as_handle(consumer.handle))
        driver.check(driver.cuEventRecord(event, consumer.handle))
        assert not driver.is_done(event)
    consumer.synchronize()
    assert driver.is_done(event)
    driver.check(driver.cuEventDestroy(event))


@pytest.mark.parametrize("given", [None, 0, 1])
def test_the_legacy_stream_waits(
    driver: Driver, stream: Stream, given: int | None
) -> None:
    buffer = DeviceBuffer(size=NBYTES, stream=stream)
    event = driver.create_event()
    with driver.held(stream):
        buffer.__dlpack__(stream=given)
        driver.check(driver.cuEventRecord(event, 1))
        assert not driver.is_done(event)
    driver.check(driver.cuCtxSynchronize())
    driver.check(driver.cuEventDestroy(event))


def test_a_consumer_that_waits_by_itself(
    driver: Driver, simulator: SimulatedCuda, stream: Stream
) -> None:
    buffer = DeviceBuffer(size=NBYTES, stream=stream)
    simulator.clear_log()
    buffer.__dlpack__(stream=-1)
    buffer.__dlpack__(stream=stream.handle)
    assert [entry for entry in simulator.log() if "Event" in entry] == []


def test_what_the_host_reads_is_done(driver: Driver, stream: Stream) -> None:
    buffer = DeviceBuffer(size=NBYTES, stream=stream, mr=numpy_rmm.registry["pinned"])
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        driver.activate()
        with driver.held(stream):
            driver.check(driver.cuMemsetD8Async(buffer.ptr, 7, NBYTES, stream.handle))
            held.set()
            let_go.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    timer = threading.Timer(0.1, let_go.set)
    timer.start()
    assert set(np.from_dlpack(buffer).tobytes()) == {7}
    thread.join()
    timer.join()


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_copy(max_version: tuple[int, int] | None, pool: mr.MemoryResource) -> None:
    buffer = DeviceBuffer.to_device(b"abc", mr=pool)
    capsule = buffer.__dlpack__(copy=True, max_version=max_version)
    held = look(capsule)
    assert held.tensor.data != buffer.ptr
    if max_version is not None:
        assert held.flags == 2
    assert pool.statistics().current_count == 2
    buffer.resize(10)
    del capsule, held
    assert pool.statistics().current_count == 1
    assert look(buffer.__dlpack__(copy=False)).tensor.data == buffer.ptr


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"stream": "1"}, TypeError, "stream must be an int"),
        ({"stream": -2}, ValueError, "stream must not be negative"),
        ({"max_version": 1}, TypeError, "max_version must be a tuple of two ints"),
        ({"max_version": (1, "0")}, TypeError, "max_version must be an int"),
        ({"dl_device": (2,)}, TypeError, "dl_device must be a tuple of two ints"),
        ({"dl_device": (2, -1)}, ValueError, "dl_device must be between 0"),
        ({"unknown": 1}, TypeError, "has no argument 'unknown'"),
    ],
)
def test_wrong_arguments(wrong: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        DeviceBuffer(size=1).__dlpack__(**wrong)


def test_a_stream_for_memory_of_the_host() -> None:
    buffer = buffer_of("pinned")
    with pytest.raises(ValueError, match="stream must be None for memory"):
        buffer.__dlpack__(stream=1)
    buffer.__dlpack__(stream=-1)


def test_a_tensor_that_is_alive_at_exit(run_python: Callable[..., Any]) -> None:
    result = run_python(
        """
        import atexit, ctypes, sys
        import numpy as np
        from numpy_rmm import DeviceBuffer, registry

        sys.modules["kept"] = [
            DeviceBuffer(size=10).__dlpack__(),
            np.from_dlpack(DeviceBuffer(size=10, mr=registry["pinned"])),
        ]
        print("end")
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")
