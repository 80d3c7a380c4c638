"""Ways to get memory that a GPU uses, behind one small interface, and work for it.

Each peer is used through its own Python interface with its own defaults; what it needs
to be comparable (a pool of the size that ours may grow to, a release threshold) is said
beside it. A way that cannot be made says why.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from _bench import GIB

KERNEL_CLOCKS = 1_000_000  # as RMM's multi_stream_allocations has it
_NON_BLOCKING = 1
_RELEASE_THRESHOLD = 4


def _nothing() -> None:
    pass


@dataclass
class Way:
    """``free(allocate(nbytes, stream), stream)``; a token's last reference may be what
    keeps the memory."""

    allocate: Callable[[int, Any], Any]
    free: Callable[[Any, Any], object]
    address: Callable[[Any], int]
    give_back: Callable[[], object] = _nothing  # what is not in use
    reserved: Callable[[], int] | None = None  # bytes taken from the driver
    stream: Callable[[int], Any] = lambda handle: None  # its own object of a handle


def simulated() -> bool:
    return os.environ.get("NUMPY_RMM_CUDA_LIBRARY") == "simulator"


class Machine:
    """The driver, its primary context, and streams."""

    def __init__(self) -> None:
        from numpy_rmm.testing import Driver, simulate_cuda

        if simulated():
            self.driver = simulate_cuda().driver
            self.library = None
        else:
            self.driver = Driver(None)
            self.library = ctypes.CDLL("libcuda.so.1")
        self.driver.activate()
        self.own: dict[int, Any] = {}  # streams that numpy_rmm has made, by handle

    def streams(self, n: int) -> list[int]:
        """New ones, which do not block: each library has its object of the handle."""
        from numpy_rmm import Stream

        made = [Stream(flags=1) for _ in range(n)]
        self.own |= {stream.handle: stream for stream in made}
        return [stream.handle for stream in made]

    def synchronize(self) -> None:
        self.driver.check(self.driver.cuCtxSynchronize())

    def call(self, name: str, *args: object) -> None:
        """A call that `Driver` does not know, on a real driver."""
        if self.library is None:
            raise RuntimeError(f"the simulated driver has no {name}")
        self.driver.check(getattr(self.library, name)(*args))


def _number(stream: object) -> int:
    return getattr(stream, "value", stream) or 0  # type: ignore[return-value]


# ---- work ----------------------------------------------------------------------------

_SPIN = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 out, .param .u64 clocks)
{
    .reg .pred %p;
    .reg .b64 %r<7>;
    ld.param.u64 %r1, [out];
    ld.param.u64 %r2, [clocks];
    mov.u64 %r3, %clock64;
again:
    mov.u64 %r4, %clock64;
    sub.s64 %r5, %r4, %r3;
    setp.lt.s64 %p, %r5, %r2;
    @%p bra again;
    cvta.to.global.u64 %r6, %r1;
    st.global.u64 [%r6], %r5;
    ret;
}
\0"""


class Kernel:
    """One thread that runs for a million clocks and then writes to its block."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.function = ctypes.c_void_p()
        if machine.library is not None:
            module = ctypes.c_void_p()
            machine.call("cuModuleLoadData", ctypes.byref(module), _SPIN)
            machine.call(
                "cuModuleGetFunction", ctypes.byref(self.function), module, b"spin"
            )

    def launch(self, address: int, handle: int, clocks: int = KERNEL_CLOCKS) -> None:
        """On the simulated driver, which runs no kernels, a fill."""
        if self.machine.library is None:
            driver = self.machine.driver
            driver.check(driver.cuMemsetD8Async(address, 1, 8, handle))
            return
        values = ctypes.c_uint64(address), ctypes.c_uint64(clocks)
        pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        one, stream = ctypes.c_uint(1), ctypes.c_void_p(handle)
        shape = [one] * 6
        self.machine.call(
            "cuLaunchKernel",
            self.function,
            *shape,
            ctypes.c_uint(0),
            stream,
            pointers,
            None,
        )


# ---- ours, and the driver's ----------------------------------------------------------


def _of_resource(mr: Any, **options: Any) -> Way:
    """Of one of our pools; a token is the address and the size."""

    def allocate(nbytes: int, stream: Any) -> tuple[int, int]:
        if stream is None:
            return mr.allocate(nbytes), nbytes
        return mr.allocate(nbytes, stream), nbytes

    def free(token: tuple[int, int], stream: Any) -> None:
        if stream is None:
            mr.deallocate(*token)
        else:
            mr.deallocate(*token, stream)

    return Way(
        allocate,
        free,
        address=lambda token: token[0],
        give_back=lambda: mr.trim(0),
        reserved=lambda: mr.statistics().reserved_bytes,
        **options,
    )


def _without_stream(handle: int) -> None:
    """The host's own memory: a pair of it belongs to no stream."""


