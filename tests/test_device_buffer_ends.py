"""DeviceBuffer: garbage, threads, the end of the process."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from device_buffers import live
from numpy_rmm import DeviceBuffer, Stream, mr

pytestmark = pytest.mark.usefixtures("driver")

Run = Callable[..., Any]


def test_cycles_with_a_buffer_and_its_resource(pool: mr.MemoryResource) -> None:
    class Holder:
        pass

    class Own(mr.StatisticsResourceAdaptor):
        pass

    own: Any = Own(pool)
    own.buffer = DeviceBuffer(size=100, mr=own)
    one, other = Holder(), Holder()
    one.items = [other, DeviceBuffer(size=10, mr=own), own]  # type: ignore[attr-defined]
    other.items = [one, DeviceBuffer(size=20, mr=pool)]  # type: ignore[attr-defined]
    dead = weakref.ref(own)
    del own, one, other
    gc.collect()
    assert dead() is None
    assert live(pool) == (0, 0)


def test_a_cycle_through_its_own_interface(pool: mr.MemoryResource) -> None:
    buffer = DeviceBuffer(size=100, mr=pool)
    buffer.__cuda_array_interface__["me"] = buffer  # as a careless consumer might
    del buffer
    gc.collect()
    assert live(pool) == (0, 0)


def test_memory_that_garbage_holds_is_found() -> None:
    pool = mr.LimitingResourceAdaptor(mr.CudaMemoryResource(), 1024)
    cycle: list[object] = [DeviceBuffer(size=1000, mr=pool)]
    cycle.append(cycle)
    del cycle
    assert len(DeviceBuffer(size=1000, mr=pool)) == 1000


def test_a_callback_that_raises() -> None:
    device = mr.HostMemoryResource()  # nothing is copied

    def allocate(nbytes: int, stream: Stream) -> int:
        if nbytes > 100:
            raise KeyError("mine")
        return device.allocate(nbytes, stream)

    def deallocate(ptr: int, nbytes: int, stream: Stream) -> None:
        device.deallocate(ptr, nbytes, stream)
        raise RuntimeError("lost")

    own = mr.CallbackMemoryResource(allocate, deallocate)
    with pytest.raises(KeyError, match="mine"):
        DeviceBuffer(size=101, mr=own)
    seen: list[Any] = []
    sys.unraisablehook, before = seen.append, sys.unraisablehook
    try:
        DeviceBuffer(size=100, mr=own)
        nothing: dict[str, str] = {}
        with pytest.raises(KeyError, match="the first one"):  # set when the buffer dies
            print(DeviceBuffer(size=100, mr=own), nothing["the first one"])
    finally:
        sys.unraisablehook = before
    assert [str(each.exc_value) for each in seen] == ["lost", "lost"]
    assert live(device) == (0, 0)


def test_many_threads(pool: mr.MemoryResource, stream: Stream) -> None:
    def work(number: int) -> bool:
        right = True
        for i in range(50):
            data = bytes([number]) * (i * 37 + 1)
            buffer = DeviceBuffer.to_device(data, stream, pool)
            buffer.resize(len(data) + 1000, stream)
            right = right and buffer.copy().tobytes(stream)[: len(data)] == data
        return right

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [True] * 4
    assert live(pool) == (0, 0)


def test_one_thread_at_a_time_changes_a_size() -> None:
    refused: list[str] = []
    buffers: list[DeviceBuffer] = []

    def allocate(nbytes: int, stream: Stream) -> int:
        if nbytes == 200:
            with pytest.raises(RuntimeError) as caught:
                buffers[0].resize(300)
            refused.append(str(caught.value))
        return device.allocate(nbytes, stream)

    device = mr.HostMemoryResource()  # nothing is copied
    own = mr.CallbackMemoryResource(allocate, device.deallocate)
    buffers.append(DeviceBuffer(mr=own))
    buffers[0].resize(200)
    assert refused == ["another thread is about to change the size of this buffer"]
    assert len(buffers[0]) == 200


EXIT = """
    import atexit, sys, threading
    import numpy_rmm
    from numpy_rmm import DeviceBuffer, Stream, mr

    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    device = mr.CudaMemoryResource()
    callback = mr.CallbackMemoryResource(device.allocate, device.deallocate)
    stream = Stream()
    kept = [
        DeviceBuffer.to_device(b"abc", on, of)
        for on in (numpy_rmm.DEFAULT_STREAM, stream)
        for of in (None, pool, device, callback, numpy_rmm.registry["pinned"])
    ]
    kept.append(kept)
    capsule = kept[0].__dlpack__()
    sys.modules["kept"] = kept
    atexit.register(lambda: kept[0].tobytes())
    thread = threading.Thread(
        target=lambda: [DeviceBuffer(size=10) for _ in iter(int, 1)], daemon=True
    )
    thread.start()
    print("end")
"""


def test_buffers_that_are_alive_at_exit(run_python: Run) -> None:
    result = run_python(EXIT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


def test_a_child_that_drops_buffers(run_python: Run) -> None:
    result = run_python(
        """
        import os
        from numpy_rmm import DeviceBuffer, Stream

        buffers = [DeviceBuffer(size=n, stream=Stream()) for n in (0, 10, 1 << 22)]
        child = os.fork()
        if child == 0:
            buffers.clear()
            try:
                DeviceBuffer.to_device(b"abc")
            except Exception as error:
                os._exit(type(error).__name__ != "CudaUnavailableError")
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert (result.stdout, result.stderr) == ("0\n", "")
