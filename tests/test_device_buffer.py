"""DeviceBuffer: bytes of a device, of a resource."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from device_buffers import Theirs, live
from numpy_rmm import (
    DEFAULT_STREAM,
    DeviceBuffer,
    Stream,
    copy_device_to_ptr,
    copy_host_to_ptr,
    copy_ptr_to_host,
    mr,
)
from numpy_rmm.testing import Driver, SimulatedCuda

pytestmark = pytest.mark.usefixtures("driver")

NBYTES = 1 << 20
KINDS = ["device", "managed", "pinned"]
Run = Callable[..., Any]


@pytest.fixture(params=KINDS)
def resource(request: pytest.FixtureRequest) -> mr.MemoryResource:
    return numpy_rmm.registry[request.param]


# ---- making one ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 5, 1000, NBYTES])
def test_its_attributes(size: int, pool: mr.MemoryResource, stream: Stream) -> None:
    buffer = DeviceBuffer(size=size, stream=stream, mr=pool)
    assert (buffer.ptr != 0) is (size != 0)
    assert buffer.ptr % 256 == 0
    assert buffer.size == buffer.nbytes == len(buffer) == buffer.capacity() == size
    assert bool(buffer) is (size != 0)
    assert buffer.mr is pool
    assert buffer.stream is stream
    assert repr(buffer).startswith(f"<DeviceBuffer of {size} B at ")


def test_it_has_a_block_of_its_resource(pool: mr.MemoryResource) -> None:
    buffer = DeviceBuffer(size=1000, mr=pool)
    assert live(pool) == (1, 1000)
    del buffer
    assert live(pool) == (0, 0)


def test_sizes_may_be_text(pool: mr.MemoryResource) -> None:
    assert len(DeviceBuffer(size="4 KiB", mr=pool)) == 4096
    assert len(DeviceBuffer(size=np.int16(7), mr=pool)) == 7


def test_the_current_resource_is_the_default(pool: mr.MemoryResource) -> None:
    assert DeviceBuffer(size=1).mr is mr.get_current_device_resource()
    mr.set_current_device_resource(pool)
    first = DeviceBuffer(size=10)
    assert first.mr is pool
    mr.set_current_device_resource(None)
    assert DeviceBuffer(size=10).mr is mr.get_current_device_resource() is not pool
    assert DeviceBuffer(size=10, mr=None).mr is not pool
    del first
    assert live(pool) == (0, 0)


def test_a_subclass_of_a_resource_stays_itself() -> None:
    class Own(mr.PoolMemoryResource):
        pass

    own = Own(mr.CudaMemoryResource())
    dead = weakref.ref(own)
    mr.set_current_device_resource(own)
    buffer = DeviceBuffer(size=10)
    mr.set_current_device_resource(None)
    del own
    gc.collect()
    assert buffer.mr is dead()
    del buffer
    gc.collect()
    assert dead() is None


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("stream_name", ["default", "own"])
def test_bytes_of_an_address(
    where: str, stream_name: str, stream: Stream, pattern: Callable[..., np.ndarray]
) -> None:
    data = pattern(1000)
    on = DEFAULT_STREAM if stream_name == "default" else stream
    other = DeviceBuffer.to_device(data)
    address = data.ctypes.data if where == "host" else other.ptr
    buffer = DeviceBuffer(ptr=address, size=1000, stream=on)
    assert buffer.ptr != address
    assert (buffer.copy_to_host(stream=on) == data).all()


def test_an_address_of_nothing(pool: mr.MemoryResource) -> None:
    data = np.zeros(4, np.uint8)
    assert len(DeviceBuffer(ptr=data.ctypes.data, size=0, mr=pool)) == 0
    assert len(DeviceBuffer(ptr=0, size=8, mr=pool)) == 8
    assert live(pool) == (0, 0)


def test_an_address_that_nobody_has(
    pool: mr.MemoryResource, simulator: SimulatedCuda
) -> None:
    """A real driver takes it for the program's own memory, and reads there."""
    with pytest.raises((ValueError, numpy_rmm.CudaError)):
        DeviceBuffer(ptr=8, size=8, mr=pool)
    assert live(pool) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"size": -1}, ValueError, "size must not be negative, not -1"),
        ({"size": 2**64}, ValueError, r"size must be less than 2\*\*64"),
        ({"size": 1.5}, TypeError, "size must be an int or text"),
        ({"size": None}, TypeError, "size must be an int or text"),
        ({"ptr": None}, TypeError, "ptr must be an int"),
        ({"ptr": -1, "size": 1}, ValueError, "ptr must not be negative"),
        ({"stream": None}, TypeError, "stream argument cannot be None"),
        ({"stream": 0}, TypeError, "stream must be a Stream .* not int"),
        ({"mr": "device"}, TypeError, "mr must be a MemoryResource, not str"),
        ({"nbytes": 1}, TypeError, "has no argument 'nbytes'"),
    ],
)
def test_wrong_arguments(wrong: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        DeviceBuffer(**wrong)


def test_nothing_by_position() -> None:
    with pytest.raises(TypeError, match="0 positional arguments"):
        DeviceBuffer(0, 10)  # type: ignore[call-arg]


def test_host_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="which a device cannot use: <PoolMemory"):
        DeviceBuffer(size=1, mr=numpy_rmm.registry["host"])


