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
    Ways,
    c_table,
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
from _suite import Run, Table

PEERS = ("cupy", "torch", "rmm", "librmm")
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


IMMEDIATE = {"reuse": "immediate"}
BASE: Ways = {OURS: ("pinned", {}), "numpy_rmm immediate": ("pinned", {**IMMEDIATE})}
# RMM's takes its memory when it is made: it cannot grow.
WAYS: Ways = {
    **BASE,
    "numpy_rmm immediate, statistics+limit": ("pinned", {**IMMEDIATE, "adaptors": 1}),
    "rmm pool": ("rmm:pinned", {"streams": 1, "initial": "64 MiB"}),
}


def c_pair(suite: Suite) -> Table:
    def fill(c: CSuite, table: Table) -> None:
        sizes = (64 * KIB, MIB) if suite.settings.brief else (256, 64 * KIB, MIB)
        for nbytes in sizes[: suite.pick(2, 3)]:
            parameters = {"size": nbytes, "samples": suite.pick(3, 50)}
            c.row(table, size(nbytes), "pair", parameters)

    return c_table(suite, "c_pair", "Hot pair", "ns", WAYS, fill)


def c_grow(suite: Suite) -> Table:
    step = suite.pick(MIB, 64 * MIB)
    title = f"A pair of 64 KiB while another thread takes 16 × {size(step)}"
    parameters = {"step": step, "steps": 16, "rounds": suite.pick(1, 10)}
    if suite.settings.brief:
        parameters["rounds"] = suite.pick(1, 3)

    def fill(c: CSuite, table: Table) -> None:
        c.row(table, "64 KiB", "grow", parameters)

    return c_table(suite, "c_grow", title, "ns", BASE, fill)


def run(run: Run) -> None:
    suite = Suite("pinned", run)
    makers = {
        "growth": growth_table,
        "shrink": shrink_table,
        "pair": pair_table,
        "growing": growing_table,
        "c_pair": c_pair,
        "c_grow": c_grow,
    }
    for name, make in makers.items():
        if run.settings.wants(name):
            run.done(make(suite))
