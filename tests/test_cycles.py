"""Garbage whose circle runs through the core: functions that lead to what is made over
the resource that calls them. It goes when nothing else holds it, and only then."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DeviceArray, DeviceBuffer, DeviceScalar, Stream, mr
from numpy_rmm.testing import Driver

NBYTES = 10_000


def count(resource: mr.MemoryResource) -> int:
    return resource.statistics().current_count


class Source:
    """An object whose methods provide the memory that it has itself."""

    def __init__(self, base: mr.MemoryResource) -> None:
        self.base = base
        self.mr = mr.CallbackMemoryResource(self.allocate, self.deallocate)
        self.over: Any = self.mr
        self.kept: list[Any] = []

    def allocate(self, nbytes: int, stream: Stream) -> int:
        return self.base.allocate(nbytes, stream)

    def deallocate(self, ptr: int, nbytes: int, stream: Stream) -> None:
        self.base.deallocate(ptr, nbytes, stream)


class Asker:
    """An object that is asked when there is no memory."""

    def __init__(self, upstream: mr.MemoryResource) -> None:
        self.mr = mr.FailureCallbackResourceAdaptor(upstream, self.ask)

    def ask(self, nbytes: int) -> bool:
        return self.mr is None


OVER: dict[str, Callable[[mr.MemoryResource], mr.MemoryResource]] = {
    "nothing": lambda source: source,
    "a pool": mr.PoolMemoryResource,
    "a pool of a pool": lambda source: mr.PoolMemoryResource(
        mr.PoolMemoryResource(source)
    ),
    "a fixed size": lambda source: mr.FixedSizeMemoryResource(
        source, block_size=1 << 16
    ),
    "an arena": lambda source: mr.ArenaMemoryResource(source, arena_size=1 << 20),
    "bins": lambda source: mr.BinningMemoryResource(source, 13, 16),
    "statistics": mr.StatisticsResourceAdaptor,
    "tracking": mr.TrackingResourceAdaptor,
    "a limit": lambda source: mr.LimitingResourceAdaptor(source, 1 << 30),
    "an alignment": lambda source: mr.AlignedResourceAdaptor(source, 512),
    "somebody who is asked": lambda source: Asker(source).mr,
    "a chain": lambda source: mr.TrackingResourceAdaptor(
        mr.StatisticsResourceAdaptor(Asker(mr.PoolMemoryResource(source)).mr)
    ),
}
MADE: dict[str, Callable[[mr.MemoryResource], list[Any]]] = {
    "nothing": lambda over: [],
    "a buffer": lambda over: [DeviceBuffer(size=NBYTES, mr=over)],
    "an empty buffer": lambda over: [DeviceBuffer(mr=over)],
    "an array": lambda over: [DeviceArray((100, 3), mr=over)],
    "a scalar": lambda over: [DeviceScalar("f4", mr=over)],
    "many": lambda over: [DeviceBuffer(size=100 * n, mr=over) for n in range(50)],
}


def make(base: mr.MemoryResource, over: str, made: str) -> Source:
    source = Source(base)
    source.over = OVER[over](source.mr)
    source.kept = MADE[made](source.over)
    return source


# ---- collected when nothing else holds them ------------------------------------------


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("over", OVER)
def test_a_circle_is_collected(base: mr.MemoryResource, over: str, made: str) -> None:
    source = make(base, over, made)
    dead = [weakref.ref(each) for each in (source, source.mr, source.over)]
    assert count(base) > 0 or made in ("nothing", "an empty buffer")
    del source
    gc.collect()
    assert [each() for each in dead] == [None] * 3
    assert count(base) == 0


def test_functions_that_lead_to_nothing_are_called_until_the_end(
    base: mr.MemoryResource,
) -> None:
    freed: list[int] = []

    def deallocate(ptr: int, nbytes: int, stream: Stream) -> None:
        freed.append(nbytes)
        base.deallocate(ptr, nbytes, stream)

    cycle: list[Any] = [
        mr.PoolMemoryResource(mr.CallbackMemoryResource(base.allocate, deallocate))
    ]
    cycle += [cycle, DeviceBuffer(size=NBYTES, mr=cycle[0])]
    del cycle, deallocate
    gc.collect()
    assert len(freed) == 1
    assert count(base) == 0


def test_a_circle_through_the_resource_alone(base: mr.MemoryResource) -> None:
    def made() -> weakref.ref[mr.MemoryResource]:
        box: list[Any] = []
        own = mr.CallbackMemoryResource(lambda *_: len(box), lambda *_: None)
        box.append(own)
        return weakref.ref(own)

    dead = made()
    gc.collect()
    assert dead() is None


def test_a_circle_through_the_dictionary_of_a_subclass(base: mr.MemoryResource) -> None:
    class Own(mr.CallbackMemoryResource):
        def __init__(self) -> None:
            super().__init__(self.take, self.give)
            self.pool = mr.PoolMemoryResource(self)
            self.buffer = DeviceBuffer(size=NBYTES, mr=self.pool)

        def take(self, nbytes: int, stream: Stream) -> int:
            return base.allocate(nbytes, stream)

        def give(self, ptr: int, nbytes: int, stream: Stream) -> None:
            base.deallocate(ptr, nbytes, stream)

    dead = weakref.ref(Own())
    gc.collect()
    assert dead() is None
    assert count(base) == 0


def test_a_circle_through_two_sources(base: mr.MemoryResource) -> None:
    one, other = make(base, "a pool", "a buffer"), make(base, "a pool", "a buffer")
    one.kept.append(other)
    other.kept.append(one)
    both = mr.BinningMemoryResource(one.over)
    both.add_bin(20_000, other.over)
    one.kept += [both, DeviceBuffer(size=NBYTES, mr=both)]
    del one, other, both
    gc.collect()
    assert count(base) == 0


def test_bins_that_were_given_and_bins_that_were_made(base: mr.MemoryResource) -> None:
    source = make(base, "a pool", "nothing")
    bins = mr.BinningMemoryResource(source.mr)
    bins.add_bin(1000, source.over)
    bins.add_bin(30_000)
    source.kept = [bins, *bins.bin_mrs]
    source.kept += [DeviceBuffer(size=n, mr=bins) for n in (100, 20_000, 100_000)]
    del source, bins
    gc.collect()
    assert count(base) == 0


def test_a_buffer_that_moved(base: mr.MemoryResource) -> None:
    source = make(base, "a pool", "a buffer")
    buffer = source.kept[0]
    buffer.reserve(1 << 20)
    buffer.resize(1 << 21)
    source.kept.append(buffer.copy())
    del source, buffer
    gc.collect()
    assert count(base) == 0


def test_arrays_and_handlers_that_are_kept_too(base: mr.MemoryResource) -> None:
    source = make(base, "a pool", "a buffer")
    with numpy_rmm.use_handler(mr.PoolMemoryResource(mr.HostMemoryResource())) as own:
        source.kept += [np.ones(1000), own, own.resource]
    dead = weakref.ref(source.kept[1])
    del source, own
    gc.collect()
    assert dead() is None
    assert count(base) == 0


def test_an_array_without_memory_of_its_own(base: mr.MemoryResource) -> None:
    source = make(base, "a pool", "an array")
    source.kept += [source.kept[0][10:], source.kept[0].base, source.kept[0].T]
    del source
    gc.collect()
    assert count(base) == 0


def test_a_thread_that_ended_left_something_in_its_cache(
    base: mr.MemoryResource,
) -> None:
    def work(over: mr.MemoryResource) -> None:
        for n in range(20):
            DeviceBuffer(size=100 * n, mr=over)

    source = make(base, "a pool", "nothing")
    threads = [threading.Thread(target=work, args=(source.over,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    work(source.over)
    for thread in threads:
        thread.join()
    del source, threads, thread
    gc.collect()
    assert count(base) == 0


def test_garbage_makes_room_for_a_request(cuda: Driver) -> None:
    cuda.activate()
    base = mr.LimitingResourceAdaptor(mr.CudaMemoryResource(), 40 << 20)
    source = make(base, "a pool", "nothing")
    source.kept = [DeviceBuffer(size=30 << 20, mr=source.over)]
    del source
    assert base.deallocate(base.allocate(30 << 20), 30 << 20) is None


def test_threads_that_make_circles(base: mr.MemoryResource) -> None:
    def work() -> None:
        for _ in range(20):
            make(base, "a pool", "a buffer")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    gc.collect()
    assert count(base) == 0
    assert numpy_rmm._core.__name__ not in [f.__module__ for f in gc.callbacks]


# ---- and only then -------------------------------------------------------------------


def still_works(source: Source) -> bool:
    return DeviceBuffer.to_device(b"abc", mr=source.over).tobytes() == b"abc"


HOLDERS: dict[str, Callable[[Source], Any]] = {
    "the object": lambda source: source,
    "a function": lambda source: source.deallocate,
    "the source": lambda source: source.mr,
    "the pool": lambda source: source.over,
    "a buffer": lambda source: DeviceBuffer(size=NBYTES, mr=source.over),
    "an array": lambda source: DeviceArray((3,), mr=source.over),
    "a capsule": lambda source: DeviceBuffer(size=10, mr=source.over).__dlpack__(),
    "an adaptor": lambda source: mr.StatisticsResourceAdaptor(source.over),
    "a copy": lambda source: DeviceBuffer(size=10, mr=source.over).copy(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_circle_that_somebody_holds_works(
    base: mr.MemoryResource, holder: str
) -> None:
    source: Source | None = make(base, "a pool", "a buffer")
    assert source is not None
    alive = weakref.ref(source)
    held = HOLDERS[holder](source)
    del source
    for _ in range(3):
        gc.collect()
    source = alive()
    assert source is not None
    assert still_works(source)
    del source, held
    gc.collect()
    assert alive() is None
    assert count(base) == 0


def test_the_current_resource_is_held(base: mr.MemoryResource) -> None:
    source = make(base, "a pool", "nothing")
    alive = weakref.ref(source)
    mr.set_current_device_resource(source.over)
    del source
    for _ in range(3):
        gc.collect()
    assert alive() is not None
    buffer = DeviceBuffer.to_device(b"abc")
    mr.set_current_device_resource(None)
    gc.collect()
    assert buffer.tobytes() == b"abc"
    del buffer
    gc.collect()
    assert alive() is None
    assert count(base) == 0


def test_a_name_of_the_registry_holds(base: mr.MemoryResource) -> None:
    source = make(base, "a pool", "a buffer")
    alive = weakref.ref(source)
    numpy_rmm.registry["cycle"] = source.over
    del source
    for _ in range(3):
        gc.collect()
    assert DeviceBuffer(size=10, mr=numpy_rmm.registry["cycle"]).size == 10
    del numpy_rmm.registry["cycle"]
    gc.collect()
    assert alive() is None
    assert count(base) == 0


def test_memory_of_allocate_holds_what_it_came_from(base: mr.MemoryResource) -> None:
    """Only the program knows of it: it goes back before the rest can go."""
    source: Source | None = make(base, "a pool", "a buffer")
    assert source is not None
    alive = weakref.ref(source)
    ptr = source.over.allocate(NBYTES)
    del source
    for _ in range(3):
        gc.collect()
    source = alive()
    assert source is not None
    source.over.deallocate(ptr, NBYTES)
    del source
    gc.collect()
    assert alive() is None
    assert count(base) == 0


def test_a_thread_in_the_middle_of_a_call_holds(base: mr.MemoryResource) -> None:
    inside, may_go = threading.Event(), threading.Event()

    class Slow(Source):
        def allocate(self, nbytes: int, stream: Stream) -> int:
            inside.set()
            assert may_go.wait(30)
            return super().allocate(nbytes, stream)

    made: list[bytes] = []

    def work(over: mr.MemoryResource) -> None:
        made.append(DeviceBuffer.to_device(b"abc", mr=over).tobytes())

    source = Slow(base)
    source.over = mr.PoolMemoryResource(source.mr)
    thread = threading.Thread(target=work, args=(source.over,))
    thread.start()
    assert inside.wait(30)
    del source
    for _ in range(3):
        gc.collect()
    may_go.set()
    thread.join()
    del thread
    assert made == [b"abc"]
    gc.collect()
    assert count(base) == 0


def test_a_finalizer_sees_everything_whole(base: mr.MemoryResource) -> None:
    seen: list[Any] = []

    class Last(Source):
        def __del__(self) -> None:
            seen.append(self.kept[0].tobytes())
            seen.append(still_works(self))

    source = Last(base)
    source.over = mr.PoolMemoryResource(source.mr)
    source.kept = [DeviceBuffer.to_device(b"abc", mr=source.over)]
    del source
    gc.collect()
    assert seen == [b"abc", True]
    assert count(base) == 0


def test_what_a_finalizer_saves_works_on(base: mr.MemoryResource) -> None:
    saved: list[Source] = []

    class Saved(Source):
        def __del__(self) -> None:
            saved.append(self)

    source = Saved(base)
    source.over = mr.PoolMemoryResource(source.mr)
    source.kept = [DeviceBuffer.to_device(b"abc", mr=source.over)]
    del source
    for _ in range(3):
        gc.collect()
    assert saved[0].kept[0].tobytes() == b"abc"
    assert still_works(saved[0])
    saved.clear()
    gc.collect()
    assert count(base) == 0


# ---- how much is left over a thousand rounds -----------------------------------------


def n_objects() -> int:
    ours = (mr.MemoryResource, DeviceBuffer, DeviceArray, Source, Asker)
    return sum(
        isinstance(each, ours) or type(each).__name__ in ("_Callbacks", "_Warden")
        for each in gc.get_objects()
    )


@pytest.mark.parametrize("over", ["nothing", "a pool", "a chain"])
def test_a_thousand_circles_leave_nothing(base: mr.MemoryResource, over: str) -> None:
    for _ in range(3):
        gc.collect()
    before = n_objects()
    for n in range(1000):
        make(base, over, "a buffer")
        if n % 250 == 249:
            gc.collect()
    gc.collect()
    assert n_objects() == before
    assert count(base) == 0


# ---- exceptions ----------------------------------------------------------------------


class Refused(Exception):
    pass


def test_an_exception_crosses_the_core_and_dies_with_its_handler(
    base: mr.MemoryResource,
) -> None:
    class Careful(Source):
        def allocate(self, nbytes: int, stream: Stream) -> int:
            mine = Refused(nbytes)
            mine.source = self  # type: ignore[attr-defined]
            raise mine

    source = Careful(base)
    source.over = OVER["a chain"](source.mr)
    with pytest.raises(Refused) as caught:
        source.over.allocate(NBYTES)
    frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "allocate"
    dead = weakref.ref(source), weakref.ref(caught.value)
    del source, caught
    gc.collect()
    assert [each() for each in dead] == [None, None]


def test_a_thousand_exceptions_leave_nothing(base: mr.MemoryResource) -> None:
    alive: list[weakref.ref[Refused]] = []

    def allocate(nbytes: int, stream: Stream) -> int:
        mine = Refused(nbytes)
        alive.append(weakref.ref(mine))
        raise mine

    own = mr.PoolMemoryResource(mr.CallbackMemoryResource(allocate, print))
    for n in range(1000):
        with pytest.raises(Refused):
            own.allocate(n + 1)
        with pytest.raises(Refused):
            DeviceBuffer(size=n + 1, mr=own)
    gc.collect()
    assert [each for each in alive if each() is not None] == []


def test_what_raises_while_garbage_goes_is_shown(base: mr.MemoryResource) -> None:
    class Careless(Source):
        def deallocate(self, ptr: int, nbytes: int, stream: Stream) -> None:
            super().deallocate(ptr, nbytes, stream)
            raise Refused("too late")

    shown: list[Any] = []
    before, sys.unraisablehook = (
        sys.unraisablehook,
        lambda each: shown.append(str(each.exc_value)),
    )
    try:
        source = Careless(base)
        source.over = mr.PoolMemoryResource(source.mr)
        source.kept = [DeviceBuffer(size=NBYTES, mr=source.over)]
        del source
        gc.collect()
    finally:
        sys.unraisablehook = before
    assert shown == ["too late"]
    assert count(base) == 0