def test_too_much_memory_says_numbers(pool: mr.MemoryResource) -> None:
    with pytest.raises(numpy_rmm.OutOfMemoryError, match="1 PiB asked") as caught:
        DeviceBuffer(size="1 PiB", mr=pool)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.requested_nbytes == 1 << 50
    assert len(DeviceBuffer(size=10, mr=pool)) == 10


# ---- the host ------------------------------------------------------------------------

HOST = {
    "bytes": b"abc",
    "empty": b"",
    "bytearray": bytearray(b"abc"),
    "memoryview": memoryview(b"xabc")[1:],
    "array": np.arange(3, dtype=np.uint8),
    "read-only array": np.frombuffer(b"abc", np.uint8),
    "signed": np.arange(-2, 2, dtype=np.int8),
}


@pytest.mark.parametrize("host", HOST.values(), ids=HOST)
def test_there_and_back(host: Any, resource: mr.MemoryResource) -> None:
    buffer = DeviceBuffer.to_device(host, mr=resource)
    expected = memoryview(host).tobytes()
    assert type(buffer) is DeviceBuffer
    assert buffer.mr is resource
    assert buffer.tobytes() == bytes(buffer) == expected
    back = buffer.copy_to_host()
    assert back.dtype == np.uint8
    assert back.tobytes() == expected


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (None, TypeError, "bytes-like"),
        ("abc", TypeError, "bytes-like"),
        (123, TypeError, "bytes-like"),
        (np.ones(2, "u2"), ValueError, r"must be one-dimensional .* items of 2 B"),
        (np.ones((2, 2), "u1"), ValueError, "it has 2 dimensions"),
        (np.ones(4, "u1")[::2], ValueError, "not contiguous"),
        (np.array(1, "u1"), ValueError, "it has 0 dimensions"),
    ],
)
def test_what_cannot_be_copied(wrong: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        DeviceBuffer.to_device(wrong)
    with pytest.raises(error, match=match):
        DeviceBuffer(size=10).copy_from_host(wrong)


@pytest.mark.parametrize("target", [bytearray(5), np.zeros(8, np.uint8)])
def test_into_host_memory(target: Any) -> None:
    buffer = DeviceBuffer.to_device(b"abcde")
    assert buffer.copy_to_host(target) is target
    assert bytes(target[:5]) == b"abcde"


def test_host_memory_that_does_not_fit() -> None:
    buffer = DeviceBuffer(size=5)
    with pytest.raises(ValueError, match="5 B do not fit into ary, which has 4 B"):
        buffer.copy_to_host(bytearray(4))
    with pytest.raises(ValueError, match="ary: 6 B do not fit into the buffer"):
        buffer.copy_from_host(bytes(6))
    with pytest.raises(BufferError):
        buffer.copy_to_host(bytes(5))


def test_to_the_beginning() -> None:
    buffer = DeviceBuffer.to_device(bytes(6))
    buffer.copy_from_host(b"abc")
    buffer.copy_from_device(DeviceBuffer.to_device(b"x"))
    assert buffer.tobytes() == b"xbc\0\0\0"


def test_a_copy_to_the_host_has_the_memory_of_the_handler() -> None:
    buffer = DeviceBuffer(size=NBYTES)
    with numpy_rmm.pinned():
        assert numpy_rmm.memory_kind(buffer.copy_to_host()) == "pinned"


def test_addresses(stream: Stream) -> None:
    source, target = DeviceBuffer.to_device(b"abcd"), DeviceBuffer.to_device(b"....")
    host = bytearray(4)
    copy_ptr_to_host(source.ptr, host, stream)
    assert host == b"abcd"
    copy_host_to_ptr(b"xy", target.ptr + 1)
    assert target.tobytes() == b".xy."
    copy_device_to_ptr(source.ptr + 2, target.ptr, 2, stream)
    stream.synchronize()
    assert target.tobytes() == b"cdy."


def test_addresses_beyond_a_block() -> None:
    buffer = DeviceBuffer(size=10)
    for call in (
        lambda: copy_ptr_to_host(buffer.ptr + 8, bytearray(3)),
        lambda: copy_host_to_ptr(bytes(3), buffer.ptr + 8),
        lambda: copy_device_to_ptr(buffer.ptr, buffer.ptr + 8, 3),
    ):
        with pytest.raises(ValueError, match=r"3 B do not fit into the block .* 2 B"):
            call()


# ---- within a device -----------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda x: x.copy(), copy.copy, copy.deepcopy])
def test_copies(make: Run, resource: mr.MemoryResource, stream: Stream) -> None:
    buffer = DeviceBuffer.to_device(b"abc", stream, resource)
    buffer.reserve(100, stream)
    other = make(buffer)
    assert other.mr is resource
    assert other.stream is stream
    assert other.ptr != buffer.ptr
    assert other.capacity() == 3
    buffer.copy_from_host(b"xyz")
    assert other.tobytes() == b"abc"


@pytest.mark.parametrize("dtype", ["u1", "<f8", "c16"])
def test_from_memory_of_others(dtype: str) -> None:
    values = np.arange(4).astype(dtype)
    source = DeviceBuffer.to_device(values.view(np.uint8))
    shapes = {"typestr": values.dtype.str, "shape": (2, 2)}
    strides = (2 * values.itemsize, values.itemsize)
    target = DeviceBuffer(size=source.size)
    for more in (shapes, {**shapes, "strides": strides}):
        target.copy_from_host(bytes(target.size))
        target.copy_from_device(Theirs(source, **more))
        assert target.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        ({"strides": (2,)}, ValueError, "cuda_ary must be C-contiguous"),
        ({"strides": ("2",)}, TypeError, "interpreted as an integer"),
        ({"shape": [8]}, ValueError, "must be tuples"),
        ({"shape": (-8,)}, ValueError, r"shape of its \w+ cannot be \(-8,\)"),
        ({"shape": (2**70,)}, ValueError, "do not fit into the buffer"),
        ({"shape": (8.0,)}, TypeError, "interpreted as an integer"),
        ({"shape": (2**40, 2**40)}, ValueError, "has no size"),
        ({"typestr": "nonsense"}, ValueError, "is no text such as"),
        ({"mask": object()}, ValueError, "mask"),
        ({"data": None}, ValueError, "has no data"),
        ({"data": (0, False)}, ValueError, r"data of its \w+ cannot be \(0, False\)"),
        (
            {"data": ("1", False)},
            TypeError,
            r"ary: data of its \w+ must be an int",
        ),
        ({"stream": 0}, ValueError, "ambiguous"),
        (
            {"stream": -1},
            ValueError,
            r"ary: stream of its \w+ must not be neg",
        ),
        ({"shape": (11,)}, ValueError, "11 B do not fit into the buffer, which has 10"),
    ],
)
def test_memory_that_is_refused(more: Any, error: type, match: str) -> None:
    target = DeviceBuffer(size=10)
    with pytest.raises(error, match=match):
        target.copy_from_device(Theirs(DeviceBuffer(size=8), **more))


