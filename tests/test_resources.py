"""Memory resources from Python: one suite for all, and which objects they are."""

from __future__ import annotations

import copy
import ctypes
import gc
import inspect
import itertools
import pickle
import random
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import _core, mr

ROWS = {name: kind for _, name, kind, _ in _core._resource_rows()}
CUDA_CLASSES = [
    "PinnedHostMemoryResource",
    "ManagedMemoryResource",
    "CudaMemoryResource",
    "CudaAsyncMemoryResource",
    "CudaAsyncManagedMemoryResource",
]


def make_callback() -> mr.MemoryResource:
    host = mr.HostMemoryResource()
    return mr.CallbackMemoryResource(host.allocate, host.deallocate, kind="host")


MAKERS: dict[str, Callable[[], mr.MemoryResource]] = {
    "HostMemoryResource": mr.HostMemoryResource,
    "HostMemoryResource huge": lambda: mr.HostMemoryResource(huge_pages=True),
    "PinnedHostMemoryResource": mr.PinnedHostMemoryResource,
    "ManagedMemoryResource": mr.ManagedMemoryResource,
    "CudaMemoryResource": mr.CudaMemoryResource,
    "CudaAsyncMemoryResource": mr.CudaAsyncMemoryResource,
    "CudaAsyncManagedMemoryResource": mr.CudaAsyncManagedMemoryResource,
    "CallbackMemoryResource": make_callback,
    "PoolMemoryResource host": lambda: mr.PoolMemoryResource(mr.HostMemoryResource()),
    "PoolMemoryResource pinned": lambda: mr.PoolMemoryResource(
        mr.PinnedHostMemoryResource()
    ),
    "PoolMemoryResource managed": lambda: mr.PoolMemoryResource(
        mr.ManagedMemoryResource()
    ),
    "PoolMemoryResource device": lambda: mr.PoolMemoryResource(mr.CudaMemoryResource()),
    "PoolMemoryResource async device": lambda: mr.PoolMemoryResource(
        mr.CudaAsyncMemoryResource()
    ),
    "PoolMemoryResource callback": lambda: mr.PoolMemoryResource(make_callback()),
    "PoolMemoryResource pool": lambda: mr.PoolMemoryResource(
        mr.PoolMemoryResource(mr.HostMemoryResource())
    ),
    "StatisticsResourceAdaptor": lambda: mr.StatisticsResourceAdaptor(
        mr.HostMemoryResource()
    ),
    "StatisticsResourceAdaptor device": lambda: mr.StatisticsResourceAdaptor(
        mr.CudaMemoryResource()
    ),
    "LimitingResourceAdaptor": lambda: mr.LimitingResourceAdaptor(
        mr.PoolMemoryResource(mr.HostMemoryResource()), "1 GiB"
    ),
    "LimitingResourceAdaptor statistics": lambda: mr.LimitingResourceAdaptor(
        mr.StatisticsResourceAdaptor(mr.HostMemoryResource()), "1 GiB"
    ),
    "AlignedResourceAdaptor": lambda: mr.AlignedResourceAdaptor(
        mr.PoolMemoryResource(mr.HostMemoryResource()), 4096
    ),
    "PrefetchResourceAdaptor managed": lambda: mr.PrefetchResourceAdaptor(
        mr.PoolMemoryResource(mr.ManagedMemoryResource())
    ),
    "FailureCallbackResourceAdaptor": lambda: mr.FailureCallbackResourceAdaptor(
        mr.PoolMemoryResource(mr.HostMemoryResource()), lambda nbytes: False
    ),
    "TrackingResourceAdaptor": lambda: mr.TrackingResourceAdaptor(
        mr.PoolMemoryResource(mr.HostMemoryResource()), True
    ),
    "LoggingResourceAdaptor": lambda: mr.LoggingResourceAdaptor(
        mr.PoolMemoryResource(mr.HostMemoryResource()), "/dev/null"
    ),
    "FixedSizeMemoryResource": lambda: mr.FixedSizeMemoryResource(
        mr.HostMemoryResource(), "64 MiB", 2
    ),
    "BinningMemoryResource": lambda: mr.BinningMemoryResource(
        mr.HostMemoryResource(), 8, 18
    ),
    "BinningMemoryResource pinned": lambda: mr.BinningMemoryResource(
        mr.PoolMemoryResource(mr.PinnedHostMemoryResource()), 9, 14
    ),
    "BinningMemoryResource device": lambda: mr.BinningMemoryResource(
        mr.CudaMemoryResource(), 9, 14
    ),
    "BinningMemoryResource callback": lambda: mr.BinningMemoryResource(
        make_callback(), 6, 12
    ),
    "ArenaMemoryResource": lambda: mr.ArenaMemoryResource(
        mr.HostMemoryResource(), "512 MiB"
    ),
    "ArenaMemoryResource managed": lambda: mr.ArenaMemoryResource(
        mr.ManagedMemoryResource(), "256 MiB"
    ),
    "ArenaMemoryResource device": lambda: mr.ArenaMemoryResource(
        mr.CudaMemoryResource(), "1 GiB"
    ),
}
NEEDS_CUDA = {
    name
    for name in MAKERS
    if name in CUDA_CLASSES or name.endswith(("pinned", "managed", "device"))
}
NEEDS_CUDA.add("StatisticsResourceAdaptor device")


