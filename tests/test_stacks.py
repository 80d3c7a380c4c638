"""Pools and adaptors over each other in any order: stacks of a seed, and a model."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import numpy_rmm
from numpy_rmm import (
    DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    OutOfMemoryError,
    Stream,
    mr,
)
from numpy_rmm.testing import SimulatedCuda, simulate_cuda

SEEDS = range(60)
SOURCES = ["host", "pinned", "managed", "device", "async", "system", "callback"]
LAYERS = [
    "pool",
    "small pool",
    "fixed",
    "bins",
    "arena",
    "statistics",
    "limit",
    "log",
    "tracking",
    "callback",
    "prefetch",
    "aligned",
]


@pytest.fixture(scope="module")
def machine() -> Iterator[SimulatedCuda]:
    with simulate_cuda(pageable_memory_access=1) as simulated:
        simulated.driver.activate()
        yield simulated
        gc.collect()
        numpy_rmm.trim()


class Callbacks:
    """Host memory of Python functions, which know of no alignment."""

    def __init__(self) -> None:
        self.host = mr.HostMemoryResource()
        self.live: dict[int, int] = {}

    def allocate(self, nbytes: int, _: Stream) -> int:
        ptr = self.host.allocate(nbytes)
        self.live[ptr] = nbytes
        return ptr

    def deallocate(self, ptr: int, nbytes: int, _: Stream) -> None:
        assert self.live.pop(ptr) == nbytes
        self.host.deallocate(ptr, nbytes)

    def resource(self) -> mr.MemoryResource:
        return mr.CallbackMemoryResource(self.allocate, self.deallocate, kind="host")


def source(kind: str, callbacks: Callbacks) -> mr.MemoryResource:
    make: dict[str, Callable[[], mr.MemoryResource]] = {
        "host": mr.HostMemoryResource,
        "pinned": mr.PinnedHostMemoryResource,
        "managed": mr.ManagedMemoryResource,
        "device": mr.CudaMemoryResource,
        "async": mr.CudaAsyncMemoryResource,
        "system": mr.SystemMemoryResource,
        "callback": callbacks.resource,
    }
    return make[kind]()


def layer(kind: str, upstream: mr.MemoryResource, log: Path) -> mr.MemoryResource:
    make: dict[str, Callable[[], mr.MemoryResource]] = {
        "pool": lambda: mr.PoolMemoryResource(upstream),
        "small pool": lambda: mr.PoolMemoryResource(upstream, "1 MiB", "16 MiB"),
        "fixed": lambda: mr.FixedSizeMemoryResource(upstream, "1 MiB", 1),
        "bins": lambda: mr.BinningMemoryResource(upstream, 8, 12),
        "arena": lambda: mr.ArenaMemoryResource(upstream, "8 MiB"),
        "statistics": lambda: mr.StatisticsResourceAdaptor(upstream),
        "limit": lambda: mr.LimitingResourceAdaptor(upstream, "4 MiB"),
        "log": lambda: mr.LoggingResourceAdaptor(upstream, log),
        "tracking": lambda: mr.TrackingResourceAdaptor(upstream),
        "callback": lambda: mr.FailureCallbackResourceAdaptor(
            upstream, lambda _: False
        ),
        "prefetch": lambda: mr.PrefetchResourceAdaptor(upstream),
        "aligned": lambda: mr.AlignedResourceAdaptor(upstream, 512),
    }
    return make[kind]()


class Model:
    """What lives, and what is in it."""

    def __init__(self, resource: mr.MemoryResource, seed: int) -> None:
        self.resource = resource
        self.numbers = random.Random(seed)
        self.live: dict[int, tuple[int, bytes]] = {}
        self.streams = [DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Stream(flags=1)]
        self.host_may_touch = resource.kind in ("host", "pinned")

    def take(self) -> None:
        sizes = [1, 100, 4096, 70_000, 1_000_000]
        nbytes = self.numbers.randint(1, self.numbers.choice(sizes))
        try:
            ptr = self.resource.allocate(nbytes, self.numbers.choice(self.streams))
        except OutOfMemoryError:
            return
        mark = bytes([self.numbers.randint(1, 255)])
        if self.host_may_touch:
            ctypes.memset(ptr, mark[0], nbytes)
        assert ptr not in self.live
        self.live[ptr] = (nbytes, mark)

    def give(self) -> None:
        if not self.live:
            return
        ptr = self.numbers.choice(list(self.live))
        nbytes, mark = self.live.pop(ptr)
        if self.host_may_touch:
            assert ctypes.string_at(ptr, nbytes) == mark * nbytes
        self.resource.deallocate(ptr, nbytes, self.numbers.choice(self.streams))

    def refuse(self) -> None:
        with pytest.raises(OutOfMemoryError):
            self.resource.allocate("1 PiB")
        for ptr in list(self.live)[:1]:
            with pytest.raises(ValueError, match=hex(ptr + 1)):
                self.resource.deallocate(ptr + 1, 1)

    def step(self) -> None:
        steps = [self.take, self.give, self.refuse, self.resource.trim]
        self.numbers.choices(steps, [50, 40, 5, 5])[0]()

    def check(self) -> None:
        for (a, (n, _)), (b, _) in itertools.pairwise(sorted(self.live.items())):
            assert a + n <= b
        statistics = self.resource.statistics()
        assert statistics.current_count == len(self.live)
        assert statistics.current_bytes == sum(n for n, _ in self.live.values())

    def end(self) -> None:
        while self.live:
            self.give()
        self.check()


def random_stack(
    seed: int, callbacks: Callbacks, folder: Path
) -> tuple[list[str], list[mr.MemoryResource]]:
    numbers = random.Random(seed)
    names = [numbers.choice(SOURCES)]
    resources = [source(names[0], callbacks)]
    while len(names) <= 5:
        name = numbers.choice(LAYERS)
        if (name, names[-1]) == ("aligned", "fixed"):
            continue  # whose blocks are aligned as they are
        with contextlib.suppress(OutOfMemoryError):
            resources.append(layer(name, resources[-1], folder / f"{len(names)}.csv"))
        names.append(name)
    return names, resources


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_stack_agrees_with_a_model(
    seed: int, machine: SimulatedCuda, tmp_path: Path
) -> None:
    callbacks = Callbacks()
    _, resources = random_stack(seed, callbacks, tmp_path)
    model = Model(resources[-1], seed)
    for _ in range(80):
        model.step()
        model.check()
    model.end()
    del model
    random.Random(seed).shuffle(resources)  # the order in which names go
    gone = [weakref.ref(resource) for resource in resources]
    while resources:
        resources.pop()
    gc.collect()
    assert not any(ref() for ref in gone)
    assert not callbacks.live


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_threads_share_a_random_stack(
    seed: int, machine: SimulatedCuda, tmp_path: Path
) -> None:
    callbacks = Callbacks()
    _, resources = random_stack(seed, callbacks, tmp_path)

    def work(number: int) -> None:
        model = Model(resources[-1], seed + number)
        for _ in range(40):
            model.step()
        while model.live:
            model.give()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    statistics = resources[-1].statistics()
    assert (statistics.current_bytes, statistics.current_count) == (0, 0)


# ---- what random stacks found --------------------------------------------------------


@pytest.mark.parametrize("over", ["pool", "arena"])
@pytest.mark.parametrize("size", ["256 KiB", "1 MiB"])
def test_segments_may_be_blocks_of_a_fixed_size(over: str, size: str) -> None:
    """No greater alignment is asked of them than they have."""
    blocks = mr.FixedSizeMemoryResource(mr.HostMemoryResource(), size, 2)
    resource = (
        mr.PoolMemoryResource(blocks)
        if over == "pool"
        else mr.ArenaMemoryResource(blocks, size)
    )
    ptr = resource.allocate(1000)
    assert blocks.statistics().current_count == 1
    resource.deallocate(ptr, 1000)


def nested(upstream: mr.MemoryResource) -> mr.MemoryResource:
    """All of a block, in a pool over an adaptor over a pool."""
    inner = mr.PoolMemoryResource(upstream, "8 MiB", "8 MiB")
    return mr.PoolMemoryResource(inner, "8 MiB")


@pytest.mark.parametrize(
    "build",
    [
        lambda source: nested(mr.StatisticsResourceAdaptor(source)),
        lambda source: nested(mr.BinningMemoryResource(source, 8, 9)),
        lambda source: mr.PoolMemoryResource(
            mr.ArenaMemoryResource(mr.LimitingResourceAdaptor(source, "9 MiB"), "8 MiB")
        ),
    ],
)
def test_blocks_in_all_of_a_block_of_a_callback(
    build: Callable[[mr.MemoryResource], mr.MemoryResource],
) -> None:
    resource = build(Callbacks().resource())
    ptr = resource.allocate(100_000)
    resource.deallocate(ptr, 100_000)
    assert resource.statistics().current_count == 0


def test_blocks_of_callbacks_beside_those_of_the_pool_that_they_are_from() -> None:
    """However many there are: each is found, and so is what is behind them."""
    pool = mr.PoolMemoryResource(Callbacks().resource(), "8 MiB")
    first = pool.allocate(300)
    functions: dict[str, Any] = {
        "allocate_func": lambda nbytes, _: pool.allocate(nbytes),
        "deallocate_func": lambda ptr, nbytes, _: pool.deallocate(ptr, nbytes),
    }
    within = mr.CallbackMemoryResource(**functions, kind="host")
    blocks = [within.allocate(100_000) for _ in range(30)]
    last = pool.allocate(200_000)
    pool.deallocate(last, 200_000)
    for ptr in blocks:
        within.deallocate(ptr, 100_000)
    pool.deallocate(first, 300)
    assert pool.statistics().current_count == 0


def test_aligned_blocks_lie_in_what_a_callback_returns() -> None:
    callbacks = Callbacks()
    resource = mr.AlignedResourceAdaptor(callbacks.resource(), 4096)
    blocks = [resource.allocate(100) for _ in range(5)]
    assert all(ptr % 4096 == 0 for ptr in blocks)
    assert sum(callbacks.live.values()) == 5 * (100 + 4096 - 64)
    assert resource.statistics().current_bytes == 500
    for ptr in blocks:
        resource.deallocate(ptr, 100)
    assert not callbacks.live
