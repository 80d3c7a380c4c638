"""Device memory: growth, shrinking, hot pairs, several streams, random allocations.

Ratios are to ``cuMemAlloc``, the driver's call without a pool; in the tables of the C
program and of random allocations to our pool.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import _gpu_suite
from _bench import KIB, MIB, size
from _gpu import OURS
from _gpu_suite import (
    RMM,
    SLOW,
    CSuite,
    Suite,
    Ways,
    c_table,
    growing_table,
    growth_table,
    multi_stream,
    multi_stream_table,
    pair_table,
    random_table,
    shrink_table,
)
from _suite import Run, Table

from suites.core import threads_name, with_scaling

__all__ = ["CASES", "PEERS", "multi_stream", "run"]

PEERS = ("cupy", "torch", "rmm", "librmm")
CASES = (
    "growth",
    "shrink",
    "pair",
    "growing",
    "multi_stream",
    "random",
    "c_pair",
    "c_grow",
    "c_live",
    "c_random",
    "c_multi_stream",
    "c_threads",
    "c_fragmentation",
)

# What run.py calls in processes of their own.
try_way = partial(_gpu_suite.try_way, "device")
growth = partial(_gpu_suite.growth, "device")
pairs = partial(_gpu_suite.pairs, "device")
shrinking = partial(_gpu_suite.shrinking, "device")
while_growing = partial(_gpu_suite.while_growing, "device")
random_allocations = partial(_gpu_suite.random_allocations, "device")

ASYNC = "cuMemAllocAsync"


def peers_and(suite: Suite, ours: Ways, own: dict[str, int], slow: bool = True) -> Ways:
    """Ours, the driver's pool and RMM's, all with the same parameters."""
    ways = {
        way: (allocator, {**own, **more}) for way, (allocator, more) in ours.items()
    }
    ways[ASYNC] = (ASYNC, {**own})
    for way, allocator in RMM.items():
        if slow or way not in SLOW or not suite.settings.brief:
            ways[way] = (allocator, {**own})
    return ways


def c_pair(suite: Suite) -> Table:
    ours: Ways = {
        OURS: ("device", {}),
        "numpy_rmm, bare handle": ("device", {"wrap": 1}),
        "numpy_rmm statistics+limit": ("device", {"adaptors": 1}),
    }
    ways = peers_and(suite, ours, {"streams": 1})
    ways["rmm statistics+limit"] = ("rmm:statistics", {"streams": 1})
    sizes = (64 * KIB,) if suite.settings.brief else (256, 64 * KIB, MIB, 16 * MIB)

    def fill(c: CSuite, table: Table) -> None:
        for nbytes in sizes[: suite.pick(2, 4)]:
            parameters = {"size": nbytes, "samples": suite.pick(3, 20)}
            c.row(table, size(nbytes), "pair", parameters)

    return c_table(suite, "c_pair", "Hot pair, one stream", "ns", ways, fill)


def c_grow(suite: Suite) -> Table:
    step = suite.pick(MIB, 64 * MIB)
    title = f"A pair of 64 KiB while another thread takes 16 × {size(step)}"
    ways: Ways = {OURS: ("device", {"streams": 1}), ASYNC: (ASYNC, {"streams": 1})}
    parameters = {"step": step, "steps": 16, "rounds": suite.pick(1, 10)}

    def fill(c: CSuite, table: Table) -> None:
        c.row(table, "64 KiB", "grow", parameters)

    return c_table(suite, "c_grow", title, "ns", ways, fill)


def c_live(suite: Suite) -> Table:
    ways = peers_and(suite, {OURS: ("device", {})}, {"streams": 1}, slow=False)

    def fill(c: CSuite, table: Table) -> None:
        for n in (1000, 32000):
            n = suite.pick(n // 100, n)
            parameters = {"n": n, "samples": suite.pick(3, 10)}
            c.row(table, f"{n:,} live", "live", parameters)

    return c_table(suite, "c_live", "Free and allocate among live blocks", "ns", ways,
                   fill)  # fmt: skip


def c_random(suite: Suite) -> Table:
    """On the default stream, as RMM's program has it."""
    ways = peers_and(suite, {OURS: ("device", {})}, {"legacy": 1}, slow=False)
    cases = [(10_000, 4), (100_000, 4), (100_000, 1)]
    cases = [(100_000, 4)] if suite.settings.brief else cases
    cases = [(100, 1)] if suite.settings.quick else cases

    def fill(c: CSuite, table: Table) -> None:
        for n, mib in cases:
            parameters = {"n": n, "max": f"{mib} MiB", "samples": 3}
            c.row(table, f"{n:,} × ≤ {mib} MiB", "random", parameters)

    title = "random_allocations, as RMM defines it"
    return c_table(suite, "c_random", title, "ms", ways, fill)


