"""Streams: a handle and what keeps it alive."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import numpy_rmm
from numpy_rmm import (
    DEFAULT_STREAM,
    LEGACY_DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    CudaStreamFlags,
    DeviceBuffer,
    Stream,
    mr,
)
from numpy_rmm.testing import Driver, SimulatedCuda


class Theirs:
    """A stream of another library."""

    def __init__(self, handle: object = 0x1000, version: object = 0) -> None:
        self.pair = (version, handle)

    def __cuda_stream__(self) -> object:
        return self.pair


def test_the_constants() -> None:
    constants = DEFAULT_STREAM, LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM
    assert [stream.handle for stream in constants] == [0, 1, 2]
    assert [stream.is_default() for stream in constants] == [True, False, False]
    for stream in constants:
        assert stream.__cuda_stream__() == (0, stream.handle)
        assert Stream(stream) == Stream(stream.handle) == stream
        assert hash(Stream(stream)) == hash(stream)
    assert len({*constants, Stream(0), Stream(1)}) == 3
    assert repr(DEFAULT_STREAM) == "<Stream DEFAULT_STREAM>"


def test_a_stream_over_a_handle() -> None:
    stream = Stream(0x1234)
    assert stream.handle == 0x1234
    assert stream == Stream(stream) != Stream(0x1235)
    assert repr(stream) == "<Stream 0x1234>"


def test_a_stream_keeps_what_it_was_made_from() -> None:
    theirs = Theirs()
    dead = weakref.ref(theirs)
    stream = Stream(theirs)
    again = Stream(stream)
    del theirs, stream
    gc.collect()
    assert dead() is not None
    assert again.handle == 0x1000
    del again
    numpy_rmm.trim()  # what the core let go of is dropped at the next call of ours
    assert dead() is None


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ([], TypeError, "obj must be a handle"),
        ("0", TypeError, "obj must be a handle"),
        (1.5, TypeError, "obj must be a handle"),
        (-1, ValueError, "negative"),
        (2**64, ValueError, r"2\*\*64"),
        (Theirs(version=1), NotImplementedError, "version: '1'"),
        (Theirs(version=-1), ValueError, "version"),
        (Theirs(handle=None), TypeError, "handle of __cuda_stream__"),
    ],
)
def test_something_that_is_no_stream(wrong: object, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        Stream(wrong)  # type: ignore[arg-type]


def test_a_protocol_that_is_broken() -> None:
    theirs = Theirs()
    theirs.pair = (0,)  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"must return \(version, handle\)"):
        Stream(theirs)


def test_an_error_of_the_protocol_is_its_own() -> None:
    class Broken:
        def __cuda_stream__(self) -> object:
            return self.nothing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="nothing"):
        Stream(Broken())  # type: ignore[arg-type]


# ---- libraries without the protocol --------------------------------------------------


class Value:
    """A pointer of ctypes, as Numba has it."""

    def __init__(self, value: int | None) -> None:
        self.value = value


def object_of(module: str, name: str, **attributes: object) -> object:
    base = type(name, (), {"__module__": module})
    made = type("Subclass", (base,), {})()
    vars(made).update(attributes)
    return made


def stream_of(module: str, **attributes: object) -> object:
    return object_of(module, "Stream", **attributes)


@pytest.mark.parametrize(
    ("module", "attributes", "handle"),
    [
        ("cupy.cuda.stream", {"ptr": 0x1230}, 0x1230),
        ("cupy", {"ptr": 0}, 0),
        ("torch.cuda.streams", {"cuda_stream": 0x1230}, 0x1230),
        ("numba.cuda.cudadrv.driver", {"handle": Value(0x1230)}, 0x1230),
        ("numba.cuda.cudadrv.driver", {"handle": Value(None)}, 0),
        ("numba_cuda.numba.cuda.driver", {"handle": 0x1230}, 0x1230),
        ("other", {"ptr": 0x1230}, 0x1230),
        ("other", {"handle": Value(0x1230), "priority": 1}, 0x1230),
    ],
)
def test_streams_of_libraries(
    module: str, attributes: dict[str, object], handle: int
) -> None:
    theirs = stream_of(module, **attributes)
    dead = weakref.ref(theirs)
    stream = Stream(theirs)  # type: ignore[arg-type]
    assert stream.handle == handle
    del theirs
    gc.collect()
    if handle != 0:
        assert dead() is not None
    del stream
    numpy_rmm.trim()
    assert dead() is None


@pytest.mark.parametrize(
    ("module", "attributes"),
    [
        ("other", {"ptr": 0x1230}),
        ("cupyx", {"ptr": 0x1230}),
        ("torch.cuda.streams", {"ptr": 0x1230}),
    ],
)
def test_names_that_others_have_too(module: str, attributes: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"obj must be a handle .*, not Subclass"):
        Stream(object_of(module, "Memory", **attributes))  # type: ignore[arg-type]


def test_a_name_that_only_streams_have() -> None:
    theirs = object_of("other", "Queue", cuda_stream=0x1230)
    assert Stream(theirs).handle == 0x1230  # type: ignore[arg-type]


def test_a_buffer_is_no_stream(cuda: Driver) -> None:
    cuda.activate()
    with pytest.raises(TypeError, match=r"not numpy_rmm\.DeviceBuffer"):
        Stream(DeviceBuffer(size=1))  # type: ignore[arg-type]


def handle_of(theirs: object) -> int:
    return Stream(theirs).handle  # type: ignore[arg-type]


def test_a_type_that_was_met_is_asked_for_the_protocol_all_the_same() -> None:
    theirs: Any = stream_of("cupy.cuda.stream", ptr=0x1230)
    assert [handle_of(theirs) for _ in range(3)] == [0x1230] * 3
    type(theirs).__cuda_stream__ = lambda _: (0, 0x1240)
    assert handle_of(theirs) == 0x1240
    del type(theirs).__cuda_stream__
    assert handle_of(theirs) == 0x1230
    theirs.__cuda_stream__ = lambda: (0, 0x1250)
    assert handle_of(theirs) == 0x1250


def test_a_type_that_was_met_may_change_its_library() -> None:
    handles = {"ptr": 0x1230, "cuda_stream": 0x1240}
    theirs: Any = object_of("cupy.cuda.stream", "Queue", **handles)
    assert [handle_of(theirs) for _ in range(3)] == [0x1230] * 3
    base = type(theirs).__bases__[0]
    base.__module__ = "torch.cuda.streams"
    assert [handle_of(theirs) for _ in range(3)] == [0x1240] * 3
    base.__module__ = "other"
    assert handle_of(theirs) == 0x1240  # a name that only streams have
    del theirs.cuda_stream
    with pytest.raises(TypeError, match="obj must be a handle"):
        handle_of(theirs)


def test_an_object_of_a_met_type_without_its_handle() -> None:
    theirs: Any = stream_of("cupy.cuda.stream", ptr=0x1230)
    assert handle_of(theirs) == 0x1230
    del theirs.ptr
    with pytest.raises(TypeError, match="obj must be a handle"):
        handle_of(theirs)


def test_more_types_than_are_remembered() -> None:
    many = [stream_of("cupy", ptr=0x1000 + i) for i in range(20)]
    for _ in range(3):
        assert [handle_of(theirs) for theirs in many] == [0x1000 + i for i in range(20)]


def test_streams_that_died_leave_their_memory_to_others() -> None:
    for _ in range(3):
        some = [Stream(0x1000 + i) for i in range(20)]
        assert [stream.handle for stream in some] == [0x1000 + i for i in range(20)]
        assert len({id(stream) for stream in some}) == 20
        closed = some.pop()
        closed.close()
        del some
        with pytest.raises(numpy_rmm.CudaError, match="closed"):
            closed.handle  # noqa: B018


# ---- new ones ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "is_blocking"),
    [
        (None, True),
        (0, True),
        (1, False),
        (CudaStreamFlags.SYNC_DEFAULT, True),
        (CudaStreamFlags.NON_BLOCKING, False),
    ],
)
def test_a_new_stream(cuda: Driver, flags: int | None, is_blocking: bool) -> None:
    cuda.activate()
    stream = Stream(flags=flags)
    assert stream.handle > PER_THREAD_DEFAULT_STREAM.handle
    assert stream == Stream(stream) != Stream(None, flags)
    event, target = cuda.create_event(), cuda.allocate(4)
    with cuda.held(stream):
        cuda.check(cuda.cuMemsetD8Async(target, 1, 4, LEGACY_DEFAULT_STREAM.handle))
        cuda.check(cuda.cuEventRecord(event, LEGACY_DEFAULT_STREAM.handle))
        time.sleep(0.1)
        assert cuda.is_done(event) is not is_blocking
    cuda.check(cuda.cuCtxSynchronize())
    cuda.check(cuda.cuEventDestroy(event))
    cuda.check(cuda.cuMemFree(target))


def test_a_stream_ends_with_its_last_use(simulator: SimulatedCuda) -> None:
    simulator.driver.activate()
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    stream = Stream()
    simulator.clear_log()
    ptr = pool.allocate(1000, stream)
    again = Stream(stream)
    stream.close()
    stream.close()
    assert again.handle == again.__cuda_stream__()[1] > 2
    pool.deallocate(ptr, 1000, again)
    again.close()
    assert sum("cuStreamDestroy" in line for line in simulator.log()) == 1
    assert simulator.faults() == []


@pytest.mark.parametrize(
    "use",
    [
        lambda stream: stream.handle,
        lambda stream: stream.synchronize(),
        lambda stream: stream.__cuda_stream__(),
        lambda stream: Stream(stream),
        lambda stream: mr.CudaMemoryResource().allocate(8, stream),
    ],
    ids=["handle", "synchronize", "__cuda_stream__", "Stream", "allocate"],
)
def test_a_closed_stream_is_named(
    cuda: Driver, use: Callable[[Stream], object]
) -> None:
    cuda.activate()
    stream = Stream()
    name = repr(stream)
    stream.close()
    with pytest.raises(numpy_rmm.CudaError, match=name[1:-1]) as caught:
        use(stream)
    assert caught.value.name == "CUDA_ERROR_INVALID_HANDLE"
    assert repr(stream) == f"{name[:-1]}, closed>"
    assert stream == stream
    assert len({stream, stream}) == 1


def test_what_a_stream_is_not_made_of(cuda: Driver) -> None:
    cuda.activate()
    with pytest.raises(ValueError, match=r"flags must be .* not 2"):
        Stream(flags=2)
    with pytest.raises(
        ValueError, match="flags may only be specified when obj is None"
    ):
        Stream(DEFAULT_STREAM, 1)
    for constant in (DEFAULT_STREAM, LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM):
        with pytest.raises(ValueError, match="cannot be closed"):
            constant.close()


def test_a_new_stream_needs_cuda(run_python: Callable[..., Any]) -> None:
    result = run_python(
        "import numpy_rmm; numpy_rmm.Stream()", NUMPY_RMM_CUDA_LIBRARY="/none"
    )
    assert "CudaUnavailableError" in result.stderr


def test_a_stream_is_not_pickled() -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(DEFAULT_STREAM)


def test_allocations_take_streams_of_all_kinds(cuda: Driver) -> None:
    cuda.activate()
    theirs = Theirs(cuda.create_stream())
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    for stream in (DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, theirs, Stream(theirs)):
        ptr = pool.allocate(1000, stream)
        pool.deallocate(ptr, 1000, stream=stream)
    assert pool.statistics().current_count == 0
    cuda.check(cuda.cuStreamDestroy(theirs.pair[1]))


def test_synchronize(cuda: Driver) -> None:
    cuda.activate()
    handle = cuda.create_stream()
    for stream in (DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Stream(handle)):
        stream.synchronize()
    cuda.check(cuda.cuStreamDestroy(handle))


def test_a_per_thread_stream_belongs_to_its_thread(cuda: Driver) -> None:
    mine = Stream(2)
    mine.synchronize()
    errors: list[Exception] = []

    def use() -> None:
        PER_THREAD_DEFAULT_STREAM.synchronize()
        for call in (
            mine.synchronize,
            lambda: mr.CudaMemoryResource().allocate(8, mine),
        ):
            try:
                call()
            except ValueError as error:
                errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 2
    assert all("of another thread" in str(error) for error in errors)
