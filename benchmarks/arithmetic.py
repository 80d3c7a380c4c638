"""Arithmetic on temporaries, ``(a + b) * (a - b) + a * 2``: four of them, made and
dropped.

The limit is the same expression written with ``out=`` into arrays that exist: what is
left when memory costs nothing. "first" is the first time in a fresh process, "later"
the median of the times after it: glibc changes its ways after the first large free.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from _bench import KIB, MIB, Report, fresh, interleaved, main, seconds, size

SIZES = [64 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
ROUNDS = 5
LONGEST_S = 0.5


def worker(way: str, nbytes: int) -> dict[str, float]:
    """Seconds of the first and of a later evaluation, in this process."""
    import numpy as np

    import numpy_rmm

    handler = None if way in ("default", "limit") else way
    with numpy_rmm.use_handler(handler):
        a = np.full(nbytes // 8, 1.5)
        b = np.full(nbytes // 8, 0.25)
        t, u = (np.ones_like(a), np.ones_like(a)) if way == "limit" else (None, None)

        def limit() -> None:
            np.add(a, b, out=t)
            np.subtract(a, b, out=u)
            np.multiply(t, u, out=t)
            np.multiply(a, 2, out=u)
            np.add(t, u, out=t)

        def chain() -> None:
            (a + b) * (a - b) + a * 2

        return measure(limit if way == "limit" else chain)


def measure(function: Any) -> dict[str, float]:
    first = seconds(function)
    times: list[float] = []
    end = time.perf_counter() + LONGEST_S
    while len(times) < 5 or (len(times) < 1000 and time.perf_counter() < end):
        times.append(seconds(function))
    return {"first": first, "later": statistics.median(times)}


def ways() -> list[str]:
    """The default, ours for host arrays, and page-locked ones where they can be had."""
    import numpy_rmm

    found = ["default", "limit", "host"]
    try:
        with numpy_rmm.use_handler("pinned"):
            found.append("pinned")
    except numpy_rmm.CudaUnavailableError:
        pass
    return found


def run() -> list[Report]:
    names = ways()
    columns = ["size", *(f"{name} ms" for name in names)]
    columns += [f"{name} ×" for name in names[1:]]
    reports = {
        moment: Report(f"(a + b) * (a - b) + a * 2, float64, {moment} time", columns)
        for moment in ("first", "later")
    }
    for nbytes in SIZES:
        results = interleaved(
            {name: partial(fresh, __file__, name, nbytes) for name in names},
            ROUNDS,
        )
        for moment, report in reports.items():
            times = {
                name: statistics.median(result[moment] for result in results[name])
                for name in names
            }
            report.rows.append(
                [
                    size(nbytes),
                    *(times[name] * 1e3 for name in names),
                    *(times["default"] / times[name] for name in names[1:]),
                ]
            )
    for report in reports.values():
        report.notes.append("×: how many times faster than the default.")
    return list(reports.values())


if __name__ == "__main__":
    main(run, worker)