def test_what_is_no_memory_of_a_device() -> None:
    with pytest.raises(TypeError, match="cuda_ary must have __cuda_array_interface__"):
        DeviceBuffer(size=10).copy_from_device(b"abc")  # type: ignore[arg-type]


# ---- size ----------------------------------------------------------------------------


def test_a_size_that_changes(resource: mr.MemoryResource, stream: Stream) -> None:
    buffer = DeviceBuffer.to_device(b"abcde", stream, resource)
    address = buffer.ptr
    interface = buffer.__cuda_array_interface__
    buffer.resize(2, stream)
    assert (buffer.size, buffer.capacity(), buffer.ptr) == (2, 5, address)
    assert buffer.tobytes(stream) == b"ab"
    assert buffer.__cuda_array_interface__["shape"] == (2,)
    assert interface["shape"] == (5,)
    buffer.resize("1 KiB", stream)
    assert (buffer.size, buffer.capacity()) == (1024, 1024)
    assert buffer.ptr != address
    assert buffer.tobytes(stream)[:2] == b"ab"
    assert buffer.mr is resource
    buffer.resize(0, stream)
    assert (buffer.size, buffer.capacity(), buffer.tobytes()) == (0, 1024, b"")


def test_room_that_is_reserved(pool: mr.MemoryResource) -> None:
    buffer = DeviceBuffer.to_device(b"abc", mr=pool)
    buffer.reserve(2)
    assert (buffer.size, buffer.capacity()) == (3, 3)
    buffer.reserve(2000)
    assert (buffer.size, buffer.capacity()) == (3, 2000)
    assert live(pool) == (1, 2000)
    address = buffer.ptr
    buffer.resize(2000)
    assert buffer.ptr == address
    assert buffer.tobytes()[:3] == b"abc"