def test_every_case_is_of_a_row_of_the_table() -> None:
    """That every row has cases is for test_conformance.py."""
    assert {name.split()[0] for name in MAKERS} <= set(ROWS)


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Callable[[], mr.MemoryResource]:
    """Each kind of resource: what makes one."""
    if request.param in NEEDS_CUDA:
        request.getfixturevalue("cuda")
    return MAKERS[request.param]


@pytest.fixture
def resource(make: Callable[[], mr.MemoryResource]) -> mr.MemoryResource:
    """Each kind of resource."""
    return make()


# ---- all resources -------------------------------------------------------------------


def test_a_resource_tells_its_kind(resource: mr.MemoryResource) -> None:
    row = ROWS[type(resource).__name__]
    expected = resource.upstream.kind if row == "upstream" else row
    assert resource.kind == ("host" if expected == "any" else expected)
    assert resource.upstream_mr is resource.get_upstream() is resource.upstream
    assert (resource.upstream is None) == (row != "upstream")
    assert resource.name is None


def test_zero_bytes_are_the_address_zero(resource: mr.MemoryResource) -> None:
    for _ in range(10):
        assert resource.allocate(0) == 0
        resource.deallocate(0, 0)
        resource.deallocate(0, 1000)
    assert resource.statistics().total_count == 0


@pytest.mark.parametrize("nbytes", [4, 1 << 10, 1 << 20, 1 << 26])
def test_memory_is_aligned_and_counted(
    resource: mr.MemoryResource, nbytes: int
) -> None:
    ptr = resource.allocate(nbytes)
    assert ptr % (64 if resource.kind == "host" else 256) == 0
    statistics = resource.statistics()
    assert (statistics.current_bytes, statistics.current_count) == (nbytes, 1)
    resource.deallocate(ptr, nbytes)
    statistics = resource.statistics()
    assert (statistics.current_bytes, statistics.current_count) == (0, 0)
    assert (statistics.peak_bytes, statistics.peak_count) == (nbytes, 1)
    assert (statistics.total_bytes, statistics.total_count) == (nbytes, 1)
    assert statistics.errors == 0


@pytest.mark.parametrize("alignment", [1, 16, 512, 4096])
def test_an_alignment_is_honoured_or_refused(
    resource: mr.MemoryResource, alignment: int
) -> None:
    try:
        pointers = [resource.allocate(100, alignment=alignment) for _ in range(8)]
    except NotImplementedError:
        assert "allback" in repr(resource) or resource.kind == "device"
        return
    assert all(ptr % alignment == 0 for ptr in pointers)
    for ptr in pointers:
        resource.deallocate(ptr, 100)


@pytest.mark.parametrize("nbytes", [2**63 - 1, 2**63, 2**64 - 4, 2**64 - 1, 1 << 55])
def test_more_than_there_is_leaves_it_usable(
    resource: mr.MemoryResource, nbytes: int
) -> None:
    with pytest.raises(MemoryError) as caught:
        resource.allocate(nbytes)
    error = caught.value
    if isinstance(error, numpy_rmm.OutOfMemoryError):
        assert error.requested_nbytes > 0
    before = resource.statistics()
    assert (before.current_bytes, before.current_count) == (0, 0)
    resource.deallocate(resource.allocate(64), 64)


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [
        (-1, ValueError),
        (-(2**70), ValueError),
        (2**64, ValueError),
        ("", ValueError),
        ("many", ValueError),
        ("50%", ValueError),
        ("-1 KiB", ValueError),
        (1.5, TypeError),
        (None, TypeError),
        ([], TypeError),
    ],
)
def test_a_size_that_is_none(
    resource: mr.MemoryResource, nbytes: object, error: type
) -> None:
    with pytest.raises(error, match="nbytes"):
        resource.allocate(nbytes)  # type: ignore[arg-type]
    assert resource.statistics().total_count == 0


