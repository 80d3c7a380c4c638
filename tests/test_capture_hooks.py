"""The captures of PyTorch and CuPy are noticed, and neither is imported for it.

The two libraries are stand-ins here that call the simulated driver, with their classes
where the real ones have them; tests/gpu/test_capture_hooks.py has the real ones.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import Stream, _capture_hooks, mr
from numpy_rmm.testing import SimulatedCuda

NBYTES = 128 << 10
NON_BLOCKING = 1
MODES = {"global": 0, "thread_local": 1, "relaxed": 2}

# What the stand-ins consist of. Each `driver` is set by the test.
FILES = {
    "torch/__init__.py": "from torch import _C, cuda, later",
    "torch/later.py": "",
    "torch/_C.py": """
import ctypes
current = []
modes = {"global": 0, "thread_local": 1, "relaxed": 2}
class _CUDAGraph:
    def __init__(self):
        self.graph = ctypes.c_void_p()
    def capture_begin(self, pool=(0, 0), capture_error_mode="global"):
        mode, self.stream = modes[capture_error_mode], current[-1]
        driver.check(driver.cuStreamBeginCapture(self.stream, mode))
    def capture_end(self):
        if current[-1] != self.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        graph = ctypes.byref(self.graph)
        driver.check(driver.cuStreamEndCapture(self.stream, graph))
""",
    "torch/cuda/__init__.py": """
from torch.cuda.graphs import CUDAGraph, graph
class Stream:
    def __init__(self, handle):
        self.cuda_stream = handle
def current_stream():
    from torch import _C
    return Stream(_C.current[-1])
""",
    "torch/cuda/graphs.py": """
from torch import _C
class CUDAGraph(_C._CUDAGraph):
    def capture_begin(self, pool=None, capture_error_mode="global"):
        super().capture_begin(capture_error_mode=capture_error_mode)
    def capture_end(self):
        super().capture_end()
class graph:
    def __init__(self, cuda_graph, stream, capture_error_mode="global"):
        self.graph, self.stream, self.mode = cuda_graph, stream, capture_error_mode
    def __enter__(self):
        _C.current.append(self.stream)
        self.graph.capture_begin(capture_error_mode=self.mode)
    def __exit__(self, *exception):
        try:
            self.graph.capture_end()
        finally:
            _C.current.pop()
""",
    "cupy/__init__.py": "from cupy import cuda, later",
    "cupy/later.py": "",
    "cupy/cuda/__init__.py": "from cupy.cuda import stream",
    "cupy/cuda/stream.py": """
import ctypes
class _BaseStream:
    def __init__(self, ptr):
        self.ptr = ptr
    def begin_capture(self, mode=None):
        mode = 2 if mode is None else mode
        driver.check(driver.cuStreamBeginCapture(self.ptr, mode))
    def end_capture(self):
        graph = ctypes.c_void_p()
        driver.check(driver.cuStreamEndCapture(self.ptr, ctypes.byref(graph)))
        return graph
class Stream(_BaseStream):
    def __init__(self):
        super().__init__(driver.create_stream(1))
    def __del__(self):
        driver.cuStreamDestroy(self.ptr)
class ExternalStream(_BaseStream):
    pass
