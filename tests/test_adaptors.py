"""The statistics and limiting adaptors from Python, as RMM's callers know them."""

from __future__ import annotations

import gc
import inspect
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import Statistics, mr

MIB = 1 << 20


def host_pool() -> mr.MemoryResource:
    return mr.PoolMemoryResource(mr.HostMemoryResource())


def callback() -> mr.MemoryResource:
    host = mr.HostMemoryResource()
    return mr.CallbackMemoryResource(host.allocate, host.deallocate, kind="host")


def counted(bytes_: int, count: int) -> Statistics:
    """Blocks that were allocated, and are all still there."""
    return Statistics(bytes_, count, bytes_, count, bytes_, count)


def zeros() -> Statistics:
    return counted(0, 0)


UPSTREAMS: dict[str, Callable[[], mr.MemoryResource]] = {
    "host": mr.HostMemoryResource,
    "pool": host_pool,
    "callback": callback,
    "pinned pool": lambda: mr.PoolMemoryResource(mr.PinnedHostMemoryResource()),
    "managed": mr.ManagedMemoryResource,
    "device pool": lambda: mr.PoolMemoryResource(mr.CudaMemoryResource()),
    "statistics": lambda: mr.StatisticsResourceAdaptor(host_pool()),
    "limiting": lambda: mr.LimitingResourceAdaptor(host_pool(), "1 GiB"),
}
NEED_CUDA = {"pinned pool", "managed", "device pool"}


@pytest.fixture(params=list(UPSTREAMS))
def upstream(request: pytest.FixtureRequest) -> mr.MemoryResource:
    """Each kind of resource that an adaptor can stand over."""
    if request.param in NEED_CUDA:
        request.getfixturevalue("cuda")
    return UPSTREAMS[request.param]()


# ---- the counts ----------------------------------------------------------------------


def test_counts_have_rmms_fields_and_compare_by_value() -> None:
    counts = Statistics(
        current_bytes=1,
        current_count=2,
        peak_bytes=3,
        peak_count=4,
        total_bytes=5,
        total_count=6,
    )
    assert counts == Statistics(1, 2, 3, 4, 5, 6) != zeros()
    assert counts.peak_count == 4
    assert repr(counts).startswith("Statistics(current_bytes=1, current_count=2,")
    assert pickle.loads(pickle.dumps(counts)) == counts
    assert Statistics is numpy_rmm.Statistics


# ---- statistics ----------------------------------------------------------------------


def test_it_counts_what_goes_through_it(upstream: mr.MemoryResource) -> None:
    adaptor = mr.StatisticsResourceAdaptor(upstream)
    assert adaptor.allocation_counts == zeros()
    pointers = [adaptor.allocate(1000) for _ in range(10)]
    assert adaptor.allocation_counts == counted(10_000, 10)
    for ptr in pointers[::2]:
        adaptor.deallocate(ptr, 1000)
    assert adaptor.allocation_counts == Statistics(5000, 5, 10_000, 10, 10_000, 10)
    for ptr in pointers[1::2]:
        adaptor.deallocate(ptr, 1000)
    assert adaptor.allocation_counts == Statistics(0, 0, 10_000, 10, 10_000, 10)
    assert upstream.statistics().current_bytes == 0


def test_one_over_another_counts_for_itself() -> None:
    inner = mr.StatisticsResourceAdaptor(host_pool())
    old = [inner.allocate(1000) for _ in range(5)]
    outer = mr.StatisticsResourceAdaptor(inner)
    new = [outer.allocate(1000) for _ in range(2)]
    assert outer.allocation_counts == counted(2000, 2)
    assert inner.allocation_counts == counted(7000, 7)
    for ptr in new:
        outer.deallocate(ptr, 1000)
    for ptr in old:
        inner.deallocate(ptr, 1000)
    assert outer.allocation_counts == Statistics(0, 0, 2000, 2, 2000, 2)
    assert inner.allocation_counts == Statistics(0, 0, 7000, 7, 7000, 7)


