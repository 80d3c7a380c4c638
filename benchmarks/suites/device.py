"""Device memory: growth, shrinking, hot pairs, several streams, random allocations.

Ratios are to ``cuMemAlloc``, the driver's call without a pool; in the tables of the C
program and of random allocations to our pool.
"""

from __future__ import annotations

from _bench import KIB, MIB, size
from _gpu import OURS
from _gpu_suite import (
    CSuite,
    Suite,
    c_tables,
    growing_table,
    growth_table,
    multi_stream,
    multi_stream_table,
    pair_table,
    random_table,
    shrink_table,
)
from _gpu_suite import growth as _growth
from _gpu_suite import pairs as _pairs
from _gpu_suite import random_allocations as _random_allocations
from _gpu_suite import shrinking as _shrinking
from _gpu_suite import try_way as _try_way
from _gpu_suite import while_growing as _while_growing
from _suite import Settings, Table

__all__ = ["CASES", "PEERS", "multi_stream", "run"]

PEERS = ("cupy", "torch", "rmm")
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
    "c_threads",
    "c_fragmentation",
)

# What run.py calls in processes of their own.


def try_way(*args):  # type: ignore[no-untyped-def]
    return _try_way("device", *args)


def growth(*args):  # type: ignore[no-untyped-def]
    return _growth("device", *args)


def pairs(*args):  # type: ignore[no-untyped-def]
    return _pairs("device", *args)


def shrinking(*args):  # type: ignore[no-untyped-def]
    return _shrinking("device", *args)


def while_growing(*args):  # type: ignore[no-untyped-def]
    return _while_growing("device", *args)


def random_allocations(*args):  # type: ignore[no-untyped-def]
    return _random_allocations("device", *args)


ASYNC = {"cuMemAllocAsync": ("cuMemAllocAsync", {"streams": 1})}
STREAM = {OURS: ("device", {"streams": 1}), **ASYNC}


def c_pair(suite: Suite) -> list[Table]:
    table = Table("Hot pair, C level, one stream", "ns", OURS)
    bare = ("device", {"streams": 1, "wrap": 1})
    c = CSuite(suite, {**STREAM, "numpy_rmm, bare handle": bare})
    for nbytes in (256, 64 * KIB, MIB, 16 * MIB)[: suite.pick(2, 4)]:
        parameters = {"size": nbytes, "samples": suite.pick(3, 50)}
        table.cases.append(c.case(size(nbytes), "pair", parameters))
    return [table]


def c_grow(suite: Suite) -> list[Table]:
    step = suite.pick(MIB, 64 * MIB)
    title = f"A pair of 64 KiB while another thread takes 16 × {size(step)}, C level"
    table = Table(title, "ns", OURS)
    parameters = {"step": step, "steps": 16, "rounds": suite.pick(1, 10)}
    table.cases.append(CSuite(suite, STREAM).case("64 KiB", "grow", parameters))
    return [table]


def c_live(suite: Suite) -> list[Table]:
    table = Table("Free and allocate among live blocks, C level", "ns", OURS)
    for n in (1000, 32000):
        n = suite.pick(n // 100, n)
        parameters = {"n": n, "samples": suite.pick(3, 50)}
        case = CSuite(suite, STREAM).case(f"{n:,} live", "live", parameters)
        table.cases.append(case)
    return [table]


def c_random(suite: Suite) -> list[Table]:
    table = Table("random_allocations, as RMM defines it, C level", "ms", OURS)
    cases = [(100, 1)] if suite.settings.quick else [(10_000, 4), (100_000, 4)]
    cases += [] if suite.settings.quick else [(100_000, 1)]
    for n, mib in cases:
        parameters = {"n": n, "max": f"{mib} MiB", "samples": 1}
        case = CSuite(suite, STREAM).case(f"{n:,} × ≤ {mib} MiB", "random", parameters)
        table.cases.append(case)
    return [table]


def c_threads(suite: Suite) -> list[Table]:
    title = "Threads with pairs of 64 KiB, own stream each, C level"
    table = Table(title, "ns", OURS)
    ways = {way: (allocator, {}) for way, (allocator, _) in STREAM.items()}
    for n in (1, 2) if suite.settings.quick else (1, 2, 4, 8, 16):
        parameters = {"n": n, "live": 1, "size": 64 * KIB, "streams": n}
        parameters |= {"operations": suite.pick(200, 20_000)}
        name = f"{n} thread{'s' if n > 1 else ''}"
        table.cases.append(CSuite(suite, ways).case(name, "threads", parameters))
    return [table]


def c_fragmentation(suite: Suite) -> list[Table]:
    """What the GPU has not finished counts as live."""
    table = Table("Peak reserved over peak live, synthetic trace", "×", OURS)
    live, largest = suite.pick(64, 4096), suite.pick(1, 64)
    for n in (1, 4):
        parameters = {"streams": n, "trace_streams": n, "live": f"{live} MiB"}
        parameters |= {"max": f"{largest} MiB", "operations": suite.pick(2000, 100_000)}
        ways = {OURS: ("device", {})}
        name = f"{live} MiB live, {n} stream{'s' if n > 1 else ''}"
        table.cases.append(CSuite(suite, ways).case(name, "usage", parameters))
    return [table]


def run(settings: Settings) -> list[Table]:
    suite = Suite("device", settings)
    makers = {
        "growth": growth_table,
        "shrink": shrink_table,
        "pair": pair_table,
        "growing": growing_table,
        "multi_stream": multi_stream_table,
        "random": random_table,
    }
    c_makers = {
        "c_pair": c_pair,
        "c_grow": c_grow,
        "c_live": c_live,
        "c_random": c_random,
        "c_threads": c_threads,
        "c_fragmentation": c_fragmentation,
    }
    tables = [make(suite) for name, make in makers.items() if settings.wants(name)]
    for name, make in c_makers.items():
        if settings.wants(name):
            tables += c_tables(suite, make, f"{name[2:]}, C level")
    return tables