def test_an_empty_buffer_grows(pool: mr.MemoryResource) -> None:
    buffer = DeviceBuffer(mr=pool)
    buffer.resize(10)
    assert buffer.size == 10
    assert live(pool) == (1, 10)


def test_nothing_is_waited_for_when_a_size_changes(
    driver: Driver, stream: Stream
) -> None:
    other = Stream(flags=1)
    buffer = DeviceBuffer.to_device(b"abc", stream)
    with driver.held(stream):
        driver.check(driver.cuMemsetD8Async(buffer.ptr, 7, 3, stream.handle))
        buffer.resize(100, other)
        assert buffer.stream is other
        assert buffer.__cuda_array_interface__["stream"] == other.handle
    assert buffer.tobytes(other)[:3] == b"\7\7\7"


def test_growth_that_fails_changes_nothing(pool: mr.MemoryResource) -> None:
    buffer = DeviceBuffer.to_device(b"abc", mr=pool)
    address = buffer.ptr
    for grow in (buffer.resize, buffer.reserve):
        with pytest.raises(numpy_rmm.OutOfMemoryError, match="1 PiB"):
            grow("1 PiB")
    assert (buffer.ptr, buffer.size, buffer.capacity()) == (address, 3, 3)
    assert buffer.tobytes() == b"abc"


def test_a_copy_that_fails_on_the_way(
    simulator: SimulatedCuda, pool: mr.MemoryResource
) -> None:
    buffer = DeviceBuffer.to_device(b"abc", mr=pool)
    for call in (lambda: buffer.resize(100), buffer.copy):
        simulator.fail("cuMemcpyAsync", error="UNKNOWN")
        with pytest.raises(numpy_rmm.CudaError, match="CUDA_ERROR_UNKNOWN"):
            call()
    simulator.fail("cuMemcpyHtoDAsync", error="UNKNOWN")
    with pytest.raises(numpy_rmm.CudaError, match="CUDA_ERROR_UNKNOWN"):
        DeviceBuffer.to_device(b"abc", mr=pool)
    assert live(pool) == (1, 3)
    assert buffer.tobytes() == b"abc"


