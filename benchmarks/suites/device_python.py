"""What a call of the Python API costs: buffers, pairs, look-ups, streams.

Every figure is of a loop in one process, as ``timeit`` has it, so a few nanoseconds of
each are the loop's. The bare way of a peer is measured beside its usual one. Streams
are compared with the driver's two calls through ctypes, which takes a few hundred
nanoseconds of its own.

A process measures all cases of one library, as to start it takes far longer than that:
a second or more, until there is a context. Libraries take turns, and where there is no
time for all of them ours is measured alone.
"""

from __future__ import annotations

import ctypes
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from _bench import KIB, MIB, size
from _gpu import OURS, Machine, simulated
from _gpu_suite import CSuite, Suite, Ways, c_table
from _progress import CannotRun, Failed, OutOfTime, turns
from _suite import Case, Measured, Run, Settings, Table, reason

__all__ = ["CASES", "PEERS", "run", "timed"]

PEERS = ("cupy", "torch", "rmm", "librmm")
C_CASES = ("c_current", "c_stack")
CASES = ("buffer", "pair", "interface", "current", "stream", "wrap", *C_CASES)
NBYTES = 64 * KIB
BATCH = 1000
BUDGET_S = 0.1  # of a way in a turn
DRIVER = "cuStreamCreate"
ALONE = "__cuda_stream__ alone"  # what the other library's part of a wrap takes
ARENA = "rmm arena"

# A statement and the names in it, of one way to do one thing.
Statement = tuple[str, dict[str, Any]]
Maker = Callable[[Machine], Statement]


