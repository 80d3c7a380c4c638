"""Counts of the current device resource, and the profiler, as RMM's, with threads."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DeviceBuffer, Statistics, mr
from numpy_rmm.statistics import (
    MemoryRecord,
    ProfilerRecords,
    default_profiler_records,
    enable_statistics,
    get_statistics,
    pop_statistics,
    profiler,
    push_statistics,
    statistics,
)

Run = Callable[..., subprocess.CompletedProcess[str]]

SIZES = [100, 40_000, 3_000_000]  # a cell, a block, a large one


def counted(bytes_: int, count: int) -> Statistics:
    """Blocks that were allocated, and are all still there."""
    return Statistics(bytes_, count, bytes_, count, bytes_, count)


@pytest.fixture
def device(cuda: object) -> Iterator[mr.MemoryResource]:
    """The current device resource, which is put back."""
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    mr.set_current_device_resource(pool)
    yield pool
    mr.set_current_device_resource(None)


@pytest.fixture
def enabled(device: mr.MemoryResource) -> mr.StatisticsResourceAdaptor:
    """The same, with statistics."""
    enable_statistics()
    adaptor = mr.get_current_device_resource()
    assert isinstance(adaptor, mr.StatisticsResourceAdaptor)
    return adaptor


@pytest.fixture
def records() -> ProfilerRecords:
    return ProfilerRecords()


def in_thread(function: Callable[[], object]) -> None:
    """Runs it to its end; what it raises is raised here."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(function).result()


# ---- of the current device resource --------------------------------------------------


def test_where_they_are_not_enabled_there_are_none(device: mr.MemoryResource) -> None:
    assert get_statistics() is None
    assert push_statistics() is None
    assert pop_statistics() is None
    assert mr.get_current_device_resource() is device


def test_without_a_device_there_are_none(run_python: Run, tmp_path: Path) -> None:
    done = run_python(
        """
        from numpy_rmm import CudaUnavailableError, statistics
        print(statistics.get_statistics(), statistics.push_statistics())
        print(statistics.pop_statistics())
        try:
            statistics.enable_statistics()
        except CudaUnavailableError:
            print("unavailable")
        """,
        NUMPY_RMM_CUDA_LIBRARY=str(tmp_path / "nowhere.so"),
    )
    assert (done.stdout, done.stderr) == ("None None\nNone\nunavailable\n", "")


def test_enabling_twice_is_enabling_once(enabled: mr.MemoryResource) -> None:
    enable_statistics()
    assert mr.get_current_device_resource() is enabled


def test_a_scope_counts_from_zero(enabled: mr.MemoryResource) -> None:
    first = DeviceBuffer(size=10)
    assert get_statistics() == counted(10, 1)
    second = DeviceBuffer(size=20)
    assert push_statistics() == counted(30, 2)
    third = DeviceBuffer(size=5)
    assert get_statistics() == counted(5, 1)
    del first
    assert pop_statistics() == Statistics(-5, 0, 5, 1, 5, 1)
    assert get_statistics() == Statistics(25, 2, 35, 3, 35, 3)
    del second, third
    assert get_statistics() == Statistics(0, 0, 35, 3, 35, 3)


def test_a_scope_that_only_frees_is_negative(enabled: mr.MemoryResource) -> None:
    buffer = DeviceBuffer(size=10)
    push_statistics()
    del buffer
    assert pop_statistics() == Statistics(-10, -1, 0, 0, 0, 0)


def test_the_last_counts_cannot_be_popped(enabled: mr.MemoryResource) -> None:
    push_statistics()
    pop_statistics()
    with pytest.raises(IndexError, match="cannot pop the last counter pair"):
        pop_statistics()


def test_scopes_of_the_adaptor_itself_show(
    enabled: mr.StatisticsResourceAdaptor,
) -> None:
    buffer = DeviceBuffer(size=10)
    enabled.push_counters()
    assert get_statistics() == counted(0, 0)
    del buffer
    assert pop_statistics() == Statistics(-10, -1, 0, 0, 0, 0)


