"""RMM's way to set the resources of devices, and its names for levels of messages."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DeviceBuffer, level_enum, mr, reinitialize
from numpy_rmm.testing import SimulatedCuda, simulate_cuda


@pytest.fixture(autouse=True)
def defaults(cuda: object) -> Iterator[None]:
    """Every device has its default before and after a test."""
    yield
    numpy_rmm._core._reset_device_resources()


@pytest.fixture
def hook() -> Iterator[Callable[..., Any]]:
    """Registers hooks that end with the test."""
    hooks: list[Callable[..., Any]] = []

    def register(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        hooks.append(function)
        return numpy_rmm.register_reinitialize_hook(function, *args)

    yield register
    for function in hooks:
        numpy_rmm.unregister_reinitialize_hook(function)


# ---- reinitialize --------------------------------------------------------------------


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("pool", [False, True])
def test_the_arguments_choose_the_resource(pool: bool, managed: bool) -> None:
    reinitialize(pool_allocator=pool, managed_memory=managed)
    source = mr.ManagedMemoryResource if managed else mr.CudaMemoryResource
    current = mr.get_current_device_resource()
    assert type(current) is (mr.PoolMemoryResource if pool else source)
    assert type(current.upstream if pool else current) is source
    assert mr.get_current_device_resource_type() is type(current)
    assert DeviceBuffer(size=100).mr is current


def test_sizes_are_those_of_the_pool() -> None:
    reinitialize(
        pool_allocator=True, initial_pool_size="2kib", maximum_pool_size="8MiB"
    )
    with pytest.raises(numpy_rmm.OutOfMemoryError):
        DeviceBuffer(size="16 MiB")
    assert mr.get_current_device_resource().statistics().reserved_bytes >= 2048


@pytest.mark.parametrize("size", ["50%", np.int64(1 << 20), None])
def test_a_size_is_what_a_pool_takes(size: Any) -> None:
    reinitialize(pool_allocator=True, maximum_pool_size=size)
    assert DeviceBuffer(size=1000).size == 1000


def test_without_a_pool_sizes_are_of_no_account() -> None:
    reinitialize(initial_pool_size="nonsense", maximum_pool_size=-1)
    assert mr.get_current_device_resource_type() is mr.CudaMemoryResource


@pytest.mark.parametrize(
    ("initial", "maximum", "error", "message"),
    [
        (2048, 1024, RuntimeError, "Initial pool size exceeds the maximum pool size"),
        ("2k", None, ValueError, "Could not parse initial_pool_size: .*2k"),
        (None, "8 apples", ValueError, "Could not parse maximum_pool_size: .*apples"),
        (None, -1, ValueError, "maximum_pool_size"),
        (1.5, None, TypeError, "must be an int or text"),
    ],
)
def test_sizes_that_make_no_sense_change_nothing(
    initial: Any, maximum: Any, error: type[Exception], message: str
) -> None:
    before = mr.get_current_device_resource()
    with pytest.raises(error, match=message):
        reinitialize(True, initial_pool_size=initial, maximum_pool_size=maximum)
    assert mr.get_current_device_resource() is before


def test_a_pool_takes_what_the_one_before_it_had(simulator: SimulatedCuda) -> None:
    """Simulated: to map more than a half of a real device takes many seconds."""
    most = "60%"  # of what is free
    reinitialize(pool_allocator=True, initial_pool_size=most)
    first = weakref.ref(mr.get_current_device_resource())
    reinitialize(pool_allocator=True, initial_pool_size=most)
    gc.collect()
    assert first() is None


def test_a_buffer_keeps_what_was_current() -> None:
    reinitialize(pool_allocator=True)
    buffer = DeviceBuffer.to_device(b"abc")
    reinitialize()
    assert type(buffer.mr) is mr.PoolMemoryResource
    assert buffer.tobytes() == b"abc"


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        ([0, 1], {0, 1}),
        (iter((1, 0)), {0, 1}),
        (None, {0}),
        (1, {1}),
        (np.int64(1), {1}),
    ],
)
def test_devices_that_are_not_named_have_their_default(
    devices: Any, named: set[int]
) -> None:
    with simulate_cuda(devices=2):
        mr.set_per_device_resource(0, mr.ManagedMemoryResource(device=0))
        reinitialize(devices=devices)
        for device in (0, 1):
            current = mr.get_per_device_resource(device)
            assert (type(current) is mr.CudaMemoryResource) == (device in named)
            assert mr.get_per_device_resource_type(device) is type(current)
            pointer = current.allocate(100)
            assert current.device == device
            current.deallocate(pointer, 100)
        numpy_rmm._core._reset_device_resources()


def test_a_resource_of_another_device_is_refused() -> None:
    with simulate_cuda(devices=2):
        before = mr.get_per_device_resource(1)
        with pytest.raises(ValueError, match=r"device 0, and cannot be .* of device 1"):
            mr.set_per_device_resource(1, mr.CudaMemoryResource(device=0))
        assert mr.get_per_device_resource(1) is before


def test_a_class_of_ones_own_comes_back() -> None:
    class Own(mr.CudaMemoryResource):
        pass

    mr.set_current_device_resource(mr=Own())
    gc.collect()
    assert type(mr.get_per_device_resource(device=0)) is Own


def test_it_may_be_set_while_others_make_buffers() -> None:
    resources = [mr.PoolMemoryResource(mr.CudaMemoryResource()) for _ in range(2)]
    mr.set_current_device_resource(resources[0])
    errors: list[BaseException] = []
    is_over = threading.Event()

    def make() -> None:
        try:
            while not is_over.is_set():
                assert DeviceBuffer(size=1000).mr in resources
        except BaseException as error:  # noqa: BLE001, shown by the test
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(3000):
        mr.set_current_device_resource(resources[i % 2])
    is_over.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [one.statistics().current_count for one in resources] == [0, 0]


def test_what_has_an_upstream_has_a_class() -> None:
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    assert isinstance(pool, mr.UpstreamResourceAdaptor)
    assert isinstance(mr.LimitingResourceAdaptor(pool, 1), mr.UpstreamResourceAdaptor)
    assert not isinstance(mr.CudaMemoryResource(), mr.UpstreamResourceAdaptor)
    assert issubclass(mr.UpstreamResourceAdaptor, mr.DeviceMemoryResource)
    with pytest.raises(TypeError, match="has no constructor"):
        mr.UpstreamResourceAdaptor(pool)  # type: ignore[call-arg]


def test_requests_are_logged_in_a_file_of_each_device(tmp_path: Path) -> None:
    with simulate_cuda(devices=2):
        reinitialize(
            True, devices=[0, 1], logging=True, log_file_name=tmp_path / "a.csv"
        )
        names = numpy_rmm.get_log_filenames()
        for device in (0, 1):
            logged = mr.get_per_device_resource(device)
            assert type(logged.upstream) is mr.PoolMemoryResource
            logged.deallocate(logged.allocate(1000), 1000)
            assert names[device] == str(tmp_path / f"a.dev{device}.csv")
        mr._flush_logs()
        for device in (0, 1):
            assert ",allocate," in (tmp_path / f"a.dev{device}.csv").read_text()
        numpy_rmm._core._reset_device_resources()


def test_a_log_wants_a_name() -> None:
    with pytest.raises(ValueError, match="log_file"):
        reinitialize(logging=True)
    assert mr.get_current_device_resource_type() is mr.PoolMemoryResource  # default


def test_it_is_initialized_where_cuda_is() -> None:
    assert numpy_rmm.is_initialized()
    assert mr.is_initialized()


def test_it_is_not_where_cuda_is_not(run_python: Any) -> None:
    done = run_python(
        "import numpy_rmm; print(numpy_rmm.is_initialized())",
        NUMPY_RMM_CUDA_LIBRARY="/nowhere/libcuda.so.1",
    )
    assert done.stdout == "False\n", done.stderr


# ---- hooks ---------------------------------------------------------------------------


def test_hooks_run_the_last_first_and_before_anything(hook: Any) -> None:
    seen: list[Any] = []
    hook(seen.append, 1)
    hook(lambda: seen.append(mr.get_current_device_resource_type()))
    hook(seen.append, 3)
    hook(seen.append, 4)
    reinitialize(pool_allocator=True)
    assert seen == [4, 3, mr.PoolMemoryResource, 1]  # the default: a pool
    numpy_rmm.unregister_reinitialize_hook(seen.append)
    del seen[:]
    reinitialize()
    assert len(seen) == 1


def test_a_hook_is_callable() -> None:
    with pytest.raises(TypeError, match="must be callable, not int"):
        numpy_rmm.register_reinitialize_hook(5)  # type: ignore[arg-type]


def test_a_hook_that_raises_ends_it(hook: Any) -> None:
    def refuse() -> None:
        raise LookupError("not now")

    before = mr.get_current_device_resource()
    assert hook(refuse) is refuse
    with pytest.raises(LookupError, match="not now"):
        reinitialize()
    assert mr.get_current_device_resource() is before


def test_an_error_by_rmms_name_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(numpy_rmm.RMMError(2, "no memory")))
    assert (error.errcode, str(error)) == (2, "no memory")


# ---- levels of messages --------------------------------------------------------------


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("numpy_rmm")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.mark.parametrize("level", level_enum)
def test_a_level_that_is_set_holds(level: level_enum, logger: logging.Logger) -> None:
    numpy_rmm.set_logging_level(level)
    assert numpy_rmm.get_logging_level() is level
    for other in level_enum:
        assert numpy_rmm.should_log(other) == (other >= level)


@pytest.mark.parametrize("level", ["info", 3, None, 1.5, [1]])
@pytest.mark.parametrize(
    "function", ["set_logging_level", "set_flush_level", "should_log"]
)
def test_a_level_is_one_of_the_enumeration(function: str, level: Any) -> None:
    with pytest.raises(TypeError, match="level must be a level_enum"):
        getattr(numpy_rmm, function)(level)


def test_what_reinitialize_does_is_told(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    numpy_rmm.set_logging_level(level_enum.warn)
    reinitialize()
    assert caplog.records == []
    numpy_rmm.set_logging_level(level_enum.info)
    reinitialize(pool_allocator=True)
    assert "device 0 is <PoolMemoryResource over" in caplog.text


def test_messages_are_kept_back_below_the_flush_level(logger: logging.Logger) -> None:
    class Written(logging.Handler):
        texts: list[str] = []  # noqa: RUF012, of one test

        def emit(self, record: logging.LogRecord) -> None:
            self.texts.append(record.getMessage())

    logger.addHandler(MemoryHandler(100, target=Written()))
    numpy_rmm.set_logging_level(level_enum.info)
    numpy_rmm.set_flush_level(level_enum.error)
    assert numpy_rmm.get_flush_level() is level_enum.error
    logger.info("one")
    assert Written.texts == []
    logger.error("two")
    assert Written.texts == ["one", "two"]
    logger.info("three")
    numpy_rmm.flush_logger()
    assert Written.texts == ["one", "two", "three"]
    numpy_rmm.set_flush_level(level_enum.info)
