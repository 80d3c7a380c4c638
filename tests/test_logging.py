"""Logs of allocations, as RMM writes them, and the switches for all devices."""

from __future__ import annotations

import csv
import inspect
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import Stream, mr
from numpy_rmm.testing import simulate_cuda

COLUMNS = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"]


def host_pool() -> mr.MemoryResource:
    return mr.PoolMemoryResource(mr.HostMemoryResource())


def device_pool() -> mr.MemoryResource:
    return mr.PoolMemoryResource(mr.CudaMemoryResource())


def rows_of(name: str | Path) -> list[dict[str, str]]:
    with Path(name).open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        assert reader.fieldnames == COLUMNS
    return rows


def rows(log: mr.LoggingResourceAdaptor) -> list[dict[str, str]]:
    log.flush()
    return rows_of(log.get_file_name())


@pytest.fixture
def log(tmp_path: Path) -> mr.LoggingResourceAdaptor:
    return mr.LoggingResourceAdaptor(host_pool(), tmp_path / "log.csv")


# ---- rows ----------------------------------------------------------------------------


def test_each_request_has_a_row(log: mr.LoggingResourceAdaptor) -> None:
    ptr = log.allocate(1000)
    log.deallocate(ptr, 1000)
    first, second = rows(log)
    assert first["Action"] == "allocate"
    assert second["Action"] == "free"
    for row in first, second:
        assert int(row["Pointer"], 16) == ptr
        assert row["Size"] == "1000"
        assert row["Stream"] == "0"
        assert int(row["Thread"]) == threading.get_native_id()
        hours, minutes, seconds = row["Time"].split(":")
        assert 0 <= int(hours) < 24
        assert 0 <= int(minutes) < 60
        assert 0 <= float(seconds) < 60


def test_a_failure_has_a_row(tmp_path: Path) -> None:
    small = mr.LimitingResourceAdaptor(host_pool(), "1 MiB")
    log = mr.LoggingResourceAdaptor(small, tmp_path / "log.csv")
    with pytest.raises(numpy_rmm.OutOfMemoryError, match="limit 1 MiB"):
        log.allocate("2 MiB")
    assert {(row["Action"], row["Pointer"], row["Size"]) for row in rows(log)} == {
        ("allocate failure", "(nil)", str(2 << 20))
    }


def test_arrays_are_logged(log: mr.LoggingResourceAdaptor) -> None:
    with numpy_rmm.use_handler(log):
        x = np.ones(1000)
        y = np.zeros(100_000)
        x.resize(2000, refcheck=False)
        del x, y
    found = [(row["Action"], int(row["Size"])) for row in rows(log)]
    assert ("allocate", 8000) in found
    assert ("allocate", 800_000) in found
    assert ("allocate", 16_000) in found
    allocated = sum(size for action, size in found if action == "allocate")
    assert allocated == sum(size for action, size in found if action == "free")
    statistics = log.statistics()
    assert statistics.current_bytes == 0
    assert statistics.total_bytes >= 816_000
    assert statistics.errors == 0


def test_statistics_know_what_is_not_written_yet(
    log: mr.LoggingResourceAdaptor,
) -> None:
    ptr = log.allocate(1000)
    assert log.statistics().current_bytes == 1000
    log.deallocate(ptr, 1000)
    assert log.statistics().current_bytes == 0
    assert log.statistics().peak_bytes == 1000


def test_rows_of_threads_are_all_there(log: mr.LoggingResourceAdaptor) -> None:
    def work() -> None:
        for _ in range(300):
            log.deallocate(log.allocate(64), 64)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rows(log)
    assert len(found) == 2400
    assert len({row["Thread"] for row in found}) in range(1, 5)
    live: set[str] = set()
    for row in found:
        if row["Action"] == "allocate":
            assert row["Pointer"] not in live
            live.add(row["Pointer"])
        else:
            live.remove(row["Pointer"])
    assert not live


