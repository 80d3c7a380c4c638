"""Page-locked memory: how fast a pool of it grows, gives back and hands out.

Ratios are to ``cuMemHostAlloc``, the driver's own call, except in the tables of the C
program, where they are to the pool with the default rule of reuse.
"""

from __future__ import annotations

from functools import partial

import _gpu_suite
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
from _suite import Run, Table

PEERS = ("cupy", "torch", "rmm", "librmm")
CASES = ("growth", "shrink", "pair", "growing", "c_pair", "c_grow")

# What run.py calls in processes of their own.
try_way = partial(_gpu_suite.try_way, "pinned")
growth = partial(_gpu_suite.growth, "pinned")
pairs = partial(_gpu_suite.pairs, "pinned")
shrinking = partial(_gpu_suite.shrinking, "pinned")
while_growing = partial(_gpu_suite.while_growing, "pinned")

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
