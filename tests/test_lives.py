"""What our objects hold, and what holds them: streams of others, weak references, and
what is left when the process ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DeviceArray, DeviceBuffer, DeviceScalar, Stream, mr

Run = Callable[..., Any]
NBYTES = 10_000


def count(resource: mr.MemoryResource) -> int:
    return resource.statistics().current_count


# ---- streams -------------------------------------------------------------------------


class Foreign:
    """A stream of another library, which may lead to what is made of it."""

    def __init__(self) -> None:
        self.own = Stream(flags=1)
        self.kept: list[Any] = []

    def __cuda_stream__(self) -> tuple[int, int]:
        return self.own.__cuda_stream__()


ON: dict[str, Callable[[Foreign], Any]] = {
    "a Stream of it": Stream,
    "two Streams of it": lambda of: [Stream(of), Stream(of)],
    "a buffer on it": lambda of: DeviceBuffer(size=NBYTES, stream=of),
    "a buffer on a Stream of it": lambda of: DeviceBuffer(
        size=NBYTES, stream=Stream(of)
    ),
    "buffers on one Stream": lambda of: [
        DeviceBuffer(size=NBYTES, stream=stream)
        for stream in [Stream(of)]
        for _ in range(5)
    ],
    "a buffer and its Stream": lambda of: [
        (buffer, buffer.stream, buffer.copy())
        for buffer in [DeviceBuffer(size=NBYTES, stream=of)]
    ],
    "a buffer that came to it": lambda of: moved_to(of),
    "an array on it": lambda of: DeviceArray((10,), stream=of),
}


def moved_to(of: Foreign) -> DeviceBuffer:
    buffer = DeviceBuffer(size=10)
    buffer.resize(NBYTES, of)  # type: ignore[arg-type]
    return buffer


@pytest.mark.parametrize("on", ON)
def test_a_circle_through_a_stream_of_others_stays_until_it_is_broken(
    base: mr.MemoryResource, on: str
) -> None:
    """The collector would end that stream before the memory that goes back on it."""
    mr.set_current_device_resource(base)
    foreign = Foreign()
    kept = foreign.kept
    kept.append(ON[on](foreign))
    dead = weakref.ref(foreign)
    del foreign
    for _ in range(2):
        gc.collect()
    assert dead() is not None
    kept.clear()
    gc.collect()
    assert dead() is None
    assert count(base) == 0


@pytest.mark.parametrize("on", ON)
def test_memory_that_dies_with_its_stream_goes_back_on_it(
    base: mr.MemoryResource, on: str
) -> None:
    """In garbage that leads to both of them, whatever the collector clears first."""
    mr.set_current_device_resource(base)
    foreign = Foreign()
    garbage: list[Any] = [foreign, ON[on](foreign)]
    garbage.append(garbage)
    dead = weakref.ref(foreign)
    del garbage, foreign
    for _ in range(2):
        gc.collect()
    assert dead() is None
    assert count(base) == 0


def test_a_closed_stream_holds_nothing(base: mr.MemoryResource) -> None:
    foreign = Foreign()
    stream = Stream(foreign)
    dead = weakref.ref(foreign)
    del foreign
    assert dead() is not None
    stream.close()
    assert dead() is None


# ---- the end -------------------------------------------------------------------------

END = """
    import atexit, gc, sys, threading
    import numpy as np
    import numpy_rmm
    from numpy_rmm import DeviceArray, DeviceBuffer, Stream, StreamPool, mr

    base = mr.CudaMemoryResource()

    class Source:
        def __init__(self):
            self.mr = mr.CallbackMemoryResource(self.allocate, self.deallocate)
            self.over = mr.StatisticsResourceAdaptor(mr.PoolMemoryResource(self.mr))
            self.asker = mr.FailureCallbackResourceAdaptor(self.over, self.ask)
            self.kept = [DeviceBuffer(size=1000, mr=self.asker, stream=Stream())]
            self.kept += [DeviceArray((10,), mr=self.over), StreamPool(2), Stream(self)]
            self.kept += [np.ones(1000), numpy_rmm.use_handler("host").handler]
        def __cuda_stream__(self):
            return (0, 1)
        def allocate(self, nbytes, stream):
            return base.allocate(nbytes, stream)
        def deallocate(self, ptr, nbytes, stream):
            base.deallocate(ptr, nbytes, stream)
        def ask(self, nbytes):
            return False

    Source()
    sys.modules["kept"] = kept = Source()
    kept.module = sys.modules[__name__]
    alone = Source()
    alone.ptr = alone.over.allocate(100)
    mr.set_current_device_resource(Source().over)
    local = threading.local()
    local.source = Source()
"""
RUNNING = """
    def make():
        for _ in range(10):
            Source()
        while True:
            DeviceBuffer(size=100)

    for _ in range(3):
        threading.Thread(target=make, daemon=True).start()
    import time
    time.sleep(0.2)
"""
DISABLED = "    gc.disable()\n"
SAVED = "    atexit.register(lambda: (gc.collect(), Source(), gc.collect()))\n"


@pytest.mark.parametrize("ending", [DISABLED, RUNNING + SAVED])
def test_the_process_ends_as_if_there_were_no_circles(
    run_python: Run, ending: str
) -> None:
    result = run_python(END + ending)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# ---- weak references -----------------------------------------------------------------

PUBLIC: dict[str, Callable[[], Any]] = {
    "MemoryResource": mr.HostMemoryResource,
    "Handler": lambda: numpy_rmm.use_handler(mr.HostMemoryResource()).handler,
    "DeviceBuffer": lambda: DeviceBuffer(size=10),
    "DeviceArray": lambda: DeviceArray((2,)),
    "DeviceScalar": lambda: DeviceScalar("f4"),
    "Stream": Stream,
    "Event": numpy_rmm.Event,
    "StreamPool": lambda: numpy_rmm.StreamPool(2),
    "Pin": lambda: numpy_rmm.pin(np.ones(10_000)),
    "Pending": lambda: numpy_rmm.copyto(DeviceArray((2,)), np.ones(2), blocking=False),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_weak_references(base: mr.MemoryResource, name: str) -> None:
    ended: list[int] = []
    made = PUBLIC[name]()
    alive = weakref.ref(made, lambda _: ended.append(1))
    assert alive() is made
    del made
    gc.collect()
    assert alive() is None
    assert ended == [1]
