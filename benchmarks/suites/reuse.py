"""Safe reuse: what it costs that memory is not handed out while a GPU may use it.

Each row has its floor beside it, measured in the same run: the driver's calls that no
epoch can do without, one buffer that is never dropped, the same work in ordinary host
memory. Ratios are to that.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from _bench import KIB, MIB, interleaved, size
from _gpu import OURS, Kernel, Machine, simulated
from _gpu_suite import CSuite, Suite, Ways, c_table
from _suite import Case, Measured, Run, Table, reason, thin

from suites import numpy as numpy_suite

PEERS = ("torch",)
# In the order in which they are measured as long as there is time.
CASES = ("use", "c_use", "c_copies", "endless", "torch_copies", "chain", "fill")
CASES += ("c_park", "c_idle_pair")
FIXED, FLOOR, FOUR = "one buffer", "driver's calls", "numpy_rmm, parked_limit 4 MiB"

FILLED = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB]
CHAINED = [256 * KIB, MIB, 4 * MIB, 16 * MIB]
PAIRED = [64 * KIB, MIB, 16 * MIB]
WAITED_MS = 5  # what takes longer has waited
ENDLESS_CLOCKS = 4_000_000_000  # about two seconds


# ---- in the measured process ---------------------------------------------------------


def batches(function: Callable[[], object], budget_s: float) -> list[float]:
    """Nanoseconds of a call, each the mean of a batch of at least 20 µs."""
    timer = timeit.Timer(function)
    count = 1
    while timer.timeit(count) < 20e-6:
        count *= 2
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 3 or (len(samples) < 300 and time.perf_counter() < end):
        samples.append(timer.timeit(count) / count * 1e9)
    return samples


def uses(rounds: int, budget_s: float) -> dict[str, dict[str, list[Measured]]]:
    """Nanoseconds of record_use for an array."""
    import numpy as np

    import numpy_rmm

    machine = Machine()
    stream = numpy_rmm.Stream(flags=1)
    with numpy_rmm.use_handler("pinned"):
        array = np.ones(MIB, np.uint8)
    note = numpy_rmm.record_use
    subjects: dict[str, Any] = {"Stream": stream, "handle": stream.handle}

    def once(subject: Any) -> Measured:
        return {"samples": batches(partial(note, array, subject), budget_s)}

    found = {
        name: interleaved({OURS: partial(once, subject)}, rounds)
        for name, subject in subjects.items()
    }
    machine.synchronize()
    return found


def fills(
    sizes: list[int], rounds: int, budget_s: float
) -> dict[str, dict[str, list[Measured]]]:
    """Nanoseconds of filling a new page-locked array, or the same one again."""
    import numpy as np

    import numpy_rmm

    machine = Machine()

    def new(nbytes: int) -> None:
        np.empty(nbytes, np.uint8).fill(1)

    found = {}
    with numpy_rmm.use_handler("pinned"):
        for nbytes in sizes:
            kept = np.ones(nbytes, np.uint8)
            works = {OURS: partial(new, nbytes), FIXED: partial(kept.fill, 1)}
            ways = {
                way: partial(lambda work: {"samples": batches(work, budget_s)}, work)
                for way, work in works.items()
            }
            found[str(nbytes)] = interleaved(ways, rounds)
    machine.synchronize()
    return found


def chains(
    sizes: list[int], rounds: int, budget_s: float
) -> dict[str, dict[str, list[Measured]]]:
    """Microseconds of the numpy suite's chain of temporaries."""
    machine = Machine()
    found = {}
    for nbytes in sizes:
        ways = ["handler host", "handler pinned"]
        samples = numpy_suite.together("chain", ways, nbytes, rounds, budget_s)
        found[str(nbytes)] = {
            way.removeprefix("handler "): [{"samples": one} for one in rows]
            for way, rows in samples.items()
        }
    machine.synchronize()
    return found


