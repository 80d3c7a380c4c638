"""Memory resources from Python: one suite for all, then what each has of its own."""

from __future__ import annotations

import copy
import ctypes
import gc
import inspect
import itertools
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import _core, mr
from numpy_rmm.testing import SimulatedCuda

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


# ---- constructors --------------------------------------------------------------------


def test_the_base_class_has_no_constructor() -> None:
    with pytest.raises(TypeError, match="has no constructor"):
        mr.MemoryResource()
    assert issubclass(mr.PoolMemoryResource, mr.MemoryResource)
    assert mr.DeviceMemoryResource is mr.MemoryResource


@pytest.mark.parametrize("name", CUDA_CLASSES)
def test_a_cuda_resource_without_cuda(name: str, run_python) -> None:  # type: ignore[no-untyped-def]
    program = f"""
        import numpy_rmm
        try:
            numpy_rmm.mr.{name}()
        except numpy_rmm.CudaUnavailableError as error:
            print(error)
    """
    for environ in (
        {"NUMPY_RMM_CUDA_LIBRARY": "/nowhere/libcuda.so.1"},
        {"CUDA_VISIBLE_DEVICES": ""},
    ):
        done = run_python(program, **environ)
        assert done.returncode == 0, done.stderr
        assert next(iter(environ)) in done.stdout or "/nowhere" in done.stdout