def ours_device(machine: Machine, initial: int) -> Way:
    from numpy_rmm import mr

    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    return _of_resource(pool, stream=machine.own.__getitem__)


def ours_pinned(machine: Machine, initial: int, reuse: str | None = None) -> Way:
    from numpy_rmm import mr

    pool = mr.PoolMemoryResource(mr.PinnedHostMemoryResource(), reuse=reuse)
    return _of_resource(pool, stream=_without_stream)


def ours_with_adaptors(machine: Machine, initial: int) -> Way:
    """Statistics and a limit on top of the pool."""
    from numpy_rmm import mr

    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    limited = mr.LimitingResourceAdaptor(pool, 64 * GIB)  # type: ignore[attr-defined]
    counted = mr.StatisticsResourceAdaptor(limited)  # type: ignore[attr-defined]
    return _of_resource(counted, stream=machine.own.__getitem__)


def driver_device(machine: Machine, initial: int) -> Way:
    driver = machine.driver
    return Way(
        lambda nbytes, stream: driver.allocate(nbytes),
        lambda token, stream: driver.check(driver.cuMemFree(token)),
        address=_number,
    )


def driver_pinned(machine: Machine, initial: int) -> Way:
    driver = machine.driver

    def allocate(nbytes: int, stream: Any) -> int:
        pointer = ctypes.c_void_p()
        driver.check(driver.cuMemHostAlloc(ctypes.byref(pointer), nbytes, 0))
        return pointer.value or 0

    return Way(
        allocate,
        lambda token, stream: driver.check(driver.cuMemFreeHost(token)),
        address=_number,
    )


def driver_async(machine: Machine, initial: int) -> Way:
    """The driver's pool, told to keep what it has as ours does."""
    pool, everything = ctypes.c_void_p(), ctypes.c_uint64(2**64 - 1)
    machine.call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)
    machine.call(
        "cuMemPoolSetAttribute", pool, _RELEASE_THRESHOLD, ctypes.byref(everything)
    )

    def allocate(nbytes: int, stream: Any) -> int:
        pointer = ctypes.c_uint64()
        size = ctypes.c_size_t(nbytes)
        machine.call("cuMemAllocAsync", ctypes.byref(pointer), size, stream)
        return pointer.value

    def free(token: int, stream: Any) -> None:
        machine.call("cuMemFreeAsync", ctypes.c_uint64(token), stream)

    def give_back() -> None:
        machine.synchronize()
        machine.call("cuMemPoolTrimTo", pool, ctypes.c_size_t(0))

    return Way(allocate, free, _number, give_back, stream=ctypes.c_void_p)


# ---- CuPy, PyTorch, RMM --------------------------------------------------------------


def _let_go(token: Any, stream: Any) -> None:
    """The caller drops the last reference."""


def _cupy(machine: Machine, initial: int, kind: str) -> Way:
    """CuPy's pools take the current stream: it is set around each allocation."""
    import cupy

    pools = {
        "pool": cupy.cuda.MemoryPool,
        "async": cupy.cuda.MemoryAsyncPool,
        "pinned": cupy.cuda.PinnedMemoryPool,
    }
    pool = pools[kind]()

    def allocate(nbytes: int, stream: Any) -> Any:
        if stream is None:
            return pool.malloc(nbytes)
        with stream:
            return pool.malloc(nbytes)

    # The asynchronous pool cannot say, and the pinned one counts blocks.
    reserved = pool.total_bytes if kind == "pool" else None
    stream = _without_stream if kind == "pinned" else cupy.cuda.ExternalStream
    return Way(
        allocate,
        _let_go,
        address=lambda token: token.ptr,
        give_back=pool.free_all_blocks,
        reserved=reserved,
        stream=stream,
    )