# ---- for other libraries -------------------------------------------------------------


def test_the_array_interface() -> None:
    buffer = DeviceBuffer(size=7)
    interface = buffer.__cuda_array_interface__
    assert interface == {
        "shape": (7,),
        "typestr": "|u1",
        "data": (buffer.ptr, False),
        "strides": None,
        "version": 3,
        "stream": None,
    }
    assert DeviceBuffer().__cuda_array_interface__["data"] == (0, False)


def test_copyto_takes_buffers() -> None:
    buffer, host = DeviceBuffer(size=8), np.arange(8, dtype=np.uint8)
    numpy_rmm.copyto(buffer, host)
    back = np.zeros(8, np.uint8)
    numpy_rmm.copyto(back, buffer)
    assert (back == host).all()


def test_there_is_no_buffer_protocol(resource: mr.MemoryResource) -> None:
    with pytest.raises(TypeError):
        memoryview(DeviceBuffer(size=3, mr=resource))  # type: ignore[arg-type]


def test_weak_references() -> None:
    buffer = DeviceBuffer(size=10)
    dead = weakref.ref(buffer)
    assert dead() is buffer
    del buffer
    assert dead() is None


def test_its_size_on_the_host() -> None:
    assert sys.getsizeof(DeviceBuffer(size=NBYTES)) < 500
    assert DeviceBuffer(size=NBYTES).__sizeof__() == DeviceBuffer().__sizeof__()


@pytest.mark.parametrize("data", [b"", b"123", bytes(NBYTES)])
def test_pickles(data: bytes) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        stored = pickle.dumps(DeviceBuffer.to_device(data), protocol)
        assert pickle.loads(stored).tobytes() == data


@pytest.mark.parametrize("data", [b"", b"123"])
def test_pickles_out_of_band(data: bytes) -> None:
    parts: list[pickle.PickleBuffer] = []
    buffer = DeviceBuffer.to_device(data)
    stored = pickle.dumps(buffer, 5, buffer_callback=parts.append)
    assert [bytes(part) for part in parts] == [data]
    assert pickle.loads(stored, buffers=parts).tobytes() == data


class Named(DeviceBuffer):
    def __init__(self, *, name: str = "", **more: Any) -> None:
        self.name = name


def test_subclasses() -> None:
    named = Named(size=3)
    named.name = "x"
    named.copy_from_host(b"abc")
    again = pickle.loads(pickle.dumps(named))
    assert type(again) is Named
    assert (again.name, again.tobytes()) == ("x", b"abc")
    assert type(Named.to_device(b"abc")) is DeviceBuffer
    assert type(named.copy()) is DeviceBuffer


# ---- prefetching ---------------------------------------------------------------------


def prefetches(simulator: SimulatedCuda) -> list[str]:
    return [entry for entry in simulator.log() if entry.startswith("cuMemPrefetch")]


def test_managed_memory_is_prefetched(simulator: SimulatedCuda, stream: Stream) -> None:
    buffer = DeviceBuffer(size=1000, mr=numpy_rmm.registry["managed"])
    simulator.clear_log()
    buffer.prefetch()
    buffer.prefetch(0, stream)
    buffer.prefetch(device=-1)
    address = f"cuMemPrefetchAsync({buffer.ptr:#x}, 0x3e8"
    assert [entry.split(" = ")[0] for entry in prefetches(simulator)] == [
        f"{address}, 0x0, 0x0)",
        f"{address}, 0x0, {stream.handle:#x})",
        f"{address}, 0xffffffffffffffff, 0x0)",
    ]
    with pytest.raises(ValueError, match="there is no device 5, only 1"):
        buffer.prefetch(5)


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_other_memory_is_not(simulator: SimulatedCuda, kind: str) -> None:
    buffer = DeviceBuffer(size=1000, mr=numpy_rmm.registry[kind])
    buffer.prefetch()
    DeviceBuffer(mr=numpy_rmm.registry["managed"]).prefetch()
    assert prefetches(simulator) == []
