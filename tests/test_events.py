"""Events, and pools of streams."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import numpy_rmm
from numpy_rmm import (
    DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    CudaStreamFlags,
    CudaStreamPool,
    Event,
    Stream,
    StreamPool,
)
from numpy_rmm.testing import Driver, SimulatedCuda

pytestmark = pytest.mark.usefixtures("driver")


# ---- events --------------------------------------------------------------------------


def test_an_event_that_was_not_recorded(stream: Stream) -> None:
    event = Event()
    assert event.done
    assert event.handle == 0
    assert repr(event) == "<Event, not recorded>"
    event.synchronize()
    stream.wait_event(event)


def test_an_event_is_done_when_its_stream_has_come_there(
    driver: Driver, stream: Stream
) -> None:
    event = Event()
    with driver.held(stream):
        event.record(stream)
        assert not event.done
        assert repr(event) == f"<Event {event.handle:#x}>"
    event.synchronize()
    assert event.done


def test_an_event_is_recorded_again(driver: Driver, stream: Stream) -> None:
    event = stream.record()
    event.synchronize()
    handle = event.handle
    with driver.held(stream):
        assert stream.record(event) is event
        assert not event.done
    event.synchronize()
    assert event.handle == handle


@pytest.mark.parametrize("which", [DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM])
def test_the_default_streams(which: Stream) -> None:
    event = Event()
    event.record(which)
    event.synchronize()
    which.wait_event(event)
    assert event.done
    assert Event().record() is None  # type: ignore[func-returns-value]


def test_another_stream_waits(driver: Driver, stream: Stream) -> None:
    other = Stream(flags=1)
    with driver.held(stream):
        other.wait_event(stream.record())
        behind = other.record()
        assert not behind.done
    behind.synchronize()


def test_others_run_while_an_event_is_waited_for(
    driver: Driver, stream: Stream
) -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        driver.activate()
        with driver.held(stream):
            event.record(stream)
            held.set()
            let_go.wait(10)

    event = Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    timer = threading.Timer(0.1, let_go.set)
    timer.start()
    event.synchronize()
    assert let_go.is_set()
    thread.join()
    timer.join()


def test_an_event_goes_with_its_object(
    simulator: SimulatedCuda, driver: Driver, stream: Stream
) -> None:
    event = stream.record()
    dead = weakref.ref(event)
    simulator.clear_log()
    del event
    assert dead() is None
    assert [entry for entry in simulator.log() if "cuEventDestroy" in entry] != []
    with driver.held(stream):
        stream.record()  # dropped before it is done
    assert simulator.faults() == []


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord"])
def test_a_record_that_fails(
    simulator: SimulatedCuda, stream: Stream, call: str
) -> None:
    event = Event()
    before = simulator.outstanding()
    simulator.fail(call, error="UNKNOWN")
    with pytest.raises(numpy_rmm.CudaError, match="CUDA_ERROR_UNKNOWN"):
        event.record(stream)
    assert event.handle == 0
    assert simulator.outstanding() == before
    event.record(stream)
    event.synchronize()


def test_wrong_events_and_streams(stream: Stream) -> None:
    event = Event()
    with pytest.raises(TypeError, match="stream argument cannot be None"):
        event.record(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="event must be an Event, not int"):
        stream.record(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="event must be an Event, not NoneType"):
        stream.wait_event(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes at most 0 positional"):
        Event(1)  # type: ignore[call-arg]
    stream.close()
    with pytest.raises(numpy_rmm.CudaError, match="which is closed"):
        event.record(stream)


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy])
def test_an_event_is_not_pickled(take: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        take(Event())


def test_events_that_are_alive_at_exit(run_python: Callable[..., Any]) -> None:
    result = run_python(
        """
        import sys
        from numpy_rmm import Event, Stream, StreamPool

        stream = Stream()
        sys.modules["kept"] = [stream.record(), stream, StreamPool(2)]
        print("end")
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


# ---- pools ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [0, 1, CudaStreamFlags.SYNC_DEFAULT, CudaStreamFlags.NON_BLOCKING]
)
def test_a_pool_hands_its_streams_out_in_turn(flags: int) -> None:
    pool = StreamPool(pool_size=10, flags=flags)
    assert pool.get_pool_size() == len(pool) == 10
    streams = [pool.get_stream() for _ in range(10)]
    assert len(set(streams)) == 10
    assert DEFAULT_STREAM not in streams
    assert [pool.get_stream() for _ in range(10)] == streams
    assert [pool.get_stream(i) for i in range(10)] == streams
    assert pool.get_stream(stream_id=13) is streams[3]
    assert repr(pool) == "<StreamPool of 10 streams>"


def test_a_pool_by_default() -> None:
    assert CudaStreamPool is StreamPool
    assert CudaStreamPool().get_pool_size() == 16


def test_streams_outlive_their_pool() -> None:
    stream = StreamPool(1).get_stream()
    stream.synchronize()


def test_threads_share_a_pool() -> None:
    pool = StreamPool(3)
    seen: list[Stream] = []

    def take() -> None:
        seen.extend(pool.get_stream() for _ in range(300))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen.count(pool.get_stream(i)) for i in range(3)] == [400] * 3


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"pool_size": 0}, ValueError, "pool_size must be between 1 and"),
        ({"pool_size": 1.5}, TypeError, "pool_size must be an int"),
        ({"flags": 2}, ValueError, "flags must be"),
        ({"size": 1}, TypeError, "has no argument 'size'"),
    ],
)
def test_pools_that_cannot_be(wrong: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        StreamPool(**wrong)


def test_streams_that_a_pool_has_not() -> None:
    pool = StreamPool(2)
    with pytest.raises(ValueError, match="stream_id must not be negative"):
        pool.get_stream(-1)


def test_a_pool_that_cannot_be_made(simulator: SimulatedCuda) -> None:
    before = simulator.outstanding()
    simulator.fail("cuStreamCreate", 3, error="UNKNOWN")
    with pytest.raises(numpy_rmm.CudaError, match="CUDA_ERROR_UNKNOWN"):
        StreamPool(5)
    assert simulator.outstanding() == before