""",
}


class TorchLike:
    """A capture as programs with PyTorch write it."""

    def __init__(self, machine: SimulatedCuda) -> None:
        self.driver = machine.driver
        self.torch = importlib.import_module("torch")
        self.torch._C.driver = self.driver
        self.handle: int = self.driver.create_stream(NON_BLOCKING)
        self.graph = self.torch.cuda.CUDAGraph()

    def begin(self, mode: str = "global") -> None:
        self.torch._C.current.append(self.handle)
        self.graph.capture_begin(capture_error_mode=mode)

    def end(self) -> ctypes.c_void_p:
        try:
            self.graph.capture_end()
        finally:
            self.torch._C.current.pop()
        graph: ctypes.c_void_p = self.graph.graph
        return graph

    def abandon(self) -> None:
        """What began the capture is no more."""
        del self.graph


class CupyLike:
    """The same with CuPy."""

    def __init__(self, machine: SimulatedCuda) -> None:
        self.driver = machine.driver
        self.cupy = importlib.import_module("cupy")
        self.cupy.cuda.stream.driver = self.driver
        self.stream = self.cupy.cuda.stream.Stream()
        self.handle: int = self.stream.ptr

    def begin(self, mode: str = "global") -> None:
        self.stream.begin_capture(mode=MODES[mode])

    def end(self) -> ctypes.c_void_p:
        graph: ctypes.c_void_p = self.stream.end_capture()
        return graph

    def abandon(self) -> None:
        del self.stream


LIBRARIES = {"torch": TorchLike, "cupy": CupyLike}
Library = TorchLike | CupyLike


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The libraries can be imported, are not yet, and have no hooks."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    kept = {
        name: sys.modules.pop(name) for name in list(sys.modules) if is_theirs(name)
    }
    waiting = {"torch": _capture_hooks._Torch, "cupy": _capture_hooks._Cupy}
    monkeypatch.setattr(_capture_hooks, "_waiting", waiting)
    monkeypatch.setattr(_capture_hooks, "hooked", {})
    yield
    for name in list(sys.modules):
        if is_theirs(name):
            del sys.modules[name]
    sys.modules.update(kept)
    gc.collect()
    assert _capture_hooks._open == {}


def is_theirs(name: str) -> bool:
    return name.split(".")[0] in LIBRARIES


@pytest.fixture(params=sorted(LIBRARIES))
def library(request: pytest.FixtureRequest, simulator: SimulatedCuda) -> Library:
    simulator.driver.activate()
    made: Library = LIBRARIES[request.param](simulator)
    return made


class Program:
    """Copies from arrays of a pool of page-locked or managed memory."""

    def __init__(self, machine: SimulatedCuda, kind: str = "pinned") -> None:
        self.driver = machine.driver
        source = {
            "pinned": mr.PinnedHostMemoryResource,
            "managed": mr.ManagedMemoryResource,
        }
        self.pool = mr.PoolMemoryResource(source[kind]())
        self.target = self.driver.allocate(NBYTES)

    def new(self, value: int) -> np.ndarray:
        with numpy_rmm.use_handler(self.pool):
            return np.full(NBYTES, value, np.uint8)

    def hands_out(self, address: int) -> bool:
        """Among all that is free; the end of a graph is told a little later."""
        for _ in range(100):
            reserved = self.pool.statistics().reserved_bytes
            arrays = []
            while self.pool.statistics().reserved_bytes == reserved:
                arrays.append(self.new(1))
                if arrays[-1].ctypes.data == address:
                    return True
            time.sleep(0.02)
        return False

    def copy(self, array: np.ndarray, stream: int) -> None:
        self.driver.check(
            self.driver.cuMemcpyAsync(self.target, array.ctypes.data, NBYTES, stream)
        )

    def churn(self, busy: int) -> None:
        """Arrays that die in use, so that epochs would have to be closed."""
        for value in range(40):
            self.copy(self.new(value), busy)

    def launch(self, executable: ctypes.c_void_p, n: int) -> set[int]:
        """What the graph copies, with other arrays made and filled in between."""
        seen: set[int] = set()
        stream = self.driver.create_stream(NON_BLOCKING)
        for value in range(n):
            others = [self.new(100 + value) for _ in range(4)]
            self.driver.check(self.driver.cuGraphLaunch(executable, stream))
            self.driver.check(self.driver.cuStreamSynchronize(stream))
            seen |= set(self.driver.read(self.target, NBYTES))
            del others
        return seen

    def instantiate(self, graph: ctypes.c_void_p) -> ctypes.c_void_p:
        executable = ctypes.c_void_p()
        self.driver.check(
            self.driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0)
        )
        self.driver.check(self.driver.cuGraphDestroy(graph))
        return executable


@pytest.fixture
def program(simulator: SimulatedCuda) -> Program:
    simulator.driver.activate()
    return Program(simulator)


def is_announced(machine: SimulatedCuda) -> bool:
    """Whether pools ask about a stream of ours, which they do for that reason only."""
    stream = Stream(flags=NON_BLOCKING)
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    pool.deallocate(pool.allocate(1000, stream), 1000, stream)
    before = machine.calls("cuStreamIsCapturing")
    pool.deallocate(pool.allocate(1000, stream), 1000, stream)
    return machine.calls("cuStreamIsCapturing") > before


# ---- where the hooks are -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place"),
    [("torch", "torch._C._CUDAGraph"), ("cupy", "cupy.cuda.stream._BaseStream")],
)
def test_a_library_that_is_imported_later_gets_its_hooks(name: str, place: str) -> None:
    importlib.import_module(name)
    assert _capture_hooks.hooked == {name: place}


def test_a_library_that_is_there_already_gets_them_at_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [x for x in sys.meta_path if not isinstance(x, _capture_hooks._Watch)]
    monkeypatch.setattr(sys, "meta_path", others)
    importlib.import_module("torch")
    assert _capture_hooks.hooked == {}
    _capture_hooks.watch()
    assert list(_capture_hooks.hooked) == ["torch"]
    _capture_hooks.watch()
    assert sum(isinstance(x, _capture_hooks._Watch) for x in sys.meta_path) == 1


def test_looking_out_imports_nothing() -> None:
    _capture_hooks.install()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("there_is_no_such_module")
    assert not any(map(is_theirs, sys.modules))


def test_a_torch_without_cuda_has_nothing_to_hook(tmp_path: Path) -> None:
    (tmp_path / "torch" / "_C.py").write_text("class _CUDAGraph:\n    pass\n")
    (tmp_path / "torch" / "cuda" / "__init__.py").write_text("")
    importlib.import_module("torch")
    assert _capture_hooks.hooked == {}


def test_classes_that_cannot_be_changed_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "cupy" / "cuda" / "stream.py"
    sealed = """
