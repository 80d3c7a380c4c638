"""How resources are made: arguments of each class, pools of every kind of memory."""

from __future__ import annotations

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr
from numpy_rmm.testing import SimulatedCuda

CUDA_CLASSES = [
    "PinnedHostMemoryResource",
    "ManagedMemoryResource",
    "CudaMemoryResource",
    "CudaAsyncMemoryResource",
    "CudaAsyncManagedMemoryResource",
]


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


def test_trim_of_everything() -> None:
    made = pool()
    made.deallocate(made.allocate("32 MiB"), 0)
    assert numpy_rmm.trim() >= 32 << 20
    assert made.statistics().reserved_bytes == 0