def test_a_scope_counts_what_its_thread_allocates(enabled: mr.MemoryResource) -> None:
    kept: list[DeviceBuffer] = []

    def other() -> None:
        push_statistics()
        kept.append(DeviceBuffer(size=1000))
        assert pop_statistics() == counted(1000, 1)

    push_statistics()
    buffer = DeviceBuffer(size=10)
    in_thread(other)
    assert pop_statistics() == counted(10, 1)
    assert get_statistics() == counted(1010, 2)
    del buffer
    kept.clear()


def test_a_block_that_another_thread_frees_counts_where_it_was_made(
    enabled: mr.MemoryResource,
) -> None:
    kept: list[DeviceBuffer] = []

    def free() -> None:
        push_statistics()
        kept.clear()
        assert pop_statistics() == counted(0, 0)

    push_statistics()
    kept.append(DeviceBuffer(size=10))
    in_thread(free)
    assert pop_statistics() == Statistics(0, 0, 10, 1, 10, 1)


def test_other_resources_do_not_count(enabled: mr.MemoryResource) -> None:
    push_statistics()
    with numpy_rmm.use_handler("host"):
        x = np.ones(1000)
    other = DeviceBuffer(size=10, mr=mr.CudaMemoryResource())
    assert pop_statistics() == counted(0, 0)
    del x, other


def test_inside_of_the_block_they_are_enabled(device: mr.MemoryResource) -> None:
    with statistics():
        adaptor = mr.get_current_device_resource()
        assert isinstance(adaptor, mr.StatisticsResourceAdaptor)
        assert adaptor.upstream is device
        outer = DeviceBuffer(size=20)
        assert get_statistics() == counted(20, 1)
        with statistics():
            assert mr.get_current_device_resource() is adaptor
            inner = DeviceBuffer(size=10)
            assert get_statistics() == counted(10, 1)
        assert get_statistics() == counted(30, 2)
        del outer, inner
    assert mr.get_current_device_resource() is device
    assert get_statistics() is None


@pytest.mark.parametrize("was_enabled", [False, True])
def test_a_resource_that_is_replaced_inside_is_reported_and_stays(
    was_enabled: bool, device: mr.MemoryResource
) -> None:
    if was_enabled:
        enable_statistics()
    other = mr.CudaMemoryResource()
    with pytest.raises(ValueError, match="was replaced inside"), statistics():
        mr.set_current_device_resource(other)
    assert mr.get_current_device_resource() is other
    assert numpy_rmm._core._scope_innermost(None) == 0


# ---- arrays, by name -----------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
def test_arrays_under_a_handler_are_counted_by_name(
    nbytes: int, handler: numpy_rmm.Handler, records: ProfilerRecords
) -> None:
    with profiler(records=records, name="load"):
        a = np.zeros(nbytes, np.uint8)
        b = np.empty(nbytes, np.uint8)
        del a
        c = np.empty(nbytes, np.uint8)
    assert records.records == {"load": MemoryRecord(1, 3 * nbytes, 2 * nbytes)}
    del b, c


def test_arrays_that_grow_are_counted(
    handler: numpy_rmm.Handler, records: ProfilerRecords
) -> None:
    with profiler(records=records, name="grow"):
        x = np.zeros(100, np.uint8)
        x.resize(1_000_000, refcheck=False)
        y = np.zeros(100, np.uint8)
    assert not x.any()
    record = records.records["grow"]
    assert 1_000_100 <= record.memory_peak <= 1_000_200
    assert record.memory_peak <= record.memory_total <= 1_000_200
    del x, y


def test_a_later_call_is_added(records: ProfilerRecords) -> None:
    with numpy_rmm.use_handler("host"):
        for n in 100, 3000, 20:
            with profiler(records=records, name="zeros"):
                np.zeros(n, np.uint8)
    assert records.records["zeros"] == MemoryRecord(3, 3120, 3000)