@pytest.mark.parametrize("alignment", [0, 3, 48, -64, 2**64, 1.0, "64"])
def test_an_alignment_that_is_none(
    resource: mr.MemoryResource, alignment: object
) -> None:
    with pytest.raises((TypeError, ValueError), match="alignment"):
        resource.allocate(64, alignment=alignment)  # type: ignore[arg-type]


def test_sizes_of_many_types() -> None:
    resource = mr.HostMemoryResource()
    for size in (1000, np.int64(1000), np.uint16(1000), "1000", "1 kB", "1000 B"):
        resource.deallocate(resource.allocate(size), size)
    assert resource.statistics().total_bytes == 6000
    assert resource.statistics().peak_bytes == 1000


def test_a_wrong_address_changes_nothing(resource: mr.MemoryResource) -> None:
    ptr = resource.allocate(1000)
    other = mr.HostMemoryResource()
    foreign = other.allocate(1000)
    for wrong, text in [
        (ptr + 16, "inside the live block"),
        (foreign, "another resource"),
        (ctypes.addressof(ctypes.c_int(0)), "no live block"),
        (1, "no live block"),
    ]:
        with pytest.raises(ValueError, match=text):
            resource.deallocate(wrong, 1000)
    assert resource.statistics().current_count == 1
    resource.deallocate(ptr, 1000)
    with pytest.raises(ValueError, match="no live block"):
        resource.deallocate(ptr, 1000)
    assert resource.statistics().errors == 5
    other.deallocate(foreign, 1000)


@pytest.mark.parametrize("wrong", [-1, 2**64, "0", 1.5, None])
def test_an_address_that_is_none(resource: mr.MemoryResource, wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match="ptr"):
        resource.deallocate(wrong, 0)  # type: ignore[arg-type]


def test_a_stream_is_needed(resource: mr.MemoryResource) -> None:
    for wrong in (None, 0, "0"):
        match = r"stream must be a Stream .* not"
        if wrong is None:
            match = "stream argument cannot be None"
        with pytest.raises(TypeError, match=match):
            resource.allocate(100, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=match):
            resource.deallocate(0, 0, stream=wrong)  # type: ignore[arg-type]


def test_live_blocks_never_overlap(resource: mr.MemoryResource) -> None:
    numbers = random.Random(7)
    blocks: dict[int, int] = {}
    direct = resource.upstream is None and resource.kind != "host"
    for _ in range(60 if direct else 400):
        if blocks and numbers.random() < 0.47:
            ptr = numbers.choice(list(blocks))
            resource.deallocate(ptr, blocks.pop(ptr))
        else:
            nbytes = int(2 ** numbers.uniform(0, 21))
            blocks[resource.allocate(nbytes)] = nbytes
        ordered = sorted(blocks.items())
        for (a, n), (b, _) in itertools.pairwise(ordered):
            assert a + n <= b
    for ptr, nbytes in blocks.items():
        resource.deallocate(ptr, nbytes)
    assert resource.statistics().current_bytes == 0


def test_blocks_are_freed_by_other_threads(resource: mr.MemoryResource) -> None:
    blocks: list[int] = []
    makers = [
        threading.Thread(
            target=lambda: blocks.extend(
                resource.allocate(n) for n in range(100, 2100, 100)
            )
        )
        for _ in range(4)
    ]
    for thread in makers:
        thread.start()
    for thread in makers:
        thread.join()
    assert resource.statistics().current_count == len(set(blocks)) == 80
    thread = threading.Thread(
        target=lambda: [resource.deallocate(p, 0) for p in blocks]
    )
    thread.start()
    thread.join()
    assert resource.statistics().current_count == 0


def test_trim_gives_back_what_is_unused(resource: mr.MemoryResource) -> None:
    kept = resource.allocate(1000)
    resource.deallocate(resource.allocate(32 << 20), 0)
    given = resource.trim()
    assert given >= 0
    if type(resource) is mr.PoolMemoryResource:
        # One segment at most: of device memory a mapped piece, of 64 MiB.
        most = 64 << 20 if resource.kind == "device" else 16 << 20
        assert resource.statistics().reserved_bytes <= most
        assert resource.trim(keep="1 GiB") == 0
    assert resource.statistics().current_bytes == 1000
    resource.deallocate(kept, 1000)
    with pytest.raises((TypeError, ValueError), match="keep"):
        resource.trim(keep=-1)


def test_a_resource_is_not_pickled_nor_copied(resource: mr.MemoryResource) -> None:
    for function in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            function(resource)


