"""Page-locked memory: how fast a pool of it grows, gives back and hands out.

Ratios are to ``cuMemHostAlloc``, the driver's own call, except in the tables of the C
program, where they are to the pool with the default rule of reuse.
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
    pair_table,
    shrink_table,
)
from _gpu_suite import growth as _growth
from _gpu_suite import pairs as _pairs
from _gpu_suite import shrinking as _shrinking
from _gpu_suite import try_way as _try_way
from _gpu_suite import while_growing as _while_growing
from _suite import Settings, Table

PEERS = ("cupy", "torch", "rmm")
CASES = ("growth", "shrink", "pair", "growing", "c_pair", "c_grow")

# What run.py calls in processes of their own.


def try_way(*args):  # type: ignore[no-untyped-def]
    return _try_way("pinned", *args)


def growth(*args):  # type: ignore[no-untyped-def]
    return _growth("pinned", *args)


def pairs(*args):  # type: ignore[no-untyped-def]
    return _pairs("pinned", *args)


def shrinking(*args):  # type: ignore[no-untyped-def]
    return _shrinking("pinned", *args)


def while_growing(*args):  # type: ignore[no-untyped-def]
    return _while_growing("pinned", *args)


def c_suite(suite: Suite) -> CSuite:
    ways = {
        OURS: ("pinned", {}),
        "numpy_rmm immediate": ("pinned", {"reuse": "immediate"}),
    }
    return CSuite(suite, ways)


def c_pair(suite: Suite) -> list[Table]:
    table = Table("Hot pair, C level", "ns", OURS)
    c = c_suite(suite)
    for nbytes in (256, 64 * KIB, MIB)[: suite.pick(2, 3)]:
        parameters = {"size": nbytes, "samples": suite.pick(3, 50)}
        table.cases.append(c.case(size(nbytes), "pair", parameters))
    return [table]


def c_grow(suite: Suite) -> list[Table]:
    step = suite.pick(MIB, 64 * MIB)
    title = f"A pair of 64 KiB while another thread takes 16 × {size(step)}, C level"
    table = Table(title, "ns", OURS)
    parameters = {"step": step, "steps": 16, "rounds": suite.pick(1, 10)}
    table.cases.append(c_suite(suite).case("64 KiB", "grow", parameters))
    return [table]


def run(settings: Settings) -> list[Table]:
    suite = Suite("pinned", settings)
    makers = {
        "growth": growth_table,
        "shrink": shrink_table,
        "pair": pair_table,
        "growing": growing_table,
    }
    tables = [make(suite) for name, make in makers.items() if settings.wants(name)]
    if settings.wants("c_pair"):
        tables += c_tables(suite, c_pair, "Hot pair, C level")
    if settings.wants("c_grow"):
        tables += c_tables(suite, c_grow, "A pair while the pool grows, C level")
    return tables
