"""What this allocator is meant to reach, and how far a run's figures are from it.

A target is a figure of one of our ways in some cases of one table: at most so many
times what others need in the same case of the same run (the best of them counts), or at
most a number in the table's unit. The table below is all there is to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _bench import Report

Record = dict[str, Any]


@dataclass(frozen=True)
class Target:
    path: str  # what it is about
    table: str  # suite/case of run.py
    cases: str  # a pattern that their names match
    ways: tuple[str, ...]  # ours
    most: float
    against: tuple[str, ...] = ()  # patterns of ways, or nothing
    figure: str = "median"  # or p99, or the name of a further figure
    at_least: bool = False  # `most` is then the least
    on_numpy_1: float | None = None  # another value for NumPy 1.26


HOST, GPU = ("host",), ("numpy_rmm",)
INITIAL = (*GPU, "numpy_rmm, 64 MiB from the start")
DEFAULT, LIMIT = ("default",), ("limit",)
RMM = ("rmm .*", "cuMemAllocAsync")
USES = (*GPU, "numpy_rmm recorded")
COPIES = (*GPU, "numpy_rmm, parked_limit 4 MiB")
BELOW_1_KIB = r"(8|64|512) B"
KIB_TO_MIB = r"(4 KiB|64 KiB|256 KiB|1 MiB)"
BESIDES = ("host statistics+limit", "numpy_rmm statistics+limit")
BESIDES += ("numpy_rmm immediate, statistics+limit",)

TARGETS = (
    # NumPy's arrays
    Target("np.empty < 1 KiB, from C", "numpy/c_empty", BELOW_1_KIB, HOST, 1.02,
           DEFAULT, on_numpy_1=1.06),
    Target("np.zeros < 1 KiB, from C", "numpy/c_zeros", BELOW_1_KIB, HOST, 1.02,
           DEFAULT, on_numpy_1=1.06),
    Target("np.empty 1 KiB, from C", "numpy/c_empty", "1 KiB", HOST, 0.95, DEFAULT),
    Target("np.zeros 1 KiB, from C", "numpy/c_zeros", "1 KiB", HOST, 0.95, DEFAULT),
    Target("np.empty 4 KiB to 1 MiB", "numpy/empty_together", KIB_TO_MIB, HOST, 0.95,
           DEFAULT),
    Target("np.empty 4 KiB to 1 MiB, from C", "numpy/c_empty", KIB_TO_MIB, HOST, 0.85,
           DEFAULT),
    Target("np.empty 4 to 16 MiB", "numpy/empty_together", r"(4|16) MiB", HOST, 0.35,
           DEFAULT),
    Target("np.empty from 64 MiB", "numpy/empty_together", r"(64|256) MiB|1 GiB", HOST,
           0.03, DEFAULT),
    Target("(a+b)*(a-b)+a*2, 256 KiB to 4 MiB", "numpy/chain",
           r"(256 KiB|1 MiB|4 MiB), .*", HOST, 1.05, LIMIT),
    Target("a+b, 64 MiB to 1 GiB", "numpy/add_together", r"(64|256) MiB|1 GiB", HOST,
           1.05, LIMIT),
    Target("np.zeros 256 MiB, µs", "numpy/patterns", "never touched", HOST, 10),
    Target("np.zeros 256 MiB filled and dropped", "numpy/patterns", "filled and .*",
           HOST, 1.25, LIMIT),
    Target("np.zeros 256 MiB after a filled one, µs", "numpy/patterns",
           "untouched after .*", HOST, 1000),
    Target("np.zeros 256 MiB, reserved to live", "numpy/patterns", ".*", HOST, 1.10,
           figure="reserved_to_live"),
    Target("resize from 1 to 256 MiB in 64 steps", "numpy/resize", ".*", HOST, 1.1,
           DEFAULT),
    Target("realloc from 1 to 256 MiB in 64 steps", "numpy/realloc", ".*", HOST, 1.1,
           DEFAULT),
    # pairs from C
    Target("hot pair, host, ns", "core/pair", "(64 B|64 KiB|1 MiB)", HOST, 12),
    Target("hot pair, device, ns", "device/c_pair", "(256 B|64 KiB|1 MiB)", GPU, 12),
    Target("hot pair, page-locked, ns", "pinned/c_pair", ".*",
           ("numpy_rmm immediate",), 12),
    Target("pair with statistics and limit, host, ns",
           "core/pair",
           "(64 B|64 KiB|1 MiB)", BESIDES, 20),
    Target("pair with statistics and limit, device, ns",
           "device/c_pair",
           "(256 B|64 KiB|1 MiB)", BESIDES, 20),
    Target("pair with statistics and limit, page-locked, ns",
           "pinned/c_pair", ".*", BESIDES,
           20),
    Target("hot pair, bare stream handle, ns", "device/c_pair",
           "(256 B|64 KiB|1 MiB)", ("numpy_rmm, bare handle",), 350),
    Target("free + allocate, 1,000 live, ns", "core/live", "1,000 live", HOST, 60),
    Target("free + allocate, 32,000 live, ns", "core/live", "32,000 live", HOST, 120),
    Target("free + allocate, 1,000 live, device, ns", "device/c_live", "1,000 live",
           GPU, 60),
    Target("free + allocate, 32,000 live, device, ns", "device/c_live",
           "32,000 live", GPU, 120),
    # threads
    Target("8 threads, own blocks, × one thread", "core/threads", "8 threads", HOST, 7,
           figure="times_one_thread", at_least=True),
    Target("8 threads, own streams, × one thread", "device/c_threads", "8 threads",
           GPU, 7, figure="times_one_thread", at_least=True),
    Target("8 threads, handed to another", "core/handoff", "8 threads", HOST, 1.0,
           ("mimalloc",)),
    # memory
    Target("peak reserved to peak live, one stream", "core/fragmentation",
           "4096 MiB live, reserved", ("addresses", "addresses, host"), 1.10),
    Target("peak reserved to peak live, one stream", "device/c_fragmentation",
           ".*, 1 stream", GPU, 1.10),
    Target("peak reserved to peak live, 4 streams", "device/c_fragmentation",
           ".*, 4 streams", GPU, 1.25),
    Target("first page-locked GiB, ms", "pinned/growth", r"first, \d+ cores", GPU, 45),
    Target("a page-locked GiB given back, ms", "pinned/growth",
           r"give back, \d+ cores", GPU, 25),
    Target("p99 of a pair while the pool grows, ns", "core/grow", ".*", HOST, 3e6,
           figure="p99"),
    Target("p99 of a pair while the pool grows, page-locked, ns", "pinned/c_grow",
           ".*", GPU, 3e6, figure="p99"),
    Target("p99 of a pair while the pool grows, device, ns", "device/c_grow", ".*",
           GPU, 3e6, figure="p99"),
    # safe reuse
    Target("record_use from C, ns", "reuse/c_use", "Stream", USES, 10),
    Target("record_use from C, bare handle, ns", "reuse/c_use", "handle", USES, 350),
    Target("record_use, ns", "reuse/use", "Stream", GPU, 120),
    Target("record_use, raw handle, ns", "reuse/use", "handle", GPU, 350),
    Target("a free that parks, ns", "reuse/c_park", ".*", GPU, 15),
    Target("pair beside an idle GPU, ns", "reuse/c_idle_pair", "64 KiB", GPU, 30),
    Target("pair beside an idle GPU, from 1 MiB", "reuse/c_idle_pair", ".* MiB", GPU,
           1.0, ("driver's calls",)),
    Target("filling a new page-locked array", "reuse/fill", ".*", GPU, 1.10,
           ("one buffer",)),
    Target("(a+b)*(a-b)+a*2, page-locked", "reuse/chain", ".*", ("pinned",), 1.10,
           HOST),
    Target("copies from dropped blocks", "reuse/c_copies", ".*", COPIES, 1 / 0.97,
           ("one buffer",)),
    Target("copies from dropped blocks, blocks", "reuse/c_copies", ".*", GPU, 16,
           figure="blocks"),
    Target("copies from dropped blocks, blocks", "reuse/c_copies", ".*", COPIES[1:], 4,
           figure="blocks"),
    Target("PyTorch's copies from dropped arrays", "reuse/torch_copies", ".*", GPU,
           1 / 0.95, ("one buffer",)),
    Target("temporaries beside an endless kernel, ms", "reuse/endless", ".*", GPU, 25,
           figure="max"),
    # calls from Python
    Target("DeviceBuffer made and dropped, ns", "device_python/buffer", ".*", GPU, 250),
    Target("allocate + deallocate from Python, ns", "device_python/pair", ".*", GPU,
           150),
    Target("__cuda_array_interface__, ns", "device_python/interface", ".*", GPU, 50),
    Target("current resource from Python, ns", "device_python/current", ".*", GPU, 60),
    Target("current resource of a device from C, ns", "device_python/c_current",
           "of a device", GPU, 10),
    Target("current resource of the current device from C, ns",
           "device_python/c_current", "of the current one", GPU, 30),
    Target("Stream() made and dropped", "device_python/stream", ".*", GPU, 1.2,
           ("cuStreamCreate",)),
    Target("foreign stream wrapped, ns", "device_python/wrap", ".*", GPU, 100),
    Target("log, statistics and limit add, ns", "device_python/c_stack", ".*",
           (*GPU, "numpy_rmm host"), 40),
    # RMM's benchmarks
    Target("random_allocations 100,000 × ≤ 4 MiB, ms", "device/c_random",
           "100,000 × ≤ 4 MiB", GPU, 27),
    Target("random_allocations 100,000 × ≤ 4 MiB", "device/c_random",
           "100,000 × ≤ 4 MiB", GPU, 0.333, RMM),
    Target("multi_stream_allocations 4×4, cold", "device/c_multi_stream", "cold",
           INITIAL, 1.0, RMM),
    Target("multi_stream_allocations 4×4, warm", "device/c_multi_stream", "warm",
           INITIAL, 1.0, RMM),
)  # fmt: skip


def judge(
    tables: Sequence[Record],
    machine: Mapping[str, str],
    wanted: Sequence[Target] = TARGETS,
) -> list[Record]:
    """Every target with each case that it is about, or with what is missing."""
    found = []
    for target in wanted:
        rows = list(_rows(target, tables, machine))
        found += rows or [_row(target, "", "", _asked(target, machine), None)]
    return found


def _asked(target: Target, machine: Mapping[str, str]) -> float:
    old = machine.get("NumPy", "").startswith("1.")
    if old and target.on_numpy_1 is not None:
        return target.on_numpy_1
    return target.most


def _rows(
    target: Target, tables: Sequence[Record], machine: Mapping[str, str]
) -> Iterator[Record]:
    asked = _asked(target, machine)
    for table in tables:
        if f"{table['suite']}/{table['key']}" != target.table:
            continue
        for name, why in table["not_measured"].items():
            if re.fullmatch(target.cases, name):
                yield _row(target, name, "", asked, None, why)
        for case in table["cases"]:
            if re.fullmatch(target.cases, case["name"]):
                for way in target.ways:
                    if way in case["ways"] or way in case["failed"]:
                        yield _compare(target, case, way, asked)


def _compare(target: Target, case: Record, way: str, asked: float) -> Record:
    if way in case["failed"]:
        return _row(target, case["name"], way, asked, None, case["failed"][way])
    value = figure(case["ways"][way], target.figure)
    if value is None:
        return _row(target, case["name"], way, asked, None, "there is no such figure")
    best = _best(target, case)
    if best is None:
        why = "nothing to compare with was measured"
        return _row(target, case["name"], way, asked, None, why)
    name, below = best
    return _row(target, case["name"], way, asked, value / below, against=name)


def figure(found: Record, name: str) -> float | None:
    value: float | None = found.get(name, found["extra"].get(name))
    return value


def _best(target: Target, case: Record) -> tuple[str, float] | None:
    """The way with the least of the figure among those to compare with."""
    if not target.against:
        return "", 1.0
    figures = [
        (value, way)
        for way, found in case["ways"].items()
        if any(re.fullmatch(pattern, way) for pattern in target.against)
        and (value := figure(found, target.figure))
    ]
    if not figures:
        return None
    value, way = min(figures)
    return way, value


def _row(
    target: Target,
    case: str,
    way: str,
    asked: float,
    measured: float | None,
    why: str = "",
    against: str = "",
) -> Record:
    met = None
    if measured is not None:
        met = measured >= asked if target.at_least else measured <= asked
    return {
        "path": target.path,
        "table": target.table,
        "case": case,
        "way": way,
        "figure": target.figure,
        "at_least": target.at_least,
        "asked": asked,
        "measured": measured,
        "against": against,
        "met": met,
        "why": why,
    }


def verdict(row: Record) -> str:
    """In words: met, or by how much it is missed."""
    if row["met"] is None:
        return f"not measured: {row['why']}" if row["why"] else "not measured"
    if row["met"]:
        return "met"
    parts = (row["asked"], row["measured"])
    off = (max(parts) / min(parts) - 1) * 100
    if off < 1:
        return "missed by less than 1 %"
    if off < 1000:
        return f"missed by {off:.0f} %"
    return f"missed {off / 100 + 1:.0f} times"


def report(rows: Sequence[Record], notes: Sequence[str] = ()) -> Report:
    columns = ["target", "case", "way", "asked", "measured", "against", "result"]
    found = Report("Targets", columns)
    for row in rows:
        sign = "≥" if row["at_least"] else "≤"
        unit = "× " if row["against"] else ""
        measured = (
            None if row["measured"] is None else f"{unit}{_short(row['measured'])}"
        )
        found.rows.append(
            [
                row["path"],
                row["case"],
                row["way"],
                f"{sign} {unit}{_short(row['asked'])}",
                measured,
                row["against"],
                verdict(row),
            ]
        )
    n_met = sum(row["met"] is True for row in rows)
    n_missed = sum(row["met"] is False for row in rows)
    n_open = len(rows) - n_met - n_missed
    found.notes += notes
    found.notes.append(f"{n_met} met, {n_missed} missed, {n_open} not measured.")
    return found


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