def test_a_resource_shows_its_chain(resource: mr.MemoryResource) -> None:
    text = repr(resource)
    assert text.startswith(f"<{type(resource).__name__}")
    if resource.upstream is not None:
        assert repr(resource.upstream) in text


def test_a_resource_dies_with_its_last_reference(
    make: Callable[[], mr.MemoryResource],
) -> None:
    resource = make()
    source = resource.upstream
    resource.deallocate(resource.allocate(100), 100)
    gone = weakref.ref(resource)
    del resource
    gc.collect()
    assert gone() is None
    if source is not None:
        assert source.statistics().current_bytes == 0


def test_a_block_outlives_its_resources_object() -> None:
    source = mr.HostMemoryResource()
    ptr = mr.PoolMemoryResource(source).allocate(64)
    gc.collect()
    ctypes.memset(ptr, 1, 64)
    assert ctypes.string_at(ptr, 64) == b"\x01" * 64
    assert source.statistics().current_count == 1


def test_signatures_can_be_read() -> None:
    for _, name, _, text in _core._resource_rows():
        assert str(inspect.signature(getattr(mr, name))) == f"({text})"
    allocate = inspect.signature(mr.MemoryResource.allocate)
    assert list(allocate.parameters) == ["self", "nbytes", "stream", "alignment"]


@pytest.mark.parametrize(
    ("arguments", "keywords", "match"),
    [
        ((), {}, r"needs the argument 'nbytes': allocate\(nbytes, stream="),
        ((1, numpy_rmm.DEFAULT_STREAM, 64, 3), {}, "at most 3 positional arguments, 4"),
        ((1,), {"nbytes": 1}, "two values for argument 'nbytes'"),
        ((1,), {"size": 1}, "has no argument 'size'"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: tuple[object, ...], keywords: dict[str, object], match: str
) -> None:
    with pytest.raises(TypeError, match=match):
        mr.HostMemoryResource().allocate(*arguments, **keywords)  # type: ignore[arg-type]


# ---- identity ------------------------------------------------------------------------


def test_one_object_for_each_resource() -> None:
    assert numpy_rmm.registry["host"] is numpy_rmm.registry["host"]
    source = mr.HostMemoryResource()
    made = mr.PoolMemoryResource(source)
    assert made.upstream is source
    with numpy_rmm.use_handler(made) as handler:
        assert numpy_rmm.array_info(np.ones(100)).resource is made
        assert handler.resource is made


def test_a_subclass_keeps_its_type_and_attributes() -> None:
    class Pool(mr.PoolMemoryResource):
        def __init__(self, label: str) -> None:
            super().__init__(mr.HostMemoryResource())
            self.label = label

    made = Pool("mine")
    numpy_rmm.registry["mine"] = made
    try:
        del made
        gc.collect()
        assert numpy_rmm.registry["mine"].label == "mine"  # type: ignore[attr-defined]
    finally:
        del numpy_rmm.registry["mine"]


def test_a_resource_that_was_not_initialised() -> None:
    class Forgetful(mr.PoolMemoryResource):
        def __init__(self) -> None:
            pass

    forgetful = Forgetful()
    assert "not initialised" in repr(forgetful)
    for use in (
        lambda: forgetful.allocate(3),
        forgetful.statistics,
        lambda: forgetful.kind,
        lambda: numpy_rmm.use_handler(forgetful),
    ):
        with pytest.raises(RuntimeError, match="__init__ was not called"):
            use()
    made = mr.HostMemoryResource()
    with pytest.raises(RuntimeError, match="initialised already"):
        made.__init__()  # type: ignore[misc]


# ---- devices -------------------------------------------------------------------------


def test_the_current_resource_of_a_device(cuda: object) -> None:
    mr.set_current_device_resource(None)
    default = mr.get_current_device_resource()
    assert default.kind == "device"
    assert mr.get_per_device_resource(0) is default
    mine = mr.CudaMemoryResource()
    mr.set_current_device_resource(mine)
    assert mr.get_per_device_resource(0) is mine
    mr.set_per_device_resource(0, None)
    assert mr.get_current_device_resource() is default
    for wrong, error in [(mr.HostMemoryResource(), ValueError), (3, TypeError)]:
        with pytest.raises(error):
            mr.set_current_device_resource(wrong)  # type: ignore[arg-type]
    for device in (-1, 1000):
        with pytest.raises(ValueError, match="device"):
            mr.get_per_device_resource(device)


def test_available_device_memory(cuda: object) -> None:
    free, total = mr.available_device_memory()
    assert 0 < free <= total