def torch_copies(nbytes: int, n: int, rounds: int) -> dict[str, list[Measured]]:
    """Nanoseconds of a copy by PyTorch, from dropped arrays or from one that stays."""
    try:
        import torch

        torch.cuda.init()
    except Exception as error:  # noqa: BLE001, whatever PyTorch raises without a GPU
        return {OURS: [{"error": reason(error)}], FIXED: [{"error": reason(error)}]}
    import numpy as np

    import numpy_rmm

    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def timed(copies: Callable[[], object]) -> Measured:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        copies()
        torch.cuda.synchronize()
        return {"samples": [(time.perf_counter_ns() - start) / n]}

    def fixed() -> None:
        for _ in range(n):
            target.copy_(source, non_blocking=True)

    def dropped() -> None:
        for _ in range(n):
            new = torch.from_numpy(np.empty(nbytes, np.uint8))
            target.copy_(new, non_blocking=True)

    with numpy_rmm.use_handler("pinned"):
        source = torch.from_numpy(np.ones(nbytes, np.uint8))
        dropped()  # which gets the memory
        ways = {OURS: partial(timed, dropped), FIXED: partial(timed, fixed)}
        return interleaved(ways, rounds)


@contextmanager
def endless(machine: Machine) -> Iterator[None]:
    """The GPU works all the while: a kernel runs, or, simulated, a stream is held."""
    stream = machine.streams(1)[0]
    context = machine.driver.held(stream) if simulated() else nullcontext()
    target = machine.driver.allocate(8)
    kernel = Kernel(machine)
    with context:
        kernel.launch(target, stream, ENDLESS_CLOCKS)
        yield
    machine.synchronize()


def temporaries(nbytes: int, n: int, rounds: int) -> dict[str, list[Measured]]:
    """Milliseconds of each making, filling and dropping beside a kernel without end; of
    those that wait for it the first is not among them."""
    import numpy as np

    import numpy_rmm

    machine = Machine()

    def once() -> Measured:
        pool = numpy_rmm.mr.PoolMemoryResource(numpy_rmm.mr.PinnedHostMemoryResource())
        samples = []
        with numpy_rmm.use_handler(pool), endless(machine):
            for _ in range(n):
                start = time.perf_counter()
                np.empty(nbytes, np.uint8).fill(1)
                samples.append((time.perf_counter() - start) * 1e3)
        first = next((x for x in samples if x > WAITED_MS), samples[0])
        samples.remove(first)
        extra = {"reserved_MiB": pool.statistics().reserved_bytes / MIB}
        extra["first_wait_ms"] = first
        return {"samples": thin(samples), "n": len(samples), "extra": extra}

    return {OURS: [once() for _ in range(rounds)]}


# ---- the tables ----------------------------------------------------------------------


class Reuse(Suite):
    """That of page-locked memory, with other questions."""

    def __init__(self, run: Run) -> None:
        super().__init__("pinned", run)
        self.common = self.settings.rounds, 0.005 if self.settings.quick else 0.1

    def measured(self, function: str, *args: object) -> Any:
        return self.settings.new_process("reuse", function, *args)

    def add_rows(
        self, table: Table, names: list[str], function: str, *args: object
    ) -> Table:
        """Those that a function above measures together, in their order."""

        def cases() -> list[Case]:
            found = self.measured(function, *args, *self.common)
            return list(map(Case.of, names, found.values()))

        table.measure(names, cases)
        return table

    def sizes(self, own: list[int]) -> list[int]:
        return self.settings.sizes or own[: self.pick(2, len(own))]


def c_use(suite: Reuse) -> Table:
    ways: Ways = {
        OURS: ("pinned", {"streams": 1}),
        "numpy_rmm recorded": ("pinned", {"streams": 1, "reuse": "recorded"}),
    }

    def fill(c: CSuite, table: Table) -> None:
        for name, is_bare in (("Stream", 0), ("handle", 1)):
            parameters = {"bare": is_bare, "samples": suite.pick(3, 50)}
            c.row(table, name, "use", parameters)

    return c_table(suite, "c_use", "record_use", "ns", ways, fill)


def use(suite: Reuse) -> Table:
    table = suite.run.table("use", "record_use, Python level", "ns", OURS)
    return suite.add_rows(table, ["Stream", "handle"], "uses")


