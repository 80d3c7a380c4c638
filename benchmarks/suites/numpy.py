"""NumPy's operations under a handler, against NumPy's default and malloc replacements.

Each operation at each size runs in a fresh process that does nothing else, and again
after a warm-up: glibc changes its ways for good after the first large free, so the two
are different programs. The limit of arithmetic is the same expression with ``out=``
into arrays that exist: what is left when memory costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _bench import GIB, KIB, MIB, interleaved, size
from _compile import CannotCompile, extension, load
from _progress import turns
from _suite import Case, Measured, Run, Settings, preload

PEERS = ("mimalloc", "jemalloc", "tcmalloc", "numpy-allocator")
SIZES = [8, 64, KIB, 4 * KIB, 64 * KIB, 256 * KIB]
SIZES += [MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB]
QUICK_SIZES = [64, 64 * KIB]
C_SIZES = [8, 64, 512, KIB, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB]
C_SIZES += [64 * MIB, 256 * MIB]
DEFAULT, LIMIT = "default", "limit"

# name: (statement, the limit's statement, live arrays at most)
STATEMENTS: dict[str, tuple[str, str, int]] = {
    "empty": ("np.empty(nbytes, u8)", "", 1),
    "zeros": ("np.zeros(nbytes, u8)", "", 1),
    "ones": ("np.ones(nbytes, u8)", "np.copyto(o8, 1)", 2),
    "add": ("a + b", "np.add(a, b, out=o)", 4),
    "chain": ("(a + b) * (a - b) + a * 2", "chain_out()", 7),
    "concatenate": (
        "np.concatenate((a, b))",
        "np.concatenate((a, b), out=o2)",
        5,
    ),
    "fromstring": ("np.fromstring(text, sep=' ')", "", 4),
}
TITLES = {
    "empty": "np.empty, made and dropped",
    "zeros": "np.zeros, made and dropped untouched",
    "ones": "np.ones, made and dropped",
    "add": "a + b, float64",
    "chain": "(a + b) * (a - b) + a * 2, float64",
    "concatenate": "np.concatenate of two arrays of this size",
    "fromstring": "np.fromstring(text, sep=' '), a growing reader, by the array's size",
}
LARGEST_TEXT = 16 * MIB  # parsing is slow
TOGETHER = ("empty", "add")  # whose ways also take turns within a process
CASES = (
    *STATEMENTS,
    *(f"{name}_together" for name in TOGETHER),
    *("resize", "realloc", "patterns", "c_empty", "c_zeros"),
)
BUDGET_S, QUICK_BUDGET_S = 0.1, 0.01


# ---- in the measured process ---------------------------------------------------------


@contextlib.contextmanager
def allocating(way: str) -> Iterator[Any]:
    """Arrays come from where the way says; preloaded peers need nothing said."""
    if way.startswith("handler "):
        import numpy_rmm

        with numpy_rmm.use_handler(way.removeprefix("handler ")) as handler:
            yield handler
    elif way == "numpy-allocator":
        allocator = plain_malloc()
        with allocator:
            yield None
    else:
        yield None


_libc = ctypes.CDLL(None)  # holds what the addresses below are of


def plain_malloc() -> Any:
    """numpy-allocator's way to write a handler, over the four functions of libc."""
    import numpy_allocator

    functions = {
        f"_{name}_": ctypes.addressof(getattr(_libc, name))
        for name in ("malloc", "calloc", "realloc", "free")
    }
    return numpy_allocator.type("plain_malloc", (), functions)


def check_preloaded() -> None:
    """Nothing is measured under a name whose library the loader left out."""
    library = os.environ.get("LD_PRELOAD", "")
    stem = Path(library).name.split(".so")[0]
    if stem and stem not in Path("/proc/self/maps").read_text():
        raise SystemExit(f"{stem} was not preloaded")


