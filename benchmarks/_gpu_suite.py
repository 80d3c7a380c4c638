"""What the suites ``pinned`` and ``device`` have in common: the same questions to two
kinds of memory.

Growth is measured in fresh processes, everything else in one process where the ways
take turns. Ratios are to the driver's own call without any pool.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import _gpu
from _bench import GIB, KIB, MIB, interleaved, size
from _compile import RMM_LIBRARY, CannotCompile, program
from _gpu import OURS, Kernel, Machine, Way
from _progress import CannotRun, turns
from _suite import Case, Measured, Run, Table, reason, thin
from suites.core import Parameters, measure

BASELINE = {"device": "cuMemAlloc", "pinned": "cuMemHostAlloc"}
PAIR_SIZES = [256, 64 * KIB, MIB, 16 * MIB]


class Suite:
    """The settings, and the ways of this kind that work here."""

    def __init__(self, kind: str, run: Run) -> None:
        self.kind = kind
        self.run = run
        self.settings = settings = run.settings
        self.baseline = BASELINE[kind]
        self.pick = settings.pick
        self.names: list[str] = []
        for name in _gpu.MAKERS[kind]:
            peer = next((word for word in _gpu.PEER_WORDS if name.startswith(word)), "")
            if peer and peer not in settings.peers:
                continue  # named as absent, or not asked for
            if settings.brief and name not in (OURS, self.baseline):
                continue  # the tables of the C program are those that count
            key = f"{kind} {name}"
            if key not in settings.works:
                settings.works[key] = settings.new_process(kind, "try_way", name, MIB)
            found = settings.works[key]
            if found == "works":
                self.names.append(name)
            else:
                settings.absent[name] = found
        if OURS not in self.names:
            raise CannotRun(f"this suite needs a GPU: {settings.absent[OURS]}")

    def table(self, key: str, title: str, unit: str) -> Table:
        return self.run.table(key, title, unit, self.baseline)

    def rows(self, function: str, names: list[str], *args: object) -> Any:
        """What a function of this file measures, in a process that all ways share."""
        return self.settings.new_process(self.kind, function, names, *args)


def try_way(kind: str, name: str, nbytes: int) -> str:
    """ "works", or why it does not."""
    try:
        machine = Machine()
        way = _gpu.make(kind, name, machine, 64 * MIB)
        stream = way.stream(machine.streams(1)[0])
        way.free(way.allocate(nbytes, stream), stream)
        machine.synchronize()
    except Exception as error:  # noqa: BLE001, whatever a foreign library raises
        return reason(error)
    return "works"


def milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


# ---- growth: in fresh processes ------------------------------------------------------

GROWTH = ("first", "give back", "in 16 steps")


def growth(kind: str, name: str, nbytes: int, n_cores: int) -> dict[str, Any]:
    """Milliseconds to get the first block, to give it back, and to grow in steps."""
    try:
        found = grown(kind, name, nbytes, n_cores)
    except Exception as error:  # noqa: BLE001, whatever a foreign library raises
        return {what: {"error": reason(error)} for what in GROWTH}
    return {what: {"samples": [value]} for what, value in found.items()}


def grown(kind: str, name: str, nbytes: int, n_cores: int) -> dict[str, float]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n_cores])
    machine = Machine()
    tokens: list[Any] = []
    made: list[Way] = []

    def first() -> None:
        made.append(_gpu.make(kind, name, machine, nbytes))
        tokens.append(made[0].allocate(nbytes, None))

    def back() -> None:
        made[0].free(tokens.pop(), None)
        made[0].give_back()

    def steps() -> None:
        tokens.extend(made[0].allocate(nbytes // 16, None) for _ in range(16))

    found = {"first": milliseconds(first)}
    check_pages(kind, made[0].address(tokens[0]), nbytes)
    found |= {"give back": milliseconds(back), "in 16 steps": milliseconds(steps)}
    return found


def check_pages(kind: str, address: int, nbytes: int) -> None:
    """Page-locked memory is there to the last byte."""
    if kind == "pinned":
        import ctypes

        ctypes.memset(address, 1, 1)
        ctypes.memset(address + nbytes - 1, 1, 1)


def growth_table(suite: Suite) -> Table:
    nbytes = suite.pick(16 * MIB, GIB)
    settings = suite.settings
    table = suite.table("growth", f"{size(nbytes)}: growth and giving back", "ms")
    cores = len(os.sched_getaffinity(0))
    grows_alike = ("numpy_rmm immediate", "numpy_rmm statistics+limit")
    all_names = [name for name in suite.names if name not in grows_alike]

    def rows(n_cores: int, names: list[str], titles: list[str]) -> list[Case]:
        ways = {
            name: partial(
                *(settings.new_process, suite.kind, "growth", name, nbytes, n_cores)
            )
            for name in names
        }
        found = turns(ways, settings.rounds, settings.clock)
        return [
            Case.of(title, {name: [one[what] for one in found[name]] for name in names})
            for title, what in zip(titles, GROWTH, strict=True)
        ]

    for n_cores in [cores] if settings.brief else sorted({1, cores}):
        names = all_names if n_cores == cores else [OURS, suite.baseline]
        plural = "s" if n_cores > 1 else ""
        titles = [f"{what}, {n_cores} core{plural}" for what in GROWTH]
        table.measure(titles, partial(rows, n_cores, names, titles))
    return table


# ---- in one process ------------------------------------------------------------------


class Bench:
    """All ways in this process; each with a stream of its own."""

    def __init__(self, kind: str, names: list[str], initial: int) -> None:
        self.machine = Machine()
        self.ways = {
            name: _gpu.make(kind, name, self.machine, initial) for name in names
        }
        handles = self.machine.streams(len(names))
        self.streams = {
            name: way.stream(handle)
            for (name, way), handle in zip(self.ways.items(), handles, strict=True)
        }

    def turns(
        self, function: Callable[[Way, Any], Measured], rounds: int
    ) -> dict[str, list[Measured]]:
        def attempt(name: str) -> Measured:
            try:
                return function(self.ways[name], self.streams[name])
            except Exception as error:  # noqa: BLE001, of a foreign library
                return {"error": reason(error)}

        return interleaved({name: partial(attempt, name) for name in self.ways}, rounds)


def pairs(
    kind: str, names: list[str], sizes: list[int], rounds: int, budget_s: float
) -> dict[str, dict[str, list[Measured]]]:
    """Nanoseconds of allocate + free, in batches of at least 20 µs."""
    bench = Bench(kind, names, GIB)

    def one(nbytes: int, way: Way, stream: Any) -> Measured:
        def batch(count: int) -> float:
            start = time.perf_counter_ns()
            for _ in range(count):
                way.free(way.allocate(nbytes, stream), stream)
            return (time.perf_counter_ns() - start) / count

        way.free(way.allocate(nbytes, stream), stream)
        count = max(1, min(1000, int(20_000 / max(batch(1), 1))))
        samples: list[float] = []
        end = time.perf_counter() + budget_s
        while len(samples) < 3 or (len(samples) < 200 and time.perf_counter() < end):
            samples.append(batch(count))
        bench.machine.synchronize()
        return {"samples": samples, "extra": {}}

    return {str(n): bench.turns(partial(one, n), rounds) for n in sizes}


def pair_table(suite: Suite) -> Table:
    table = suite.table("pair", "Hot pair, Python level", "ns")
    sizes = suite.settings.sizes or PAIR_SIZES[: suite.pick(2, len(PAIR_SIZES))]
    budget_s = 0.005 if suite.settings.quick else 0.1
    rounds = suite.settings.rounds

    def rows() -> list[Case]:
        found = suite.rows("pairs", suite.names, sizes, rounds, budget_s)
        return [Case.of(size(int(nbytes)), ways) for nbytes, ways in found.items()]

    table.measure([size(nbytes) for nbytes in sizes], rows)
    return table


def shrinking(
    kind: str, names: list[str], nbytes: int, n_blocks: int, rounds: int
) -> dict[str, list[Measured]]:
    """Milliseconds to give back every second of many blocks, and what is left."""
    bench = Bench(kind, names, nbytes * n_blocks)

    def one(way: Way, stream: Any) -> Measured:
        tokens = [way.allocate(nbytes, stream) for _ in range(n_blocks)]
        kept = tokens[1::2]
        dropped = tokens[::2]
        tokens.clear()
        bench.machine.synchronize()
        start = time.perf_counter()
        while dropped:
            way.free(dropped.pop(), stream)
        if not is_rmm(way):  # whose pools shrink only by dying
            way.give_back()
        found = (time.perf_counter() - start) * 1e3
        left = {}
        if way.reserved is not None:
            left["reserved_to_live"] = way.reserved() / (nbytes * len(kept))
        while kept:
            way.free(kept.pop(), stream)
        way.give_back()
        return {"samples": [found], "extra": left}

    def is_rmm(way: Way) -> bool:
        return any(w is way and n.startswith("rmm") for n, w in bench.ways.items())

    return bench.turns(one, rounds)


def shrink_table(suite: Suite) -> Table:
    nbytes, n_blocks = suite.pick(MIB, 16 * MIB), suite.pick(8, 64)
    title = "Shrinking: every second block freed and given back"
    table = suite.table("shrink", title, "ms")
    name, rounds = f"{n_blocks} × {size(nbytes)}", suite.settings.rounds

    def row() -> Case:
        found = suite.rows("shrinking", suite.names, nbytes, n_blocks, rounds)
        return Case.of(name, found)

    table.measure(name, row)
    table.notes.append("RMM's pools give nothing back while they live.")
    return table


def while_growing(
    kind: str, names: list[str], step: int, n_steps: int, rounds: int
) -> dict[str, list[Measured]]:
    """Nanoseconds of single pairs of 64 KiB while another thread grows the pool."""
    bench = Bench(kind, names, 64 * MIB)

    def one(way: Way, stream: Any) -> Measured:
        is_growing, is_done = threading.Event(), threading.Event()

        def grow() -> None:
            bench.machine.driver.activate()  # a thread has no context of its own
            is_growing.set()
            tokens = [way.allocate(step, stream) for _ in range(n_steps)]
            is_done.set()
            while tokens:
                way.free(tokens.pop(), stream)

        way.free(way.allocate(64 * KIB, stream), stream)
        thread = threading.Thread(target=grow)
        samples = []
        thread.start()
        is_growing.wait()
        while not is_done.is_set() or not samples:
            start = time.perf_counter_ns()
            way.free(way.allocate(64 * KIB, stream), stream)
            samples.append(float(time.perf_counter_ns() - start))
            if not thread.is_alive() and not is_done.is_set():
                raise RuntimeError("the thread that grows the pool ended early")
        thread.join()
        bench.machine.synchronize()
        way.give_back()  # or the next round has nothing to grow
        return {"samples": thin(samples), "n": len(samples), "extra": {}}

    growers = {n: w for n, w in bench.ways.items() if not n.startswith("rmm")}
    bench.ways = growers  # RMM's have the memory before, or fail
    return bench.turns(one, rounds)


def growing_table(suite: Suite) -> Table:
    step, n_steps = suite.pick(MIB, 64 * MIB), 16
    title = f"A pair of 64 KiB while another thread takes {n_steps} × {size(step)}"
    table = suite.table("growing", f"{title}, Python level", "ns")
    rounds = suite.settings.rounds

    def row() -> Case:
        found = suite.rows("while_growing", suite.names, step, n_steps, rounds)
        return Case.of("64 KiB", found)

    table.measure("64 KiB", row)
    table.notes.append(
        "The interpreter's lock is in these figures: it changes hands every 5 ms where "
        "a way does not release it."
    )
    return table


# ---- of devices: several streams, random allocations ---------------------------------


def multi_stream(
    names: list[str], n_streams: int, n_kernels: int, rounds: int
) -> dict[str, dict[str, list[Measured]]]:
    """Microseconds of kernels that each get a block, on streams in turn."""
    machine = Machine()
    kernel = Kernel(machine)
    handles = machine.streams(n_streams)
    kept = machine.driver.allocate(8 * n_kernels)

    def attempt(name: str, is_warm: bool) -> Measured:
        try:
            return run(name, is_warm)
        except Exception as error:  # noqa: BLE001, of a foreign library
            return {"error": reason(error)}

    def run(name: str, is_warm: bool) -> Measured:
        way = _gpu.make("device", name, machine, 64 * MIB)
        streams = [way.stream(handle) for handle in handles]
        tokens = [way.allocate(8, stream) for stream in streams if is_warm]
        for stream in reversed(streams if is_warm else []):
            way.free(tokens.pop(), stream)
        machine.synchronize()
        start = time.perf_counter()
        for i in range(n_kernels):
            stream = streams[i % n_streams]
            token = way.allocate(8, stream)
            kernel.launch(way.address(token), handles[i % n_streams])
            way.free(token, stream)
            del token
        machine.synchronize()
        return {"samples": [(time.perf_counter() - start) * 1e6], "extra": {}}

    def alone() -> Measured:
        machine.synchronize()
        start = time.perf_counter()
        for i in range(n_kernels):
            kernel.launch(_gpu._number(kept) + 8 * i, handles[i % n_streams])
        machine.synchronize()
        return {"samples": [(time.perf_counter() - start) * 1e6], "extra": {}}

    alone()
    found = {}
    for moment in ("cold", "warm"):
        ways: dict[str, Callable[[], Measured]] = {
            name: partial(attempt, name, moment == "warm") for name in names
        }
        ways["kernels alone"] = alone
        found[moment] = interleaved(ways, rounds)
    return found


def multi_stream_table(suite: Suite) -> Table:
    title = "multi_stream_allocations 4×4, as RMM defines it, Python level"
    table = suite.table("multi_stream", title, "µs")
    table.limit = "kernels alone"
    rounds = suite.settings.rounds

    def rows() -> list[Case]:
        found = suite.rows("multi_stream", suite.names, 4, 4, rounds)
        return [Case.of(moment, ways) for moment, ways in found.items()]

    table.measure(["cold", "warm"], rows)
    if suite.settings.simulator:
        table.notes.append("The simulated driver runs no kernels: fills instead.")
    return table


def random_allocations(
    kind: str, names: list[str], n: int, largest: int, rounds: int
) -> dict[str, list[Measured]]:
    """Milliseconds of RMM's random_allocations through Python."""
    import random

    from numpy_rmm import mr

    # Four of RMM's pools take this at once, and the others grow to as much.
    share = mr.available_device_memory()[1] // 12 // MIB * MIB
    bench = Bench(kind, names, min(12 * GIB, share))
    cap = 16000 * MIB

    def one(way: Way, stream: Any) -> Measured:
        chance = random.Random(1)
        blocks: list[tuple[Any, int]] = []
        n_made = live = 0
        start = time.perf_counter()
        for _ in range(2 * n):
            nbytes = chance.randint(1, largest)
            allocates = not blocks or (
                chance.randrange(100) < 73 and n_made < n and live + nbytes < cap
            )
            if allocates:
                blocks.append((way.allocate(nbytes, stream), nbytes))
                n_made, live = n_made + 1, live + nbytes
            else:
                i = chance.randrange(len(blocks))
                blocks[i], blocks[-1] = blocks[-1], blocks[i]
                token, nbytes = blocks.pop()
                way.free(token, stream)
                del token
                live -= nbytes
        found = (time.perf_counter() - start) * 1e3
        while blocks:
            way.free(blocks.pop()[0], stream)
        bench.machine.synchronize()
        return {"samples": [found], "extra": {}}

    return bench.turns(one, rounds)