@pytest.fixture
def one_thread_at_a_time() -> Iterator[None]:
    """None but one that waits gives the interpreter up."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("one_thread_at_a_time")
def test_who_waits_for_the_interpreter_is_not_waited_for(tmp_path: Path) -> None:
    """A thread is about to give a block back while another one fills its ring."""
    host, name = mr.HostMemoryResource(), tmp_path / "log.csv"
    begun, goes_on = threading.Event(), False

    def deallocate(ptr: int, nbytes: int, _: Stream) -> None:
        begun.set()
        while not goes_on:
            time.sleep(0.001)
        host.deallocate(ptr, nbytes)

    slow = mr.CallbackMemoryResource(
        lambda nbytes, _: host.allocate(nbytes), deallocate, kind="host"
    )
    log = mr.LoggingResourceAdaptor(slow, name)
    other = mr.LoggingResourceAdaptor(host, name)
    thread = threading.Thread(target=log.deallocate, args=(log.allocate(100), 100))
    thread.start()
    begun.wait()
    goes_on = True
    for _ in range(5000):
        other.deallocate(other.allocate(64), 64)
    thread.join()
    times = [row["Time"] for row in rows(log)]
    assert len(times) == 10_002
    assert times == sorted(times)


@pytest.mark.usefixtures("cuda")
def test_the_stream_of_a_buffer_stands_in_its_row(tmp_path: Path) -> None:
    log = mr.LoggingResourceAdaptor(device_pool(), tmp_path / "log.csv")
    stream = numpy_rmm.Stream()
    buffer = numpy_rmm.DeviceBuffer(size=1000, stream=stream, mr=log)
    stream.synchronize()
    del buffer
    allocated, freed = rows(log)
    assert allocated["Stream"] == freed["Stream"] == hex(stream.handle)


# ---- names ---------------------------------------------------------------------------


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("rmm_log.txt", "rmm_log.dev0.txt"),
        ("rmm_log", "rmm_log.dev0"),
        (".rmm_log", ".rmm_log.dev0"),
        ("a.b/rmm_log", "a.b/rmm_log.dev0"),
    ],
)
def test_device_memory_names_its_device(
    tmp_path: Path, given: str, becomes: str
) -> None:
    (tmp_path / "a.b").mkdir()
    log = mr.LoggingResourceAdaptor(mr.CudaMemoryResource(), str(tmp_path / given))
    assert log.get_file_name() == str(tmp_path / becomes)
    assert (tmp_path / becomes).exists()


def test_host_memory_has_the_name_as_it_is(log: mr.LoggingResourceAdaptor) -> None:
    assert log.get_file_name().endswith("/log.csv")


def test_the_option_is_the_name_of_those_without_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NUMPY_RMM_LOG_FILE"):
        mr.LoggingResourceAdaptor(mr.HostMemoryResource())
    with numpy_rmm.options(log_file=str(tmp_path / "log.csv")):
        log = mr.LoggingResourceAdaptor(mr.HostMemoryResource())
    assert log.get_file_name() == str(tmp_path / "log.csv")


def test_the_environment_is_the_option(run_python: Callable[..., object]) -> None:
    code = """
    import numpy_rmm
    log = numpy_rmm.mr.LoggingResourceAdaptor(numpy_rmm.mr.HostMemoryResource())
    print(log.get_file_name(), end="")
    """
    done = run_python(code, NUMPY_RMM_LOG_FILE="here.csv")
    assert done.stdout == "here.csv", done.stderr  # type: ignore[attr-defined]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no/such"):
        mr.LoggingResourceAdaptor(mr.HostMemoryResource(), tmp_path / "no/such")
    with pytest.raises(TypeError):
        mr.LoggingResourceAdaptor(mr.HostMemoryResource(), 3)  # type: ignore[arg-type]


# ---- nothing is lost -----------------------------------------------------------------


def test_the_end_of_a_process_writes_the_rows(
    run_python: Callable[..., object], tmp_path: Path
) -> None:
    code = """
    import numpy as np, numpy_rmm
    log = numpy_rmm.mr.LoggingResourceAdaptor(numpy_rmm.registry["host"], "log.csv")
    numpy_rmm.set_handler(log)
    kept = [np.ones(1000) for _ in range(10)]
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    found = [row for row in rows_of(tmp_path / "log.csv") if row["Size"] == "8000"]
    assert sum(row["Action"] == "allocate" for row in found) == 10


