"""Pools of device memory: who may have a block that was freed on a stream, and when."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator

import pytest

import numpy_rmm
from numpy_rmm import DEFAULT_STREAM, Stream, mr
from numpy_rmm.testing import SimulatedCuda, simulate_cuda

KIB = 1 << 10
MIB = 1 << 20
BLOCK = 4 * KIB


class Theirs:
    """A stream of another library, which may destroy it at any time."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.driver = cuda.driver
        self.handle: int = cuda.driver.create_stream()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def close(self) -> None:
        self.driver.check(self.driver.cuStreamDestroy(ctypes.c_void_p(self.handle)))


class Program:
    """Works on blocks on streams, and reads what a held stream has seen."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda
        cuda.driver.activate()
        self.seen: int = cuda.driver.allocate(BLOCK)

    def stream(self) -> Stream:
        return Stream(flags=1)

    def fill(self, ptr: int, value: int, stream: Stream) -> None:
        driver = self.cuda.driver
        driver.check(
            driver.cuMemsetD8Async(
                ptr, ctypes.c_ubyte(value), BLOCK, ctypes.c_void_p(stream.handle)
            )
        )

    def read(self, ptr: int, stream: Stream) -> None:
        driver = self.cuda.driver
        driver.check(
            driver.cuMemcpyAsync(self.seen, ptr, BLOCK, ctypes.c_void_p(stream.handle))
        )

    def free_in_use(self, pool: mr.MemoryResource, stream: Stream) -> int:
        """A block of sevens, freed while the stream, held, has yet to read it."""
        ptr = pool.allocate(BLOCK, stream)
        self.fill(ptr, 7, stream)
        self.cuda.hold(stream.handle)
        self.read(ptr, stream)
        pool.deallocate(ptr, BLOCK, stream)
        return ptr

    def was_right(self, stream: Stream) -> bool:
        """Lets the stream go on; whether it has read the sevens."""
        self.cuda.release(stream.handle)
        self.cuda.driver.check(self.cuda.driver.cuCtxSynchronize())
        return bool(self.cuda.driver.read(self.seen, BLOCK) == b"\x07" * BLOCK)


@pytest.fixture
def program(simulator: SimulatedCuda) -> Iterator[Program]:
    program = Program(simulator)
    yield program
    assert simulator.faults() == []


def pool_of(nbytes: int | None = None, **keywords: object) -> mr.PoolMemoryResource:
    """A pool that cannot grow, or one that can."""
    return mr.PoolMemoryResource(mr.CudaMemoryResource(), nbytes, nbytes, **keywords)  # type: ignore[arg-type]


def test_a_stream_gets_its_block_back_at_once_and_without_a_call(
    program: Program,
) -> None:
    pool, a = pool_of(BLOCK), program.stream()
    ptr = program.free_in_use(pool, a)
    program.cuda.clear_log()
    assert pool.allocate(BLOCK, a) == ptr
    assert program.cuda.log() == []
    pool.deallocate(ptr, BLOCK, a)
    assert program.cuda.log() == []
    assert program.was_right(a)


def test_another_stream_is_made_to_wait(program: Program) -> None:
    pool, a, b = pool_of(BLOCK), program.stream(), program.stream()
    ptr = program.free_in_use(pool, a)
    program.cuda.clear_log()
    assert pool.allocate(BLOCK, b) == ptr
    calls = [line.partition("(")[0] for line in program.cuda.log()]
    assert calls.count("cuEventRecord") == 1
    assert calls.count("cuStreamWaitEvent") == 1
    assert calls.index("cuEventRecord") < calls.index("cuStreamWaitEvent")
    program.fill(ptr, 9, b)
    assert program.was_right(a)
    pool.deallocate(ptr, BLOCK, b)


def test_a_pool_that_may_grow_lets_no_stream_wait(program: Program) -> None:
    pool, a, b = pool_of(), program.stream(), program.stream()
    ptr = program.free_in_use(pool, a)
    reserved = pool.statistics().reserved_bytes
    rest = pool.allocate(reserved - BLOCK, a)
    other = pool.allocate(BLOCK, b)
    assert other != ptr
    assert pool.statistics().reserved_bytes > reserved
    assert program.cuda.calls("cuStreamWaitEvent") == 0
    assert program.was_right(a)
    pool.deallocate(rest, reserved - BLOCK, a)
    pool.deallocate(other, BLOCK, b)


def fixed() -> mr.MemoryResource:
    """One block, and no more."""
    upstream = mr.LimitingResourceAdaptor(mr.CudaMemoryResource(), BLOCK)
    return mr.FixedSizeMemoryResource(upstream, BLOCK, 1)


def bins() -> mr.MemoryResource:
    made = mr.BinningMemoryResource(pool_of())
    made.add_bin(BLOCK, fixed())
    return made


@pytest.mark.parametrize(
    "make",
    [
        fixed,
        bins,
        lambda: mr.StatisticsResourceAdaptor(fixed()),
        lambda: mr.LimitingResourceAdaptor(bins(), MIB),
    ],
    ids=["fixed size", "binning", "statistics of fixed size", "limited binning"],
)
def test_blocks_of_one_size_have_the_order_of_streams(
    program: Program, make: Callable[[], mr.MemoryResource]
) -> None:
    made, a, b = make(), program.stream(), program.stream()
    ptr = program.free_in_use(made, a)
    assert made.statistics().current_bytes == 0
    program.cuda.clear_log()
    assert made.allocate(100, a) == ptr
    made.deallocate(ptr, 100, a)
    assert program.cuda.log() == []
    assert made.allocate(BLOCK, b) == ptr
    assert program.cuda.calls("cuStreamWaitEvent") == 1
    program.fill(ptr, 9, b)
    assert program.was_right(a)
    made.deallocate(ptr, BLOCK, b)


def test_what_waits_for_the_gpu_is_counted_as_parked(program: Program) -> None:
    pool, a = pool_of(BLOCK), program.stream()
    program.free_in_use(pool, a)
    assert pool.statistics().parked_bytes == BLOCK
    assert pool.trim() == 0
    assert program.was_right(a)
    assert pool.trim() == BLOCK
    assert pool.statistics().reserved_bytes == 0


def test_the_default_stream_has_its_own_blocks(program: Program) -> None:
    pool, b = pool_of(BLOCK), program.stream()
    ptr = program.free_in_use(pool, DEFAULT_STREAM)
    program.cuda.clear_log()
    assert pool.allocate(BLOCK) == ptr
    assert program.cuda.log() == []
    pool.deallocate(ptr, BLOCK)
    assert pool.allocate(BLOCK, b) == ptr
    program.fill(ptr, 9, b)
    assert program.was_right(DEFAULT_STREAM)
    pool.deallocate(ptr, BLOCK, b)


@pytest.mark.parametrize("keeps", [True, False], ids=["its object", "its handle"])
def test_a_handle_that_was_given_to_another_stream(
    program: Program, keeps: bool
) -> None:
    pool, aside = pool_of(BLOCK), program.stream()
    driver = program.cuda.driver
    handle = driver.create_stream()
    a = Stream(handle)
    ptr = pool.allocate(BLOCK, a)
    program.fill(ptr, 7, a)
    driver.check(driver.cuStreamSynchronize(ctypes.c_void_p(handle)))
    program.cuda.hold(aside.handle)
    program.fill(program.seen, 0, aside)
    event = driver.create_event()
    driver.check(driver.cuEventRecord(event, ctypes.c_void_p(aside.handle)))
    driver.check(driver.cuStreamWaitEvent(ctypes.c_void_p(handle), event, 0))
    program.read(ptr, a)
    pool.deallocate(ptr, BLOCK, a)
    driver.check(driver.cuStreamDestroy(ctypes.c_void_p(handle)))
    assert driver.create_stream() == handle  # with the old one's work pending
    again = a if keeps else Stream(handle)
    assert pool.allocate(BLOCK, again) == ptr
    program.fill(ptr, 9, again)
    assert program.was_right(aside)
    pool.deallocate(ptr, BLOCK, again)


def test_a_stream_that_is_destroyed_below_its_object(program: Program) -> None:
    """A driver crashes on a handle that is none any more; the simulator names it."""
    pool, theirs = pool_of(), Theirs(program.cuda)
    stream = Stream(theirs)
    ptr = pool.allocate(BLOCK, stream)
    program.fill(ptr, 7, stream)
    pool.deallocate(ptr, BLOCK, stream)
    theirs.close()
    assert pool.statistics().current_count == 0
    again = pool.allocate(BLOCK)
    pool.deallocate(again, BLOCK)
    pool.trim()
    del stream
    gc.collect()
    del pool
    assert program.cuda.faults() == []


def test_a_full_pool_says_what_the_gpu_still_has(program: Program) -> None:
    pool, a = pool_of(BLOCK, wait_limit="1 ms"), program.stream()
    program.free_in_use(pool, a)
    with pytest.raises(numpy_rmm.OutOfMemoryError, match="4 KiB freed but not done"):
        pool.allocate(2 * BLOCK, a)
    assert program.was_right(a)


def test_a_program_that_synchronises_itself_may_say_so(program: Program) -> None:
    pool, a, b = pool_of(BLOCK, reuse="immediate"), program.stream(), program.stream()
    ptr = program.free_in_use(pool, a)
    program.cuda.clear_log()
    assert pool.allocate(BLOCK, b) == ptr
    assert program.cuda.log() == []
    assert program.was_right(a)
    pool.deallocate(ptr, BLOCK, b)


# ---- segments ------------------------------------------------------------------------


def mapped(cuda: SimulatedCuda) -> int:
    return cuda.outstanding()["mappings"][1]


def allocated(cuda: SimulatedCuda) -> int:
    return cuda.outstanding()["device_allocations"][1]


def test_pieces_are_one_memory_and_go_back_one_by_one(simulator: SimulatedCuda) -> None:
    with numpy_rmm.options(segment_nbytes="2 MiB"):
        pool = pool_of()
    ptrs = [pool.allocate(2 * MIB) for _ in range(4)]
    assert ptrs == [ptrs[0] + i * 2 * MIB for i in range(4)]
    assert mapped(simulator) == 8 * MIB
    for ptr in ptrs[1:3]:
        pool.deallocate(ptr, 2 * MIB)
    assert pool.allocate(4 * MIB) == ptrs[1]
    pool.deallocate(ptrs[1], 4 * MIB)
    assert pool.trim() == 4 * MIB
    assert mapped(simulator) == pool.statistics().reserved_bytes == 4 * MIB
    for ptr in (ptrs[0], ptrs[3]):
        pool.deallocate(ptr, 2 * MIB)
    del pool
    gc.collect()
    assert mapped(simulator) == 0
    assert simulator.outstanding()["reservations"] == (0, 0)


@pytest.mark.parametrize(
    ("keywords", "is_mapped"),
    [
        ({}, True),
        ({"segments": None}, True),
        ({"segments": "vmm"}, True),
        ({"segments": "alloc"}, False),
        ({"reuse": "immediate"}, False),
    ],
)
def test_where_segments_come_from(
    simulator: SimulatedCuda, keywords: dict[str, str], is_mapped: bool
) -> None:
    pool = pool_of(**keywords)
    ptr = pool.allocate(MIB)
    assert (mapped(simulator) > 0) is is_mapped
    assert (allocated(simulator) > 0) is not is_mapped
    pool.deallocate(ptr, MIB)


def test_the_option_holds_for_pools_that_do_not_say(simulator: SimulatedCuda) -> None:
    with numpy_rmm.options(segments="alloc"):
        silent, explicit = pool_of(), pool_of(segments="vmm")
    ptrs = silent.allocate(MIB), explicit.allocate(MIB)
    assert allocated(simulator) == silent.statistics().reserved_bytes
    assert mapped(simulator) == explicit.statistics().reserved_bytes
    silent.deallocate(ptrs[0], MIB)
    explicit.deallocate(ptrs[1], MIB)


def test_a_device_that_cannot_map_memory() -> None:
    with simulate_cuda(virtual_memory_management_supported=0) as cuda:
        pool = pool_of()
        ptr = pool.allocate(MIB)
        assert mapped(cuda) == 0
        assert allocated(cuda) == pool.statistics().reserved_bytes
        pool.deallocate(ptr, MIB)
        del pool


@pytest.mark.parametrize(
    ("value", "error"), [("mapped", ValueError), (1, TypeError), ("", ValueError)]
)
def test_a_word_that_is_none(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="segments must be"):
        mr.PoolMemoryResource(mr.HostMemoryResource(), segments=value)  # type: ignore[arg-type]


# ---- peers ---------------------------------------------------------------------------


def test_a_peer_is_added_before_and_after_an_allocation() -> None:
    with simulate_cuda(devices=2) as cuda:
        early, late = pool_of(), pool_of()
        early.add_peer(1)
        ptrs = early.allocate(MIB), late.allocate(MIB)
        n = cuda.calls("cuMemSetAccess")
        late.add_peer(device=1)
        assert cuda.calls("cuMemSetAccess") == n + 1
        early.deallocate(ptrs[0], MIB)
        late.deallocate(ptrs[1], MIB)
        del early, late


@pytest.mark.parametrize(
    ("device", "error"),
    [(2, ValueError), (-1, ValueError), (1 << 40, ValueError), ("1", TypeError)],
)
def test_a_peer_that_is_no_device(device: object, error: type[Exception]) -> None:
    with simulate_cuda(devices=2):
        pool = pool_of()
        with pytest.raises(error):
            pool.add_peer(device)  # type: ignore[arg-type]
        del pool


def test_memory_that_is_not_mapped_has_no_peers(simulator: SimulatedCuda) -> None:
    for pool in (
        pool_of(segments="alloc"),
        mr.PoolMemoryResource(mr.HostMemoryResource()),
    ):
        with pytest.raises(NotImplementedError, match="does not map"):
            pool.add_peer(0)