INITIAL = "numpy_rmm, 64 MiB from the start"  # RMM's pool and arena have half of all
MOMENTS = {
    "cold": {"cold": 1},
    "not warmed, again and again": {},
    "warm": {"warm": 1},
}


def c_multi_stream(suite: Suite) -> Table:
    """Four kernels on four streams that the default stream waits for, as RMM's are."""
    ours: Ways = {
        OURS: ("device", {"new": 1}),
        INITIAL: ("device", {"new": 1, "initial": "64 MiB"}),
    }
    ways = peers_and(suite, ours, {"streams": 4, "blocking": 1})
    alone = {"streams": 4, "blocking": 1, "alone": 1}
    ways["kernels alone"] = ("device", alone)

    def fill(c: CSuite, table: Table) -> None:
        table.limit = "kernels alone"
        for moment, own in MOMENTS.items():
            if suite.settings.brief and moment not in ("cold", "warm"):
                continue
            n_samples = 3 if moment == "cold" else suite.pick(3, 100)
            parameters = {"kernels": 4, "samples": n_samples, **own}
            c.row(table, moment, "multi_stream", parameters)

    title = "multi_stream_allocations 4×4, as RMM defines it"
    return c_table(suite, "c_multi_stream", title, "µs", ways, fill)


def c_threads(suite: Suite) -> Table:
    counts = (1, 8) if suite.settings.brief else (1, 2, 4, 8, 16)
    counts = (1, 2) if suite.settings.quick else counts
    ways = peers_and(suite, {OURS: ("device", {})}, {})
    ways = {way: ways[way] for way in ways if way != "rmm pool" or len(counts) > 2}

    def fill(c: CSuite, table: Table) -> None:
        for n in counts:
            parameters = {"n": n, "live": 1, "size": 64 * KIB, "streams": n}
            parameters |= {"operations": suite.pick(200, 20_000)}
            parameters |= {"samples": 2 if suite.settings.brief else 5}
            c.row(table, threads_name(n), "threads", parameters)
        with_scaling(table)

    title = "Threads with pairs of 64 KiB, own stream each"
    return c_table(suite, "c_threads", title, "ns", ways, fill)


def c_fragmentation(suite: Suite) -> Table:
    """Nothing uses the blocks: what is freed is done. A trace of its own each turn."""
    cases = suite.pick(((64, 1),), ((4096, 64), (16384, 512)))

    def fill(c: CSuite, table: Table) -> None:
        for (live, largest), n in product(cases, (1, 4)):
            parameters = {"streams": n, "trace_streams": n, "live": f"{live} MiB"}
            parameters |= {"max": f"{largest} MiB", "samples": suite.settings.rounds}
            parameters |= {"operations": suite.pick(2000, 100_000)}
            name = f"{size(live * MIB)} live of ≤ {size(largest * MIB)}, "
            name += f"{n} stream{'s' if n > 1 else ''}"
            rounds = {OURS: c.runs("usage", parameters)[OURS]}
            table.measure(name, partial(c.settings.in_turns, name, rounds, 1))

    title = "Peak reserved over peak live, synthetic traces"
    ways: Ways = {OURS: ("device", {})}
    return c_table(suite, "c_fragmentation", title, "×", ways, fill)


def run(run: Run) -> None:
    suite = Suite("device", run)
    makers = {
        "growth": growth_table,
        "shrink": shrink_table,
        "pair": pair_table,
        "growing": growing_table,
        "multi_stream": multi_stream_table,
        "random": random_table,
        "c_pair": c_pair,
        "c_grow": c_grow,
        "c_live": c_live,
        "c_random": c_random,
        "c_multi_stream": c_multi_stream,
        "c_threads": c_threads,
        "c_fragmentation": c_fragmentation,
    }
    for name, make in makers.items():
        if run.settings.wants(name):
            run.done(make(suite))
