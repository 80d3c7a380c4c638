"""The core alone, through its C interface, against malloc and its replacements.

The loops are in ``benchmarks/core``, a program that is built here in release mode and
links the same archive as the extension. Each measurement is a process of it, all
allocators are called through the same pointers, and the processes take turns.
"Addresses" is our pool over an upstream that hands out addresses and no memory: it
stands for device memory, and for workloads of many gigabytes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from _bench import KIB, MIB, size
from _compile import program
from _progress import OutOfTime
from _suite import Measured, Run, Settings, Table, preload

PEERS = ("mimalloc", "jemalloc", "tcmalloc")
CASES = (
    "pair",
    "live",
    "churn",
    "random",
    "threads",
    "handoff",
    "fragmentation",
    "replay",
    "grow",
)
Parameters = dict[str, int | str]
MALLOC = "malloc"
ADDRESSES = "addresses"
ADAPTORS: Parameters = {"adaptors": 1}  # statistics over a limit over the resource
THREADS = (1, 2, 4, 8, 16)
PAIR_SIZES = [8, 64, 512, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
RANDOM_MIB = (1, 4, 64, 1024, 4096)


def measure(
    nrm_bench: Path,
    workload: str,
    allocator: str,
    parameters: Parameters,
    settings: Settings,
    environ: Mapping[str, str] | None = None,
) -> Measured:
    """One process of the C program; if it fails, why."""
    words = [f"{key}={value}" for key, value in parameters.items()]
    timeout = settings.clock.timeout()
    try:
        done = subprocess.run(
            [str(nrm_bench), workload, allocator, *words],
            env={**os.environ, **(environ or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise OutOfTime("the time was up while it was measured") from None
    if done.returncode != 0 or not done.stdout:
        error = done.stderr.strip() or f"ended with {done.returncode}"
        return {"error": error.removeprefix("nrm_bench: ")}
    return json.loads(done.stdout)


class Suite:
    """The program, the run, and a way for every allocator."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = run.settings
        self.program = self.settings.program or program(self.settings.build)
        self.quick = self.settings.quick
        self.pick = self.settings.pick

    def way(
        self, workload: str, allocator: str, parameters: Parameters, library: str = ""
    ) -> Callable[[], Measured]:
        return partial(
            measure,
            *(self.program, workload, allocator, parameters, self.settings),
            environ=preload(library),
        )

    def ways(
        self,
        workload: str,
        parameters: Parameters,
        addresses: bool = True,
        adaptors: bool = False,
    ) -> dict[str, Callable[[], Measured]]:
        """malloc and its replacements, our host handlers, and the pool of addresses."""
        settings = self.settings
        ways = {MALLOC: self.way(workload, MALLOC, parameters)}
        ways |= {
            name: self.way(workload, name, parameters) for name in settings.handlers
        }
        for name in settings.handlers if adaptors else []:
            more = {**parameters, **ADAPTORS}
            ways[f"{name} statistics+limit"] = self.way(workload, name, more)
        if addresses and not settings.brief:
            ways[ADDRESSES] = self.way(workload, ADDRESSES, parameters)
        ways |= {
            name: self.way(workload, MALLOC, parameters, lib)
            for name, lib in settings.peers.items()
        }
        return ways

    def row(
        self,
        table: Table,
        name: str,
        workload: str,
        parameters: Parameters,
        addresses: bool = True,
        adaptors: bool = False,
    ) -> None:
        ways = self.ways(workload, parameters, addresses, adaptors)
        table.measure(name, partial(self.settings.in_turns, name, ways))


def pair(suite: Suite) -> Table:
    title = "Hot pair: allocate and deallocate one size"
    table = suite.run.table("pair", title, "ns", MALLOC)
    quick = [64, 64 * KIB]
    for nbytes in suite.settings.sizes or (quick if suite.quick else PAIR_SIZES):
        parameters: Parameters = {"size": nbytes, "samples": suite.pick(5, 50)}
        parameters["batch"] = 1000 if nbytes <= 16 * MIB else 50
        suite.row(table, size(nbytes), "pair", parameters, adaptors=True)
    return table