class Sealed(type):
    def __setattr__(cls, name, value):
        raise TypeError("it is immutable")
class _BaseStream(metaclass=Sealed):
"""
    path.write_text(path.read_text().replace("class _BaseStream:\n", sealed.lstrip()))
    importlib.import_module("cupy")
    assert _capture_hooks.hooked == {"cupy": "none: it is immutable"}


def test_info_says_where_they_are(simulator: SimulatedCuda) -> None:
    importlib.import_module("cupy")
    hooks = numpy_rmm.info()["cuda"]["capture_hooks"]
    assert hooks == {"cupy": "cupy.cuda.stream._BaseStream"}


def test_a_hooked_method_looks_like_the_one_it_wraps(library: Library) -> None:
    if isinstance(library, TorchLike):
        method = library.torch._C._CUDAGraph.capture_begin
        assert method.__name__ == "capture_begin"
    else:
        method = library.cupy.cuda.stream.ExternalStream.begin_capture
        assert method.__name__ == "begin_capture"
    assert method.__wrapped__.__module__.startswith(("torch", "cupy"))


# ---- captures are left alone ---------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_arrays_may_come_and_go_during_a_capture(
    library: Library, program: Program, mode: str
) -> None:
    busy = program.driver.create_stream(NON_BLOCKING)
    with program.driver.held(busy):
        library.begin(mode)
        program.churn(busy)
        graph = library.end()  # with an error if somebody has broken it
    program.driver.check(program.driver.cuGraphDestroy(graph))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_program_without_the_hooks_breaks_the_capture(
    library: Library, program: Program, mode: str
) -> None:
    graph, handle = ctypes.c_void_p(), ctypes.c_void_p(library.handle)
    driver, busy = program.driver, program.driver.create_stream(NON_BLOCKING)
    with driver.held(busy):
        driver.check(driver.cuStreamBeginCapture(handle, MODES[mode]))
        with pytest.warns(RuntimeWarning, match="invalidated.*stream_capture"):
            program.churn(busy)
        assert driver.cuStreamEndCapture(handle, ctypes.byref(graph)) != 0


def test_the_context_manager_of_torch_goes_through_the_hooks(
    simulator: SimulatedCuda, program: Program
) -> None:
    torch = TorchLike(simulator).torch
    stream, graph = program.driver.create_stream(NON_BLOCKING), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream):
        assert is_announced(simulator)
    assert not is_announced(simulator)
    program.driver.check(program.driver.cuGraphDestroy(graph.graph))


def test_epochs_close_again_after_the_capture(
    library: Library, program: Program
) -> None:
    library.begin()
    program.churn(0)
    during = program.pool.statistics().epochs
    program.driver.check(program.driver.cuGraphDestroy(library.end()))
    program.churn(0)
    assert program.pool.statistics().epochs > during


def test_a_capture_that_cannot_begin_is_not_announced(
    library: Library, simulator: SimulatedCuda
) -> None:
    simulator.fail("cuStreamBeginCapture", error="INVALID_VALUE")
    with pytest.raises(Exception, match="INVALID_VALUE"):
        library.begin()
    assert not is_announced(simulator)


def test_a_capture_that_was_invalidated_is_over_with_its_end(
    library: Library, simulator: SimulatedCuda
) -> None:
    library.begin()
    identity = ctypes.c_uint64()
    simulator.driver.cuStreamGetId(library.handle, ctypes.byref(identity))
    with pytest.raises(Exception, match="INVALIDATED"):
        library.end()
    assert not is_announced(simulator)


def test_an_end_on_another_stream_ends_nothing(simulator: SimulatedCuda) -> None:
    simulator.driver.activate()
    library = TorchLike(simulator)
    library.begin()
    library.torch._C.current.append(simulator.driver.create_stream(NON_BLOCKING))
    with pytest.raises(RuntimeError, match="same stream"):
        library.graph.capture_end()
    assert is_announced(simulator)
    library.torch._C.current.pop()
    simulator.driver.check(simulator.driver.cuGraphDestroy(library.end()))
    assert not is_announced(simulator)


def test_an_end_in_the_wrong_thread_ends_nothing(
    library: Library, simulator: SimulatedCuda
) -> None:
    library.begin("thread_local")
    failures = []

    def end_elsewhere() -> None:
        try:
            library.end()
        except Exception as error:  # noqa: BLE001, of either library
            failures.append(error)

    thread = threading.Thread(target=end_elsewhere)
    thread.start()
    thread.join()
    assert len(failures) == 1
    assert is_announced(simulator)
    if isinstance(library, TorchLike):
        library.torch._C.current.append(library.handle)
    simulator.driver.check(simulator.driver.cuGraphDestroy(library.end()))
    assert not is_announced(simulator)


def test_a_capture_that_nobody_can_end_is_forgotten(
    library: Library, simulator: SimulatedCuda
) -> None:
    library.begin()
    assert is_announced(simulator)
    library.abandon()
    gc.collect()
    assert not is_announced(simulator)


def test_an_external_stream_may_go_before_its_capture_ends(
    simulator: SimulatedCuda,
) -> None:
    simulator.driver.activate()
    library = CupyLike(simulator)
    external = library.cupy.cuda.stream.ExternalStream
    external(library.handle).begin_capture()
    gc.collect()
    assert is_announced(simulator)
    graph = external(library.handle).end_capture()
    assert not is_announced(simulator)
    simulator.driver.check(simulator.driver.cuGraphDestroy(graph))


def test_two_captures_at_once(simulator: SimulatedCuda) -> None:
    simulator.driver.activate()
    first, second = TorchLike(simulator), CupyLike(simulator)
    first.begin("relaxed")
    second.begin("relaxed")
    simulator.driver.check(simulator.driver.cuGraphDestroy(first.end()))
    assert is_announced(simulator)
    simulator.driver.check(simulator.driver.cuGraphDestroy(second.end()))
    assert not is_announced(simulator)


# ---- arrays that die inside ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_an_array_that_dies_in_the_capture_lives_on_in_the_graph(
    library: Library, simulator: SimulatedCuda, kind: str
) -> None:
    program = Program(simulator, kind)
    array = program.new(7)
    address = array.ctypes.data
    library.begin()
    program.copy(array, library.handle)
    del array
    executable = program.instantiate(library.end())
    assert program.launch(executable, 5) == {7}
    program.driver.check(program.driver.cuGraphExecDestroy(executable))
    assert program.hands_out(address)


def test_the_same_array_is_lost_where_the_stream_is_not_known(
    library: Library, program: Program
) -> None:
    graph, handle = ctypes.c_void_p(), ctypes.c_void_p(library.handle)
    driver = program.driver
    with numpy_rmm.stream_capture():
        driver.check(driver.cuStreamBeginCapture(handle, 0))
        program.copy(program.new(7), library.handle)
        driver.check(driver.cuStreamEndCapture(handle, ctypes.byref(graph)))
    executable = program.instantiate(graph)
    assert program.launch(executable, 3) != {7}
    driver.check(driver.cuGraphExecDestroy(executable))


def test_an_array_that_dies_in_another_thread_does_too(
    library: Library, program: Program
) -> None:
    arrays = [program.new(7)]
    library.begin("relaxed")
    program.copy(arrays[0], library.handle)
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    executable = program.instantiate(library.end())
    assert program.launch(executable, 5) == {7}
    program.driver.check(program.driver.cuGraphExecDestroy(executable))


def test_an_array_that_shrinks_in_the_capture_does_too(
    library: Library, program: Program
) -> None:
    array = program.new(7)
    library.begin()
    program.copy(array, library.handle)
    array.resize(NBYTES // 4, refcheck=False)
    executable = program.instantiate(library.end())
    assert program.launch(executable, 5) == {7}
    program.driver.check(program.driver.cuGraphExecDestroy(executable))


@pytest.mark.parametrize("over", ["FixedSize", "Arena", "direct"])
def test_it_does_not_matter_whose_memory_it_is(
    library: Library, simulator: SimulatedCuda, over: str
) -> None:
    program = Program(simulator)
    source = mr.PinnedHostMemoryResource()
    if over == "FixedSize":
        program.pool = mr.FixedSizeMemoryResource(source, NBYTES)
    else:
        is_arena = over == "Arena"
        program.pool = mr.ArenaMemoryResource(source, "32 MiB") if is_arena else source
    array = program.new(7)
    library.begin()
    program.copy(array, library.handle)
    del array
    executable = program.instantiate(library.end())
    assert program.launch(executable, 5) == {7}
    program.driver.check(program.driver.cuGraphExecDestroy(executable))


def test_what_died_before_and_after_is_not_the_graphs(
    library: Library, program: Program
) -> None:
    before, after = program.new(1), program.new(2)
    addresses = before.ctypes.data, after.ctypes.data
    del before
    library.begin()
    graph = library.end()
    del after
    assert all(map(program.hands_out, addresses))
    program.driver.check(program.driver.cuGraphDestroy(graph))