def _torch_device(machine: Machine, initial: int) -> Way:
    import torch

    def allocate(nbytes: int, stream: Any) -> Any:
        if stream is None:
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    torch.cuda.init()
    return Way(
        allocate,
        _let_go,
        address=lambda token: token.data_ptr(),
        give_back=torch.cuda.empty_cache,
        reserved=torch.cuda.memory_reserved,
        stream=torch.cuda.ExternalStream,
    )


def _torch_pinned(machine: Machine, initial: int) -> Way:
    import torch

    torch.cuda.init()
    return Way(
        lambda nbytes, stream: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        _let_go,
        address=lambda token: token.data_ptr(),
        give_back=getattr(torch._C, "_host_emptyCache", _nothing),
        stream=_without_stream,
    )


class _Handle:
    """A stream by the protocol that RMM reads."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _rmm(machine: Machine, initial: int, kind: str) -> Way:
    """RMM's pools get their size when they are made, and keep it until they die."""
    import rmm.mr
    from rmm.pylibrmm.stream import DEFAULT_STREAM, Stream

    upstream = rmm.mr.CudaMemoryResource()
    makers: dict[str, Callable[[], Any]] = {
        "pool": lambda: rmm.mr.PoolMemoryResource(upstream, initial),
        "arena": lambda: rmm.mr.ArenaMemoryResource(upstream, initial),
        "binning": lambda: rmm.mr.BinningMemoryResource(
            rmm.mr.PoolMemoryResource(upstream, initial), 18, 22
        ),
        "async": lambda: rmm.mr.CudaAsyncMemoryResource(initial),
        "pinned": lambda: rmm.mr.PoolMemoryResource(
            rmm.mr.PinnedHostMemoryResource(), initial
        ),
    }
    held = [makers[kind]()]

    def allocate(nbytes: int, stream: Any) -> tuple[int, int]:
        if not held:
            held.append(makers[kind]())
        return held[0].allocate(nbytes, stream or DEFAULT_STREAM), nbytes

    def free(token: tuple[int, int], stream: Any) -> None:
        held[0].deallocate(*token, stream or DEFAULT_STREAM)

    return Way(
        allocate,
        free,
        address=lambda token: token[0],
        give_back=held.clear,
        stream=lambda handle: Stream(_Handle(handle)),
    )


# ---- by name -------------------------------------------------------------------------

Maker = Callable[[Machine, int], Way]
OURS = "numpy_rmm"

DEVICE: dict[str, Maker] = {
    OURS: ours_device,
    "numpy_rmm statistics+limit": ours_with_adaptors,
    "cuMemAlloc": driver_device,
    "cuMemAllocAsync": driver_async,
    "cupy": partial(_cupy, kind="pool"),
    "cupy async": partial(_cupy, kind="async"),
    "torch": _torch_device,
    "rmm pool": partial(_rmm, kind="pool"),
    "rmm arena": partial(_rmm, kind="arena"),
    "rmm binning": partial(_rmm, kind="binning"),
    "rmm async": partial(_rmm, kind="async"),
}
PINNED: dict[str, Maker] = {
    OURS: ours_pinned,
    "numpy_rmm immediate": partial(ours_pinned, reuse="immediate"),
    "cuMemHostAlloc": driver_pinned,
    "cupy": partial(_cupy, kind="pinned"),
    "torch": _torch_pinned,
    "rmm pool": partial(_rmm, kind="pinned"),
}
MAKERS = {"device": DEVICE, "pinned": PINNED}
PEER_WORDS = ("cupy", "torch", "rmm")


def make(kind: str, name: str, machine: Machine, initial: int) -> Way:
    return MAKERS[kind][name](machine, initial)
