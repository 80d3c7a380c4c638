"""What a fork costs a process that holds page-locked memory, in two tables.

    python tests/gpu/forks.py [--json FILE] [--simulator] [--idle 4GiB] [--live 1GiB]

The first: how long `os.fork` takes, and what the child has then, for a process with
CUDA in use and with so much memory of one sort. The second: forked workers that each
read all of one array. Each row is measured in a process of its own, as memory that a
process once had changes what its forks cost. The simulated driver locks no pages: its
figures only show that the program works.

Status 0: the forks are as the documentation says (see `problems`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np

import numpy_rmm
from numpy_rmm import mr
from proof import driver_of, machine

MIB, GIB = 1 << 20, 1 << 30
PIECE = 64 * MIB
KEPT_PIECE, N_THREADS = 4 * MIB, 8
N_FORKS, N_WORKERS = 7, 4
ROW_LIMIT = 200  # seconds
Row = dict[str, Any]

# ---- what a process has --------------------------------------------------------------


def memory() -> dict[str, int]:
    """Bytes of this process: all that is mapped and there, and what it shares with no
    other process."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        found[name.rstrip(":")] = int(value) * 1024
    own = found["Private_Clean"] + found["Private_Dirty"]
    return {"rss": found["Rss"], "own": own}


def available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


# ---- the memory of the rows: each function returns what has to stay ------------------


def pinned_pool() -> mr.MemoryResource:
    return mr.PoolMemoryResource(mr.PinnedHostMemoryResource())


def make_nothing(nbytes: int) -> object:
    return None


def make_ordinary(nbytes: int) -> object:
    return np.ones(nbytes, np.uint8)


