"""A graph that is launched when the owners of its memory have gone, as a program.

A stream is captured: two blocks of a pool are allocated, one is filled and copied to
the other, and that to a buffer of the program's own. Both are freed, inside the
capture or after it. Then the graph is launched many times, while another stream takes
blocks of the same size and overwrites them. The graph must find its own bytes each
time, and the others theirs. `tests/test_capture.py` runs it, on the simulated driver or
on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy_rmm
from numpy_rmm import PER_THREAD_DEFAULT_STREAM, Stream, mr
from numpy_rmm.testing import Driver

NBYTES = 16 << 10
N_BLOCKS = 6
MODES = {"global": 0, "thread-local": 1, "relaxed": 2}
STREAMS = ("theirs", "ours", "per-thread")
SEVENS = b"\x07" * NBYTES


class Theirs:
    """A stream of another library."""

    def __init__(self, driver: Driver) -> None:
        self.handle: int = driver.create_stream()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def stream_of(driver: Driver, kind: str) -> Any:
    if kind == "theirs":
        return Theirs(driver)
    return Stream(flags=1) if kind == "ours" else PER_THREAD_DEFAULT_STREAM


class Program:
    """A pool of a fixed size on a driver, and what its graphs have seen."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        driver.activate()
        self.seen: int = driver.allocate(NBYTES)
        nbytes = N_BLOCKS * NBYTES
        self.pool = mr.PoolMemoryResource(mr.CudaMemoryResource(), nbytes, nbytes)

    def fill(self, ptr: int, value: int, stream: Any) -> None:
        self.driver.check(
            self.driver.cuMemsetD8Async(
                ptr, ctypes.c_ubyte(value), NBYTES, ctypes.c_void_p(stream.handle)
            )
        )

    def copy(self, to: int, ptr: int, stream: Any) -> None:
        self.driver.check(
            self.driver.cuMemcpyAsync(to, ptr, NBYTES, ctypes.c_void_p(stream.handle))
        )

    def synchronize(self, stream: Any) -> None:
        self.driver.check(
            self.driver.cuStreamSynchronize(ctypes.c_void_p(stream.handle))
        )

    @contextmanager
    def captured(
        self, stream: Any, mode: str, announced: bool
    ) -> Iterator[ctypes.c_void_p]:
        """The graph of what is submitted inside, when the block has been left."""
        graph = ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.handle)
        with numpy_rmm.stream_capture() if announced else nullcontext():
            self.driver.check(self.driver.cuStreamBeginCapture(handle, MODES[mode]))
            yield graph
            self.driver.check(
                self.driver.cuStreamEndCapture(handle, ctypes.byref(graph))
            )

    def capture(
        self, stream: Any, mode: str, announced: bool, frees_inside: bool
    ) -> ctypes.c_void_p:
        """An executable graph, all of whose memory was freed."""
        executable = ctypes.c_void_p()
        with self.captured(stream, mode, announced) as graph:
            blocks = [self.pool.allocate(NBYTES, stream) for _ in range(2)]
            self.fill(blocks[0], 7, stream)
            self.copy(blocks[1], blocks[0], stream)
            self.copy(self.seen, blocks[1], stream)
            if frees_inside:
                self.free(blocks, stream)
        if not frees_inside:
            self.free(blocks, stream)
        self.driver.check(
            self.driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0)
        )
        self.driver.check(self.driver.cuGraphDestroy(graph))
        return executable

    def free(self, blocks: list[int], stream: Any) -> None:
        for ptr in blocks:
            self.pool.deallocate(ptr, NBYTES, stream)

    def take(self, stream: Any, limit: int = N_BLOCKS) -> list[int]:
        """All blocks that are to be had; each attempt in vain collects garbage."""
        blocks: list[int] = []
        while len(blocks) < limit:
            try:
                blocks.append(self.pool.allocate(NBYTES, stream))
            except MemoryError:
                break
        return blocks

    def launch(self, executable: ctypes.c_void_p, n: int) -> int:
        """How many of the launches found wrong bytes, or left some to others."""
        others, own = Stream(flags=1), Theirs(self.driver)
        n_wrong = 0
        limit = N_BLOCKS
        for i in range(n):
            value = 10 + i
            blocks = self.take(others, limit)
            limit = len(blocks) if i == 2 else limit
            for ptr in blocks:
                self.fill(ptr, value, others)
            self.fill(self.seen, 0, others)
            self.synchronize(others)
            self.driver.check(
                self.driver.cuGraphLaunch(executable, ctypes.c_void_p(own.handle))
            )
            self.synchronize(own)
            right = self.driver.read(self.seen, NBYTES) == SEVENS and all(
                self.driver.read(ptr, NBYTES) == bytes([value]) * NBYTES
                for ptr in blocks
            )
            self.free(blocks, others)
            n_wrong += not right
        return n_wrong

    def destroy(self, executable: ctypes.c_void_p) -> None:
        self.driver.check(self.driver.cuGraphExecDestroy(executable))