def c_park(suite: Reuse) -> Table:
    ways: Ways = {
        OURS: ("pinned", {}),
        "numpy_rmm immediate": ("pinned", {"reuse": "immediate"}),
    }

    def fill(c: CSuite, table: Table) -> None:
        for nbytes in suite.sizes([64 * KIB, MIB]):
            parameters = {"size": nbytes, "samples": suite.pick(3, 500)}
            c.row(table, size(nbytes), "park", parameters)

    return c_table(suite, "c_park", "A free", "ns", ways, fill)


def c_idle_pair(suite: Reuse) -> Table:
    ways: Ways = {OURS: ("pinned", {}), FLOOR: ("pinned", {"floor": 1})}

    def fill(c: CSuite, table: Table) -> None:
        for nbytes in suite.sizes(PAIRED):
            parameters = {"size": nbytes, "samples": suite.pick(3, 50)}
            c.row(table, size(nbytes), "idle_pair", parameters)

    title = "A pair beside an idle GPU"
    table = c_table(suite, "c_idle_pair", title, "ns", ways, fill)
    table.notes.append(
        f"{FLOOR}: 1.3 × a record of the context, a query and two exchanges of the "
        "capture mode, and 60 ns for each device."
    )
    return table


def fill(suite: Reuse) -> Table:
    title, sizes = "Filling a new page-locked array each time", suite.sizes(FILLED)
    table = suite.run.table("fill", title, "ns", FIXED)
    return suite.add_rows(table, list(map(size, sizes)), "fills", sizes)


def chain(suite: Reuse) -> Table:
    title, sizes = "(a + b) * (a - b) + a * 2, page-locked", suite.sizes(CHAINED)
    table = suite.run.table("chain", title, "µs", "host")
    return suite.add_rows(table, list(map(size, sizes)), "chains", sizes)


def c_copies(suite: Reuse) -> Table:
    common = {"streams": 1, "new": 1}
    ways: Ways = {
        OURS: ("pinned", {**common}),
        FOUR: ("pinned", {**common, "parked_limit": "4MiB"}),
        FIXED: ("pinned", {**common, "fixed": 1}),
    }
    parameters = {"copies": suite.pick(40, 4000), "samples": suite.pick(1, 5)}

    def fill(c: CSuite, table: Table) -> None:
        c.row(table, "1 MiB", "copy_loop", parameters)

    title = "Copies from blocks that are dropped at once"
    table = c_table(suite, "c_copies", title, "ns", ways, fill)
    table.baseline = FIXED
    return table


def torch_table(suite: Reuse) -> Table:
    n, rounds = suite.pick(40, 4000), suite.settings.rounds
    title = "non_blocking=True from arrays that are dropped at once, PyTorch"
    table = suite.run.table("torch_copies", title, "ns", FIXED)
    if "torch" not in suite.settings.peers:
        table.notes.append("Not measured: PyTorch is not here.")
        return table

    def row() -> Case:
        return Case.of("1 MiB", suite.measured("torch_copies", MIB, n, rounds))

    table.measure("1 MiB", row)
    return table


def endless_table(suite: Reuse) -> Table:
    n, rounds = suite.pick(20, 300), suite.pick(1, 3)
    title = "Making, filling and dropping 1 MiB beside a kernel without end"
    table = suite.run.table("endless", title, "ms", OURS)

    def row() -> Case:
        return Case.of("1 MiB", suite.measured("temporaries", MIB, n, rounds))

    table.measure("1 MiB", row)
    return table


def run(run: Run) -> None:
    suite = Reuse(run)
    makers: dict[str, Callable[[Reuse], Table]] = {
        "c_use": c_use,
        "use": use,
        "c_park": c_park,
        "c_idle_pair": c_idle_pair,
        "fill": fill,
        "chain": chain,
        "c_copies": c_copies,
        "torch_copies": torch_table,
        "endless": endless_table,
    }
    for name in CASES:
        if run.settings.wants(name):
            run.done(makers[name](suite))
