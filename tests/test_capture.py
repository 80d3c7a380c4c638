"""Graphs whose memory comes of a device pool, on the simulated driver or, with
NUMPY_RMM_TEST_GPU=1, on a real one."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Iterator

import pytest

import captures
import numpy_rmm
from captures import MODES, N_BLOCKS, NBYTES, STREAMS, Program, Theirs
from numpy_rmm import DEFAULT_STREAM, Stream
from numpy_rmm.testing import Driver, SimulatedCuda


@pytest.fixture
def program(cuda: Driver) -> Program:
    return Program(cuda)


def all_comes_back(program: Program) -> bool:
    """The driver tells of a graph's end in a thread of its own, and a little later."""
    for _ in range(100):
        blocks = program.take(DEFAULT_STREAM)
        program.free(blocks, DEFAULT_STREAM)
        program.synchronize(DEFAULT_STREAM)
        if len(blocks) == N_BLOCKS:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("frees_inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_graph_keeps_its_memory_for_each_launch(
    program: Program, kind: str, mode: str, frees_inside: bool
) -> None:
    stream = captures.stream_of(program.driver, kind)
    executable = program.capture(stream, mode, kind != "theirs", frees_inside)
    assert program.launch(executable, 100) == 0
    free = program.take(stream)
    assert len(free) == N_BLOCKS - 2
    program.free(free, stream)
    program.destroy(executable)
    assert all_comes_back(program)


def test_the_same_program_fails_where_nobody_knows_of_the_capture(
    program: Program,
) -> None:
    stream = captures.stream_of(program.driver, "ours")
    executable = program.capture(stream, "relaxed", False, True)
    assert program.launch(executable, 3) > 0
    program.destroy(executable)


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_that_was_invalidated_gives_its_memory_back(
    program: Program, mode: str
) -> None:
    driver, stream = program.driver, Theirs(program.driver)
    handle, graph = ctypes.c_void_p(stream.handle), ctypes.c_void_p()
    driver.check(driver.cuStreamBeginCapture(handle, MODES[mode]))
    ptr = program.pool.allocate(NBYTES, stream)
    program.fill(ptr, 7, stream)
    program.pool.deallocate(ptr, NBYTES, stream)
    identity = ctypes.c_uint64()
    assert driver.cuStreamGetId(handle, ctypes.byref(identity)) != 0
    assert driver.cuStreamEndCapture(handle, ctypes.byref(graph)) != 0
    assert all_comes_back(program)


def test_what_was_allocated_before_and_freed_inside_is_the_graphs(
    program: Program,
) -> None:
    stream = Theirs(program.driver)
    ptr = program.pool.allocate(NBYTES, stream)
    with program.captured(stream, "global", False) as graph:
        program.fill(ptr, 7, stream)
        program.pool.deallocate(ptr, NBYTES, stream)
    free = program.take(stream)
    assert len(free) == N_BLOCKS - 1
    program.free(free, stream)
    program.driver.check(program.driver.cuGraphDestroy(graph))
    assert all_comes_back(program)


# ---- stream_capture ------------------------------------------------------------------


def is_asked(machine: SimulatedCuda, stream: Stream) -> bool:
    pool = numpy_rmm.mr.PoolMemoryResource(numpy_rmm.mr.CudaMemoryResource())
    pool.deallocate(pool.allocate(NBYTES, stream), NBYTES, stream)
    before = machine.calls("cuStreamIsCapturing")
    pool.deallocate(pool.allocate(NBYTES, stream), NBYTES, stream)
    return machine.calls("cuStreamIsCapturing") > before


def test_streams_of_ours_are_asked_about_inside_stream_capture_only(
    simulator: SimulatedCuda,
) -> None:
    simulator.driver.activate()
    stream = Stream(flags=1)
    assert not is_asked(simulator, stream)
    with numpy_rmm.stream_capture():
        assert is_asked(simulator, stream)
        with numpy_rmm.stream_capture():
            pass
        assert is_asked(simulator, stream)
    assert not is_asked(simulator, stream)


def test_stream_capture_ends_with_an_exception(simulator: SimulatedCuda) -> None:
    simulator.driver.activate()
    with pytest.raises(KeyError), numpy_rmm.stream_capture():
        raise KeyError
    assert not is_asked(simulator, Stream(flags=1))


def test_stream_capture_can_be_entered_again(simulator: SimulatedCuda) -> None:
    simulator.driver.activate()
    stream, capture = Stream(flags=1), numpy_rmm.stream_capture()
    for _ in range(2):
        with capture, capture:
            assert is_asked(simulator, stream)
        assert not is_asked(simulator, stream)
    with pytest.raises(RuntimeError, match="was not entered"):
        capture.__exit__(None, None, None)
    with capture:
        assert is_asked(simulator, stream)
    assert not is_asked(simulator, stream)


def test_stream_capture_decorates_functions(simulator: SimulatedCuda) -> None:
    simulator.driver.activate()
    stream = Stream(flags=1)

    @numpy_rmm.stream_capture()
    def plain() -> bool:
        return is_asked(simulator, stream)

    @numpy_rmm.stream_capture()
    async def in_parts() -> bool:
        await asyncio.sleep(0)
        return is_asked(simulator, stream)

    assert plain()
    assert plain()
    assert asyncio.run(in_parts())
    assert not is_asked(simulator, stream)
    with pytest.raises(TypeError, match="a generator would keep its capture"):

        @numpy_rmm.stream_capture()
        def generator() -> Iterator[None]:
            yield
