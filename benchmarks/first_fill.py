"""The first fill of a new array: what the pages cost that the system must find for it.

Each fill runs in a fresh process, as a process that freed large blocks before is
another case. "host_direct" asks the system for every array anew, as NumPy's default
does for large ones; "malloc" is the handler one writes first, and has no huge pages.
"""

from __future__ import annotations

from functools import partial

from _bench import MIB, Report, fresh, interleaved, main, medians, seconds, size

SIZES = [16 * MIB, 256 * MIB, 1024 * MIB]
ROUNDS = 9
WAYS = ["default", "malloc", "host_direct", "host"]


def worker(way: str, nbytes: int) -> float:
    import numpy as np

    import numpy_rmm

    if way == "malloc":
        from _malloc import capsule

        handler = capsule()
    else:
        handler = None if way == "default" else way
    with numpy_rmm.use_handler(handler):
        return seconds(lambda: np.empty(nbytes, np.uint8).fill(1))


def run() -> Report:
    columns = [
        "size",
        *(f"{way} ms" for way in WAYS),
        *(f"{way} ×" for way in WAYS[1:]),
    ]
    report = Report("First fill of a new array", columns)
    for nbytes in SIZES:
        times = medians(
            interleaved(
                {way: partial(fresh, __file__, way, nbytes) for way in WAYS},
                ROUNDS,
            )
        )
        report.rows.append(
            [
                size(nbytes),
                *(times[way] * 1e3 for way in WAYS),
                *(times[way] / times["default"] for way in WAYS[1:]),
            ]
        )
    report.notes.append("×: the time as a multiple of the default's; less is better.")
    return report


if __name__ == "__main__":
    main(run, worker)
