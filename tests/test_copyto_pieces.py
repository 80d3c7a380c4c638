"""copyto in many pieces: boxes, batches, buffers, and what a graph makes of them."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import CudaError, Stream, copyto
from numpy_rmm.testing import Driver, SimulatedCuda, simulate_cuda

PIECE = 4096
N_PIECES = 20  # more than a host array is cut into without batches


class Device:
    """Memory of a device with the layout of an array, and what stood in that; views of
    it are those of the array."""

    def __init__(self, driver: Driver, array: np.ndarray) -> None:
        self.driver, self.array = driver, array
        self.address = driver.allocate(array.nbytes)
        driver.check(driver.cuMemcpyHtoD(self.address, array.ctypes.data, array.nbytes))

    def view(self, of: np.ndarray) -> _View:
        offset = of.ctypes.data - self.array.ctypes.data
        return _View(of, self.address + offset)

    @property
    def whole(self) -> _View:
        return self.view(self.array)

    def read(self) -> np.ndarray:
        self.driver.check(self.driver.cuCtxSynchronize())
        data = self.driver.read(self.address, self.array.nbytes)
        return np.frombuffer(data, self.array.dtype).reshape(self.array.shape)


class _View:
    def __init__(self, of: np.ndarray, address: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": of.shape,
            "typestr": of.dtype.str,
            "data": (address, False),
            "strides": of.strides,
        }


MakeDevice = Callable[[np.ndarray], Device]


@pytest.fixture
def device(driver: Driver) -> Iterator[MakeDevice]:
    made: list[Device] = []

    def make(array: np.ndarray) -> Device:
        made.append(Device(driver, array))
        return made[-1]

    yield make
    driver.check(driver.cuCtxSynchronize())
    for each in made:
        driver.check(driver.cuMemFree(each.address))


def rows(n: int = N_PIECES, nbytes: int = PIECE, pinned: bool = True) -> np.ndarray:
    """Rows that differ, in an array of ours."""
    with numpy_rmm.pinned() if pinned else numpy_rmm.use_handler("host"):
        array = np.empty((n, nbytes), np.uint8)
    array[:] = np.arange(1, n + 1, dtype=np.uint8)[:, None]
    return array


def copies(simulator: SimulatedCuda) -> Counter[str]:
    """How often each copying call was made since the log was cleared."""
    names = (entry.split("(")[0] for entry in simulator.log())
    return Counter(name for name in names if "cuMemcpy" in name)


# ---- any strides ---------------------------------------------------------------------

BASE = (6, 7, 8, 9)
SHAPE = (3, 2, 4, 3)


def some_view(random: np.random.Generator, base: np.ndarray) -> np.ndarray:
    """A view of SHAPE, its axes in any order and direction, with steps of 1 or 2."""
    axes = random.permutation(4)
    parts = [slice(None)] * 4
    for n, axis in zip(SHAPE, axes, strict=True):
        step = int(random.integers(1, 3))
        step = step if (n - 1) * step < BASE[axis] else 1
        reach = (n - 1) * step
        start = int(random.integers(0, BASE[axis] - reach))
        part = slice(start, start + reach + 1, step)
        parts[axis] = part
    view = base[tuple(parts)].transpose(tuple(int(axis) for axis in axes))
    turns = tuple(slice(None, None, int(random.choice([1, -1]))) for _ in SHAPE)
    return view[turns]


def repeated(random: np.random.Generator, view: np.ndarray) -> np.ndarray:
    """The same with one axis repeated, as a source may be."""
    axis = int(random.integers(0, 4))
    part = tuple(slice(0, 1) if i == axis else slice(None) for i in range(4))
    return np.broadcast_to(view[part], SHAPE)


@pytest.mark.parametrize("handle", [None, 0, 1, 2], ids=str)
@pytest.mark.parametrize("way", ["in", "out", "within"])
def test_random_strides(
    driver: Driver, device: MakeDevice, handle: int | None, way: str
) -> None:
    random = np.random.default_rng([20, len(way), 3 if handle is None else handle])
    stream = Stream(flags=1) if handle is None else Stream(handle)
    base = np.arange(np.prod(BASE), dtype=np.int16).reshape(BASE)
    blank = np.full(BASE, -1, np.int16)
    source, target = device(base), device(blank)
    for number in range(12):
        of, to = some_view(random, base), some_view(random, blank)
        of = repeated(random, of) if number % 3 == 0 else of
        expected = blank.copy()
        seen = blank.copy()
        at = np.ndarray(SHAPE, np.int16, seen, offset_of(to, blank), to.strides)
        np.copyto(
            np.ndarray(SHAPE, np.int16, expected, offset_of(to, blank), to.strides), of
        )
        driver.check(
            driver.cuMemcpyHtoD(target.address, blank.ctypes.data, blank.nbytes)
        )
        # It returns when the bytes are staged, and other streams may be faster.
        driver.check(driver.cuCtxSynchronize())
        if way == "out":
            copyto(at, source.view(of), stream=stream)
        else:
            copyto(
                target.view(to), of if way == "in" else source.view(of), stream=stream
            )
            seen = target.read()
        assert (seen == expected).all()


def offset_of(view: np.ndarray, base: np.ndarray) -> int:
    return view.ctypes.data - base.ctypes.data


# ---- boxes ---------------------------------------------------------------------------


@pytest.mark.parametrize("handle", [0, None], ids=["default", "own"])
def test_a_box_is_one_call(
    simulator: SimulatedCuda, device: MakeDevice, handle: int | None
) -> None:
    stream = Stream(flags=1) if handle is None else Stream(handle)
    array = np.arange(4 * 6 * 512, dtype=np.int64).reshape(4, 6, 512)
    part = np.s_[1:4, 2:6, 100:400]
    target = device(np.zeros_like(array))
    back = np.zeros_like(array)
    simulator.clear_log()
    copyto(target.view(target.array[part]), array[part], stream=stream)
    copyto(back[part], target.view(target.array[part]), stream=stream)
    assert copies(simulator) == {"cuMemcpy3DAsync": 2}
    assert (back[part] == array[part]).all()
    assert np.count_nonzero(back) == array[part].size


# ---- batches -------------------------------------------------------------------------


def test_page_locked_pieces_go_in_one_call(
    simulator: SimulatedCuda, device: MakeDevice, stream: Stream
) -> None:
    array, target = rows(), device(np.zeros((N_PIECES, PIECE), np.uint8))
    simulator.clear_log()
    copyto(target.whole, array[::-1], stream=stream)
    assert copies(simulator) == {"cuMemcpyBatchAsync": 1}
    assert (target.read() == array[::-1]).all()


def test_page_locked_pieces_are_not_waited_for(
    driver: Driver, device: MakeDevice, stream: Stream
) -> None:
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        pytest.skip("needs a driver of CUDA 12.8")
    source = device(rows(pinned=False))
    with numpy_rmm.pinned():
        array = np.zeros((N_PIECES, PIECE), np.uint8)
    with driver.held(stream):
        pending = copyto(array[::-1], source.whole, stream=stream, blocking=False)
        assert not pending.done
        assert numpy_rmm.array_info(array).uses == (f"{stream.handle:#x}",)
        assert not array.any()
    pending.wait()
    assert (array[::-1] == source.array).all()


def shorter() -> np.ndarray:
    return rows(nbytes=PIECE - 1)


def ordinary() -> np.ndarray:
    return rows(pinned=False)


@pytest.mark.parametrize("make", [shorter, ordinary])
def test_other_pieces_go_over_a_buffer(
    simulator: SimulatedCuda,
    device: MakeDevice,
    stream: Stream,
    make: Callable[[], np.ndarray],
) -> None:
    array = make()
    target = device(np.zeros_like(array))
    simulator.clear_log()
    copyto(target.whole, array[::-1], stream=stream)
    copyto(array, target.whole, stream=stream)  # so it is reversed
    copyto(array[::-1], target.whole, stream=stream)
    assert copies(simulator) == {"cuMemcpyHtoDAsync": 1, "cuMemcpyDtoHAsync": 2}
    assert (target.read() == array[::-1]).all()


@pytest.mark.parametrize(
    ("n", "handle", "expected"),
    [
        (3, None, {"cuMemcpyHtoDAsync": 3}),
        (4, None, {"cuMemcpyBatchAsync": 1}),
        (16, None, {"cuMemcpyBatchAsync": 1}),
        (16, 2, {"cuMemcpyBatchAsync": 1}),
        (16, 1, {"cuMemcpyHtoDAsync": 16}),
        (16, 0, {"cuMemcpyHtoDAsync": 16}),
        (17, None, {"cuMemcpyHtoDAsync": 1}),
    ],
)
def test_few_pieces_of_ordinary_memory(
    simulator: SimulatedCuda,
    device: MakeDevice,
    n: int,
    handle: int | None,
    expected: dict[str, int],
) -> None:
    array = rows(n, pinned=False)
    target = device(np.zeros_like(array))
    stream = Stream(flags=1) if handle is None else Stream(handle)
    simulator.clear_log()
    copyto(target.whole, array[::-1], stream=stream)
    assert copies(simulator) == expected
    assert (target.read() == array[::-1]).all()


@pytest.mark.parametrize(
    ("handle", "expected"),
    [(None, {"cuMemcpyBatchAsync": 2}), (0, {"cuMemcpyAsync": 300})],
    ids=["own", "default"],
)
def test_pieces_within_a_device(
    simulator: SimulatedCuda,
    device: MakeDevice,
    handle: int | None,
    expected: dict[str, int],
) -> None:
    source = device(rows(300, 8, pinned=False))
    target = device(np.zeros_like(source.array))
    stream = Stream(flags=1) if handle is None else Stream(handle)
    simulator.clear_log()
    copyto(target.whole, source.view(source.array[::-1]), stream=stream)
    assert copies(simulator) == expected
    assert (target.read() == source.array[::-1]).all()


def test_a_repeated_row_goes_in_one_call(
    simulator: SimulatedCuda, device: MakeDevice, stream: Stream
) -> None:
    source = np.broadcast_to(rows()[3], (N_PIECES, PIECE))
    target = device(np.zeros((N_PIECES, PIECE), np.uint8))
    simulator.clear_log()
    copyto(target.whole, source, stream=stream)
    assert copies(simulator) == {"cuMemcpyBatchAsync": 1}
    assert (target.read() == source).all()


def test_a_driver_without_batches() -> None:
    with simulate_cuda(driver=12060) as machine:
        machine.driver.activate()
        array = rows()
        target = Device(machine.driver, np.zeros_like(array))
        source = Device(machine.driver, array)
        stream = Stream(flags=1)
        machine.clear_log()
        copyto(target.whole, array[::-1], stream=stream)
        assert copies(machine) == {"cuMemcpyHtoDAsync": 1}
        assert (target.read() == array[::-1]).all()
        copyto(target.whole, source.whole, stream=stream)
        machine.clear_log()
        copyto(target.whole, source.view(array[::-1]), stream=stream)
        assert copies(machine) == {"cuMemcpyAsync": N_PIECES}
        assert (target.read() == array[::-1]).all()
        assert "cuMemcpyBatchAsync" in numpy_rmm._core._cuda_driver()["missing"]
        stream.close()


# ---- what fails ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "nth", "handle"),
    [
        ("cuMemcpyBatchAsync", 1, None),
        ("cuMemcpyBatchAsync", 2, None),
        ("cuMemcpyAsync", 1, 0),
        ("cuMemcpyAsync", 150, 0),
        ("cuMemcpyAsync", 300, 0),
        ("cuEventRecord", 1, None),
    ],
)
def test_the_nth_call_fails(
    simulator: SimulatedCuda,
    device: MakeDevice,
    call: str,
    nth: int,
    handle: int | None,
) -> None:
    source = device(rows(300, 8, pinned=False))
    target = device(np.zeros_like(source.array))
    stream = Stream(flags=1) if handle is None else Stream(handle)
    simulator.fail(call, nth, "OPERATING_SYSTEM")
    with pytest.raises(CudaError) as caught:
        copyto(target.whole, source.view(source.array[::-1]), stream=stream)
    assert caught.value.name == "CUDA_ERROR_OPERATING_SYSTEM"
    assert simulator.outstanding()["operations"][0] == 0
    copyto(target.whole, source.view(source.array[::-1]), stream=stream)
    assert (target.read() == source.array[::-1]).all()


def test_a_failed_batch_leaves_no_use(
    simulator: SimulatedCuda, device: MakeDevice, stream: Stream
) -> None:
    array = rows()
    target = device(np.zeros_like(array))
    simulator.fail("cuMemcpyBatchAsync", 1, "OPERATING_SYSTEM")
    with pytest.raises(CudaError, match="a batch of 20 copies of 4096 B"):
        copyto(target.whole, array[::-1], stream=stream, blocking=False)
    assert numpy_rmm.array_info(array).uses == ()


@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "INVALID_VALUE"])
def test_what_a_driver_does_not_take_as_a_batch_goes_piece_by_piece(
    simulator: SimulatedCuda, device: MakeDevice, stream: Stream, error: str
) -> None:
    array = rows()
    target = device(np.zeros_like(array))
    simulator.fail("cuMemcpyBatchAsync", 1, error)
    simulator.clear_log()
    copyto(target.whole, array[::-1], stream=stream)
    assert copies(simulator) == {
        "cuMemcpyBatchAsync": 1,
        "cuMemcpyHtoDAsync": N_PIECES,
    }
    assert (target.read() == array[::-1]).all()


# ---- graphs --------------------------------------------------------------------------


def narrow(array: np.ndarray) -> np.ndarray:
    return array[:, ::2]


def reversed_rows(array: np.ndarray) -> np.ndarray:
    return array[::-1]


@pytest.mark.parametrize("view", [narrow, reversed_rows])
def test_a_graph_copies_what_the_array_holds_when_it_runs(
    driver: Driver,
    device: MakeDevice,
    stream: Stream,
    view: Callable[[np.ndarray], np.ndarray],
) -> None:
    array = rows()
    target = device(np.zeros(view(array).shape, np.uint8))
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    with numpy_rmm.stream_capture():
        driver.check(driver.cuStreamBeginCapture(stream.handle, 2))
        copyto(target.whole, view(array), stream=stream, blocking=False)
        driver.check(driver.cuStreamEndCapture(stream.handle, ctypes.byref(graph)))
    driver.check(driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0))
    array += 100
    driver.check(driver.cuGraphLaunch(executable, stream.handle))
    assert (target.read() == view(array)).all()
    driver.check(driver.cuGraphExecDestroy(executable))
    driver.check(driver.cuGraphDestroy(graph))


def test_a_graph_copies_out_of_a_device(
    driver: Driver, device: MakeDevice, stream: Stream
) -> None:
    array = rows()
    source = device(np.full((N_PIECES, PIECE), 7, np.uint8))
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    with numpy_rmm.stream_capture():
        driver.check(driver.cuStreamBeginCapture(stream.handle, 2))
        copyto(array[::-1], source.whole, stream=stream, blocking=False)
        driver.check(driver.cuStreamEndCapture(stream.handle, ctypes.byref(graph)))
    assert array[0, 0] == 1
    driver.check(driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0))
    driver.check(driver.cuGraphLaunch(executable, stream.handle))
    driver.check(driver.cuCtxSynchronize())
    assert (array == 7).all()
    driver.check(driver.cuGraphExecDestroy(executable))
    driver.check(driver.cuGraphDestroy(graph))
