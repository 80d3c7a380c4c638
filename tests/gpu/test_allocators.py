"""CuPy, numba-cuda, PyTorch, cuda.core and JAX on memory of numpy_rmm, on a real GPU.

What a library can be told only before it makes a context runs in a process of its own.
Stand-ins for the libraries are in tests/test_allocators.py, for machines without a GPU.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import (
    DeviceBuffer,
    DeviceScalar,
    Stream,
    as_dlpack_pinned,
    mr,
    to_device,
)
from numpy_rmm.testing import Driver

pytestmark = [
    pytest.mark.gpu,
    # Of the libraries; ours are RuntimeWarnings and stay errors.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

Run = Callable[..., Any]

# Small launches are what is tested.
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")
if not hasattr(np, "row_stack"):  # gone since NumPy 2.5, and numba-cuda asks for it
    vars(np)["row_stack"] = np.vstack


def library(name: str) -> Any:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"needs {name}")
    return pytest.importorskip(name)


@pytest.fixture(autouse=True)
def driver() -> Driver:
    if os.environ.get("NUMPY_RMM_TEST_GPU") != "1":
        pytest.skip("needs a GPU: set NUMPY_RMM_TEST_GPU=1 on a machine that has one")
    driver = Driver()
    driver.activate()
    return driver


def count(resource: mr.MemoryResource) -> int:
    gc.collect()
    return resource.statistics().current_count


def ran(result: Any, *lines: str) -> None:
    """That a program ended well, and said this."""
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:-1] == list(lines), result.stderr


# ---- CuPy ----------------------------------------------------------------------------


@pytest.fixture
def cupy() -> Iterator[Any]:
    from numpy_rmm.allocators.cupy import cupy_pinned_allocator, rmm_cupy_allocator

    cupy = library("cupy")
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    cupy.cuda.set_pinned_memory_allocator(cupy_pinned_allocator)
    yield cupy
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)


def test_cupy_computes_on_our_memory(cupy: Any, counted: mr.MemoryResource) -> None:
    a = cupy.arange(1000, dtype=cupy.float32)
    assert count(counted) >= 1
    b = (a * 2 + 1).sum()
    assert float(b) == float((np.arange(1000, dtype=np.float32) * 2 + 1).sum())
    assert a.data.mem._owner.mr is counted
    assert cupy.zeros(0).data.ptr == 0
    del a, b
    assert count(counted) == 0


def test_cupys_streams_are_the_memorys(cupy: Any, counted: mr.MemoryResource) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.full(1 << 20, 7, cupy.uint8)
    buffer = array.data.mem._owner
    assert buffer.stream.handle == stream.ptr
    del array, buffer, stream  # the memory keeps its stream
    assert count(counted) == 0


def test_cupys_memory_is_not_handed_out_while_it_is_used(
    cupy: Any, driver: Driver, counted: mr.MemoryResource
) -> None:
    """A block that is freed on a stream that works goes to others behind it."""
    own, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    # No kernel of CuPy's: one that is loaded while a stream is held waits for that.
    fill = cupy.cuda.runtime.memsetAsync
    for _ in range(20):
        with own:
            array = cupy.empty(1 << 20, cupy.uint8)
            with driver.held(own):
                ptr = array.data.ptr
                fill(ptr, 1, 1 << 20, own.ptr)
                del array
                with other:
                    again = cupy.empty(1 << 20, cupy.uint8)
                    fill(again.data.ptr, 2, 1 << 20, other.ptr)
                    is_same = again.data.ptr == ptr
        other.synchronize()
        assert int(again.min()) == 2, f"the same memory: {is_same}"


def test_cupys_page_locked_memory(cupy: Any) -> None:
    import cupyx

    pool = numpy_rmm.registry["pinned"]
    before = count(pool)
    array = cupyx.zeros_pinned(1_000_000, np.uint8)
    assert count(pool) == before + 1
    assert numpy_rmm.is_pinned(array)
    assert pool.statistics().current_bytes % (1 << 20) != 0  # no power of two
    device = cupy.asarray(array)
    assert not device.any()
    del array, device
    cupy.cuda.get_current_stream().synchronize()


def test_cupy_hears_of_the_end_of_memory(cupy: Any, counted: mr.MemoryResource) -> None:
    with pytest.raises(MemoryError):
        cupy.zeros(1 << 50, cupy.uint8)
    assert int(cupy.ones(3).sum()) == 3


def test_cupy_takes_our_arrays() -> None:
    cupy = library("cupy")
    ours = to_device(np.arange(12, dtype=np.int32).reshape(3, 4))
    for taken in (cupy.asarray(ours), cupy.from_dlpack(ours)):
        assert taken.data.ptr == ours.ptr
        taken += 1
    assert (ours.copy_to_host().ravel() == np.arange(12) + 2).all()
    managed = to_device(np.arange(3), mr=numpy_rmm.registry["managed"])
    assert int(cupy.from_dlpack(managed).sum()) == 3


# ---- numba-cuda ----------------------------------------------------------------------


def test_a_kernel_of_numba_takes_our_arrays() -> None:
    cuda = library("numba.cuda")

    @cuda.jit
    def add(x: Any, y: Any) -> None:
        i, j = cuda.grid(2)
        if i < x.shape[0] and j < x.shape[1]:
            x[i, j] += y[i, j]

    host = np.arange(48, dtype=np.float32).reshape(6, 8)
    for view in (lambda x: x, lambda x: x.T, lambda x: x[::2, 1::3]):
        x, y = to_device(host), to_device(host)
        add[(8, 8), (8, 8)](view(x), view(y))
        cuda.synchronize()
        expected = host.copy()
        view(expected)[...] += view(host)
        assert (x.copy_to_host() == expected).all()
    assert hasattr(cuda.dispatcher.wrap_arg, "_numpy_rmm")


def test_a_kernel_of_numba_takes_buffers_and_scalars() -> None:
    cuda = library("numba.cuda")

    @cuda.jit
    def fill(x: Any, value: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            x[i] = value[()]

    buffer, scalar = DeviceBuffer(size=100), DeviceScalar(np.uint8, 7)
    fill[1, 128](buffer, scalar)
    cuda.synchronize()
    assert buffer.tobytes() == b"\x07" * 100
    buffer.resize(1000)


def test_a_launch_of_numba_comes_behind_our_copy(driver: Driver) -> None:
    cuda = library("numba.cuda")

    @cuda.jit
    def double(x: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            x[i] *= 2

    own, launch = Stream(flags=1), Stream(flags=1)
    array = to_device(np.arange(1000), own)
    double[1, 1024, cuda.external_stream(launch.handle)](array)  # compiled
    launch.synchronize()
    with driver.held(own):
        copied = array.copy()
        double[1, 1024, cuda.external_stream(launch.handle)](copied)
    launch.synchronize()
    assert (copied.copy_to_host() == np.arange(1000) * 4).all()


NUMBA = """
    import gc
    import numpy as np
    np.row_stack = np.vstack  # gone since NumPy 2.5, and numba-cuda asks for it
    import numpy_rmm
    from numba import cuda
    from numpy_rmm import mr
    {set}
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    counted = mr.StatisticsResourceAdaptor(pool)
    mr.set_current_device_resource(counted)
    pinned = numpy_rmm.registry["pinned"]
    managed = numpy_rmm.registry["managed"]

    @cuda.jit
    def double(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] *= 2

    x = cuda.to_device(np.arange(1000))
    print(counted.statistics().current_bytes)
    double[1, 1024](x)
    print((x.copy_to_host() == 2 * np.arange(1000)).all())
    p = cuda.pinned_array(1000)
    m = cuda.mapped_array(1000, dtype=np.int64)
    m[:] = 1
    double[1, 1024](m)
    cuda.synchronize()
    print(pinned.statistics().current_count, m.sum(), numpy_rmm.is_pinned(p))
    a = cuda.managed_array(1000, dtype=np.int64)
    a[:] = 3
    double[1, 1024](a)
    cuda.synchronize()
    print(managed.statistics().current_count, a.sum())
    try:
        cuda.current_context().get_memory_info()
    except NotImplementedError:
        print("no info")
    del x, p, m, a
    gc.collect()
    print(*(r.statistics().current_count for r in (counted, pinned, managed)))
