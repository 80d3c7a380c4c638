"""The registry: names to resources."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr, registry
from numpy_rmm.testing import SimulatedCuda

BUILT_IN = [
    "host",
    "host_direct",
    "huge_pages",
    "pinned",
    "pinned_direct",
    "managed",
    "managed_direct",
    "device",
    "device_direct",
    "device_async",
]


@pytest.fixture
def name() -> Iterator[str]:
    """A name that is free before and after the test."""
    assert "mine" not in registry
    yield "mine"
    registry.pop("mine", None)


def test_the_built_in_names() -> None:
    assert list(registry) == BUILT_IN
    assert len(registry) == len(BUILT_IN)
    assert all(name in registry for name in BUILT_IN)
    assert "nope" not in registry
    assert 3 not in registry


def test_looking_makes_nothing(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import numpy_rmm
        list(numpy_rmm.registry), len(numpy_rmm.registry), "host" in numpy_rmm.registry
        numpy_rmm.info()
        print(repr(numpy_rmm.registry))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not made yet") == len(BUILT_IN)


def test_plain_names_are_pools_and_direct_ones_sources(cuda: object) -> None:
    for kind, source in [
        ("host", mr.HostMemoryResource),
        ("pinned", mr.PinnedHostMemoryResource),
        ("managed", mr.ManagedMemoryResource),
        ("device", mr.CudaMemoryResource),
    ]:
        assert type(registry[kind]) is mr.PoolMemoryResource
        assert type(registry[kind].upstream) is source
        assert type(registry[f"{kind}_direct"]) is source
        assert registry[kind].kind == registry[f"{kind}_direct"].kind == kind
    assert type(registry["device_async"]) is mr.CudaAsyncMemoryResource
    assert registry["huge_pages"].kind == "host"


def test_a_name_of_ones_own(name: str) -> None:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource())
    registry[name] = pool
    assert registry[name] is pool
    assert pool.name == name
    assert list(registry)[-1] == name
    with numpy_rmm.use_handler(name) as handler:
        assert handler.name.startswith("numpy_rmm:mine#")
        assert numpy_rmm.array_info(np.ones(10)).resource is pool
    del registry[name]
    assert name not in registry
    with pytest.raises(ValueError, match="unknown handler 'mine'"):
        numpy_rmm.set_handler(name)


def test_rebinding_a_name_makes_another_handler(name: str) -> None:
    first, second = (mr.PoolMemoryResource(mr.HostMemoryResource()) for _ in range(2))
    registry[name] = first
    with numpy_rmm.use_handler(name):
        array = np.ones(10)
    registry[name] = second
    with numpy_rmm.use_handler(name):
        assert numpy_rmm.array_info(np.ones(10)).resource is second
    assert numpy_rmm.array_info(array).resource is first


def test_a_built_in_name_comes_back() -> None:
    before = registry["huge_pages"]
    mine = mr.PoolMemoryResource(mr.HostMemoryResource())
    registry["huge_pages"] = mine
    assert registry["huge_pages"] is mine
    del registry["huge_pages"]
    after = registry["huge_pages"]
    assert after not in (mine, before)
    assert "huge_pages" in registry


@pytest.mark.parametrize(
    "wrong", ["", "x" * 65, "a:b", "a#b", "a\nb", "ä", "\x7f", "a\0b"]
)
def test_a_name_that_is_none(wrong: str) -> None:
    before = list(registry)
    with pytest.raises(ValueError):
        registry[wrong] = mr.HostMemoryResource()
    assert list(registry) == before


@pytest.mark.parametrize("wrong", [3, None, b"host"])
def test_a_name_of_another_type(wrong: object) -> None:
    for use in (registry.__getitem__, registry.__delitem__):
        with pytest.raises(TypeError, match="name must be a str"):
            use(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name must be a str"):
        registry[wrong] = mr.HostMemoryResource()  # type: ignore[index]


@pytest.mark.parametrize("wrong", [None, "host", mr.HostMemoryResource])
def test_a_resource_that_is_none(name: str, wrong: object) -> None:
    with pytest.raises(TypeError, match="resource must be a MemoryResource"):
        registry[name] = wrong  # type: ignore[assignment]
    assert name not in registry


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"'nope'.*'host'"):
        registry["nope"]
    with pytest.raises(KeyError):
        del registry["nope"]
    assert registry.get("nope") is None


def test_a_name_that_cannot_work_here(run_python) -> None:  # type: ignore[no-untyped-def]
    program = """
        import numpy as np, numpy_rmm
        for name in ("pinned", "managed_direct", "device", "device_async"):
            for use in (numpy_rmm.registry.__getitem__, numpy_rmm.set_handler,
                        numpy_rmm.use_handler):
                try:
                    use(name)
                except numpy_rmm.CudaUnavailableError as error:
                    assert isinstance(error, numpy_rmm.CudaError), error
                else:
                    raise AssertionError((name, use))
            assert name in numpy_rmm.registry
        numpy_rmm.set_handler("auto")
        print(numpy_rmm.get_handler().name, np.ones(3).sum())
    """
    for environ in (
        {"NUMPY_RMM_CUDA_LIBRARY": "/nowhere/libcuda.so.1"},
        {"CUDA_VISIBLE_DEVICES": ""},
    ):
        done = run_python(program, **environ)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("numpy_rmm:host#")


def test_resources_of_a_driver_that_went_are_made_again(
    simulator: SimulatedCuda,
) -> None:
    before = registry["pinned"]
    numpy_rmm._core._set_driver(simulator.driver.path)
    assert registry["pinned"] is not before
    assert registry["host"] is registry["host"]