def test_no_constructor_initialises_cuda(simulator: SimulatedCuda) -> None:
    for name in CUDA_CLASSES:
        mr.PoolMemoryResource(getattr(mr, name)())
    numpy_rmm.set_handler("pinned")
    numpy_rmm.registry["managed"]
    assert simulator.calls("cuInit") == 0
    assert not numpy_rmm.info()["cuda"]["initialized"]


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"huge_pages": "always"}, ValueError, "huge_pages must be 'auto'"),
        ({"huge_pages": 1}, TypeError, "'auto', True or False"),
        ({"alignment": 3}, ValueError, "alignment must be a power of two, not 3"),
        ({"alignment": "64"}, TypeError, "alignment must be an int"),
        ({"numa_node": -1}, ValueError, "numa_node must be between 0"),
        ({"numa_node": 4000}, ValueError, "4000"),
        ({"numa_node": "0"}, TypeError, "numa_node must be an int"),
        ({"size": 3}, TypeError, "has no argument 'size'"),
    ],
)
def test_host_arguments(keywords: dict[str, object], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        mr.HostMemoryResource(**keywords)  # type: ignore[arg-type]


def test_a_numa_node_that_exists() -> None:
    resource = mr.HostMemoryResource(numa_node=0)
    with numpy_rmm.use_handler(resource):
        array = np.ones(1_000_000)
    assert numpy_rmm.array_info(array).numa_node == 0


def test_device_arguments(cuda: object) -> None:
    for name in CUDA_CLASSES:
        assert getattr(mr, name)(device=0).device in (0, None)
        with pytest.raises((TypeError, ValueError), match="device"):
            getattr(mr, name)(device=-1)
    for source in (mr.CudaMemoryResource, mr.PinnedHostMemoryResource):
        with pytest.raises(TypeError, match="positional"):
            source(0)  # type: ignore[misc]


# ---- pools ---------------------------------------------------------------------------


def pool(**keywords: object) -> mr.PoolMemoryResource:
    return mr.PoolMemoryResource(mr.HostMemoryResource(), **keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        (
            {"initial_pool_size": -1},
            ValueError,
            "initial_pool_size must not be negative",
        ),
        (
            {"initial_pool_size": 2**64},
            ValueError,
            "initial_pool_size must be less than",
        ),
        (
            {"initial_pool_size": 1.5},
            TypeError,
            "initial_pool_size must be an int or text",
        ),
        ({"maximum_pool_size": "150%"}, ValueError, "maximum_pool_size"),
        ({"maximum_pool_size": 0}, ValueError, "maximum_pool_size must be more than 0"),
        (
            {"initial_pool_size": "2 MiB", "maximum_pool_size": "1 MiB"},
            ValueError,
            "larger than the maximum",
        ),
        ({"reuse": "never"}, ValueError, "reuse must be one of 'context', 'immediate'"),
        ({"on_exhausted": "host"}, ValueError, "on_exhausted='host' is for pools of"),
        (
            {"on_exhausted": "no"},
            ValueError,
            "one of 'host', 'error', 'wait', not 'no'",
        ),
        ({"wait_limit": -1}, ValueError, "wait_limit"),
        ({"wait_limit": "soon"}, ValueError, "wait_limit"),
        ({"parked_limit": None, "wait_limit": []}, TypeError, "wait_limit"),
    ],
)
def test_pool_arguments(keywords: dict[str, object], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        pool(**keywords)


@pytest.mark.parametrize("upstream", [None, 3, "host", mr.HostMemoryResource])
def test_an_upstream_that_is_none(upstream: object) -> None:
    with pytest.raises(TypeError, match="upstream_mr must be a MemoryResource, not"):
        mr.PoolMemoryResource(upstream)  # type: ignore[arg-type]


def test_sizes_of_a_pool_as_text() -> None:
    made = pool(initial_pool_size="4 MiB", maximum_pool_size="25%", wait_limit="10 ms")
    assert made.statistics().reserved_bytes == 4 << 20
    system = numpy_rmm.info()["system"]
    limits = [system["memory_nbytes"], system["cgroup_limit_nbytes"]]
    host = min(limit for limit in limits if limit)
    with pytest.raises(MemoryError):
        made.allocate(int(host * 0.26))


def test_percentages_are_of_the_memory_of_the_kind(simulator: SimulatedCuda) -> None:
    """Of free device memory for device and managed pools; here 8 GiB."""
    for source in (mr.CudaMemoryResource(), mr.ManagedMemoryResource()):
        made = mr.PoolMemoryResource(source, maximum_pool_size="1%")
        with pytest.raises(MemoryError, match="limit 8"):
            made.allocate(84 << 20)


def test_a_full_pool_tells_its_numbers_and_recovers() -> None:
    made = pool(maximum_pool_size="8 MiB")
    ptr = made.allocate("6 MiB")
    with pytest.raises(
        numpy_rmm.OutOfMemoryError, match="4 MiB asked, limit 8 MiB"
    ) as e:
        made.allocate("4 MiB")
    assert e.value.requested_nbytes == 4 << 20
    assert e.value.resource == "PoolMemoryResource"
    made.deallocate(ptr, "6 MiB")
    made.deallocate(made.allocate("8 MiB"), 0)


def test_a_pool_on_device_memory(cuda: object) -> None:
    made = mr.PoolMemoryResource(mr.CudaMemoryResource())
    ptr = made.allocate(1000)
    assert made.device == 0
    assert made.kind == "device"
    made.deallocate(ptr, 1000)


# ---- callbacks -----------------------------------------------------------------------


def test_a_callback_sees_every_request() -> None:
    calls: list[tuple[object, ...]] = []
    host = mr.HostMemoryResource()

    def allocate(nbytes: int, stream: numpy_rmm.Stream) -> int:
        calls.append(("allocate", nbytes, stream))
        return host.allocate(nbytes)

    def deallocate(ptr: int, nbytes: int, stream: numpy_rmm.Stream) -> None:
        calls.append(("deallocate", ptr, nbytes, stream))
        host.deallocate(ptr, nbytes)

    made = mr.CallbackMemoryResource(allocate, deallocate, kind="host")
    ptr = made.allocate(100, numpy_rmm.LEGACY_DEFAULT_STREAM)
    made.deallocate(ptr, 100)
    assert calls == [
        ("allocate", 100, numpy_rmm.LEGACY_DEFAULT_STREAM),
        ("deallocate", ptr, 100, numpy_rmm.DEFAULT_STREAM),
    ]


@pytest.mark.parametrize("wrap", [lambda x: x, mr.PoolMemoryResource])
def test_an_exception_of_a_callback_crosses_unchanged(wrap) -> None:  # type: ignore[no-untyped-def]
    class Mine(Exception):
        pass

    error = Mine("no")

    def allocate(nbytes: int, stream: object) -> int:
        raise error

    made = wrap(mr.CallbackMemoryResource(allocate, print, kind="host"))
    with pytest.raises(Mine) as caught:
        made.allocate(100)
    assert caught.value is error
    names = [entry.name for entry in caught.traceback]
    assert names[-1] == "allocate"


def test_an_exception_of_a_deallocate_callback_reaches_the_caller() -> None:
    host = mr.HostMemoryResource()

    def deallocate(ptr: int, nbytes: int, stream: object) -> None:
        host.deallocate(ptr, nbytes)
        raise OSError("told")

    made = mr.CallbackMemoryResource(host.allocate, deallocate, kind="host")
    ptr = made.allocate(100)
    with pytest.raises(OSError, match="told"):
        made.deallocate(ptr, 100)
    assert made.statistics().current_count == 0


@pytest.mark.parametrize(
    ("result", "error"),
    [(None, TypeError), ("0", TypeError), (-1, ValueError), (0, MemoryError)],
)
def test_what_a_callback_must_return(result: object, error: type) -> None:
    made = mr.CallbackMemoryResource(lambda *_: result, print, kind="host")  # type: ignore
    with pytest.raises(error):
        made.allocate(100)


def test_a_callback_that_fails_first_and_then_serves() -> None:
    """A pool asks for less after a failure: the first error is then none."""
    host = mr.HostMemoryResource()

    def allocate(nbytes: int, stream: object) -> int:
        if nbytes > 4 << 20:
            raise MemoryError("too much")
        return host.allocate(nbytes)

    made = mr.PoolMemoryResource(
        mr.CallbackMemoryResource(allocate, host.deallocate, kind="host")
    )
    made.deallocate(made.allocate(1000), 1000)
    with pytest.raises(MemoryError):
        made.allocate(32 << 20)


@pytest.mark.parametrize("arguments", [(None, print), (print, None), (3, 4)])
def test_callbacks_must_be_callable(arguments: tuple[object, object]) -> None:
    with pytest.raises(TypeError, match="must be callable"):
        mr.CallbackMemoryResource(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind must be one of"):
        mr.CallbackMemoryResource(print, print, kind="stone")  # type: ignore[arg-type]


def test_a_callback_resource_in_a_cycle_is_collected() -> None:
    class Functions:
        def __init__(self) -> None:
            self.mr = mr.CallbackMemoryResource(self.allocate, self.deallocate)

        def allocate(self, nbytes: int, stream: object) -> int:
            return 0

        def deallocate(self, ptr: int, nbytes: int, stream: object) -> None:
            pass

    dead = weakref.ref(Functions())
    gc.collect()
    numpy_rmm.last_error()
    numpy_rmm.trim()  # what the core let go of is dropped at the next call of ours
    assert dead() is None


def test_callbacks_are_released_with_the_resource() -> None:
    def allocate(nbytes: int, stream: object) -> int:
        return 0

    before = sys.getrefcount(allocate)
    for _ in range(10):
        mr.CallbackMemoryResource(allocate, print)
    numpy_rmm.trim()
    after = sys.getrefcount(allocate)
    assert after == before


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


def test_trim_of_everything() -> None:
    made = pool()
    made.deallocate(made.allocate("32 MiB"), 0)
    assert numpy_rmm.trim() >= 32 << 20
    assert made.statistics().reserved_bytes == 0