def test_scopes_nest() -> None:
    adaptor = mr.StatisticsResourceAdaptor(host_pool())
    blocks = [adaptor.allocate(10) for _ in range(10)]
    assert adaptor.push_counters() == counted(100, 10)
    first = adaptor.allocate(10)
    assert adaptor.push_counters() == counted(10, 1)
    adaptor.deallocate(first, 10)
    assert adaptor.pop_counters() == Statistics(-10, -1, 0, 0, 0, 0)
    second = adaptor.allocate(10)
    assert adaptor.push_counters() == Statistics(10, 1, 10, 1, 20, 2)
    third = adaptor.allocate(10)
    assert adaptor.allocation_counts == counted(10, 1)
    assert adaptor.pop_counters() == counted(10, 1)
    assert adaptor.pop_counters() == Statistics(20, 2, 20, 2, 30, 3)
    adaptor.deallocate(second, 10)
    adaptor.deallocate(third, 10)
    assert adaptor.allocation_counts == Statistics(100, 10, 120, 12, 130, 13)
    with pytest.raises(IndexError, match="cannot pop the last counter pair"):
        adaptor.pop_counters()
    for ptr in blocks:
        adaptor.deallocate(ptr, 10)


def test_a_pop_too_many_changes_nothing() -> None:
    adaptor = mr.StatisticsResourceAdaptor(host_pool())
    ptr = adaptor.allocate(10)
    for _ in range(3):
        with pytest.raises(IndexError):
            adaptor.pop_counters()
    assert adaptor.allocation_counts == counted(10, 1)
    adaptor.deallocate(ptr, 10)


def test_the_resource_statistics_ignore_scopes() -> None:
    adaptor = mr.StatisticsResourceAdaptor(host_pool())
    adaptor.deallocate(adaptor.allocate(1000), 1000)
    adaptor.push_counters()
    ptr = adaptor.allocate(10)
    statistics = adaptor.statistics()
    assert statistics.peak_bytes == 1000
    assert statistics.current_bytes == 10
    assert statistics.total_bytes == 1010
    assert statistics.reserved_bytes == adaptor.upstream.statistics().reserved_bytes > 0  # type: ignore[union-attr]
    adaptor.deallocate(ptr, 10)


def test_arrays_are_counted_and_outlive_every_name() -> None:
    adaptor = mr.StatisticsResourceAdaptor(host_pool())
    with numpy_rmm.use_handler(adaptor):
        kept = np.ones(1000)
        adaptor.push_counters()
        grown = np.zeros(10)
        grown.resize(100_000, refcheck=False)
        total = kept.sum() + grown.sum()
        assert adaptor.pop_counters().current_bytes == 800_000
    assert total == 1000
    assert adaptor.allocation_counts.current_bytes == 808_000
    del grown
    assert adaptor.allocation_counts.current_bytes == 8000
    upstream = adaptor.upstream
    assert upstream is not None
    del adaptor
    gc.collect()
    assert kept[-1] == 1
    del kept
    assert upstream.statistics().current_bytes == 0