class Foreign:
    """A stream of a library that has the protocol and nothing else."""

    def __init__(self, handle: int) -> None:
        self.pair = (0, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self.pair


# ---- ours ----------------------------------------------------------------------------


def our_buffer(machine: Machine) -> Statement:
    from numpy_rmm import DeviceBuffer

    return "make(size=n)", {"make": DeviceBuffer, "n": NBYTES}


def our_pair(machine: Machine) -> Statement:
    from numpy_rmm import mr

    pool = mr.get_current_device_resource()
    return "mr.deallocate(mr.allocate(n), n)", {"mr": pool, "n": NBYTES}


def our_counted_pair(machine: Machine) -> Statement:
    from numpy_rmm import mr

    limited = mr.LimitingResourceAdaptor(mr.get_current_device_resource(), "1 GiB")
    counted = mr.StatisticsResourceAdaptor(limited)
    return "mr.deallocate(mr.allocate(n), n)", {"mr": counted, "n": NBYTES}


def our_interface(machine: Machine) -> Statement:
    from numpy_rmm import DeviceBuffer

    return "x.__cuda_array_interface__", {"x": DeviceBuffer(size=NBYTES)}


def our_current(machine: Machine) -> Statement:
    from numpy_rmm import mr

    return "get()", {"get": mr.get_current_device_resource}


def our_stream(machine: Machine) -> Statement:
    from numpy_rmm import Stream

    return "make()", {"make": Stream}


def our_wrap(machine: Machine) -> Statement:
    from numpy_rmm import Stream

    return "make(x)", {"make": Stream, "x": Foreign(*machine.streams(1))}


def our_wrap_of_cupy(machine: Machine) -> Statement:
    import cupy

    from numpy_rmm import Stream

    return "make(x)", {"make": Stream, "x": cupy.cuda.Stream()}


def protocol_alone(machine: Machine) -> Statement:
    return "x.__cuda_stream__()", {"x": Foreign(*machine.streams(1))}


# ---- RMM's ---------------------------------------------------------------------------


def rmm_over(kind: str) -> Any:
    """RMM's pool or arena of device 0, as the current resource."""
    import rmm.mr

    make = {"pool": rmm.mr.PoolMemoryResource, "arena": rmm.mr.ArenaMemoryResource}
    mr = make[kind](rmm.mr.CudaMemoryResource(), 64 * MIB)
    rmm.mr.set_current_device_resource(mr)
    return mr


def rmm_buffer(kind: str, machine: Machine) -> Statement:
    import rmm

    return "make(size=n)", {"mr": rmm_over(kind), "make": rmm.DeviceBuffer, "n": NBYTES}


def rmm_pair(kind: str, machine: Machine) -> Statement:
    return "mr.deallocate(mr.allocate(n), n)", {"mr": rmm_over(kind), "n": NBYTES}


def rmm_interface(machine: Machine) -> Statement:
    import rmm

    return "x.__cuda_array_interface__", {"x": rmm.DeviceBuffer(size=NBYTES)}


def rmm_current(machine: Machine) -> Statement:
    import rmm.mr

    return "get()", {"get": rmm.mr.get_current_device_resource}


def rmm_stream(machine: Machine) -> Statement:
    from rmm.pylibrmm.stream import Stream

    return "make()", {"make": Stream}


def rmm_wrap(machine: Machine) -> Statement:
    from rmm.pylibrmm.stream import Stream

    return "make(x)", {"make": Stream, "x": Foreign(*machine.streams(1))}


# ---- CuPy's, PyTorch's and the driver's ----------------------------------------------


def cupy_buffer(machine: Machine) -> Statement:
    import cupy

    return "empty(n, 'u1')", {"empty": cupy.empty, "n": NBYTES}


def cupy_pool(machine: Machine) -> Statement:
    import cupy

    return "malloc(n)", {"malloc": cupy.cuda.MemoryPool().malloc, "n": NBYTES}


def cupy_interface(machine: Machine) -> Statement:
    import cupy

    return "x.__cuda_array_interface__", {"x": cupy.empty(NBYTES, "u1")}


def cupy_stream(machine: Machine) -> Statement:
    import cupy

    return "make(non_blocking=False)", {"make": cupy.cuda.Stream}


def torch_buffer(machine: Machine) -> Statement:
    import torch

    names = {"empty": torch.empty, "n": NBYTES, "u1": torch.uint8}
    return "empty(n, dtype=u1, device='cuda')", names


def torch_interface(machine: Machine) -> Statement:
    import torch

    x = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    return "x.__cuda_array_interface__", {"x": x}


def driver_stream(machine: Machine) -> Statement:
    if machine.library is None:
        raise RuntimeError("the simulated driver is not called through ctypes")
    handle = ctypes.c_void_p()
    names = {
        "create": machine.library.cuStreamCreate,
        "destroy": machine.library.cuStreamDestroy_v2,
        "handle": handle,
        "place": ctypes.byref(handle),
    }
    return "create(place, 0); destroy(handle)", names


# ---- the cases -----------------------------------------------------------------------

WAYS: dict[str, dict[str, Maker]] = {
    "buffer": {
        OURS: our_buffer,
        "rmm pool": partial(rmm_buffer, "pool"),
        ARENA: partial(rmm_buffer, "arena"),
        "cupy": cupy_buffer,
        "cupy pool": cupy_pool,
        "torch": torch_buffer,
    },
    "pair": {
        OURS: our_pair,
        f"{OURS} statistics+limit": our_counted_pair,
        "rmm pool": partial(rmm_pair, "pool"),
        ARENA: partial(rmm_pair, "arena"),
    },
    "interface": {
        OURS: our_interface,
        "rmm": rmm_interface,
        "cupy": cupy_interface,
        "torch": torch_interface,
    },
    "current": {OURS: our_current, "rmm": rmm_current},
    "stream": {
        OURS: our_stream,
        DRIVER: driver_stream,
        "rmm": rmm_stream,
        "cupy": cupy_stream,
    },
    "wrap": {
        OURS: our_wrap,
        "cupy's by numpy_rmm": our_wrap_of_cupy,
        ALONE: protocol_alone,
        "rmm": rmm_wrap,
    },
}
TITLES = {
    "buffer": "A buffer of 64 KiB made and dropped",
    "pair": "allocate and deallocate of 64 KiB",
    "interface": "__cuda_array_interface__",
    "current": "The current resource of the current device",
    "stream": "A stream made and dropped",
    "wrap": "A stream of another library wrapped, and dropped",
}


def timed_one(case: str, way: str, n_samples: int) -> Measured:
    """Nanoseconds, each of a batch."""
    try:
        statement, names = WAYS[case][way](Machine())
        timer = timeit.Timer(statement, globals=names)
        timer.timeit(BATCH // 10)  # the first ones get the memory
        end = time.perf_counter() + BUDGET_S
        samples: list[float] = []
        while len(samples) < min(n_samples, 10) or (
            len(samples) < n_samples and time.perf_counter() < end
        ):
            samples.append(timer.timeit(BATCH) / BATCH * 1e9)
    except Exception as error:  # noqa: BLE001, whatever a foreign library raises
        return {"error": reason(error)}
    return {"samples": samples, "extra": {"least": min(samples)}}


def timed(pairs: Sequence[tuple[str, str]], n_samples: int) -> list[Measured]:
    """Ways of cases, one after the other."""
    return [timed_one(case, way, n_samples) for case, way in pairs]


def library_of(way: str) -> str:
    """Whose process a way is measured in."""
    word = way.partition(" ")[0].removesuffix("'s")
    return OURS if way in (DRIVER, ALONE) else word


def is_here(way: str, settings: Settings) -> bool:
    if way == DRIVER:
        return not simulated()
    return library_of(way) == OURS or library_of(way) in settings.peers


class Measurement:
    """All cases that are wanted, measured when the first one is asked for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pairs: dict[str, list[tuple[str, str]]] = {}
        for case, ways in WAYS.items():
            for way in ways:
                if settings.wants(case) and is_here(way, settings):
                    self.pairs.setdefault(library_of(way), []).append((case, way))
        self.rounds: dict[str, list[list[Measured]]] = {}
        self.left_out: list[str] = []
        self.error: OutOfTime | Failed | None = None

    def run(self, libraries: Sequence[str]) -> dict[str, list[list[Measured]]]:
        settings = self.settings
        n_samples = 2 if settings.quick else 100
        works = {
            library: partial(
                *(settings.new_process, "device_python", "timed"),
                *(self.pairs[library], n_samples),
            )
            for library in libraries
        }
        return turns(works, 3 if settings.brief else settings.rounds, settings.clock)

    def ensure(self) -> None:
        if self.rounds or self.error:
            return
        try:
            try:
                self.rounds = self.run(list(self.pairs))
            except OutOfTime:
                others = [library for library in self.pairs if library != OURS]
                if not others:
                    raise
                self.rounds = self.run([OURS])
                self.left_out = others
        except (OutOfTime, Failed) as error:
            self.error = error

    def case(self, name: str) -> Case:
        self.ensure()
        if self.error:
            raise self.error
        ways = {
            way: [found[i] for found in rounds]
            for library, rounds in self.rounds.items()
            for i, (case, way) in enumerate(self.pairs[library])
            if case == name
        }
        return Case.of(name, {way: ways[way] for way in WAYS[name] if way in ways})


def python_table(run: Run, case: str, measurement: Measurement) -> Table:
    baseline = DRIVER if case == "stream" and not simulated() else OURS
    table = run.table(case, f"{TITLES[case]}, from Python", "ns", baseline)
    table.measure(case, partial(measurement.case, case))
    here = set(map(library_of, WAYS[case]))
    left_out = [name for name in measurement.left_out if name in here]
    if left_out:
        table.notes.append(f"No time was left for {', '.join(left_out)}.")
    return table


def c_current(run: Run) -> Table:
    """What other extensions pay, a reference included."""

    def fill(c: CSuite, table: Table) -> None:
        n_samples = run.settings.pick(3, 100)
        for asked, name in enumerate(("of a device", "of the current one")):
            parameters = {"samples": n_samples, "asked": asked}
            c.row(table, name, "current", parameters)

    suite = Suite("device", run)
    title = "The current resource"
    return c_table(suite, "c_current", title, "ns", {OURS: ("device", {})}, fill)


def c_stack(run: Run) -> Table:
    """The difference of a pair with them and one without, measured by turns."""

    def fill(c: CSuite, table: Table) -> None:
        for nbytes in (256, NBYTES):
            parameters = {"samples": run.settings.pick(3, 200), "size": nbytes}
            c.row(table, size(nbytes), "stack", parameters)

    suite = Suite("device", run)
    title = "What a log over statistics over a limit adds to a pair"
    ways: Ways = {OURS: ("device", {"streams": 1}), f"{OURS} host": ("host", {})}
    return c_table(suite, "c_stack", title, "ns", ways, fill)


def require_gpu(settings: Settings) -> None:
    key = "device_python"
    if key not in settings.works:
        found = settings.new_process("device_python", "timed", [("buffer", OURS)], 1)
        settings.works[key] = found[0].get("error", "works")
    if settings.works[key] != "works":
        raise CannotRun(f"this suite needs a GPU: {settings.works[key]}")


def run(run: Run) -> None:
    require_gpu(run.settings)
    measurement = Measurement(run.settings)
    for case in CASES:
        if run.settings.wants(case):
            make = {"c_current": c_current, "c_stack": c_stack}.get(case)
            run.done(
                make(run) if make is not None else python_table(run, case, measurement)
            )