def test_a_function_has_a_name_of_its_own(records: ProfilerRecords) -> None:
    @profiler(records=records)
    def load(n: int) -> np.ndarray:
        """Loads."""
        return np.zeros(n, np.uint8)

    with numpy_rmm.use_handler("host"):
        x = load(100), load(n=200)
    (name,) = records.records
    assert name.startswith(__file__ + ":")
    assert name.endswith("(test_a_function_has_a_name_of_its_own.<locals>.load)")
    assert records.records[name] == MemoryRecord(2, 300, 200)
    assert (load.__name__, load.__doc__) == ("load", "Loads.")
    del x


def test_names_nest(records: ProfilerRecords) -> None:
    with numpy_rmm.use_handler("host"), profiler(records=records, name="outer"):
        x = np.zeros(100, np.uint8)
        with profiler(records=records, name="inner"):
            y = np.zeros(30, np.uint8)
            del x
    assert records.records["outer"] == MemoryRecord(1, 130, 130)
    assert records.records["inner"] == MemoryRecord(1, 30, 30)
    del y


def test_an_exception_passes_and_is_counted(records: ProfilerRecords) -> None:
    @profiler(records=records, name="fails")
    def fail() -> float:
        return np.zeros(100, np.uint8).size / 0

    with numpy_rmm.use_handler("host"), pytest.raises(ZeroDivisionError):
        fail()
    assert records.records["fails"] == MemoryRecord(1, 100, 100)
    assert numpy_rmm._core._scope_innermost(None) == 0


def test_buffers_of_devices_count_with_nothing_enabled(
    device: mr.MemoryResource, records: ProfilerRecords
) -> None:
    with profiler(records=records, name="buffers"):
        DeviceBuffer(size=100)
        DeviceBuffer(size=50)
    assert records.records["buffers"] == MemoryRecord(1, 150, 100)


def test_nothing_given_means_the_default_records() -> None:
    with numpy_rmm.use_handler("host"), profiler(name="test of the default"):
        np.zeros(100, np.uint8)
    record = default_profiler_records.records["test of the default"]
    assert record == MemoryRecord(1, 100, 100)


def test_a_block_needs_a_name(records: ProfilerRecords) -> None:
    with pytest.raises(ValueError, match="no name of its own"):
        profiler(records=records).__enter__()
    assert numpy_rmm._core._scope_innermost(None) == 0


def test_generators_are_refused(records: ProfilerRecords) -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="a generator runs in parts"):
        profiler(records=records)(numbers)
    with pytest.raises(TypeError, match="a function is needed, not int"):
        profiler(records=records)(3)  # type: ignore[arg-type]


# ---- threads and tasks ---------------------------------------------------------------


def test_each_thread_counts_its_own(records: ProfilerRecords) -> None:
    barrier = threading.Barrier(4)

    @profiler(records=records, name="work")
    def work(n: int) -> None:
        barrier.wait()
        for _ in range(200):
            np.zeros(n, np.uint8)
        barrier.wait()

    def run(n: int) -> None:
        with numpy_rmm.use_handler("host"):
            work(n)

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(run, [100, 1000, 10_000, 100_000]))
    assert records.records["work"] == MemoryRecord(4, 200 * 111_100, 100_000)


def test_one_object_serves_threads_and_enters_itself(records: ProfilerRecords) -> None:
    block = profiler(records=records, name="block")

    def use() -> None:
        with numpy_rmm.use_handler("host"), block:
            np.zeros(1000, np.uint8)

    with numpy_rmm.use_handler("host"), block, block:
        np.zeros(10, np.uint8)
        in_thread(use)
    assert records.records["block"] == MemoryRecord(3, 1020, 1000)


def test_arrays_that_a_consumer_frees_leave_the_producer(
    records: ProfilerRecords,
) -> None:
    arrays: list[np.ndarray] = []

    def consume() -> None:
        with profiler(records=records, name="consume"), numpy_rmm.use_handler("host"):
            arrays.clear()
            np.zeros(70, np.uint8)

    with profiler(records=records, name="produce"), numpy_rmm.use_handler("host"):
        for _ in range(3):
            arrays.append(np.zeros(50_000, np.uint8))
            in_thread(consume)
    assert records.records["produce"] == MemoryRecord(1, 150_000, 50_000)
    assert records.records["consume"] == MemoryRecord(3, 210, 70)