def test_scopes_are_those_of_the_resource_not_of_a_thread() -> None:
    adaptor = mr.StatisticsResourceAdaptor(host_pool())
    adaptor.push_counters()
    threads = [threading.Thread(target=adaptor.allocate, args=(100,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert adaptor.pop_counters() == counted(800, 8)


# ---- limiting ------------------------------------------------------------------------


def test_a_limit_holds(upstream: mr.MemoryResource) -> None:
    adaptor = mr.LimitingResourceAdaptor(upstream, allocation_limit=10 * MIB)
    assert adaptor.get_allocated_bytes() == 0
    assert adaptor.get_allocation_limit() == 10 * MIB
    first = adaptor.allocate(4 * MIB)
    second = adaptor.allocate(4 * MIB)
    assert adaptor.get_allocated_bytes() == 8 * MIB
    text = "3 MiB asked, 8 MiB in use, limit 10 MiB"
    with pytest.raises(numpy_rmm.OutOfMemoryError, match=text) as caught:
        adaptor.allocate(3 * MIB)
    assert caught.value.requested_nbytes == 3 * MIB
    assert adaptor.get_allocated_bytes() == 8 * MIB
    adaptor.deallocate(first, 4 * MIB)
    third = adaptor.allocate(6 * MIB)
    assert adaptor.get_allocated_bytes() == 10 * MIB
    adaptor.deallocate(second, 4 * MIB)
    adaptor.deallocate(third, 6 * MIB)
    assert adaptor.get_allocated_bytes() == 0
    assert upstream.statistics().current_bytes == 0


@pytest.mark.parametrize(
    ("keywords", "nbytes", "counts"),
    [({}, 1, 256), ({}, 257, 512), ({"alignment": 1}, 257, 257)],
)
def test_blocks_count_as_multiples(
    keywords: dict[str, int], nbytes: int, counts: int
) -> None:
    adaptor = mr.LimitingResourceAdaptor(host_pool(), 1 << 20, **keywords)
    ptr = adaptor.allocate(nbytes)
    assert adaptor.get_allocated_bytes() == counts
    adaptor.deallocate(ptr, nbytes)
    assert adaptor.get_allocated_bytes() == 0


@pytest.mark.parametrize("size", [1 << 30, np.int64(1 << 30), "1 GiB", "1024 MiB"])
def test_a_limit_of_many_types(size: int | str) -> None:
    adaptor = mr.LimitingResourceAdaptor(host_pool(), size)
    assert adaptor.get_allocation_limit() == 1 << 30


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "match"),
    [
        ((), {}, TypeError, "needs the argument 'allocation_limit'"),
        ((-1,), {}, ValueError, "allocation_limit must not be negative, not -1"),
        ((2**64,), {}, ValueError, "allocation_limit must be less than"),
        ((1.5,), {}, TypeError, "allocation_limit must be an int or text"),
        ((None,), {}, TypeError, "allocation_limit must be an int or text"),
        (("much",), {}, ValueError, "allocation_limit: .*much"),
        ((1, 3), {}, ValueError, "alignment must be a power of two, not 3"),
        ((1, 0), {}, ValueError, "alignment must be a power of two, not 0"),
        ((1, "256"), {}, TypeError, "alignment must be an int"),
        ((1,), {"limit": 1}, TypeError, "has no argument 'limit'"),
    ],
)
def test_arguments_of_a_limit(
    arguments: tuple[object, ...],
    keywords: dict[str, object],
    error: type,
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        mr.LimitingResourceAdaptor(mr.HostMemoryResource(), *arguments, **keywords)  # type: ignore[arg-type]


def test_what_the_upstream_refuses_does_not_count() -> None:
    small = mr.PoolMemoryResource(mr.HostMemoryResource(), maximum_pool_size="2 MiB")
    adaptor = mr.LimitingResourceAdaptor(small, "1 GiB")
    for _ in range(3):
        with pytest.raises(numpy_rmm.OutOfMemoryError, match="the pool is full"):
            adaptor.allocate("4 MiB")
    assert adaptor.get_allocated_bytes() == 0
    adaptor.deallocate(adaptor.allocate("1 MiB"), "1 MiB")


def test_an_exception_of_a_callback_does_not_count() -> None:
    def allocate(nbytes: int, stream: object) -> int:
        raise KeyError("mine")

    upstream = mr.CallbackMemoryResource(allocate, print, kind="host")
    adaptor = mr.LimitingResourceAdaptor(upstream, "1 GiB")
    with pytest.raises(KeyError, match="mine"):
        adaptor.allocate(100)
    assert adaptor.get_allocated_bytes() == 0


def test_arrays_keep_to_the_limit() -> None:
    adaptor = mr.LimitingResourceAdaptor(host_pool(), "10 MiB")
    with numpy_rmm.use_handler(adaptor):
        array = np.ones(MIB, dtype="u1")
        with pytest.raises(MemoryError):
            np.ones(10 * MIB, dtype="u1")
        error = numpy_rmm.last_error()
        assert error is not None
        assert "10 MiB asked, 1 MiB in use, limit 10 MiB" in error.message
        with pytest.raises(MemoryError):
            array.resize(11 * MIB, refcheck=False)
        assert array.nbytes == MIB
        assert array.all()
        array.resize(2 * MIB, refcheck=False)
        assert adaptor.get_allocated_bytes() == 2 * MIB
    del array
    assert adaptor.get_allocated_bytes() == 0


def test_arrays_over_the_limit_take_the_fallback() -> None:
    adaptor = mr.LimitingResourceAdaptor(host_pool(), "1 MiB")
    with (
        pytest.warns(RuntimeWarning, match="4 MiB asked, 0 B in use, limit 1 MiB"),
        numpy_rmm.use_handler(adaptor, fallback="host"),
    ):
        array = np.ones(4 * MIB, dtype="u1")
    assert array.all()
    assert adaptor.get_allocated_bytes() == 0
    reason = numpy_rmm.array_info(array).reason
    assert reason is not None
    assert "limit 1 MiB" in reason


def test_threads_share_a_limit() -> None:
    adaptor = mr.LimitingResourceAdaptor(host_pool(), 64 * 256)
    failures: list[BaseException] = []

    def work() -> None:
        for _ in range(500):
            try:
                held = [adaptor.allocate(256) for _ in range(8)]
            except numpy_rmm.OutOfMemoryError as error:
                failures.append(error)
                return
            for ptr in held:
                adaptor.deallocate(ptr, 256)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(20):  # each collects garbage first, which takes long here
        with pytest.raises(numpy_rmm.OutOfMemoryError):
            adaptor.allocate(64 * 256 + 1)
    for thread in threads:
        thread.join()
    assert failures == []
    assert adaptor.get_allocated_bytes() == 0


# ---- both ----------------------------------------------------------------------------

Adapt = Callable[[mr.MemoryResource], mr.MemoryResource]
ADAPTORS: dict[str, Adapt] = {
    "statistics": mr.StatisticsResourceAdaptor,
    "limiting": lambda upstream: mr.LimitingResourceAdaptor(upstream, "1 GiB"),
}


@pytest.fixture(params=list(ADAPTORS))
def adapt(request: pytest.FixtureRequest) -> Adapt:
    """Each adaptor, over an upstream."""
    return ADAPTORS[request.param]


def test_over_python_functions_it_backs_no_handler(adapt: Adapt) -> None:
    adaptor = adapt(adapt(callback()))
    adaptor.deallocate(adaptor.allocate(100), 100)
    with pytest.raises((TypeError, ValueError), match="Python"):
        numpy_rmm.set_handler(adaptor)


@pytest.mark.parametrize("upstream", [None, 3, "host", mr.HostMemoryResource])
def test_an_upstream_that_is_none(upstream: object) -> None:
    match = "upstream_mr must be a MemoryResource, not"
    with pytest.raises(TypeError, match=match):
        mr.StatisticsResourceAdaptor(upstream)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=match):
        mr.LimitingResourceAdaptor(upstream, 1)  # type: ignore[arg-type]


def test_it_goes_by_a_name(adapt: Adapt) -> None:
    adaptor = adapt(host_pool())
    numpy_rmm.registry["watched"] = adaptor
    try:
        with numpy_rmm.use_handler("watched") as handler:
            array = np.ones(1000)
        assert handler.resource is adaptor
        assert adaptor.statistics().current_bytes == 8000
        assert numpy_rmm.array_info(array).resource is adaptor.upstream
    finally:
        del numpy_rmm.registry["watched"]


def test_pinned_arrays_under_it(adapt: Adapt, cuda: object) -> None:
    adaptor = adapt(mr.PoolMemoryResource(mr.PinnedHostMemoryResource()))
    with numpy_rmm.use_handler(adaptor, threshold=0):
        array = np.ones(1000)
    assert numpy_rmm.is_pinned(array)
    assert adaptor.kind == "pinned"
    assert adaptor.statistics().current_bytes == 8000
    del array
    assert adaptor.statistics().current_bytes == 0


def test_the_methods_can_be_read() -> None:
    for method in (
        mr.StatisticsResourceAdaptor.push_counters,
        mr.StatisticsResourceAdaptor.pop_counters,
        mr.LimitingResourceAdaptor.get_allocated_bytes,
        mr.LimitingResourceAdaptor.get_allocation_limit,
    ):
        assert str(inspect.signature(method)) == "(self, /)"
        assert method.__doc__


def test_before_its_init_it_says_so() -> None:
    for adaptor, name in (
        (mr.StatisticsResourceAdaptor, "push_counters"),
        (mr.LimitingResourceAdaptor, "get_allocated_bytes"),
    ):
        empty = adaptor.__new__(adaptor)
        with pytest.raises(RuntimeError, match="__init__ was not called"):
            getattr(empty, name)()
