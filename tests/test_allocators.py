"""Memory for other libraries, over small stand-ins for the places where they meet us.

Each stand-in has the names, the arguments and the habits of its library's; the
libraries themselves are in tests/gpu/test_allocators.py.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import Stream, mr
from numpy_rmm.testing import Driver, SimulatedCuda

MODULES = ["cuda_core", "cupy", "numba", "torch"]


@pytest.fixture(autouse=True)
def driver(simulator: SimulatedCuda) -> Driver:
    simulator.driver.activate()
    return simulator.driver


def count(resource: mr.MemoryResource) -> int:
    return resource.statistics().current_count


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts modules where the import finds them; ours forget what they found before."""

    def put(**modules: Any) -> None:
        for name, content in modules.items():
            module = types.ModuleType(name.replace("__", "."))
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for name in MODULES:
            monkeypatch.delitem(
                sys.modules, f"numpy_rmm.allocators.{name}", raising=False
            )

    return put


def ours(name: str) -> Any:
    return importlib.import_module(f"numpy_rmm.allocators.{name}")


# ---- the modules ---------------------------------------------------------------------


def test_importing_them_imports_no_library(run_python: Callable[..., Any]) -> None:
    result = run_python(
        """
        import sys
        from numpy_rmm.allocators import cuda_core, cupy, numba, torch
        names = {name.partition(".")[0] for name in sys.modules}
        print(sorted(names & {"cuda", "cupy", "numba", "torch"}))
        print(dir(torch)[-1], "RMMNumbaManager" in dir(numba))
        """
    )
    assert result.stdout == "[]\nrmm_torch_allocator True\n", result.stderr