def live(suite: Suite) -> Table:
    title = "Free and allocate among live blocks of 1 B to 64 KiB"
    table = suite.run.table("live", title, "ns", MALLOC)
    for n in (1000, 32000):
        n = suite.pick(n // 100, n)
        parameters: Parameters = {"n": n, "samples": suite.pick(5, 50)}
        suite.row(table, f"{n:,} live", "live", parameters)
    return table


def churn(suite: Suite) -> Table:
    title = "Churn: groups of 512 blocks, made and dropped"
    table = suite.run.table("churn", title, "ns", MALLOC)
    for low, high in ((16, 4 * KIB), (16, MIB), (64 * KIB, 16 * MIB)):
        parameters: Parameters = {"min": low, "max": high}
        parameters |= {"samples": suite.pick(3, 50)}
        suite.row(table, f"{size(low)} to {size(high)}", "churn", parameters)
    return table


def random_allocations(suite: Suite) -> Table:
    title = "random_allocations, as RMM defines it"
    table = suite.run.table("random", title, "ms", MALLOC)
    for n in (1000,) if suite.quick else (1000, 10_000, 100_000):
        for mib in (4,) if suite.quick else RANDOM_MIB:
            parameters: Parameters = {"n": n, "max": f"{mib} MiB"}
            parameters |= {"samples": suite.pick(1, 3 if n < 100_000 else 1)}
            suite.row(table, f"{n:,} × ≤ {mib} MiB", "random", parameters)
    table.notes.append(
        "At most 16,000 MiB live, 73 % allocations. Nobody's memory is touched, so "
        "that the kernel's part is mapping only; failed requests are counted."
    )
    return table


def threads(suite: Suite) -> Table:
    title = "Threads with blocks of their own, 16 B to 64 KiB"
    table = suite.run.table("threads", title, "ns", MALLOC)
    for n in thread_counts(suite, table, [1]):
        parameters: Parameters = {"n": n, "samples": suite.pick(2, 5)}
        parameters["operations"] = suite.pick(5000, 200_000)
        suite.row(table, threads_name(n), "threads", parameters)
    return with_scaling(table)


def thread_counts(suite: Suite, table: Table, least: list[int]) -> list[int]:
    """As many as there are cores for; the others are named."""
    cores = max(len(os.sched_getaffinity(0)), least[-1])
    wanted = [n for n in THREADS if n >= least[0]]
    table.notes += [
        f"{n} threads are left out: there are {cores} cores."
        for n in wanted
        if n > cores
    ]
    return [n for n in wanted if n <= cores]


def threads_name(n: int) -> str:
    return f"{n} thread{'s' if n > 1 else ''}"


def with_scaling(table: Table) -> Table:
    """Times faster than one thread, beside each way's figures."""
    alone = next((c.ways for c in table.cases if c.name == "1 thread"), {})
    for case in table.cases:
        for way, found in case.ways.items():
            if way in alone:
                ratio = alone[way]["median"] / found["median"]
                found["extra"]["times_one_thread"] = ratio
    return table


def handoff(suite: Suite) -> Table:
    title = "Blocks of 1 KiB, freed by another thread"
    table = suite.run.table("handoff", title, "ns", MALLOC)
    for n in thread_counts(suite, table, [2]):
        parameters: Parameters = {"n": n, "samples": suite.pick(2, 5)}
        parameters["operations"] = suite.pick(5000, 100_000)
        suite.row(table, threads_name(n), "handoff", parameters)
    return table


def trace_parameters(suite: Suite, largest: bool) -> Parameters:
    """Of the synthetic trace; the large one for addresses, which cost no memory."""
    if largest:
        live_mib, max_mib = suite.pick(64, 4096), suite.pick(1, 64)
    else:
        live_mib, max_mib = suite.pick(32, 1024), suite.pick(1, 16)
    return {
        "operations": suite.pick(2000, 100_000 if largest else 10_000),
        "live": f"{live_mib} MiB",
        "max": f"{max_mib} MiB",
    }


def fragmentation(suite: Suite) -> Table:
    """Every byte is written but of addresses, so resident memory is what is used.

    The same trace gives the same figure each time: a turn is a trace of its own.
    """
    title = "Peak memory over peak live, synthetic traces"
    table = suite.run.table("fragmentation", title, "×", MALLOC)
    n_traces = {"samples": suite.settings.rounds}
    small = trace_parameters(suite, largest=False)
    if not suite.settings.brief:
        ways = suite.ways("usage", {**small, "resident": 1}, addresses=False)
        rounds = 1 if suite.quick else suite.settings.rounds
        name = f"{small['live']} live, resident"
        table.measure(name, lambda: suite.settings.in_turns(name, ways, rounds))
        reserved = {
            handler: suite.way("usage", handler, {**small, **n_traces})
            for handler in suite.settings.handlers
        }
        of_ours = f"{small['live']} live, reserved"
        table.measure(of_ours, lambda: suite.settings.in_turns(of_ours, reserved, 1))
    large: Parameters = {**trace_parameters(suite, largest=True), **n_traces}
    ways_of_addresses = {
        ADDRESSES: suite.way("usage", ADDRESSES, large),
        f"{ADDRESSES}, host": suite.way("usage", ADDRESSES, {**large, "kind": "host"}),
    }
    of_addresses = f"{large['live']} live, reserved"
    table.measure(
        of_addresses,
        lambda: suite.settings.in_turns(of_addresses, ways_of_addresses, 1),
    )
    table.notes.append(
        "Sizes are uniform in the logarithm; of the blocks 70 % are last in first out, "
        "20 % first in first out, 10 % long; 80 % repeat a shape. A sample is a trace."
    )
    return table


def replay(suite: Suite) -> Table:
    table = suite.run.table("replay", "Replay of a trace", "ns", MALLOC)
    samples = suite.pick(2, 5)
    parameters = trace_parameters(suite, largest=False) | {"samples": samples}
    suite.row(table, "synthetic", "replay", parameters)
    if suite.settings.trace:
        recorded: Parameters = {"file": str(suite.settings.trace), "samples": samples}
        suite.row(table, "recorded", "replay", recorded)
    return table


def grow(suite: Suite) -> Table:
    steps = suite.pick(4, 16)
    title = f"A pair of 64 KiB while another thread makes {steps} blocks of 64 MiB"
    table = suite.run.table("grow", title, "ns", MALLOC)
    parameters: Parameters = {"steps": steps, "rounds": suite.pick(2, 20)}
    suite.row(table, "64 KiB", "grow", parameters)
    table.notes.append("Single pairs: the clock, some 25 ns, is in them.")
    return table


def run(run: Run) -> None:
    suite = Suite(run)
    makers = {
        "pair": pair,
        "live": live,
        "churn": churn,
        "random": random_allocations,
        "threads": threads,
        "handoff": handoff,
        "fragmentation": fragmentation,
        "replay": replay,
        "grow": grow,
    }
    for name, make in makers.items():
        if run.settings.wants(name):
            run.done(make(suite))
