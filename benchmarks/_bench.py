"""What the benchmarks share: fresh processes, interleaved repeats, tables and JSON.

A benchmark is a script with a function ``run() -> Report``; ``main(run)`` prints the
table and, with ``--json PATH``, writes the figures together with the machine they were
made on. Absolute times of a shared machine drift by the minute, so the ways to be
compared take turns, and what is reported is the median and the ratio of medians of one
run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Result = TypeVar("Result")


@dataclass
class Report:
    """A table of figures: one row a case, and under it what a reader must know."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # in the JSON only

    def text(self) -> str:
        cells = [list(map(str, self.columns))]
        cells += [[show(value) for value in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [self.title, ""]
        for number, row in enumerate(cells):
            padded = [
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(padded).rstrip())
            if number == 0:
                lines.append("  ".join("-" * width for width in widths))
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [list(row) for row in self.rows],
            "notes": self.notes,
            "details": self.details,
            "machine": machine(),
        }


def show(value: Any) -> str:
    """A figure with three significant digits; anything else as it is."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "–" if value is None else str(value)


def size(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


# ---- measuring -----------------------------------------------------------------------


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(
    ways: Mapping[str, Callable[[], Result]], repeats: int
) -> dict[str, list[Result]]:
    """Each way's results; the ways take turns, and every round starts with another
    one."""
    names = list(ways)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for number in range(repeats):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            results[name].append(ways[name]())
    return results


def medians(results: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in results.items()}


def fresh(
    script: str | Path,
    *args: object,
    environ: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Any:
    """Runs this benchmark's ``worker(*args)`` in a new interpreter; its result by JSON.

    glibc raises its mmap threshold after the first large free, so that a process of one
    size behaves unlike one that has run for a while: each case gets a process of its
    own.
    """
    command = [sys.executable, script, "--worker", json.dumps(args)]
    env = {**os.environ, **(environ or {})}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=env,
        timeout=timeout,
    )
    if done.returncode != 0:
        words = " ".join(map(str, args))
        raise SystemExit(f"{Path(script).name} {words} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def forked(function: Callable[..., Any], *args: object) -> Any:
    """The same without a new interpreter, for tests: a fork begins where this one is,
    so its figures mean nothing."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(writable, "w") as pipe:
                json.dump(function(*args), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit(f"{function.__name__} ended with an error")
    return json.loads(text)


def main(
    run: Callable[[], Report | list[Report]], worker: Callable[..., Any] | None = None
) -> None:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the figures too"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None and worker is not None:
        print(json.dumps(worker(*json.loads(options.worker))))
        return
    reports = run()
    reports = [reports] if isinstance(reports, Report) else reports
    for report in reports:
        print(report.text(), end="\n\n")
    print("; ".join(f"{name} {value}" for name, value in machine().items()))
    if options.json:
        records = [report.record() for report in reports]
        options.json.write_text(json.dumps(records, indent=1) + "\n")


# ---- the machine: what is needed to read the figures, and nothing that names its owner


def machine() -> dict[str, str]:
    import numpy as np

    import numpy_rmm

    release = ".".join(platform.release().split(".")[:2])
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {
        "CPU": f"{_cpu()} ({len(os.sched_getaffinity(0))} cores)",
        "memory": f"{nbytes / GIB:.0f} GiB",
        "GPU": _gpu(),
        "driver": _driver(),
        "Linux": f"{release} (huge pages: {_huge_pages()})",
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "numpy_rmm": numpy_rmm.__version__,
    }
    return {name: value for name, value in found.items() if value}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return re.sub(r"\s+", " ", found[1]) if found else platform.machine()


def _huge_pages() -> str:
    found = re.search(
        r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled")
    )
    return found[1] if found else "unknown"


def _gpu() -> str:
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", _read(str(path)), re.MULTILINE)
        models += [found[1].strip()] if found else []
    return ", ".join(sorted(set(models))) or _nvidia_smi("name")


def _driver() -> str:
    found = re.search(
        r"Kernel Module.*?\s(\d+\.\d[\d.]*)", _read("/proc/driver/nvidia/version")
    )
    return found[1] if found else _nvidia_smi("driver_version")


def _nvidia_smi(field: str) -> str:
    """Where the driver's files cannot be read, as in some containers."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return ", ".join(sorted({line.strip() for line in lines}))
