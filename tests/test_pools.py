"""Fixed-size blocks, bins and arenas: what they have beyond every other resource."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr
from numpy_rmm.testing import Driver, SimulatedCuda

MIB = 1 << 20


def fixed(*arguments: object) -> mr.FixedSizeMemoryResource:
    return mr.FixedSizeMemoryResource(mr.HostMemoryResource(), *arguments)  # type: ignore[arg-type]


def binning(*arguments: object) -> mr.BinningMemoryResource:
    return mr.BinningMemoryResource(mr.HostMemoryResource(), *arguments)  # type: ignore[arg-type]


def arena(*arguments: object) -> mr.ArenaMemoryResource:
    return mr.ArenaMemoryResource(mr.HostMemoryResource(), *arguments)  # type: ignore[arg-type]


def failure() -> str:
    """What the last request that failed was told."""
    error = numpy_rmm.last_error()
    assert error is not None
    return error.message


@pytest.mark.parametrize(
    "name",
    ["FixedSizeMemoryResource", "BinningMemoryResource", "ArenaMemoryResource"],
)
@pytest.mark.parametrize("upstream", [None, 3, "host", mr.HostMemoryResource])
def test_an_upstream_that_is_none(name: str, upstream: object) -> None:
    with pytest.raises(TypeError, match="upstream_mr must be a MemoryResource, not"):
        getattr(mr, name)(upstream)


# ---- fixed size ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0,), ValueError, "block_size must be more than 0 bytes"),
        ((-1,), ValueError, "block_size must not be negative"),
        ((2**64,), ValueError, "block_size must be less than"),
        (("50%",), ValueError, "block_size"),
        ((1.5,), TypeError, "block_size must be an int or text"),
        ((None,), TypeError, "block_size must be an int or text"),
        ((64, 0), ValueError, "blocks_to_preallocate must be between 1 and"),
        ((64, "3"), TypeError, "blocks_to_preallocate must be an int"),
        ((2**63,), MemoryError, "more than an address space holds"),
        ((2**30, 2**20), MemoryError, "1 PiB"),
    ],
)
def test_arguments_of_fixed_size(
    arguments: tuple[object, ...], error: type, match: str
) -> None:
    with pytest.raises(error, match=match):
        fixed(*arguments)


def test_the_defaults_are_128_blocks_of_a_mebibyte() -> None:
    assert fixed().statistics().reserved_bytes == 128 * MIB


def test_a_request_larger_than_a_block_changes_nothing() -> None:
    made = fixed("64 KiB", 4)
    with pytest.raises(
        numpy_rmm.OutOfMemoryError, match=r"65537 B asked of a .* have 64 KiB each"
    ) as caught:
        made.allocate(65537)
    assert caught.value.requested_nbytes == 65537
    assert caught.value.resource == "FixedSizeMemoryResource"
    assert made.statistics().current_count == 0
    assert made.statistics().reserved_bytes == 256 << 10


def test_blocks_come_back_the_last_first() -> None:
    made = fixed(1000)
    pointers = [made.allocate(1000) for _ in range(5)]
    for ptr in pointers:
        made.deallocate(ptr, 1000)
    assert [made.allocate(1) for _ in range(5)] == pointers[::-1]
    for ptr in pointers:
        made.deallocate(ptr, 1000)


def test_more_blocks_are_taken_when_none_is_free() -> None:
    made = fixed(MIB, 4)
    pointers = [made.allocate(MIB) for _ in range(9)]
    assert made.statistics().reserved_bytes == 12 * MIB
    assert made.upstream is not None
    assert made.upstream.statistics().current_count == 3
    for ptr in pointers:
        made.deallocate(ptr, MIB)
    assert made.trim(keep="4 MiB") == 8 * MIB
    assert made.trim() == 4 * MIB


def test_arrays_live_in_blocks() -> None:
    made = fixed("1 MiB", 8)
    with numpy_rmm.use_handler(made):
        arrays = [np.full(1000 + i, i, np.int32) for i in range(20)]
        with pytest.raises(MemoryError):
            np.ones(200_000)
        assert "blocks have 1 MiB each" in failure()
        zeros = np.zeros(100_000)
    assert numpy_rmm.array_info(arrays[3]).resource is made
    view = numpy_rmm.array_info(arrays[3][500:])
    assert (view.block_address, view.block_nbytes) == (arrays[3].ctypes.data, MIB)
    assert made.statistics().current_count == 21
    assert not zeros.any()
    assert all((array == i).all() for i, array in enumerate(arrays))
    del arrays, zeros
    gc.collect()
    assert made.statistics().current_bytes == 0


def test_a_pinned_block_waits_for_its_copy(simulator: SimulatedCuda) -> None:
    made = mr.FixedSizeMemoryResource(mr.PinnedHostMemoryResource(), "64 KiB", 2)
    with numpy_rmm.use_handler(made, threshold=0):
        first = np.ones(8000)
    address = first.ctypes.data
    parked = made.statistics().parked_bytes  # NumPy allocates a little more
    del first
    assert made.statistics().parked_bytes == parked + (64 << 10)
    n_blocks = made.statistics().reserved_bytes >> 16
    pointers = {made.allocate(1000) for _ in range(n_blocks)}
    assert address in pointers  # the simulated GPU has nothing to do
    assert made.statistics().epochs >= 1
    for ptr in pointers:
        made.deallocate(ptr, 1000)


def test_an_upstream_that_takes_its_first_blocks_initialises_cuda(
    simulator: SimulatedCuda,
) -> None:
    mr.FixedSizeMemoryResource(mr.CudaMemoryResource(), 1024, 4)
    assert simulator.calls("cuInit") == 1


# ---- binning -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((18,), ValueError, r"min_size_exponent \(18\).*both are given or none"),
        ((-1, 18), ValueError, "both are given or none"),
        ((12, 11), ValueError, r"must not be larger than max_size_exponent \(11\)"),
        ((-2, 3), ValueError, "min_size_exponent must be between -1 and 62"),
        ((1, 63), ValueError, "max_size_exponent must be between -1 and 62"),
        (("1", 2), TypeError, "min_size_exponent must be an int"),
    ],
)
def test_arguments_of_binning(
    arguments: tuple[object, ...], error: type, match: str
) -> None:
    with pytest.raises(error, match=match):
        binning(*arguments)


def test_without_exponents_there_are_no_bins() -> None:
    made = binning()
    assert made.bin_mrs == []
    ptr = made.allocate(100)
    assert made.upstream is not None
    assert made.upstream.statistics().current_bytes == 100
    made.deallocate(ptr, 100)


def test_a_bin_for_each_power_of_two() -> None:
    made = binning(10, 14)
    assert [type(bin_mr).__name__ for bin_mr in made.bin_mrs] == [
        "FixedSizeMemoryResource"
    ] * 5
    assert all(bin_mr.upstream is made.upstream for bin_mr in made.bin_mrs)
    kibs = [bin_mr.statistics().reserved_bytes >> 10 for bin_mr in made.bin_mrs]
    assert kibs == [128, 256, 512, 1024, 2048]
    assert made.statistics().reserved_bytes == sum(kibs) << 10


def test_a_bin_of_ones_own() -> None:
    made = binning(18, 22)
    small = mr.FixedSizeMemoryResource(mr.HostMemoryResource(), 1 << 10)
    large = mr.HostMemoryResource()
    made.add_bin(1 << 10, small)
    made.add_bin(1 << 23, bin_resource=large)
    made.add_bin("8 MiB")  # there is one already
    assert len(made.bin_mrs) == 7
    assert made.bin_mrs[0] is small
    assert made.bin_mrs[-1] is large
    pointers = [made.allocate(n) for n in (500, 8 * MIB, 9 * MIB)]
    assert small.statistics().current_bytes == 500
    assert large.statistics().current_bytes == 8 * MIB
    for ptr in pointers:
        made.deallocate(ptr, 0)
    assert made.statistics().current_bytes == 0


def test_a_bin_is_kept_as_what_it_is() -> None:
    class Labelled(mr.PoolMemoryResource):
        label = "mine"

    made = binning()
    made.add_bin(1000, Labelled(mr.HostMemoryResource()))
    gc.collect()
    assert made.bin_mrs[0].label == "mine"  # type: ignore[attr-defined]
    gone = weakref.ref(made.bin_mrs[0])
    del made
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        (0, ValueError, "a bin cannot be for 0 B"),
        (-1, ValueError, "allocation_size must not be negative"),
        (None, TypeError, "allocation_size must be an int or text"),
        (2**62, MemoryError, "more than an address space holds"),
    ],
)
def test_sizes_of_bins(size: object, error: type, match: str) -> None:
    made = binning()
    with pytest.raises(error, match=match):
        made.add_bin(size)  # type: ignore[arg-type]
    assert made.bin_mrs == []


def test_resources_that_are_no_bins(simulator: SimulatedCuda) -> None:
    made = binning()
    host = mr.HostMemoryResource()
    callback = mr.CallbackMemoryResource(host.allocate, host.deallocate, kind="host")
    for wrong, error, match in [
        (3, TypeError, "bin_resource must be a MemoryResource, not int"),
        (mr.CudaMemoryResource(), ValueError, "device memory, not host"),
        (callback, ValueError, "must not call user code"),
        (made, ValueError, "must not lead back"),
        (mr.PoolMemoryResource(made), ValueError, "must not lead back"),
    ]:
        with pytest.raises(error, match=match):
            made.add_bin(1000, wrong)  # type: ignore[arg-type]
    assert made.bin_mrs == []
    over = mr.BinningMemoryResource(callback)
    over.add_bin(1000, callback)
    assert over.bin_mrs == [callback]


def test_device_memory_beside_managed_is_device_memory(cuda: object) -> None:
    made = mr.BinningMemoryResource(mr.ManagedMemoryResource(), 10, 12)
    made.add_bin("1 MiB", mr.CudaMemoryResource())
    assert made.kind == "device"
    with pytest.raises(ValueError, match="device"):
        numpy_rmm.set_handler(made)
    for size in (100, 5000, 1 << 20, 1 << 21):
        data = bytes(range(100)) * (size // 100)
        assert numpy_rmm.DeviceBuffer.to_device(data, mr=made).tobytes() == data


def test_device_memory_does_not_come_under_a_handler(cuda: object) -> None:
    made = mr.BinningMemoryResource(mr.ManagedMemoryResource(), 10, 12)
    with numpy_rmm.use_handler(made):
        array = np.ones(100)
    with pytest.raises(ValueError, match="others use it as managed already"):
        made.add_bin("1 MiB", mr.CudaMemoryResource())
    assert made.kind == "managed"
    assert array.sum() == 100


@pytest.mark.parametrize("nbytes", [100, 10_000, 3 << 20, 8 << 20, 100 << 20])
def test_a_pool_of_a_pool_of_a_callback_knows_its_blocks(
    cuda: Driver, nbytes: int
) -> None:
    """All three may have a range that is the same to the byte."""
    cuda.activate()
    device = mr.CudaMemoryResource()
    inner = mr.PoolMemoryResource(
        mr.CallbackMemoryResource(device.allocate, device.deallocate)
    )
    outer = mr.PoolMemoryResource(mr.StatisticsResourceAdaptor(inner))
    ptr = outer.allocate(nbytes)
    outer.deallocate(ptr, nbytes)
    assert outer.statistics().current_count == 0
    del outer
    assert inner.statistics().current_count == 0


def test_an_exception_of_a_callback_under_a_new_bin_crosses_unchanged() -> None:
    error = OSError("no blocks")

    def allocate(nbytes: int, stream: object) -> int:
        raise error

    made = mr.BinningMemoryResource(
        mr.CallbackMemoryResource(allocate, print, kind="host")
    )
    with pytest.raises(OSError, match="no blocks") as caught:
        made.add_bin(1000)
    assert caught.value is error


def test_arrays_live_in_bins() -> None:
    made = binning(10, 16)
    with numpy_rmm.use_handler(made):
        arrays = [np.full(n, n, np.uint32) for n in (10, 1000, 5000, 100_000)]
        grown = np.arange(100)
        grown.resize(10_000, refcheck=False)
    owners = [numpy_rmm.array_info(array).resource for array in arrays]
    assert owners[0] is made.bin_mrs[0]
    assert owners[1] is made.bin_mrs[2]
    assert owners[2] is made.bin_mrs[5]
    assert owners[3] is made.upstream
    assert (grown[:100] == np.arange(100)).all()
    assert not grown[100:].any()
    assert all((array == array.size).all() for array in arrays)
    assert made.statistics().current_count == 5


def test_bins_are_added_while_arrays_come_and_go() -> None:
    made = binning()
    wrong = []

    def churn(value: int) -> None:
        with numpy_rmm.use_handler(made):
            for size in range(1, 1500):
                array = np.full(size, value, np.int64)
                if array[-1] != value:
                    wrong.append(size)

    threads = [threading.Thread(target=churn, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for kib in range(12, 0, -1):
        made.add_bin(kib << 10)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(made.bin_mrs) == 12
    assert made.statistics().current_bytes == 0


# ---- arenas --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0,), ValueError, "arena_size must be more than 0 bytes"),
        ((-1,), ValueError, "arena_size must not be negative"),
        (("150%",), ValueError, "arena_size"),
        ((1.5,), TypeError, "arena_size must be an int or text"),
        ((2**61,), MemoryError, "refused to map"),
    ],
)
def test_arguments_of_an_arena(
    arguments: tuple[object, ...], error: type, match: str
) -> None:
    with pytest.raises(error, match=match):
        arena(*arguments)


@pytest.mark.parametrize(
    ("size", "nbytes"), [(1 << 20, 1 << 20), ("3 MiB", 3 << 20), (1000, 65536)]
)
def test_an_arena_takes_its_size_at_once(size: object, nbytes: int) -> None:
    made = arena(size)
    assert made.statistics().reserved_bytes == nbytes
    assert made.upstream is not None
    assert made.upstream.statistics().current_count == 1


def test_the_default_size_is_half_of_the_memory(simulator: SimulatedCuda) -> None:
    free, _ = mr.available_device_memory()
    made = mr.ArenaMemoryResource(mr.CudaMemoryResource())
    assert 0.49 * free < made.statistics().reserved_bytes <= 0.5 * free
    system = numpy_rmm.info()["system"]
    limits = [system["memory_nbytes"], system["cgroup_limit_nbytes"]]
    host = min(limit for limit in limits if limit)
    assert 0.49 * host < arena().statistics().reserved_bytes <= 0.5 * host
    assert arena("10%").statistics().reserved_bytes == pytest.approx(
        0.1 * host, rel=1e-3
    )


def test_an_arena_does_not_grow() -> None:
    made = arena("8 MiB")
    with numpy_rmm.use_handler(made):
        arrays = [np.ones(100_000) for _ in range(8)]
        with pytest.raises(MemoryError):
            np.ones(400_000)
        assert "limit 8 MiB" in failure()
        with pytest.raises(MemoryError):
            np.ones(2_000_000)
        assert "an arena of 8 MiB in all" in failure()
    assert made.statistics().reserved_bytes == 8 * MIB
    assert all(array.all() for array in arrays)
    del arrays
    gc.collect()
    made.deallocate(made.allocate("7 MiB"), 0)


def test_a_failed_request_leaves_a_report_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "rmm_arena_memory_dump.log"
    with pytest.raises(MemoryError):
        arena("1 MiB").allocate("2 MiB")
    assert not log.exists()
    made = arena("1 MiB", True)
    ptr = made.allocate("768 KiB")
    with pytest.raises(
        numpy_rmm.OutOfMemoryError, match=r"report is in rmm_arena_memory_dump\.log"
    ) as caught:
        made.allocate("512 KiB")
    assert caught.value.requested_nbytes == 512 << 10
    text = log.read_text()
    assert "an arena of 1 MiB of host memory failed to allocate 512 KiB" in text
    assert "in use 768 KiB in 1 blocks, free 256 KiB in 1" in text
    assert "largest free block 256 KiB" in text
    made.deallocate(ptr, "768 KiB")
    with numpy_rmm.use_handler(made), pytest.raises(MemoryError):
        np.ones(1_000_000)
    # one of the array, and two of allocate: before and after it has collected garbage
    assert log.read_text().count("failed to allocate") == 3


# ---- growth ahead of demand ----------------------------------------------------------


def _ahead(pool: mr.MemoryResource) -> int:
    """Segments that came ahead when half of the first one is in use."""
    ptrs = [pool.allocate(1 << 20) for _ in range(6)]
    end = time.monotonic() + 0.5
    while time.monotonic() < end and pool.statistics().segments_ahead == 0:
        time.sleep(0.01)
    for ptr in ptrs:
        pool.deallocate(ptr, 1 << 20)
    return pool.statistics().segments_ahead


@pytest.mark.parametrize(
    ("keywords", "n"), [({}, 0), ({"grow_ahead": False}, 0), ({"grow_ahead": True}, 1)]
)
def test_a_pool_grows_ahead_of_demand_when_asked_to(
    keywords: dict[str, bool], n: int
) -> None:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource(), **keywords)  # type: ignore[arg-type]
    assert _ahead(pool) == n
    assert pool.statistics().failures_ahead == 0


def test_growth_ahead_is_seen_through_an_adaptor() -> None:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource(), grow_ahead=True)
    assert _ahead(mr.StatisticsResourceAdaptor(pool)) == 1


def test_what_cannot_be_had_ahead_is_no_error() -> None:
    limited = mr.LimitingResourceAdaptor(mr.HostMemoryResource(), "12 MiB")
    pool = mr.PoolMemoryResource(limited, grow_ahead=True)
    assert _ahead(pool) == 0
    assert pool.statistics().failures_ahead > 0
    pool.deallocate(pool.allocate(100), 100)


def test_python_functions_are_not_called_in_the_background() -> None:
    host = mr.HostMemoryResource()
    callback = mr.CallbackMemoryResource(host.allocate, host.deallocate, kind="host")
    with pytest.raises(ValueError, match="grow_ahead"):
        mr.PoolMemoryResource(callback, grow_ahead=True)


def test_the_size_of_a_pool_is_what_it_has_of_its_upstream() -> None:
    host = mr.HostMemoryResource()
    pool = mr.PoolMemoryResource(host, "2 MiB", "8 MiB")
    assert pool.pool_size() == 2 << 20
    ptr = pool.allocate("3 MiB")
    assert pool.pool_size() == host.statistics().current_bytes > 3 << 20
    assert pool.pool_size() == pool.statistics().reserved_bytes
    pool.deallocate(ptr, "3 MiB")
    pool.trim()
    assert pool.pool_size() == host.statistics().current_bytes
