"""Adaptors that track, ask, align and prefetch, as RMM's callers know them."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr
from numpy_rmm.testing import SimulatedCuda

MIB = 1 << 20


def host_pool() -> mr.MemoryResource:
    return mr.PoolMemoryResource(mr.HostMemoryResource())


def limited() -> mr.LimitingResourceAdaptor:
    return mr.LimitingResourceAdaptor(host_pool(), "1 MiB")


def callback() -> mr.MemoryResource:
    host = mr.HostMemoryResource()
    return mr.CallbackMemoryResource(host.allocate, host.deallocate, kind="host")


UPSTREAMS: dict[str, Callable[[], mr.MemoryResource]] = {
    "host": mr.HostMemoryResource,
    "pool": host_pool,
    "callback": callback,
    "limiting": limited,
    "tracking": lambda: mr.TrackingResourceAdaptor(host_pool()),
    "aligned": lambda: mr.AlignedResourceAdaptor(host_pool(), 4096),
    "prefetch": lambda: mr.PrefetchResourceAdaptor(host_pool()),
    "failure callback": lambda: mr.FailureCallbackResourceAdaptor(
        host_pool(), lambda nbytes: False
    ),
    "pinned pool": lambda: mr.PoolMemoryResource(mr.PinnedHostMemoryResource()),
    "managed pool": lambda: mr.PoolMemoryResource(mr.ManagedMemoryResource()),
    "device pool": lambda: mr.PoolMemoryResource(mr.CudaMemoryResource()),
}
ADAPTORS: dict[str, Callable[[mr.MemoryResource], mr.MemoryResource]] = {
    "tracking": lambda upstream: mr.TrackingResourceAdaptor(upstream, True),
    "aligned": lambda upstream: mr.AlignedResourceAdaptor(upstream, 1024),
    "prefetch": mr.PrefetchResourceAdaptor,
    "failure callback": lambda upstream: mr.FailureCallbackResourceAdaptor(
        upstream, lambda nbytes: False
    ),
}
NEED_CUDA = {"pinned pool", "managed pool", "device pool"}


@pytest.fixture(params=list(UPSTREAMS))
def upstream(request: pytest.FixtureRequest) -> mr.MemoryResource:
    """Each kind of resource that an adaptor can stand over."""
    if request.param in NEED_CUDA:
        request.getfixturevalue("cuda")
    return UPSTREAMS[request.param]()


@pytest.mark.parametrize("kind", ADAPTORS)
def test_they_stand_over_every_resource(kind: str, upstream: mr.MemoryResource) -> None:
    adaptor = ADAPTORS[kind](upstream)
    assert adaptor.kind == upstream.kind
    assert adaptor.upstream is upstream
    blocks = [(adaptor.allocate(n), n) for n in (1, 1000, 100_000)]
    assert adaptor.statistics().current_bytes == 101_001
    assert upstream.statistics().current_bytes == 101_001
    for ptr, nbytes in blocks:
        adaptor.deallocate(ptr, nbytes)
        with pytest.raises(ValueError, match="no live block"):
            adaptor.deallocate(ptr, nbytes)
    assert adaptor.allocate(0) == 0
    assert adaptor.statistics().current_bytes == 0
    with pytest.raises(numpy_rmm.OutOfMemoryError):
        adaptor.allocate("1 PiB")
    adaptor.deallocate(adaptor.allocate(100), 100)


@pytest.mark.parametrize("kind", ["tracking", "aligned", "prefetch"])
def test_they_back_handlers(kind: str) -> None:
    adaptor = ADAPTORS[kind](host_pool())
    with numpy_rmm.use_handler(adaptor):
        x = np.arange(100_000)
        x.resize(200_000, refcheck=False)
    assert x[99_999] == 99_999
    assert adaptor.statistics().current_bytes == x.nbytes
    del x
    assert adaptor.statistics().current_bytes == 0


# ---- tracking ------------------------------------------------------------------------


def test_tracking_lists_what_lives() -> None:
    adaptor = mr.TrackingResourceAdaptor(host_pool())
    assert adaptor.get_outstanding_allocations_str() == ""
    pointers = sorted(adaptor.allocate(1000) for _ in range(10))
    assert adaptor.get_allocated_bytes() == 10_000
    text = adaptor.get_outstanding_allocations_str()
    assert text == "".join(f"{ptr:#x}: 1000 B\n" for ptr in pointers)
    for ptr in pointers:
        adaptor.deallocate(ptr, 1000)
    assert adaptor.get_allocated_bytes() == 0
    assert adaptor.get_outstanding_allocations_str() == ""


def test_tracking_tells_where_python_asked() -> None:
    adaptor = mr.TrackingResourceAdaptor(host_pool(), capture_stacks=True)
    over = mr.StatisticsResourceAdaptor(adaptor)

    def leak() -> int:
        return over.allocate(1000)

    ptr = leak()
    text = adaptor.get_outstanding_allocations_str()
    assert f"{ptr:#x}: 1000 B : callstack:\n" in text
    innermost, outer = text.splitlines()[1:3]
    assert innermost.endswith("in leak")
    assert __file__ in innermost
    assert outer.endswith("in test_tracking_tells_where_python_asked")
    assert "#0 in 0x" in text
    over.deallocate(ptr, 1000)


@pytest.mark.usefixtures("cuda")
def test_tracking_tells_of_buffers() -> None:
    adaptor = mr.TrackingResourceAdaptor(mr.CudaMemoryResource(), capture_stacks=True)
    buffer = numpy_rmm.DeviceBuffer(size=1000, mr=adaptor)
    text = adaptor.get_outstanding_allocations_str()
    assert "in test_tracking_tells_of_buffers" in text
    del buffer
    assert adaptor.get_allocated_bytes() == 0


def test_arrays_have_the_stack_of_c_alone() -> None:
    adaptor = mr.TrackingResourceAdaptor(host_pool(), capture_stacks=True)
    with numpy_rmm.use_handler(adaptor):
        x = np.ones(1000)
    text = adaptor.get_outstanding_allocations_str()
    assert "8000 B : callstack:\n#0 in 0x" in text
    assert "multiarray" in text
    assert __file__ not in text
    del x


def test_tracking_logs_what_lives(caplog: pytest.LogCaptureFixture) -> None:
    adaptor = mr.TrackingResourceAdaptor(host_pool())
    ptr = adaptor.allocate(1000)
    with caplog.at_level(logging.DEBUG, "numpy_rmm"):
        adaptor.log_outstanding_allocations()
    assert caplog.messages == [f"Outstanding allocations: {ptr:#x}: 1000 B\n"]
    adaptor.deallocate(ptr, 1000)


# ---- failure callback ----------------------------------------------------------------


def test_it_is_asked_until_it_gives_up() -> None:
    asked: list[int] = []

    def ask(nbytes: int) -> bool:
        asked.append(nbytes)
        return len(asked) < 3

    adaptor = mr.FailureCallbackResourceAdaptor(limited(), ask)
    with pytest.raises(numpy_rmm.OutOfMemoryError, match=r"2 MiB asked.*limit 1 MiB"):
        adaptor.allocate("2 MiB")
    assert asked == [2 * MIB] * 3
    adaptor.deallocate(adaptor.allocate(1000), 1000)
    assert len(asked) == 3


def test_what_it_frees_serves_the_request() -> None:
    upstream = limited()
    cache = [upstream.allocate("500 KiB") for _ in range(2)]

    def give_up(nbytes: int) -> bool:
        if cache:
            upstream.deallocate(cache.pop(), "500 KiB")
            return True
        return False

    adaptor = mr.FailureCallbackResourceAdaptor(upstream, give_up)
    ptr = adaptor.allocate("900 KiB")
    assert not cache
    adaptor.deallocate(ptr, "900 KiB")


class MineError(Exception):
    pass


@pytest.mark.parametrize("error", [MineError, MemoryError, KeyboardInterrupt])
def test_its_exceptions_cross_unchanged(error: type[BaseException]) -> None:
    raised = error("mine")

    def ask(nbytes: int) -> bool:
        raise raised

    inner = mr.FailureCallbackResourceAdaptor(limited(), ask)
    adaptor = mr.StatisticsResourceAdaptor(inner)
    with pytest.raises(error, match="mine") as caught:
        adaptor.allocate("2 MiB")
    assert caught.value is raised
    assert caught.traceback[-1].name == "ask"
    assert adaptor.statistics().current_bytes == 0


def test_what_an_upstream_of_python_raised_stays_when_it_gives_up() -> None:
    n_calls = 0

    def allocate(nbytes: int, stream: object) -> int:
        nonlocal n_calls
        n_calls += 1
        raise MemoryError(f"number {n_calls}")

    failing = mr.CallbackMemoryResource(allocate, print, kind="host")
    answers = [True, False]
    adaptor = mr.FailureCallbackResourceAdaptor(failing, lambda _: answers.pop(0))
    with pytest.raises(MemoryError, match="number 2"):
        adaptor.allocate(256)
    assert n_calls == 2
    assert answers == []


def test_an_exception_of_its_own_has_the_others_as_context() -> None:
    def allocate(nbytes: int, stream: object) -> int:
        raise MemoryError("first")

    def ask(nbytes: int) -> bool:
        raise MineError("second")

    failing = mr.CallbackMemoryResource(allocate, print, kind="host")
    with pytest.raises(MineError, match="second") as caught:
        mr.FailureCallbackResourceAdaptor(failing, ask).allocate(256)
    assert isinstance(caught.value.__context__, MemoryError)


def test_an_answer_without_a_truth_is_an_error() -> None:
    adaptor = mr.FailureCallbackResourceAdaptor(
        limited(),
        lambda nbytes: np.zeros(2),  # type: ignore[arg-type,return-value]
    )
    with pytest.raises(ValueError, match="truth value"):
        adaptor.allocate("2 MiB")


def test_it_backs_no_handler_nor_does_what_stands_over_it() -> None:
    adaptor = mr.FailureCallbackResourceAdaptor(host_pool(), lambda nbytes: False)
    for refused in adaptor, mr.TrackingResourceAdaptor(adaptor):
        with pytest.raises(TypeError, match="calls Python functions"):
            numpy_rmm.set_handler(refused)


def test_its_function_must_be_one() -> None:
    with pytest.raises(TypeError, match="callback must be callable, not int"):
        mr.FailureCallbackResourceAdaptor(host_pool(), 3)  # type: ignore[arg-type]


def test_a_cycle_through_its_function_is_collected() -> None:
    class Owner:
        def __init__(self) -> None:
            self.mr = mr.FailureCallbackResourceAdaptor(host_pool(), self.ask)

        def ask(self, nbytes: int) -> bool:
            return False

    alive = weakref.ref(Owner())
    gc.collect()
    assert alive() is None


# ---- alignment and prefetching -------------------------------------------------------


@pytest.mark.parametrize("alignment", [64, 256, 4096, 1 << 20])
def test_blocks_are_aligned_from_the_threshold_on(alignment: int) -> None:
    adaptor = mr.AlignedResourceAdaptor(host_pool(), alignment, "1 KiB")
    for nbytes in (1024, 10_000, 3 * MIB):
        ptr = adaptor.allocate(nbytes)
        assert ptr % alignment == 0
        adaptor.deallocate(ptr, nbytes)


def test_wrong_alignments_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two, not 3"):
        mr.AlignedResourceAdaptor(host_pool(), 3)
    fixed = mr.FixedSizeMemoryResource(mr.HostMemoryResource(), 192, 4)
    with pytest.raises(NotImplementedError, match="4096"):
        mr.AlignedResourceAdaptor(fixed, 4096).allocate(100)


def test_managed_memory_is_moved_to_the_device(simulator: SimulatedCuda) -> None:
    adaptor = mr.PrefetchResourceAdaptor(
        mr.PoolMemoryResource(mr.ManagedMemoryResource())
    )
    ptr = adaptor.allocate(1000)
    moved = [entry for entry in simulator.log() if "Prefetch" in entry]
    assert len(moved) == 1
    assert f"({ptr:#x}, 0x3e8, 0x0" in moved[0]
    adaptor.deallocate(ptr, 1000)


def test_signatures_are_rmms() -> None:
    expected = {
        mr.AlignedResourceAdaptor: (
            "(upstream_mr, alignment=256, alignment_threshold=0)"
        ),
        mr.PrefetchResourceAdaptor: "(upstream_mr)",
        mr.FailureCallbackResourceAdaptor: "(upstream_mr, callback)",
        mr.TrackingResourceAdaptor: "(upstream_mr, capture_stacks=False)",
    }
    for adaptor, signature in expected.items():
        assert str(inspect.signature(adaptor)) == signature