"""
SAID = ("8000", "True", "2 2000 True", "1 6000", "no info", "0 0 0")


def test_numba_with_our_manager(run_python: Run) -> None:
    library("numba.cuda")
    setting = (
        "from numpy_rmm.allocators.numba import RMMNumbaManager; "
        "cuda.set_memory_manager(RMMNumbaManager)"
    )
    ran(run_python(NUMBA.format(set=setting)), *SAID)


def test_numba_with_our_manager_by_the_environment(run_python: Run) -> None:
    library("numba.cuda")
    name = "numpy_rmm.allocators.numba"
    ran(run_python(NUMBA.format(set=""), NUMBA_CUDA_MEMORY_MANAGER=name), *SAID)


def test_an_ipc_handle_of_numba(run_python: Run) -> None:
    """Memory that is allocated has one, memory that is mapped has not."""
    library("numba.cuda")
    result = run_python(
        """
        import numpy as np
        from numba import cuda
        from numpy_rmm import mr
        from numpy_rmm.allocators.numba import RMMNumbaManager

        cuda.set_memory_manager(RMMNumbaManager)
        for segments in ("alloc", "vmm"):
            mr.set_current_device_resource(
                mr.PoolMemoryResource(mr.CudaMemoryResource(), segments=segments)
            )
            first = cuda.device_array(1000)
            second = cuda.device_array(1000)
            try:
                handle = second.get_ipc_handle()._ipc_handle
                print(handle.offset > 0, handle.size)
            except Exception as error:
                print("INVALID_VALUE" in str(error))
        """
    )
    ran(result, "True 8000", "True")


# ---- PyTorch -------------------------------------------------------------------------

TORCH = """
    import gc
    import torch
    import numpy_rmm
    from numpy_rmm import mr
    from numpy_rmm.allocators.torch import rmm_torch_allocator
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    counted = mr.StatisticsResourceAdaptor(pool)
    mr.set_current_device_resource(counted)
    def count():
        gc.collect()
        return counted.statistics().current_count
