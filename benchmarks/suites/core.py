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
from _suite import Case, Measured, Settings, Table, in_turns, preload

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
MALLOC = "malloc"
ADDRESSES = "addresses"
THREADS = (1, 2, 4, 8, 16)
PAIR_SIZES = [8, 64, 512, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
RANDOM_MIB = (1, 4, 64, 1024, 4096)

Parameters = dict[str, int | str]


def measure(
    nrm_bench: Path,
    workload: str,
    allocator: str,
    parameters: Parameters,
    environ: Mapping[str, str] | None = None,
) -> Measured:
    """One process of the C program; if it fails, why."""
    words = [f"{key}={value}" for key, value in parameters.items()]
    done = subprocess.run(
        [str(nrm_bench), workload, allocator, *words],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not done.stdout:
        error = done.stderr.strip() or f"ended with {done.returncode}"
        return {"error": error.removeprefix("nrm_bench: ")}
    return json.loads(done.stdout)


class Suite:
    """The program, the settings, and a way for every allocator."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.program = settings.program or program(settings.build)
        self.quick = settings.quick

    def pick(self, quick: int, full: int) -> int:
        return quick if self.quick else full

    def ways(
        self, workload: str, parameters: Parameters, addresses: bool = True
    ) -> dict[str, Callable[[], Measured]]:
        """malloc and its replacements, our host handlers, and the pool of addresses."""
        settings = self.settings

        def way(allocator: str, library: str = "") -> Callable[[], Measured]:
            return partial(
                measure,
                self.program,
                workload,
                allocator,
                parameters,
                preload(library),
            )

        ways = {MALLOC: way(MALLOC)}
        ways |= {name: way(name) for name in settings.handlers}
        if addresses:
            ways[ADDRESSES] = way(ADDRESSES)
        ways |= {name: way(MALLOC, lib) for name, lib in settings.peers.items()}
        return ways

    def case(
        self, name: str, workload: str, parameters: Parameters, addresses: bool = True
    ) -> Case:
        ways = self.ways(workload, parameters, addresses)
        return in_turns(name, ways, self.settings.rounds)


def pair(suite: Suite) -> Table:
    table = Table("Hot pair: allocate and deallocate one size", "ns", MALLOC)
    quick = [64, 64 * KIB]
    for nbytes in suite.settings.sizes or (quick if suite.quick else PAIR_SIZES):
        parameters: Parameters = {"size": nbytes, "samples": suite.pick(5, 50)}
        parameters["batch"] = 1000 if nbytes <= 16 * MIB else 50
        table.cases.append(suite.case(size(nbytes), "pair", parameters))
    return table


def live(suite: Suite) -> Table:
    table = Table("Free and allocate among live blocks of 1 B to 64 KiB", "ns", MALLOC)
    for n in (1000, 32000):
        n = suite.pick(n // 100, n)
        parameters: Parameters = {"n": n, "samples": suite.pick(5, 50)}
        table.cases.append(suite.case(f"{n:,} live", "live", parameters))
    return table


def churn(suite: Suite) -> Table:
    table = Table("Churn: groups of 512 blocks, made and dropped", "ns", MALLOC)
    for low, high in ((16, 4 * KIB), (16, MIB), (64 * KIB, 16 * MIB)):
        parameters: Parameters = {"min": low, "max": high}
        parameters |= {"samples": suite.pick(3, 50)}
        name = f"{size(low)} to {size(high)}"
        table.cases.append(suite.case(name, "churn", parameters))
    return table


def random_allocations(suite: Suite) -> Table:
    table = Table("random_allocations, as RMM defines it", "ms", MALLOC)
    for n in (1000,) if suite.quick else (1000, 10_000, 100_000):
        for mib in (4,) if suite.quick else RANDOM_MIB:
            parameters: Parameters = {"n": n, "max": f"{mib} MiB"}
            parameters |= {"samples": suite.pick(1, 3 if n < 100_000 else 1)}
            name = f"{n:,} × ≤ {mib} MiB"
            table.cases.append(suite.case(name, "random", parameters))
    table.notes.append(
        "At most 16,000 MiB live, 73 % allocations. Nobody's memory is touched, so "
        "that the kernel's part is mapping only; failed requests are counted."
    )
    return table


def threads(suite: Suite) -> Table:
    table = Table("Threads with blocks of their own, 16 B to 64 KiB", "ns", MALLOC)
    cores = len(os.sched_getaffinity(0))
    counts = [n for n in THREADS if n <= max(cores, 2 if suite.quick else 1)]
    for n in counts:
        parameters: Parameters = {"n": n, "samples": suite.pick(2, 5)}
        parameters["operations"] = suite.pick(5000, 200_000)
        table.cases.append(suite.case(threads_name(n), "threads", parameters))
    for n in THREADS:
        if n not in counts:
            table.notes.append(f"{n} threads are left out: there are {cores} cores.")
    return with_scaling(table)


def threads_name(n: int) -> str:
    return f"{n} thread{'s' if n > 1 else ''}"


def with_scaling(table: Table) -> Table:
    """Times faster than one thread, beside each way's figures."""
    alone = table.cases[0].ways
    for case in table.cases:
        for way, found in case.ways.items():
            if way in alone:
                ratio = alone[way]["median"] / found["median"]
                found["extra"]["times_one_thread"] = ratio
    return table


def handoff(suite: Suite) -> Table:
    table = Table("Blocks of 1 KiB, freed by another thread", "ns", MALLOC)
    cores = len(os.sched_getaffinity(0))
    for n in (n for n in THREADS if n > 1):
        if n > max(cores, 2):
            table.notes.append(f"{n} threads are left out: there are {cores} cores.")
            continue
        parameters: Parameters = {"n": n, "samples": suite.pick(2, 5)}
        parameters["operations"] = suite.pick(5000, 100_000)
        table.cases.append(suite.case(threads_name(n), "handoff", parameters))
    return table


def trace_parameters(suite: Suite, largest: bool) -> Parameters:
    """Of the synthetic trace; the large one for addresses, which cost no memory."""
    if largest:
        live_mib, max_mib = suite.pick(64, 4096), suite.pick(1, 64)
    else:
        live_mib, max_mib = suite.pick(32, 1024), suite.pick(1, 16)
    return {
        "operations": suite.pick(2000, 100_000 if largest else 20_000),
        "live": f"{live_mib} MiB",
        "max": f"{max_mib} MiB",
    }


def fragmentation(suite: Suite) -> Table:
    """Every byte is written but of addresses, so resident memory is what is used."""
    table = Table("Peak memory over peak live, synthetic trace", "×", MALLOC)
    parameters = trace_parameters(suite, largest=False)
    by_resident = suite.ways("usage", {**parameters, "resident": 1}, addresses=False)
    name = f"{parameters['live']} live, resident"
    table.cases.append(in_turns(name, by_resident, 1 if suite.quick else 3))
    parameters = trace_parameters(suite, largest=True)
    for names in ([*suite.settings.handlers], [ADDRESSES]):
        large = parameters if names == [ADDRESSES] else trace_parameters(suite, False)
        ways = {
            way: partial(measure, suite.program, "usage", way, large) for way in names
        }
        name = f"{large['live']} live, reserved"
        table.cases.append(in_turns(name, ways, 1))
    table.notes.append(
        "Sizes are uniform in the logarithm; of the blocks 70 % are last in first out, "
        "20 % first in first out, 10 % long; 80 % repeat a shape."
    )
    return table


def replay(suite: Suite) -> Table:
    table = Table("Replay of a trace", "ns", MALLOC)
    samples = suite.pick(2, 5)
    parameters = trace_parameters(suite, largest=False) | {"samples": samples}
    table.cases.append(suite.case("synthetic", "replay", parameters))
    if suite.settings.trace:
        recorded: Parameters = {"file": str(suite.settings.trace), "samples": samples}
        table.cases.append(suite.case("recorded", "replay", recorded))
    return table


def grow(suite: Suite) -> Table:
    steps = suite.pick(4, 16)
    title = f"A pair of 64 KiB while another thread makes {steps} blocks of 64 MiB"
    table = Table(title, "ns", MALLOC)
    parameters: Parameters = {"steps": steps, "rounds": suite.pick(2, 20)}
    table.cases.append(suite.case("64 KiB", "grow", parameters))
    table.notes.append("Single pairs: the clock, some 25 ns, is in them.")
    return table


def run(settings: Settings) -> list[Table]:
    suite = Suite(settings)
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
    return [make(suite) for name, make in makers.items() if settings.wants(name)]