@pytest.mark.parametrize(
    ("module", "use", "package"),
    [
        ("cupy", lambda x: x.rmm_cupy_allocator(1), "cupy-cuda13x"),
        ("cupy", lambda x: x.cupy_pinned_allocator(1), "cupy-cuda13x"),
        ("numba", lambda x: x.RMMNumbaManager, "numba-cuda"),
        ("torch", lambda x: x.rmm_torch_allocator, "torch"),
        (
            "cuda_core",
            lambda x: x.memory_resource(mr.CudaMemoryResource()),
            "cuda-core",
        ),
    ],
)
def test_a_library_that_is_not_there(
    module: str,
    use: Callable[[Any], object],
    package: str,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install()
    for name in ("cupy", "numba", "torch", "cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}"):
        use(ours(module))


@pytest.mark.parametrize("module", MODULES)
def test_a_name_that_no_module_has(module: str) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = ours(module).nothing


# ---- CuPy ----------------------------------------------------------------------------


class CupyPointer:
    def __init__(self, memory: Any, offset: int) -> None:
        self.mem, self.ptr = memory, memory.ptr + offset


class CupyMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


@pytest.fixture
def cupy(install: Callable[..., None]) -> types.SimpleNamespace:
    cuda = types.SimpleNamespace(
        UnownedMemory=CupyMemory,
        MemoryPointer=CupyPointer,
        PinnedMemoryPointer=CupyPointer,
        stream=Stream(flags=1),
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
    )
    cuda.get_current_stream = lambda: cuda.stream
    install(cupy={"cuda": cuda})
    return cuda


def test_cupy_gets_memory_on_its_stream(
    cupy: types.SimpleNamespace, counted: mr.MemoryResource
) -> None:
    pointer = ours("cupy").rmm_cupy_allocator(1000)
    assert pointer.mem.size == 1000
    assert pointer.mem.device_id == 0
    assert pointer.mem.owner.stream == cupy.stream
    assert pointer.ptr == pointer.mem.owner.ptr != 0
    assert counted.statistics().current_bytes == 1000
    del pointer
    assert count(counted) == 0


def test_cupy_gets_no_bytes(cupy: object) -> None:
    assert ours("cupy").rmm_cupy_allocator(0).ptr == 0


def test_cupy_hears_of_the_end_of_memory(
    cupy: object, counted: mr.MemoryResource
) -> None:
    with pytest.raises(numpy_rmm.OutOfMemoryError, match="1 PiB"):
        ours("cupy").rmm_cupy_allocator(1 << 50)
    assert count(counted) == 0


def test_cupys_page_locked_memory(cupy: object) -> None:
    pool = numpy_rmm.registry["pinned"]
    before = count(pool)
    pointer = ours("cupy").cupy_pinned_allocator(5000)
    assert pointer.mem.size == 5000
    array = np.ctypeslib.as_array((ctypes.c_uint8 * 5000).from_address(pointer.ptr))
    assert numpy_rmm.memory_kind(array) in ("pinned", "external")
    array[:] = 1
    assert count(pool) == before + 1
    del array, pointer
    assert count(pool) == before


# ---- PyTorch -------------------------------------------------------------------------


class TorchAllocator:
    """The part of torch.cuda.memory.CUDAPluggableAllocator that is used."""

    def __init__(self, path: str, allocate: str, deallocate: str) -> None:
        self.loaded = ctypes.CDLL(path)
        self.names = (allocate, deallocate)
        self.hooks: dict[str, int] = {}

    def allocator(self) -> Any:
        return types.SimpleNamespace(
            set_record_stream_fn=lambda x: self.hooks.update(record_stream=x),
            set_reset_fn=lambda x: self.hooks.update(reset=x),
        )


def test_torchs_allocator(install: Callable[..., None]) -> None:
    memory = {"CUDAPluggableAllocator": TorchAllocator}
    install(
        torch={"__file__": "/nowhere/torch/__init__.py"},
        torch__cuda={},
        torch__cuda__memory=memory,
    )
    allocator = ours("torch").rmm_torch_allocator
    assert allocator is ours("torch").rmm_torch_allocator
    assert allocator.names == ("nrm_torch_allocate", "nrm_torch_deallocate")
    for name in allocator.names:
        assert hasattr(allocator.loaded, name)
    functions = ctypes.CDLL(numpy_rmm._core.__file__)
    reset = ctypes.cast(functions.nrm_torch_empty_cache, ctypes.c_void_p).value
    assert allocator.hooks["reset"] == reset
    assert set(allocator.hooks) == {"reset", "record_stream"}


# ---- Numba ---------------------------------------------------------------------------


class UniqueDict(dict[Any, Any]):
    def __setitem__(self, key: object, value: object) -> None:
        assert key not in self
        super().__setitem__(key, value)


class HostOnly:
    def __init__(self, *, context: Any) -> None:
        self.context = context
        self.allocations = UniqueDict()

    def memhostalloc(self, size: int, *flags: bool) -> tuple[int, Any]:
        return size, flags

    def memallocmanaged(self, size: int, attach_global: bool) -> tuple[int, bool]:
        return size, attach_global

    def reset(self) -> None:
        self.allocations.clear()


class NumbaPointer:
    def __init__(
        self, context: Any, pointer: int, size: int, finalizer: Any = None
    ) -> None:
        self.context, self.handle, self.size = context, pointer, size
        if finalizer is not None:
            self.finalize = weakref.finalize(self, finalizer)

    def own(self) -> object:
        return self


class NumbaOwned:
    """What stands for memory of Numba's that it knows weakly, and ends with it."""

    def __init__(self, memory: Any) -> None:
        self.handle = memory.handle
        weakref.finalize(self, lambda: memory.finalize())


class NumbaAutoFree(NumbaPointer):
    def own(self) -> object:
        return NumbaOwned(weakref.proxy(self))


class Context:
    pass


@pytest.fixture
def manager(install: Callable[..., None]) -> Iterator[Any]:
    bases = {
        "MemoryPointer": NumbaPointer,
        "MappedMemory": NumbaAutoFree,
        "PinnedMemory": NumbaPointer,
        "ManagedMemory": NumbaAutoFree,
    }
    kinds = {name: type(name, (base,), {}) for name, base in bases.items()}
    kinds["binding"] = types.SimpleNamespace(CUdeviceptr=int)  # type: ignore[assignment]
    install(
        numba={},
        numba__cuda={
            "HostOnlyCUDAMemoryManager": HostOnly,
            "GetIpcHandleMixin": type("GetIpcHandleMixin", (), {}),
        },
        numba__cuda__cudadrv={},
        numba__cuda__cudadrv__driver=kinds,
    )
    context = Context()
    yield ours("numba").RMMNumbaManager(context=context)
    del context


def test_numba_finds_the_manager_by_its_name(manager: Any) -> None:
    assert ours("numba")._numba_memory_manager is type(manager)
    assert isinstance(manager, HostOnly)
    assert type(manager)(context=None).interface_version == 1
    with pytest.raises(NotImplementedError):
        manager.get_memory_info()


def test_numba_gets_memory(manager: Any, counted: mr.MemoryResource) -> None:
    memory = manager.memalloc(1000)
    assert memory.size == 1000
    assert counted.statistics().current_bytes == 1000
    assert list(manager.allocations) == [memory.handle]
    del memory
    assert count(counted) == 0
    assert not manager.allocations


def test_numba_gets_no_bytes(manager: Any) -> None:
    memory = [manager.memalloc(0), manager.memalloc(0)]
    assert [x.handle for x in memory] == [0, 0]


def test_memory_that_outlives_a_reset_of_numba(
    manager: Any, counted: mr.MemoryResource
) -> None:
    """Its end is not that of what was allocated at its address since."""
    old = manager.memalloc(1000)
    manager.reset()
    assert count(counted) == 0
    new = manager.memalloc(1000)
    assert new.handle == old.handle
    del old
    assert count(counted) == 1
    del new
    assert count(counted) == 0


@pytest.mark.parametrize("mapped", [True, False])
def test_numbas_page_locked_memory(manager: Any, mapped: bool) -> None:
    pool = numpy_rmm.registry["pinned"]
    before = count(pool)
    memory = manager.memhostalloc(1 << 16, mapped=mapped)
    assert type(memory).__name__ == ("NumbaOwned" if mapped else "PinnedMemory")
    assert memory.handle != 0
    assert count(pool) == before + 1
    del memory
    assert count(pool) == before
    assert manager.memhostalloc(10, wc=True) == (10, (False, False, True))


def test_numbas_managed_memory(manager: Any) -> None:
    pool = numpy_rmm.registry["managed"]
    before = count(pool)
    memory = manager.memallocmanaged(1 << 16, attach_global=True)
    assert type(memory).__name__ == "NumbaOwned"
    assert memory.handle != 0
    assert count(pool) == before + 1
    del memory
    assert count(pool) == before
    assert manager.memallocmanaged(10, attach_global=False) == (10, False)


# ---- cuda.core -----------------------------------------------------------------------


class CoreBuffer:
    def __init__(self, ptr: int, size: int, mr: Any, stream: Any) -> None:
        self.handle, self.size, self.mr, self.stream = ptr, size, mr, stream

    @staticmethod
    def from_handle(
        ptr: int, size: int, mr: Any = None, owner: Any = None, *, stream: Any = None
    ) -> CoreBuffer:
        return CoreBuffer(ptr, size, mr, stream)

    def close(self, stream: Any = None) -> None:
        self.mr.deallocate(self.handle, self.size, stream=stream or self.stream)


class OldBuffer(CoreBuffer):
    @staticmethod
    def from_handle(ptr: int, size: int, mr: Any = None) -> CoreBuffer:  # type: ignore[override]
        return CoreBuffer(ptr, size, mr, None)


class NoBuffer(CoreBuffer):
    @staticmethod
    def from_handle(*args: Any, stream: Any = None, **kwargs: Any) -> CoreBuffer:
        raise RuntimeError("no context is current")


@pytest.mark.parametrize("buffer_type", [CoreBuffer, OldBuffer])
def test_cuda_core_gets_memory(
    install: Callable[..., None], counted: mr.MemoryResource, buffer_type: type
) -> None:
    base = type("MemoryResource", (), {})
    install(cuda={}, cuda__core={"MemoryResource": base, "Buffer": buffer_type})
    resource = ours("cuda_core").memory_resource(counted)
    assert isinstance(resource, base)
    assert resource.mr is counted
    stream, other = Stream(flags=1), Stream(flags=1)
    buffer = resource.allocate(1000, stream=stream)
    assert counted.statistics().current_bytes == 1000
    assert buffer.stream is (stream if buffer_type is CoreBuffer else None)
    buffer.close(other)
    assert count(counted) == 0


def test_cuda_core_is_told_what_memory_it_is(install: Callable[..., None]) -> None:
    install(cuda={}, cuda__core={"MemoryResource": object, "Buffer": CoreBuffer})
    make = ours("cuda_core").memory_resource
    seen = {}
    for kind in ("host", "device", "pinned", "managed"):
        resource = make(numpy_rmm.registry[kind])
        resource.mr.deallocate(resource.mr.allocate(100), 100)
        seen[kind] = (
            resource.is_device_accessible,
            resource.is_host_accessible,
            resource.is_managed,
            resource.device_id >= 0,
        )
        assert repr(resource).startswith("<cuda.core resource over <PoolMemoryResource")
    assert seen["host"] == (False, True, False, False)
    assert seen["device"] == (True, False, False, True)
    assert seen["pinned"][:3] == (True, True, False)
    assert seen["managed"][:3] == (True, True, True)


def test_cuda_core_refuses_the_memory(
    install: Callable[..., None], counted: mr.MemoryResource
) -> None:
    install(cuda={}, cuda__core={"MemoryResource": object, "Buffer": NoBuffer})
    resource = ours("cuda_core").memory_resource(counted)
    with pytest.raises(RuntimeError, match="no context is current"):
        resource.allocate(1000, stream=Stream(flags=1))
    assert counted.statistics().total_count == 1
    assert count(counted) == 0
    with pytest.raises(TypeError, match="mr must be a MemoryResource, not int"):
        ours("cuda_core").memory_resource(1)