"""


def test_torch_computes_on_our_memory(run_python: Run) -> None:
    library("torch")
    result = run_python(
        TORCH
        + """
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    x = torch.arange(1000, device="cuda", dtype=torch.float32)
    print(counted.statistics().current_bytes >= 4000)
    print(float((x * 2).sum()))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = torch.ones(1000, device="cuda") + x
    stream.synchronize()
    print(float(y.sum()))
    print(torch.empty(0, device="cuda").data_ptr())
    before = count()
    del x, y
    print(count() < before)
    old = torch.ones(10, device="cuda")
    mr.set_current_device_resource(None)
    n = count()
    del old
    print(n - count())
    torch.cuda.empty_cache()
    print(counted.upstream.statistics().reserved_bytes == 0 or count() > 0)
    """
    )
    ran(result, "True", "999000.0", "500500.0", "0", "True", "1", "True")


def test_torch_hears_of_the_end_of_memory(run_python: Run) -> None:
    library("torch")
    result = run_python(
        TORCH
        + """
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        print("1 PiB" in str(error))
    print(int(torch.ones(3, device="cuda").sum()))
    """
    )
    ran(result, "True", "3")


def test_torch_streams_that_share_a_tensor(run_python: Run) -> None:
    """Without record_stream the block would be overwritten while it is read."""
    library("torch")
    result = run_python(
        TORCH
        + """
    from numpy_rmm.testing import Driver
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    driver = Driver()
    own, other = torch.cuda.Stream(), torch.cuda.Stream()
    wrong = 0
    # A kernel that is loaded while a stream is held waits for it.
    y = torch.ones(1 << 20, device="cuda", dtype=torch.uint8) + 0
    z = torch.full((1 << 20,), 9, device="cuda", dtype=torch.uint8)
    torch.cuda.synchronize()
    del y, z
    for _ in range(20):
        with torch.cuda.stream(own):
            x = torch.ones(1 << 20, device="cuda", dtype=torch.uint8)
        other.wait_stream(own)
        with driver.held(other.cuda_stream):
            with torch.cuda.stream(other):
                y = x + 0
            x.record_stream(other)
            del x
            with torch.cuda.stream(own):
                z = torch.full((1 << 20,), 9, device="cuda", dtype=torch.uint8)
                own.synchronize()  # not held up
        other.synchronize()
        wrong += int((y != 1).sum())
        del y, z
    print(wrong)
    """
    )
    ran(result, "0")


def test_a_mem_pool_of_torch(run_python: Run) -> None:
    library("torch")
    result = run_python(
        TORCH
        + """
    outside = torch.ones(1000, device="cuda")
    print(count())
    memories = torch.cuda.MemPool(rmm_torch_allocator.allocator())
    with torch.cuda.use_mem_pool(memories):
        x = torch.arange(1000, device="cuda")
        print(count() > 0, int(x.sum()))
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            print("out of memory")
    del x
    del memories
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    print(count(), float(outside.sum()))
    """
    )
    ran(result, "0", "True 499500", "out of memory", "0 1000.0")


def test_torch_captures_a_graph_on_our_memory(run_python: Run) -> None:
    library("torch")
    result = run_python(
        TORCH
        + """
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = x * 2 + 1
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = x * 2 + 1
    for n in range(5):
        x.fill_(n)
        graph.replay()
        torch.cuda.synchronize()
        print(float(y[0]))
    """
    )
    ran(result, "1.0", "3.0", "5.0", "7.0", "9.0")


def test_torch_takes_our_arrays() -> None:
    torch = library("torch")
    ours = to_device(np.arange(12, dtype=np.int32).reshape(3, 4))
    for taken in (torch.from_dlpack(ours), torch.as_tensor(ours, device="cuda")):
        assert taken.data_ptr() == ours.ptr
        taken += 1
    torch.cuda.synchronize()
    assert (ours.copy_to_host().ravel() == np.arange(12) + 2).all()
    managed = to_device(np.arange(3), mr=numpy_rmm.registry["managed"])
    assert int(torch.from_dlpack(managed).sum()) == 3


def test_the_c_exchange_is_like_torchs() -> None:
    """The tables of both have the same layout: ours takes what torch's hands out."""
    torch = library("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"PyTorch {torch.__version__} has no C exchange")
    import ctypes

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    words = {}
    for kind in (torch.Tensor, numpy_rmm.DeviceArray):
        capsule = kind.__dlpack_c_exchange_api__
        address = pointer(capsule, b"dlpack_exchange_api")
        words[kind] = (ctypes.c_void_p * 7).from_address(address)
    for function in (3, 4, 6):  # from_object, to_object, current_stream
        assert words[torch.Tensor][function]
        assert words[numpy_rmm.DeviceArray][function]
    out = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
    into = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    tensor = torch.arange(12, device="cuda", dtype=torch.int32).reshape(3, 4)[:, ::2]
    managed, array = ctypes.c_void_p(), ctypes.py_object()
    assert out(words[torch.Tensor][3])(tensor, ctypes.addressof(managed)) == 0
    ours = words[numpy_rmm.DeviceArray]
    assert into(ours[4])(managed, ctypes.addressof(array)) == 0
    taken = array.value
    assert taken.ptr == tensor.data_ptr()
    assert (taken.copy_to_host() == tensor.cpu().numpy()).all()
    assert out(ours[3])(taken, ctypes.addressof(managed)) == 0
    back = ctypes.py_object()
    assert into(words[torch.Tensor][4])(managed, ctypes.addressof(back)) == 0
    assert back.value.data_ptr() == tensor.data_ptr()


# ---- cuda.core -----------------------------------------------------------------------


def test_cuda_core_allocates_of_us(counted: mr.MemoryResource) -> None:
    from numpy_rmm.allocators.cuda_core import memory_resource

    core = library("cuda.core")
    device = core.Device(0)
    device.set_current()
    resource = memory_resource(counted)
    stream = device.create_stream()
    buffer = resource.allocate(1000, stream=stream)
    assert counted.statistics().current_bytes == 1000
    assert (buffer.size, buffer.device_id, buffer.is_host_accessible) == (
        1000,
        0,
        False,
    )
    assert buffer.memory_resource is resource
    buffer.fill(7, stream=stream)
    other = memory_resource(numpy_rmm.registry["pinned"]).allocate(1000, stream=stream)
    buffer.copy_to(other, stream=stream)
    stream.sync()
    assert set(np.from_dlpack(other).view(np.uint8).tolist()) == {7}
    buffer.close(stream)
    other.close()
    assert count(counted) == 0


def test_cuda_cores_device_allocates_of_us(counted: mr.MemoryResource) -> None:
    from numpy_rmm.allocators.cuda_core import memory_resource

    core = library("cuda.core")
    device = core.Device(0)
    device.set_current()
    before = device.memory_resource
    device.memory_resource = memory_resource(counted)
    try:
        buffer = device.allocate(5000, stream=device.default_stream)
        assert counted.statistics().current_bytes == 5000
        del buffer
        assert count(counted) == 0
    finally:
        device.memory_resource = before


def test_cuda_core_views_our_arrays() -> None:
    core = library("cuda.core")
    utils = library("cuda.core.utils")
    device = core.Device(0)
    device.set_current()
    ours = to_device(np.arange(12, dtype=np.float32).reshape(3, 4))
    view = utils.StridedMemoryView.from_dlpack(ours, stream_ptr=-1)
    assert (view.ptr, view.shape) == (ours.ptr, (3, 4))
    with numpy_rmm.pinned(threshold=0):
        array = np.arange(12)
    view = utils.StridedMemoryView.from_dlpack(as_dlpack_pinned(array), stream_ptr=-1)
    assert view.ptr == array.ctypes.data
    assert view.is_device_accessible


# ---- JAX -----------------------------------------------------------------------------


def test_jax_takes_our_arrays(run_python: Run) -> None:
    library("jax")
    result = run_python(
        """
        import os
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        import jax
        import numpy as np
        import numpy_rmm

        print(jax.default_backend())
        ours = numpy_rmm.to_device(np.arange(12, dtype=np.float32).reshape(3, 4))
        taken = jax.dlpack.from_dlpack(ours)
        print(float((taken * 2).sum()), taken.unsafe_buffer_pointer() == ours.ptr)
        managed = numpy_rmm.registry["managed"]
        ours = numpy_rmm.to_device(np.ones(3, "f4"), mr=managed)
        taken = jax.dlpack.from_dlpack(ours)
        print(float(taken.sum()))
        with numpy_rmm.pinned(threshold=0):
            array = np.arange(6, dtype=np.float32)
        try:
            taken = jax.dlpack.from_dlpack(numpy_rmm.as_dlpack_pinned(array))
            print(float(np.asarray(taken).sum()))
        except Exception as error:  # before JAX knew page-locked memory
            print(15.0 if "device" in str(error).lower() else error)
        """
    )
    if result.stdout.startswith("cpu"):
        pytest.skip("this JAX has no GPU")
    ran(result, "gpu", "132.0 True", "3.0", "15.0")