def make_idle(nbytes: int) -> object:
    """A pool that has handed it out and has it back."""
    pool = pinned_pool()
    with numpy_rmm.use_handler(pool):
        arrays = [np.ones(PIECE, np.uint8) for _ in range(nbytes // PIECE)]
        del arrays
    statistics = pool.statistics()
    assert statistics is not None
    assert statistics.current_bytes == 0
    assert statistics.reserved_bytes >= nbytes, statistics
    return pool


def keep(nbytes: int, has_kept: threading.Barrier) -> None:
    """Frees much, of which a thread keeps a part, and stays."""
    arrays = [np.ones(KEPT_PIECE, np.uint8) for _ in range(nbytes // KEPT_PIECE)]
    del arrays
    has_kept.wait()
    threading.Event().wait()


def work_on(nbytes: int, begins: threading.Barrier) -> None:
    """Allocates and frees all the time, and has one array at most."""
    begins.wait()
    while True:
        np.ones(KEPT_PIECE, np.uint8)


def in_threads(part: Callable[[int, threading.Barrier], None], nbytes: int) -> object:
    pool = pinned_pool()
    handler = numpy_rmm.use_handler(pool).handler
    barrier = threading.Barrier(N_THREADS + 1)
    for _ in range(N_THREADS):
        args = (part, nbytes // N_THREADS, barrier)
        threading.Thread(target=handler.run, args=args, daemon=True).start()
    barrier.wait()
    return pool


def make_kept(nbytes: int) -> object:
    """What threads have freed: some of it in the pool, some with them."""
    pool = in_threads(keep, nbytes)
    assert isinstance(pool, mr.MemoryResource)
    statistics = pool.statistics()
    assert statistics is not None
    assert statistics.current_bytes == 0
    assert statistics.reserved_bytes >= nbytes // N_THREADS, statistics
    return pool


def make_busy(nbytes: int) -> object:
    return in_threads(work_on, nbytes)


def make_live(nbytes: int) -> object:
    with numpy_rmm.use_handler(pinned_pool()):
        return np.ones(nbytes, np.uint8)


def make_pinned(nbytes: int) -> object:
    array = np.ones(nbytes, np.uint8)
    return array, numpy_rmm.pin(array)


# name: (what it is called, how it is made, "idle" or "live" size, the option)
FORKS: dict[str, tuple[str, Callable[[int], object], str, str]] = {
    "nothing": ("none", make_nothing, "idle", "copy"),
    "ordinary": ("an ordinary array", make_ordinary, "idle", "copy"),
    "idle": ("a page-locked pool, all free", make_idle, "idle", "copy"),
    "kept": ("the same, freed by 8 threads that live on", make_kept, "live", "copy"),
    "busy": ("8 threads that allocate and free 4 MiB", make_busy, "live", "copy"),
    "live": ("a page-locked array", make_live, "live", "copy"),
    "live_dontfork": ('the same, fork="dontfork"', make_live, "live", "dontfork"),
    "pinned": ("an ordinary array that pin() has locked", make_pinned, "live", "copy"),
}


# ---- forks ---------------------------------------------------------------------------


def fork(function: Callable[[], object]) -> int:
    child = os.fork()
    if child != 0:
        return child
    status = 1
    try:
        function()
        status = 0
    except Exception:  # noqa: BLE001, nothing of the parent's goes on here
        traceback.print_exc()
    finally:
        os._exit(status)


def tell_memory(writer: int) -> None:
    own = memory()
    os.write(writer, struct.pack("qq", own["rss"], own["own"]))


def fork_once() -> tuple[float, dict[str, int]]:
    """Seconds that the parent needs, and what the child has at its start."""
    reader, writer = os.pipe()
    start = time.perf_counter()
    child = fork(lambda: tell_memory(writer))
    seconds = time.perf_counter() - start
    os.close(writer)
    told = os.read(reader, 16)
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0 or len(told) != 16:
        raise RuntimeError(f"a child ended with status {status}")
    rss, own = struct.unpack("qq", told)
    return seconds, {"rss": rss, "own": own}


def measure_fork(name: str, nbytes: int) -> Row:
    _, make, _, mode = FORKS[name]
    numpy_rmm.options["fork"] = mode
    kept = make(nbytes)
    gc.collect()
    forks = [fork_once() for _ in range(N_FORKS)]
    del kept
    return {
        "seconds": sorted(seconds for seconds, _ in forks),
        "rss": max(child["rss"] for _, child in forks),
        "own": max(child["own"] for _, child in forks),
    }


# ---- workers -------------------------------------------------------------------------


def array_ordinary(nbytes: int) -> tuple[np.ndarray, object]:
    return np.arange(nbytes // 8), None


def array_live(nbytes: int) -> tuple[np.ndarray, object]:
    with numpy_rmm.use_handler(pinned_pool()):
        return np.arange(nbytes // 8), None


def array_shared(nbytes: int) -> tuple[np.ndarray, object]:
    memory = shared_memory.SharedMemory(create=True, size=nbytes)
    memory.unlink()  # it lives as long as somebody has it mapped
    array = np.ndarray(nbytes // 8, np.int64, memory.buf)
    array[:] = np.arange(nbytes // 8)
    return array, (memory, numpy_rmm.pin(array))


WORKERS: dict[str, tuple[str, Callable[[int], tuple[np.ndarray, object]]]] = {
    "ordinary": ("an ordinary array", array_ordinary),
    "live": ("a page-locked array", array_live),
    "shared": ("shared memory that pin() has locked", array_shared),
}


def work(array: np.ndarray, writer: int) -> None:
    start = time.perf_counter()
    total = int(array.sum())
    seconds = time.perf_counter() - start
    os.write(writer, struct.pack("qdq", total, seconds, memory()["own"]))


def measure_workers(name: str, nbytes: int) -> Row:
    """Workers that each read the whole array, side by side."""
    array, owner = WORKERS[name][1](nbytes)
    expected = int(array.sum())
    reader, writer = os.pipe()
    start, children, forking = time.perf_counter(), [], 0.0
    for _ in range(N_WORKERS):
        before = time.perf_counter()
        children.append(fork(lambda: work(array, writer)))
        forking += time.perf_counter() - before
    statuses = [os.waitstatus_to_exitcode(os.waitpid(x, 0)[1]) for x in children]
    seconds = time.perf_counter() - start
    told = [struct.unpack("qdq", os.read(reader, 24)) for _ in range(statuses.count(0))]
    if any(statuses):
        raise RuntimeError(f"the workers ended with {statuses}")
    if any(total != expected for total, _, _ in told):
        raise RuntimeError(f"the workers read {told}, not {expected}")
    os.close(reader)
    os.close(writer)
    del owner
    return {
        "seconds": seconds,
        "forking": forking,
        "reading": max(seconds for _, seconds, _ in told),
        "own": sum(own for _, _, own in told),
    }


# ---- all of it -----------------------------------------------------------------------


def run_row(part: str, name: str, nbytes: int, simulator: bool) -> Row:
    """In this process."""
    driver = driver_of(simulator)  # CUDA is in use, as in any program that needs it
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
    warnings.simplefilter("ignore", RuntimeWarning)  # ours: it is what is measured
    row = (measure_fork if part == "fork" else measure_workers)(name, nbytes)
    return {"part": part, "row": name, "nbytes": nbytes, **row, **machine(driver)}


def ask(part: str, name: str, nbytes: int, simulator: bool) -> Row:
    """In a process of its own; its error when it fails."""
    needed = nbytes * (1 + N_WORKERS if (part, name) == ("workers", "live") else 2)
    if needed > available() * 0.9:
        error = f"not run: needs {size(needed)}, and {size(available())} are left"
        return {"part": part, "row": name, "nbytes": nbytes, "error": error}
    command = [sys.executable, __file__, "--row", part, name, str(nbytes)]
    path = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            [*command, *(["--simulator"] if simulator else [])],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=ROW_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        error = f"not done after {ROW_LIMIT} s"
        return {"part": part, "row": name, "nbytes": nbytes, "error": error}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        error = f"status {done.returncode}: {done.stderr.strip()[-2000:]}"
        return {"part": part, "row": name, "nbytes": nbytes, "error": error}
    row: Row = json.loads(lines[-1])
    return row


def measure(idle: int, live: int, simulator: bool = False) -> list[Row]:
    sizes = {"idle": idle, "live": live}
    rows = [ask("fork", name, sizes[FORKS[name][2]], simulator) for name in FORKS]
    return rows + [ask("workers", name, live, simulator) for name in WORKERS]


# ---- what is said of it --------------------------------------------------------------


def find(rows: list[Row], part: str, name: str) -> Row:
    found = [row for row in rows if (row["part"], row["row"]) == (part, name)]
    return found[0] if found else {"error": "not measured"}


def problems(rows: list[Row], simulator: bool = False) -> list[str]:
    """What is not as the documentation says. Of a simulated device only failures."""
    failed = [row for row in rows if "error" in row]
    found = [f"{row['part']} {row['row']}: {row['error']}" for row in failed]
    nothing, idle = find(rows, "fork", "nothing"), find(rows, "fork", "idle")
    live, left_out = find(rows, "fork", "live"), find(rows, "fork", "live_dontfork")
    kept, busy = find(rows, "fork", "kept"), find(rows, "fork", "busy")
    if simulator or found:
        return found
    if idle["seconds"][0] > 2 * nothing["seconds"][0]:
        found.append("idle memory makes a fork more than twice as long")
    found += [
        f"{row['row']}: the child has 200 MiB more, or above"
        for row in (idle, kept, busy, left_out)
        if row["rss"] > nothing["rss"] + 200 * MIB
    ]
    # Otherwise nothing was locked here, and the rows above say nothing.
    if live["own"] < live["nbytes"]:
        found.append("a live page-locked array was not copied into the child")
    return found


def columns(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def tables(rows: list[Row]) -> str:
    forks = [["memory", "size", "fork, ms (least, median)", "child: resident", "own"]]
    for name, (title, *_) in FORKS.items():
        row = find(rows, "fork", name)
        if "error" in row:
            forks.append([title, "", row["error"].splitlines()[-1], "", ""])
            continue
        times = [1000 * seconds for seconds in row["seconds"]]
        forks.append(
            [
                title,
                "" if name in ("nothing", "busy") else size(row["nbytes"]),
                f"{times[0]:.1f}, {times[len(times) // 2]:.1f}",
                size(row["rss"]),
                size(row["own"]),
            ]
        )
    workers = [["array", "size", "all, s", "of it forks, s", "read, s", "workers' own"]]
    for name, (title, _) in WORKERS.items():
        row = find(rows, "workers", name)
        if "error" in row:
            workers.append([title, "", row["error"].splitlines()[-1], "", "", ""])
            continue
        times = [f"{row[key]:.2f}" for key in ("seconds", "forking", "reading")]
        workers.append([title, size(row["nbytes"]), *times, size(row["own"])])
    head = f"{N_WORKERS} forked workers, each of which reads all of one array"
    return f"{columns(forks)}\n\n{head}\n\n{columns(workers)}"


MEASURED = (
    *("part", "row", "nbytes", "error"),
    *("seconds", "rss", "own", "forking", "reading"),
)


def described(rows: list[Row]) -> dict[str, Any]:
    """The machine, from whichever row has got so far."""
    told = next((row for row in rows if "error" not in row), {})
    return {key: value for key, value in told.items() if key not in MEASURED} | {
        "kernel": platform.release(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows too")
    parser.add_argument("--simulator", action="store_true", help="without a GPU")
    nbytes = numpy_rmm._core._parse_nbytes
    parser.add_argument("--idle", type=nbytes, default=4 * GIB, metavar="SIZE")
    parser.add_argument("--live", type=nbytes, default=GIB, metavar="SIZE")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        part, name, text = options.row
        print(json.dumps(run_row(part, name, int(text), options.simulator)))
        return 0
    rows = measure(options.idle, options.live, options.simulator)
    about = described(rows)
    wrong = problems(rows, options.simulator)
    print("; ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
    print(tables(rows))
    if wrong:
        print("\nNot as expected:", *wrong, sep="\n  ")
    if options.json:
        kept = [{key: row[key] for key in MEASURED if key in row} for row in rows]
        record = {"machine": about, "rows": kept, "problems": wrong}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