def environment(case: str, nbytes: int, is_limit: bool) -> dict[str, Any]:
    """The names that a statement sees."""
    import numpy as np

    names: dict[str, Any] = {"np": np, "u8": np.uint8, "nbytes": nbytes}
    if case in ("add", "chain", "concatenate"):
        n = max(nbytes // 8, 1)
        names["a"], names["b"] = np.full(n, 1.5), np.full(n, 0.25)
    if case == "fromstring":
        names["text"] = "1.5 " * max(nbytes // 8, 1)
    if is_limit:
        names |= limit_arrays(case, nbytes, names)
    return names


def limit_arrays(case: str, nbytes: int, names: dict[str, Any]) -> dict[str, Any]:
    """The arrays that the limit writes into; their pages are there."""
    import numpy as np

    if case == "ones":
        return {"o8": np.full(nbytes, 2, np.uint8)}
    a, b = names["a"], names["b"]
    if case == "concatenate":
        return {"o2": np.ones(2 * a.size)}
    o, t, u = np.ones_like(a), np.ones_like(a), np.ones_like(a)

    def chain_out() -> None:
        np.add(a, b, out=t)
        np.subtract(a, b, out=u)
        np.multiply(t, u, out=t)
        np.multiply(a, 2, out=u)
        np.add(t, u, out=o)

    return {"o": o, "chain_out": chain_out}


def measure(timer: timeit.Timer, budget_s: float) -> list[float]:
    """Microseconds of one execution; of short ones, the mean of a batch of 20 µs."""
    number = 1
    while (once := timer.timeit(number)) < 20e-6 and number < 1 << 20:
        number *= 4
    samples = [once / number * 1e6]
    end = time.perf_counter() + budget_s
    while len(samples) < 3 or (len(samples) < 300 and time.perf_counter() < end):
        samples.append(timer.timeit(number) / number * 1e6)
    return samples[1:]


def warm_up(budget_s: float) -> None:
    """What a program has done that has run for a while: blocks of every size, filled
    and dropped, up to where glibc's threshold stops to grow."""
    import numpy as np

    for exponent in range(6, 26 if budget_s > QUICK_BUDGET_S else 17):
        arrays = [np.empty(1 << exponent, np.uint8) for _ in range(3)]
        for array in arrays:
            array.fill(1)


def statement(case: str, way: str, nbytes: int, budget_s: float) -> dict[str, Measured]:
    """In a fresh process, and again warmed up."""
    check_preloaded()
    source = STATEMENTS[case][1 if way == LIMIT else 0]
    with allocating(way):
        names = environment(case, nbytes, way == LIMIT)
        timer = timeit.Timer(source, globals=names)
        first = timer.timeit(1) * 1e6
        fresh = measure(timer, budget_s)
        warm_up(budget_s)
        warm = measure(timer, budget_s)
    return {
        "fresh": {"samples": fresh, "extra": {"first": first}},
        "warmed up": {"samples": warm, "extra": {}},
    }


def together(
    case: str, ways: list[str], nbytes: int, rounds: int, budget_s: float
) -> dict[str, list[list[float]]]:
    """Samples of each turn, the ways in turns in a process that is warmed up."""
    check_preloaded()
    names = environment(case, nbytes, is_limit=bool(STATEMENTS[case][1]))
    timers = {
        way: timeit.Timer(STATEMENTS[case][1 if way == LIMIT else 0], globals=names)
        for way in ways
    }
    warm_up(budget_s)

    def once(way: str) -> list[float]:
        with allocating(way):
            return measure(timers[way], budget_s)

    for way in ways:
        once(way)
    return interleaved({way: partial(once, way) for way in ways}, rounds)


def resize(way: str, last: int, steps: int, repeats: int) -> Measured:
    """Milliseconds to grow an array to ``last`` bytes; NumPy zeroes what is new."""
    check_preloaded()
    import numpy as np

    first = max(last // 256, 1)
    sizes = [first + (last - first) * step // steps for step in range(1, steps + 1)]

    def grow() -> None:
        array = np.empty(first, np.uint8)
        for nbytes in sizes:
            array.resize(nbytes, refcheck=False)

    with allocating(way):
        samples = [timeit.timeit(grow, number=1) * 1e3 for _ in range(repeats)]
    return {"samples": samples, "extra": {"first": samples[0]}}


def realloc(path: str, way: str, last: int, steps: int, repeats: int) -> Measured:
    """Milliseconds in the handler's realloc alone, the block written in between."""
    check_preloaded()
    loop = load(path)
    with allocating(way):
        first = max(last // 256, 1)
        samples = [loop.grow(first, last, steps) * 1e3 for _ in range(repeats)]
    return {"samples": samples, "extra": {}}


def c_loop(
    path: str, function: str, ways: list[str], sizes: list[int], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Nanoseconds of one array of each size, the ways in turns within this process."""
    check_preloaded()
    loop = getattr(load(path), function)

    def once(way: str, nbytes: int, count: int) -> float:
        with allocating(way):
            loop(nbytes, min(count, 10))  # what was cached by the other way
            return loop(nbytes, count) * 1e9

    found = {}
    for nbytes in sizes:
        count = max(3, min(20000, (1 << 27) // max(nbytes, 1)))
        count = count if nbytes >= 64 * MIB else max(count, 200)
        found[str(nbytes)] = interleaved(
            {way: partial(once, way, nbytes, count) for way in ways}, rounds
        )
    return found


# ---- np.zeros in three patterns ------------------------------------------------------


def resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def usage(handler: Any, before: int, nbytes: int) -> dict[str, float]:
    """With one array alive: what is reserved, and what the process has, over it."""
    found = {"resident_to_live": (resident_nbytes() - before) / nbytes}
    if handler is not None and handler.statistics() is not None:
        statistics_now = handler.statistics()
        found["reserved_to_live"] = (
            statistics_now.reserved_bytes / statistics_now.current_bytes
        )
    return found


def zeros_pattern(pattern: str, way: str, nbytes: int, repeats: int) -> Measured:
    """Microseconds of the part of the pattern that is ours to make cheap."""
    check_preloaded()
    import numpy as np

    samples = []
    found: dict[str, float] = {}
    with allocating(way) as handler:
        before = resident_nbytes()
        kept = np.empty(nbytes, np.uint8) if way == LIMIT else None
        if kept is not None:
            kept.fill(1)
        for _ in range(repeats):
            start = time.perf_counter()
            if kept is not None:
                kept.fill(0)
                kept.fill(1)
                samples.append(time.perf_counter() - start)
                continue
            array = np.zeros(nbytes, np.uint8)
            if pattern != "never touched":
                if pattern == "untouched after a filled one":
                    array.fill(1)
                    del array
                    start = time.perf_counter()
                    array = np.zeros(nbytes, np.uint8)
                else:
                    array.fill(1)
            samples.append(time.perf_counter() - start)
            found = usage(handler, before, nbytes)
            del array
    if kept is None and pattern == "untouched after a filled one":
        with allocating(way):
            assert not np.zeros(nbytes, np.uint8).any()
    return {"samples": [value * 1e6 for value in samples], "extra": found}


PATTERNS = (
    "never touched",
    "filled and dropped in turn",
    "untouched after a filled one",
)


# ---- the tables ----------------------------------------------------------------------


def ways_of(settings: Settings, limit: bool = False) -> dict[str, tuple[str, str]]:
    """The name of each way: what its process is told, and what is preloaded there."""
    ways = {DEFAULT: (DEFAULT, "")}
    if limit:
        ways[LIMIT] = (LIMIT, "")
    for handler in settings.handlers:
        ways[handler] = (f"handler {handler}", "")
    for name, library in settings.peers.items():
        ways[name] = (DEFAULT, library) if library else (name, "")
    return ways


def processes(
    settings: Settings, function: str, *args: object, limit: bool = False
) -> dict[str, Callable[[], Any]]:
    """A fresh process of each way; ``{way}`` among the arguments is its own."""
    return {
        name: partial(
            settings.new_process,
            "numpy",
            function,
            *(way if arg == "{way}" else arg for arg in args),
            environ=preload(library),
        )
        for name, (way, library) in ways_of(settings, limit).items()
    }


def available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def sizes_for(case: str, settings: Settings, notes: list[str]) -> list[int]:
    """The sizes whose arrays fit into the memory that is free; others are named."""
    chosen = settings.sizes or (QUICK_SIZES if settings.quick else SIZES)
    if case == "fromstring":
        chosen = [nbytes for nbytes in chosen if KIB <= nbytes <= LARGEST_TEXT]
    most = int(0.8 * available_nbytes() / STATEMENTS[case][2])
    notes += [
        f"{size(nbytes)} is left out: too little memory is free."
        for nbytes in chosen
        if nbytes > most
    ]
    return [nbytes for nbytes in chosen if nbytes <= most]


MOMENTS = ("fresh", "warmed up")


def statement_table(run: Run, case: str) -> None:
    settings = run.settings
    has_limit = bool(STATEMENTS[case][1])
    title = f"{TITLES[case]}, Python level"
    table = run.table(case, title, "µs", DEFAULT, LIMIT if has_limit else "")
    budget_s = QUICK_BUDGET_S if settings.quick else BUDGET_S

    def rows(nbytes: int) -> list[Case]:
        ways = processes(
            settings, "statement", case, "{way}", nbytes, budget_s, limit=has_limit
        )
        found = turns(ways, settings.rounds, settings.clock)
        return [
            Case.of(
                f"{size(nbytes)}, {moment}",
                {way: [one[moment] for one in found[way]] for way in found},
            )
            for moment in MOMENTS
        ]

    for nbytes in sizes_for(case, settings, table.notes):
        names = [f"{size(nbytes)}, {moment}" for moment in MOMENTS]
        table.measure(names, partial(rows, nbytes))
    run.done(table)


def together_table(run: Run, case: str) -> None:
    """One process a size, which all ways share; preloaded peers have no place in it."""
    settings = run.settings
    has_limit = bool(STATEMENTS[case][1])
    title = f"{TITLES[case]}, Python level, the ways in turns in one process"
    table = run.table(
        f"{case}_together", title, "µs", DEFAULT, LIMIT if has_limit else ""
    )
    ways = {DEFAULT: DEFAULT} | ({LIMIT: LIMIT} if has_limit else {})
    ways |= {name: f"handler {name}" for name in settings.handlers}
    budget_s = QUICK_BUDGET_S if settings.quick else BUDGET_S

    def row(nbytes: int) -> Case:
        found = settings.new_process(
            *("numpy", "together", case, list(ways.values()), nbytes),
            *(settings.rounds, budget_s),
        )
        rounds = {
            name: [{"samples": samples} for samples in found[way]]
            for name, way in ways.items()
        }
        return Case.of(size(nbytes), rounds)

    for nbytes in sizes_for(case, settings, table.notes):
        table.measure(size(nbytes), partial(row, nbytes))
    run.done(table)


def growth_target(settings: Settings) -> tuple[int, int, int]:
    """Bytes, steps, repeats in a process."""
    return (4 * MIB, 16, 2) if settings.quick else (256 * MIB, 64, 3)


def resize_table(run: Run) -> None:
    last, steps, repeats = growth_target(run.settings)
    title = f"resize to {size(last)} in {steps} steps"
    table = run.table("resize", title, "ms", DEFAULT)
    ways = processes(run.settings, "resize", "{way}", last, steps, repeats)
    name = "resize, zeroed by NumPy"
    table.measure(name, lambda: run.settings.in_turns(name, ways))
    run.done(table)


def patterns_table(run: Run) -> None:
    settings = run.settings
    nbytes = max(settings.sizes) if settings.sizes else 256 * MIB
    nbytes = 4 * MIB if settings.quick else nbytes
    title = f"np.zeros of {size(nbytes)} in three patterns"
    table = run.table("patterns", title, "µs", DEFAULT, LIMIT)
    repeats = 3 if settings.brief or settings.quick else 9
    for pattern in PATTERNS:
        is_filled = pattern == "filled and dropped in turn"
        ways = processes(
            *(settings, "zeros_pattern", pattern, "{way}", nbytes, repeats),
            limit=is_filled,
        )
        table.measure(pattern, partial(settings.in_turns, pattern, ways))
    table.notes.append(
        "limit: fill(0) and fill(1) of one array that exists. Reserved and resident "
        "are looked at while the array is alive."
    )
    run.done(table)


C_TURNS = 5  # in a process, and processes: 25 in all


def c_loop_cases(
    path: Path, function: str, sizes: list[int], settings: Settings
) -> list[Case]:
    """The ways of one process in turns, and the processes in turns."""
    in_process = {DEFAULT: DEFAULT}
    in_process |= {name: f"handler {name}" for name in settings.handlers}
    if "numpy-allocator" in settings.peers:
        in_process["numpy-allocator"] = "numpy-allocator"
    groups: dict[str, tuple[list[str], str]] = {"": (list(in_process.values()), "")}
    for name, library in settings.peers.items():
        if library:
            groups[name] = ([DEFAULT], library)
    n_turns = min(settings.rounds, C_TURNS)
    runs = {
        group: partial(
            settings.new_process,
            *("numpy", "c_loop", str(path), function, ways, sizes, n_turns),
            environ=preload(library),
        )
        for group, (ways, library) in groups.items()
    }
    found = turns(runs, n_turns, settings.clock)

    def rounds(group: str, way: str, nbytes: int) -> list[Measured]:
        """Each turn of each process."""
        return [
            {"samples": [value]}
            for one in found[group]
            for value in one[str(nbytes)][way]
        ]

    return [
        Case.of(
            size(nbytes),
            {name: rounds("", way, nbytes) for name, way in in_process.items()}
            | {name: rounds(name, DEFAULT, nbytes) for name in groups if name},
        )
        for nbytes in sizes
    ]


def compiled_tables(run: Run) -> None:
    """The tables that need the C loop; without a compiler, they say so."""
    settings = run.settings
    wanted = [case for case in ("c_empty", "c_zeros") if settings.wants(case)]
    last, steps, repeats = growth_target(settings)
    with tempfile.TemporaryDirectory() as folder:
        path, why = Path(), ""
        try:
            path = extension("npy_loop", Path(folder))
        except CannotCompile as error:
            why = f"Not measured: {error}"
        for case in wanted:
            title = f"np.{case[2:]} from C, made and dropped"
            table = run.table(case, title, "ns", DEFAULT)
            table.notes += [why] if why else []
            sizes = c_sizes(settings) if not why else []
            for group in (sizes[i : i + 4] for i in range(0, len(sizes), 4)):
                make = partial(c_loop_cases, path, case[2:], group, settings)
                table.measure([size(nbytes) for nbytes in group], make)
            run.done(table)
        if settings.wants("realloc"):
            title = f"realloc to {size(last)} in {steps} steps, C level"
            table = run.table("realloc", title, "ms", DEFAULT)
            table.notes += [why] if why else []
            ways = processes(
                settings, "realloc", str(path), "{way}", last, steps, repeats
            )
            if not why:
                name = "realloc alone"
                table.measure(name, lambda: settings.in_turns(name, ways))
            run.done(table)


def c_sizes(settings: Settings) -> list[int]:
    return settings.sizes or (QUICK_SIZES if settings.quick else C_SIZES)


def run(run: Run) -> None:
    wants = run.settings.wants
    for case in STATEMENTS:
        if wants(case):
            statement_table(run, case)
    for case in TOGETHER:
        if wants(f"{case}_together"):
            together_table(run, case)
    if wants("resize"):
        resize_table(run)
    if wants("patterns"):
        patterns_table(run)
    if any(map(wants, ("c_empty", "c_zeros", "realloc"))):
        compiled_tables(run)
