"""Arrays as arguments of Numba's kernels, over stand-ins for the modules of numba-cuda.

`prepare` is what numba-cuda 0.30 does with an argument; on a GPU the real one is asked
(tests/gpu/test_allocators.py).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DeviceArray, DeviceBuffer, DeviceScalar, Stream, _numba, to_device
from numpy_rmm.testing import Driver

pytestmark = pytest.mark.usefixtures("driver")


class Hint:
    """numba.cuda.args.InOut, and what it makes of things that are not ours."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def to_device(self, retr: list[Any], stream: Any = 0) -> Any:
        raise AssertionError("it went the long way")


def wrap_arg(value: Any, default: type = Hint) -> Any:
    return value if isinstance(value, Hint) else default(value)


@pytest.fixture
def numba(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Puts numba-cuda where it is looked for; its dispatcher is returned."""
    contents: dict[str, dict[str, Any]] = {
        "numba": {},
        "numba.cuda": {},
        "numba.cuda.np": {},
        "numba.cuda.np.numpy_support": {"from_dtype": lambda dtype: dtype.name},
        "numba.cuda.types": {"Array": lambda *args: args},
        "numba.cuda.dispatcher": {"wrap_arg": wrap_arg},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    _numba.array_type.cache_clear()
    yield sys.modules["numba.cuda.dispatcher"]
    _numba.array_type.cache_clear()


def prepare(dispatcher: Any, value: Any, stream: Any = 0) -> list[Any]:
    """The words that a kernel gets for an array."""
    _ = value._numba_type_  # at each launch, before
    array = dispatcher.wrap_arg(value).to_device([], stream)
    layout = array._layout
    strides = layout.strides_in_bytes or np.empty(array.shape, array.dtype).strides
    return [array.size, array.dtype.itemsize, array.ptr, *array.shape, *strides]


VIEWS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "all": (lambda x: x, "C"),
    "transposed": (lambda x: x.T, "F"),
    "steps": (lambda x: x[::2, 1::3], "A"),
    "row": (lambda x: x[2], "C"),
    "column": (lambda x: x[:, 2], "A"),
    "one column": (lambda x: x[:, 2:3], "A"),
    "element": (lambda x: x[1, 1, ...], "C"),
    "no rows": (lambda x: x[3:3], "C"),
}


@pytest.mark.parametrize("view", VIEWS)
def test_its_type(numba: object, view: str) -> None:
    take, layout = VIEWS[view]
    array = take(to_device(np.zeros((6, 8), np.float32)))
    found = array._numba_type_
    assert found == ("float32", array.ndim, layout)
    assert array._numba_type_ is found
    assert array.is_contiguous_c == take(np.zeros((6, 8))).flags.c_contiguous
    assert array.is_contiguous_f == take(np.zeros((6, 8))).flags.f_contiguous


@pytest.mark.parametrize("view", VIEWS)
def test_what_a_kernel_gets(numba: Any, view: str) -> None:
    take, _ = VIEWS[view]
    array = take(to_device(np.arange(48, dtype="f8").reshape(6, 8)))
    expected = [array.size, 8, array.ptr, *array.shape, *array.strides]
    assert prepare(numba, array) == expected


def test_a_buffer_is_an_array_of_bytes(numba: Any) -> None:
    buffer = DeviceBuffer(size=100)
    assert buffer._numba_type_ == ("uint8", 1, "C")
    assert prepare(numba, buffer) == [100, 1, buffer.ptr, 100, 1]
    buffer.resize(1000)  # nothing of the launch is left


def test_a_scalar_is_an_array_of_no_dimensions(numba: Any) -> None:
    scalar = DeviceScalar(np.int32, 5)
    assert prepare(numba, scalar) == [1, 4, scalar.ptr]
    # numba-cuda-mlir takes what has both names for a hint about a value of the host
    assert not hasattr(scalar, "to_device")
    assert not hasattr(to_device(np.zeros(3)), "value")


def test_what_is_not_ours_goes_its_way(numba: Any) -> None:
    prepare(numba, DeviceArray(3))
    hint = Hint(5)
    assert numba.wrap_arg(hint) is hint
    assert numba.wrap_arg(7).value == 7
    assert numba.wrap_arg(7, default=str) == "7"
    wrapped = numba.wrap_arg
    _numba.array_type.cache_clear()
    prepare(numba, DeviceArray(3))
    assert numba.wrap_arg is wrapped  # once


class Named(DeviceArray):
    pass


def test_a_subclass_goes_by_dlpack(numba: Any) -> None:
    assert Named(3)._numba_type_ == ("float64", 1, "C")
    assert isinstance(numba.wrap_arg(Named(3)), Hint)


def test_a_numba_without_that_name(numba: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(numba, "wrap_arg")
    assert DeviceArray(3)._numba_type_ == ("float64", 1, "C")


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numba.cuda", raising=False)
    _numba.array_type.cache_clear()
    for value in (DeviceArray(3), DeviceBuffer(size=3), DeviceScalar("i4")):
        assert not hasattr(value, "_numba_type_")


class NumbaStream:
    def __init__(self, handle: int) -> None:
        self.handle = handle


NumbaStream.__module__ = "numba.cuda.cudadrv.driver"


@pytest.mark.parametrize("as_object", [True, False])
def test_a_copy_of_ours_that_runs_comes_before_the_launch(
    numba: Any, driver: Driver, as_object: bool
) -> None:
    own, launch = Stream(flags=1), Stream(flags=1)
    array = to_device(np.zeros(1000), own)
    with driver.held(own):
        copied = array.copy()
        given = NumbaStream(launch.handle) if as_object else launch.handle
        assert prepare(numba, copied, given)[2] == copied.ptr
        event = driver.create_event()
        driver.check(driver.cuEventRecord(event, launch.handle))
        assert not driver.is_done(event)
    launch.synchronize()
    match = "stream must be a handle or a stream"
    with driver.held(own), pytest.raises(TypeError, match=match):
        array.copy().to_device([], "no stream")
    driver.check(driver.cuEventDestroy(event))


def test_an_argument_waits_for_nothing_else(
    numba: Any, driver: Driver, simulator: Any
) -> None:
    array = to_device(np.zeros(1000), Stream(flags=1))
    prepare(numba, array)
    simulator.clear_log()
    prepare(numba, array, 0)
    assert simulator.log() == []


def test_numpy_is_refused_elements() -> None:
    array = numpy_rmm.to_device(np.zeros(3))
    for call in (np.asarray, np.array, lambda x: np.add(x, 1), np.sum):
        with pytest.raises(TypeError, match=r"copy_to_host\(\) brings them"):
            call(array)
