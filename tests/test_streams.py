"""Streams: a handle and what keeps it alive."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref

import pytest

import numpy_rmm
from numpy_rmm import (
    DEFAULT_STREAM,
    LEGACY_DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    Stream,
    mr,
)
from numpy_rmm.testing import Driver


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
        (None, TypeError, "obj must be a handle"),
        ("0", TypeError, "obj must be a handle"),
        (1.5, TypeError, "obj must be a handle"),
        (-1, ValueError, "negative"),
        (2**64, ValueError, r"2\*\*64"),
        (Theirs(version=1), ValueError, "version"),
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
    with pytest.raises(TypeError, match="needs the argument 'obj'"):
        Stream()  # type: ignore[call-arg]


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