def test_a_forked_child_goes_on_with_the_file(
    run_python: Callable[..., object], tmp_path: Path
) -> None:
    code = """
    import os, sys, numpy_rmm
    log = numpy_rmm.mr.LoggingResourceAdaptor(numpy_rmm.registry["host"], "log.csv")
    log.deallocate(log.allocate(1000), 1000)
    child = os.fork()
    log.deallocate(log.allocate(2000 if child else 3000), 1)
    if child:
        assert os.waitpid(child, 0)[1] == 0
    else:
        assert log.statistics().total_bytes == 4000
    sys.exit(0)
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    found = rows_of(tmp_path / "log.csv")
    assert sorted(row["Size"] for row in found) == [
        size for size in ("1000", "2000", "3000") for _ in range(2)
    ]
    threads = {row["Size"]: row["Thread"] for row in found}
    assert threads["1000"] == threads["2000"] != threads["3000"]


def test_a_child_of_multiprocessing_writes_its_rows(
    run_python: Callable[..., object], tmp_path: Path
) -> None:
    code = """
    import multiprocessing, numpy_rmm
    log = numpy_rmm.mr.LoggingResourceAdaptor(numpy_rmm.registry["host"], "log.csv")
    log.deallocate(log.allocate(1000), 1000)
    process = multiprocessing.get_context("fork").Process(
        target=lambda: log.deallocate(log.allocate(2000), 2000))
    process.start()
    process.join()
    assert process.exitcode == 0
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    found = [row["Size"] for row in rows_of(tmp_path / "log.csv")]
    assert sorted(found) == ["1000", "1000", "2000", "2000"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file can grow over 2000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.filterwarnings("ignore:rows of the log:RuntimeWarning")
def test_a_full_disk_is_said_once(log: mr.LoggingResourceAdaptor) -> None:
    for _ in range(100):
        log.deallocate(log.allocate(64), 64)
    with pytest.raises(OSError, match=r"rows of the log .* are lost: EFBIG"):
        log.flush()
    assert 100 < log.statistics().errors < 200
    log.flush()


# ---- all devices ---------------------------------------------------------------------


@pytest.fixture
def two_devices() -> Iterator[None]:
    with simulate_cuda(devices=2):
        yield
        numpy_rmm.disable_logging()
        numpy_rmm.trim()


@pytest.mark.usefixtures("two_devices")
def test_logging_of_all_devices(tmp_path: Path) -> None:
    before = [mr.get_per_device_resource(device) for device in range(2)]
    assert numpy_rmm.get_log_filenames() == {0: None, 1: None}
    numpy_rmm.enable_logging(log_file_name=tmp_path / "rmm_log.csv")
    numpy_rmm.enable_logging(log_file_name=tmp_path / "other.csv")  # is on already
    names = {i: str(tmp_path / f"rmm_log.dev{i}.csv") for i in range(2)}
    assert numpy_rmm.get_log_filenames() == names
    logged = mr.get_per_device_resource(1)
    assert isinstance(logged, mr.LoggingResourceAdaptor)
    assert logged.upstream is before[1]
    logged.deallocate(logged.allocate(1000), 1000)
    buffer = numpy_rmm.DeviceBuffer(size=500)
    numpy_rmm.disable_logging()
    assert numpy_rmm.get_log_filenames() == {0: None, 1: None}
    assert [mr.get_per_device_resource(device) for device in range(2)] == before
    assert [row["Size"] for row in rows_of(tmp_path / "rmm_log.dev1.csv")] == [
        "1000"
    ] * 2
    assert [row["Size"] for row in rows_of(tmp_path / "rmm_log.dev0.csv")] == ["500"]
    log = buffer.mr
    assert isinstance(log, mr.LoggingResourceAdaptor)
    del buffer  # after its log was taken away
    assert [row["Action"] for row in rows(log)] == ["allocate", "free"]
    numpy_rmm.disable_logging()


@pytest.mark.usefixtures("cuda")
def test_logging_needs_a_name() -> None:
    with pytest.raises(ValueError, match="needs the name of a file"):
        numpy_rmm.enable_logging()


def test_signatures_are_rmms() -> None:
    assert str(inspect.signature(mr.LoggingResourceAdaptor)) == (
        "(upstream_mr, log_file_name=None)"
    )
    assert list(inspect.signature(numpy_rmm.enable_logging).parameters) == [
        "log_file_name"
    ]


def test_a_handler_keeps_its_log(log: mr.LoggingResourceAdaptor) -> None:
    name = log.get_file_name()
    with numpy_rmm.use_handler(log):
        x = np.ones(1000)
    del log
    del x
    assert os.path.getsize(name) > 0