def test_a_coroutine_is_counted_until_it_ends(records: ProfilerRecords) -> None:
    @profiler(records=records, name="task")
    async def task(n: int) -> None:
        x = np.zeros(n, np.uint8)
        await asyncio.sleep(0)
        del x

    async def main() -> None:
        await task(100)
        await asyncio.gather(task(10), task(20))

    with numpy_rmm.use_handler("host"):
        asyncio.run(main())
    record = records.records["task"]
    assert record.num_calls == 3
    assert 130 <= record.memory_total <= 160
    assert numpy_rmm._core._scope_innermost(None) == 0


def test_a_block_that_another_thread_leaves_is_warned_of(
    records: ProfilerRecords,
) -> None:
    block = profiler(records=records, name="astray")

    def leave() -> None:
        with pytest.warns(RuntimeWarning, match="did not enter it"):
            block.__exit__(None, None, None)

    with block:
        in_thread(leave)
    assert records.records["astray"] == MemoryRecord(1, 0, 0)


def test_a_thread_may_end_inside_of_a_block(records: ProfilerRecords) -> None:
    kept: list[np.ndarray] = []

    def begin() -> None:
        profiler(records=records, name="never ends").__enter__()
        with numpy_rmm.use_handler("host"):
            kept.append(np.ones(100))

    before = numpy_rmm.registry["host"].statistics().current_count
    in_thread(begin)
    assert records.records == {}
    kept.clear()
    assert numpy_rmm.registry["host"].statistics().current_count == before


# ---- the report ----------------------------------------------------------------------


def test_a_report_without_records_says_so(records: ProfilerRecords) -> None:
    assert "No data" in records.report()
    assert records.records == {}


@pytest.mark.parametrize(
    ("ordered_by", "names"),
    [
        ("memory_peak", ["peak", "total", "calls"]),
        ("memory_total", ["total", "calls", "peak"]),
        ("num_calls", ["calls", "total", "peak"]),
    ],
)
def test_a_report_is_ordered(
    ordered_by: str, names: list[str], records: ProfilerRecords
) -> None:
    records.add("peak", Statistics(0, 0, 5000, 1, 5000, 1))
    for _ in range(2):
        records.add("total", Statistics(0, 0, 3000, 1, 1_000_000, 1))
    for _ in range(3):
        records.add("calls", Statistics(0, 0, 2000, 1, 2000, 1))
    report = records.report(ordered_by)  # type: ignore[arg-type]
    assert [line.split()[-1] for line in report.splitlines()[-3:]] == names
    assert "\n     2           3,000       2,000,000  total" in report
    assert f"Ordered by: {ordered_by}\n" in report
    columns = ["ncalls", "memory_peak", "memory_total", "filename:lineno(function)"]
    assert report.splitlines()[-4].split() == columns  # as in RMM
    assert str(records) == records.report()
    assert "num_calls=3" in repr(records)


def test_a_report_in_no_known_order_is_refused(records: ProfilerRecords) -> None:
    with pytest.raises(ValueError, match="one of num_calls, memory_total, "):
        records.report("name")  # type: ignore[arg-type]


def test_records_are_a_copy(records: ProfilerRecords) -> None:
    records.add("a", counted(1, 1))
    records.records["a"].add(10, 10)
    assert records.records == {"a": ProfilerRecords.MemoryRecord(1, 1, 1)}


def test_scopes_that_are_gone_are_a_lookup_error() -> None:
    scope = numpy_rmm._core._scope_push(None)
    numpy_rmm._core._scope_pop(scope)
    for call in numpy_rmm._core._scope_pop, numpy_rmm._core._scope_counts:
        with pytest.raises(LookupError, match="no such scope"):
            call(scope)
    with pytest.raises(TypeError):
        numpy_rmm._core._scope_push("host")  # type: ignore[arg-type]
