"""What holds for every resource: the rows of resources.def, over each source.

A row is picked up by itself. Its arguments are those that its signature asks for, by
their names; a pool or an adaptor stands over every source there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import itertools
import os
import queue
import random
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Stream, _core, mr
from numpy_rmm.testing import Driver, assert_no_races, simulate_cuda

ON_GPU = os.environ.get("NUMPY_RMM_TEST_GPU") == "1"
KIB, MIB, GIB, PIB = 1 << 10, 1 << 20, 1 << 30, 1 << 50

KINDS = {name: kind for _, name, kind, _ in _core._resource_rows()}
SOURCES = [name for name, kind in KINDS.items() if kind != "upstream"]
OVER = [name for name, kind in KINDS.items() if kind == "upstream"]
POOLS = {
    "PoolMemoryResource",
    "FixedSizeMemoryResource",
    "BinningMemoryResource",
    "ArenaMemoryResource",
}
PAGEABLE = ("SystemMemoryResource", "SamHeadroomMemoryResource")

# What a class is made with besides what it needs, so that a test is short.
SMALL: dict[str, dict[str, Any]] = {
    "FixedSizeMemoryResource": {"block_size": "4 MiB", "blocks_to_preallocate": 2},
    "BinningMemoryResource": {"min_size_exponent": 10, "max_size_exponent": 13},
    "ArenaMemoryResource": {"arena_size": "48 MiB"},
}
LARGEST = {"FixedSizeMemoryResource": 4 * MIB, "ArenaMemoryResource": 32 * MIB}

CASES = [(name, None) for name in SOURCES] + list(itertools.product(OVER, SOURCES))


def name_of(case: tuple[str, str | None]) -> str:
    return " over ".join(filter(None, case))


class Machine:
    """A driver, simulated or real, and the resources of one test."""

    def __init__(self, driver: Driver, folder: Path) -> None:
        self.driver = driver
        self.folder = folder
        # What calls Python says nothing of alignment, and an adaptor asks for 256.
        self.host = mr.HostMemoryResource(alignment=256)

    def value(self, parameter: str) -> Any:
        """Of an argument that has no default, or one that a test needs."""
        if parameter == "pool_handle":
            return self.default_pool
        return {
            "allocate_func": lambda nbytes, _: self.host.allocate(
                nbytes, alignment=256
            ),
            "deallocate_func": self.host.deallocate,
            "kind": "host",
            "headroom": "1 GiB",
            "allocation_limit": "6 GiB",
            "callback": lambda nbytes: False,
            "log_file_name": str(self.folder / "log.csv"),
        }[parameter]

    @property
    def default_pool(self) -> int:
        handle = ctypes.c_void_p()
        self.driver.check(self.driver.cuInit(0))
        self.driver.check(
            self.driver.cuDeviceGetDefaultMemPool(ctypes.byref(handle), 0)
        )
        return handle.value or 0

    def make(self, name: str, source: str | None, **more: object) -> mr.MemoryResource:
        cls = getattr(mr, name)
        arguments = dict(SMALL.get(name, {}))
        for parameter in inspect.signature(cls).parameters.values():
            if parameter.name == "upstream_mr":
                assert source is not None
                arguments["upstream_mr"] = self.make(source, None, **more)
            elif parameter.name in more:
                arguments[parameter.name] = more[parameter.name]
            elif parameter.default is parameter.empty or parameter.name in (
                "kind",
                "log_file_name",
            ):
                arguments[parameter.name] = self.value(parameter.name)
        made: mr.MemoryResource = cls(**arguments)
        return made

    def write(self, resource: mr.MemoryResource, ptr: int, data: bytes) -> None:
        if resource.kind == "device":
            self.driver.check(self.driver.cuMemcpyHtoD(ptr, data, len(data)))
        else:
            self.settle(resource)
            ctypes.memmove(ptr, data, len(data))

    def read(self, resource: mr.MemoryResource, ptr: int, nbytes: int) -> bytes:
        if resource.kind == "device":
            return self.driver.read(ptr, nbytes)
        self.settle(resource)
        return ctypes.string_at(ptr, nbytes)

    def settle(self, resource: mr.MemoryResource) -> None:
        """The host may touch managed memory of a stream when it has waited for it."""
        if resource.kind == "managed":
            self.driver.check(self.driver.cuCtxSynchronize())


@contextlib.contextmanager
def machine_for(
    case: tuple[str, str | None], folder: Path, **config: Any
) -> Iterator[Machine]:
    """A machine on which the case works, with two devices if it is simulated."""
    if ON_GPU:
        driver = Driver()
        driver.activate()
        yield Machine(driver, folder)
        return
    reads_pageable = int(any(name in PAGEABLE for name in case))
    with simulate_cuda(
        devices=2, pageable_memory_access=reads_pageable, **config
    ) as simulated:
        simulated.driver.activate()
        yield Machine(simulated.driver, folder)
        numpy_rmm.reset_handler()
        gc.collect()
        numpy_rmm.trim()


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def case(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    """The class of a resource, and of the source below it."""
    found: tuple[str, str | None] = request.param
    return found


@pytest.fixture(scope="module")
def machine(
    case: tuple[str, str | None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    with machine_for(case, tmp_path_factory.mktemp("machine")) as made:
        yield made


@pytest.fixture(scope="module")
def resource(machine: Machine, case: tuple[str, str | None]) -> mr.MemoryResource:
    """Each resource there is; each test leaves it empty."""
    try:
        made = machine.make(*case)
        made.deallocate(made.allocate(256), 256)
    except numpy_rmm.CudaUnavailableError as error:
        if not ON_GPU:
            raise
        pytest.skip(str(error))
    return made


def assert_nothing_lives(resource: mr.MemoryResource) -> None:
    statistics = resource.statistics()
    assert (statistics.current_bytes, statistics.current_count) == (0, 0)
    assert statistics.errors == 0


def assert_apart(blocks: dict[int, int]) -> None:
    for (a, n), (b, _) in itertools.pairwise(sorted(blocks.items())):
        assert a + n <= b


def largest(resource: mr.MemoryResource) -> int:
    # A pinned GiB is touched page by page.
    limit = 64 * MIB if resource.kind == "pinned" else GIB
    return min(limit, LARGEST.get(type(resource).__name__, limit))


# ---- on machines of their own, before the one that the others share ------------------


def test_every_argument_that_is_needed_is_known(tmp_path: Path) -> None:
    with machine_for(("", None), tmp_path) as machine:
        for name in KINDS:
            signature = inspect.signature(getattr(mr, name))
            for parameter in signature.parameters.values():
                needed = parameter.default is parameter.empty
                if needed and parameter.name != "upstream_mr":
                    assert machine.value(parameter.name) is not None


@pytest.mark.parametrize(
    "each",
    [case for case in CASES if "CallbackMemoryResource" in case],
    ids=name_of,
)
def test_an_exception_of_a_callback_crosses_it_unchanged(
    each: tuple[str, str | None], tmp_path: Path
) -> None:
    """When a block is taken and when it is given back, with where it came from."""

    class Mine(Exception):
        pass

    taking, giving = Mine("taking"), Mine("giving")
    fails = True

    def allocate(nbytes: int, stream: Stream) -> int:
        if fails:
            raise taking
        return machine.host.allocate(nbytes)

    def deallocate(ptr: int, nbytes: int, stream: Stream) -> None:
        machine.host.deallocate(ptr, nbytes)
        raise giving

    with machine_for(each, tmp_path) as machine:
        functions = {"allocate_func": allocate, "deallocate_func": deallocate}
        with pytest.raises(Mine) as caught:
            machine.make(*each, **functions).allocate(100)
        assert caught.value is taking
        assert caught.traceback[-1].name == "allocate"
        fails = False
        if each[0] in POOLS:
            return  # keeps what was given back
        resource = machine.make(*each, **functions)
        ptr = resource.allocate(100)
        with pytest.raises(Mine) as caught:
            resource.deallocate(ptr, 100)
        assert caught.value is giving
        assert caught.traceback[-1].name == "deallocate"
        assert resource.statistics().current_count == 0


@pytest.mark.skipif(ON_GPU, reason="only the simulator sees what is used too early")
@pytest.mark.parametrize("each", CASES, ids=name_of)
def test_streams_follow_each_other(
    each: tuple[str, str | None], tmp_path: Path
) -> None:
    """Freed on one stream and taken on another: nothing is used too early."""
    with machine_for(each, tmp_path, check=True) as machine, assert_no_races():
        resource = machine.make(*each)
        driver = machine.driver
        own = [Stream(flags=1), Stream(flags=1)]
        streams = [*own, DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM]
        for stream in itertools.chain(*itertools.product(streams, streams)):
            ptr = resource.allocate(64 * KIB, stream)
            if resource.kind != "host":
                handle = stream.__cuda_stream__()[1]
                driver.check(driver.cuMemsetD8Async(ptr, 1, 64 * KIB, handle))
            resource.deallocate(ptr, 64 * KIB, stream)
        driver.check(driver.cuCtxSynchronize())
        assert_nothing_lives(resource)


# ---- requests ------------------------------------------------------------------------


def test_sizes_from_nothing_to_a_gibibyte(resource: mr.MemoryResource) -> None:
    assert resource.allocate(0) == 0
    resource.deallocate(0, 0)
    sizes = [n for n in (4, KIB, MIB, 64 * MIB, GIB) if n <= largest(resource)]
    if type(resource).__name__ == "FixedSizeMemoryResource":
        sizes = [4, KIB, MIB]
    blocks = {resource.allocate(nbytes): nbytes for nbytes in sizes}
    assert len(blocks) == len(sizes)
    assert all(ptr % (64 if resource.kind == "host" else 256) == 0 for ptr in blocks)
    assert_apart(blocks)
    statistics = resource.statistics()
    assert statistics.current_bytes == sum(sizes)
    assert statistics.current_count == len(sizes)
    for ptr, nbytes in blocks.items():
        resource.deallocate(ptr, nbytes)
    assert_nothing_lives(resource)


def test_an_alignment_is_honoured_or_refused(resource: mr.MemoryResource) -> None:
    for alignment in (16, 64, 256, 512, 4096):
        blocks = []
        try:
            for _ in range(4):
                blocks.append(resource.allocate(100, alignment=alignment))  # noqa: PERF401
        except NotImplementedError:
            assert alignment > 64
        assert all(ptr % alignment == 0 for ptr in blocks)
        for ptr in blocks:
            resource.deallocate(ptr, 100)
    assert_nothing_lives(resource)


def test_more_than_there_is_leaves_it_usable(resource: mr.MemoryResource) -> None:
    with pytest.raises(numpy_rmm.OutOfMemoryError):
        resource.allocate(PIB)
    assert_nothing_lives(resource)
    resource.deallocate(resource.allocate(MIB), MIB)
    assert_nothing_lives(resource)


def test_live_blocks_keep_what_is_in_them(
    resource: mr.MemoryResource, machine: Machine
) -> None:
    numbers = random.Random(11)
    blocks: dict[int, int] = {}
    marks: dict[int, bytes] = {}
    most = min(5 * MIB, largest(resource))
    for i in range(60):
        if blocks and numbers.random() >= 0.53:
            ptr = numbers.choice(list(blocks))
            assert machine.read(resource, ptr, 8) == marks.pop(ptr)
            resource.deallocate(ptr, blocks.pop(ptr))
            continue
        nbytes = numbers.randint(8, most if len(blocks) < 8 else 64 * KIB)
        ptr = resource.allocate(nbytes)
        blocks[ptr] = nbytes
        marks[ptr] = i.to_bytes(8, "little")
        machine.write(resource, ptr, marks[ptr])
        assert_apart(blocks)
    for ptr, nbytes in blocks.items():
        assert machine.read(resource, ptr, 8) == marks[ptr]
        resource.deallocate(ptr, nbytes)
    assert_nothing_lives(resource)


def test_four_threads_give_back_what_others_took(resource: mr.MemoryResource) -> None:
    handed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(12):
            nbytes = numbers.randint(1, 100 * KIB)
            handed.put((resource.allocate(nbytes), nbytes))
            if numbers.random() < 0.8:
                resource.deallocate(*handed.get())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    while not handed.empty():
        resource.deallocate(*handed.get())
    assert_nothing_lives(resource)


# ---- streams -------------------------------------------------------------------------


def test_memory_in_flight_is_not_the_hosts(
    resource: mr.MemoryResource, machine: Machine
) -> None:
    """A caller with a stream frees while the GPU reads; an array must not get that."""
    if resource.kind == "device":
        pytest.skip("the host cannot use device memory")
    try:
        handler = numpy_rmm.use_handler(resource)
    except (TypeError, ValueError):
        pytest.skip("no handler may call Python functions")
    if resource.kind == "host":
        pytest.skip("the GPU does not read ordinary memory in place")
    nbytes = 128 * KIB
    driver = machine.driver
    stream = Stream(flags=1)
    seen = driver.allocate(nbytes)
    ptr = resource.allocate(nbytes, stream)
    stream.synchronize()
    ctypes.memset(ptr, 7, nbytes)
    with driver.held(stream):
        handle = stream.__cuda_stream__()[1]
        driver.check(driver.cuMemcpyAsync(seen, ptr, nbytes, handle))
        resource.deallocate(ptr, nbytes, stream)
        with handler:
            arrays = [np.full(nbytes, 9, dtype=np.uint8) for _ in range(3)]
    assert driver.read(seen, nbytes) == b"\x07" * nbytes
    del arrays
    driver.check(driver.cuMemFree(seen))


# ---- devices -------------------------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="there may be one device")
def test_two_devices(case: tuple[str, str | None], machine: Machine) -> None:
    """The device of a resource has its memory, whichever is current."""
    if "CudaAsyncViewMemoryResource" in case:
        pytest.skip("the pool of others says where its memory is")
    resource = machine.make(*case, device=1)
    driver = machine.driver
    for current in (0, 1, 0):
        driver.activate(current)
        ptr = resource.allocate(MIB)
        if resource.kind == "device":
            ordinal = ctypes.c_int(-1)
            found = driver.cuPointerGetAttribute(ctypes.byref(ordinal), 9, ptr)
            driver.check(found)
            assert ordinal.value == resource.device == 1
        driver.activate(1 - current)
        resource.deallocate(ptr, MIB)
    driver.activate(0)
    assert_nothing_lives(resource)


# ---- the end -------------------------------------------------------------------------


@pytest.mark.usefixtures("resource")  # which skips what cannot be here
def test_it_dies_with_its_last_reference(
    machine: Machine, case: tuple[str, str | None]
) -> None:
    made = machine.make(*case)
    source = made.upstream
    made.deallocate(made.allocate(100), 100)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    if source is not None:
        assert_nothing_lives(source)