def random_table(suite: Suite) -> Table:
    title = "random_allocations, as RMM defines it, Python level"
    table = suite.table("random", title, "ms")
    names = [name for name in suite.names if name != suite.baseline]
    table.baseline = OURS  # the driver's plain calls would take minutes
    n, largest = suite.pick(100, 10_000), suite.pick(64 * KIB, 4 * MIB)
    name, rounds = f"{n:,} × ≤ {size(largest)}", suite.settings.rounds

    def row() -> Case:
        found = suite.rows("random_allocations", names, n, largest, rounds)
        return Case.of(name, found)

    table.measure(name, row)
    table.notes.append(
        "The script's own part is the same for all of them; the random numbers are "
        "Python's, those of RMM's program are drawn at C level."
    )
    return table


# ---- the C program on a device -------------------------------------------------------

# RMM's resources in C++; a brief run leaves out those that are never the best.
RMM = {
    "rmm pool": "rmm:pool",
    "rmm arena": "rmm:arena",
    "rmm binning": "rmm:binning",
    "rmm async": "rmm:async",
}
SLOW = ("rmm pool", "rmm arena")

Ways = dict[str, tuple[str, Parameters]]


class CSuite:
    """Ways of ``nrm_bench``: an allocator with parameters."""

    def __init__(self, suite: Suite, ways: Ways) -> None:
        self.suite = suite
        self.settings = suite.settings
        self.program = self.settings.program or program(self.settings.build)
        self.environ: dict[str, str] = {}
        library = self.settings.peers.get("librmm", "")
        self.ways = {
            way: found
            for way, found in ways.items()
            if library or not found[0].startswith("rmm:")
        }
        if library:
            self.environ[RMM_LIBRARY] = library
        if self.settings.simulator:
            from numpy_rmm._simulator import find_library

            self.environ["NUMPY_RMM_CUDA_LIBRARY"] = str(find_library())
            self.ways.pop("cuMemAllocAsync", None)

    def runs(
        self, workload: str, parameters: Parameters
    ) -> dict[str, Callable[[], Measured]]:
        """A process of each way."""
        return {
            way: partial(
                measure,
                *(self.program, workload, allocator, {**parameters, **own}),
                *(self.settings, self.environ),
            )
            for way, (allocator, own) in self.ways.items()
        }

    def row(
        self, table: Table, name: str, workload: str, parameters: Parameters
    ) -> None:
        runs = self.runs(workload, parameters)
        table.measure(name, partial(self.settings.in_turns, name, runs))


def c_table(
    suite: Suite,
    key: str,
    title: str,
    unit: str,
    ways: Ways,
    fill: Callable[[CSuite, Table], object],
) -> Table:
    """A table of the C program; where it cannot be built it says so."""
    table = suite.run.table(key, f"{title}, C level", unit, OURS)
    try:
        fill(CSuite(suite, ways), table)
    except CannotCompile as error:
        reason = str(error).splitlines()[0]
        table.notes.append(f"Not measured: {reason}")
    return table
