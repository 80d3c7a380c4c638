"""Every combination of the proof that memory is not reused too early, in one table.

    python tests/gpu/proof.py [--json FILE] [--simulator] [--sizes SIZES] [--limit S]
    python tests/gpu/proof.py --situations [--library NAME]

For each library that is installed, each kind of memory, size, stream and pool the
program of `hazards` runs once under each policy. Status 0: no byte was wrong under the
default policy, and bytes were wrong under "immediate", without which the first would
prove nothing. With --situations the program is played inside and beside captures, with
graphs, with a kernel without end and with a pool that dies.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import hazards
import numpy_rmm
import situations
from hazards import Case, Outcome
from numpy_rmm.testing import Driver, simulate_cuda

STUCK_AFTER = 60  # seconds of one combination, after which the process gives up
RIGHT, WRONG, WAITED, FAILED, LEFT_OUT = ".", "X", "w", "!", " "

LEGEND = f"""\
One character a stream: {", ".join(hazards.STREAMS)}.
"{RIGHT}" every byte right   "{WRONG}" wrong bytes   "{FAILED}" the program failed
"{WAITED}" the call that queued the copy waited for it: no hazard   blank: not run
Pools: below their limit, full, and full with on_exhausted="wait".
"fill": cuMemsetD8Async on managed memory; "cuda()": Tensor.cuda(non_blocking=True)."""


@dataclass
class Row:
    """One combination and what came of it."""

    library: str
    case: Case
    outcome: Outcome | None
    error: str = ""

    @property
    def mark(self) -> str:
        if self.outcome is None:
            return FAILED
        if self.outcome.wrong:
            return WRONG
        return WAITED if self.outcome.waited else RIGHT

    @property
    def is_expected(self) -> bool:
        safe = (RIGHT, WAITED)
        expected = safe if self.case.reuse == "context" else (WRONG, WAITED)
        return self.mark in expected

    def record(self) -> dict[str, object]:
        outcome = asdict(self.outcome) if self.outcome is not None else {}
        return {
            "library": self.library,
            **asdict(self.case),
            **outcome,
            "error": self.error,
        }


# ---- running -------------------------------------------------------------------------


def installed(names: list[str]) -> tuple[list[type[hazards.Library]], list[str]]:
    """The libraries that are here, and the names of those that are not."""
    found, missing = [], []
    for library in hazards.RAW_LIBRARIES + hazards.PYTHON_LIBRARIES:
        if names and library.name not in names:
            continue
        if library in hazards.RAW_LIBRARIES:
            found.append(library)
        elif not hazards.is_installed(library.name):
            missing.append(library.name)
        else:
            found.append(library)
    return found, missing


def cases(library: type[hazards.Library], sizes: tuple[int, ...]) -> Iterator[Case]:
    for reuse in hazards.POLICIES:
        for kind, operation, room, nbytes in hazards.rows(library, reuse, sizes):
            for stream in hazards.STREAMS:
                yield Case(kind, reuse, room, nbytes, operation, stream)


def run_one(user: hazards.Library, case: Case) -> Row:
    faulthandler.dump_traceback_later(STUCK_AFTER, exit=True)
    try:
        return Row(user.name, case, hazards.run(user, case))
    except Exception as error:  # noqa: BLE001, the other rows are wanted all the same
        return Row(user.name, case, None, f"{type(error).__name__}: {error}")
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_all(
    driver: Driver,
    sizes: tuple[int, ...],
    limit: float,
    names: list[str],
    kind: str | None,
) -> tuple[list[Row], list[str]]:
    """The rows that could be run within `limit` seconds, and what is missing."""
    rows = []
    end = time.monotonic() + limit
    has_managed = hazards.has_managed(driver)
    libraries, missing = installed(names)
    for library in libraries:
        try:
            user = library(driver)
        except Exception as error:  # noqa: BLE001, any library may fail in any way
            missing.append(f"{library.name} ({type(error).__name__}: {error})")
            continue
        start = time.monotonic()
        wanted = [
            case
            for case in cases(library, sizes)
            if hazards.fits(case)
            and (has_managed or case.kind != "managed")
            and kind in (None, case.kind)
        ]
        mine = [run_one(user, case) for case in wanted if time.monotonic() < end]
        if len(mine) < len(wanted):
            missing.append(f"{len(wanted) - len(mine)} runs of {user.name}: no time")
        seconds = time.monotonic() - start
        print(f"{library.name}: {len(mine)} runs, {seconds:.0f} s", file=sys.stderr)
        rows += mine
    return rows, missing


# ---- situations ----------------------------------------------------------------------


@dataclass
class Played:
    """A situation and what came of it."""

    library: str
    name: str
    operation: str
    found: situations.Found | None
    error: str = ""

    @property
    def is_expected(self) -> bool:
        return self.found is not None and self.found.is_right

    def line(self) -> list[str]:
        head = [self.library, self.operation, self.name]
        if self.found is None:
            return [*head, FAILED, "", self.error]
        slowest = f"{self.found.slowest * 1e3:.1f} ms" if self.found.slowest else ""
        leak = "" if self.found.n_returned else "its memory did not come back"
        return [*head, f"{self.found.wrong:,}", slowest, leak]


def play_all(driver: Driver, names: list[str]) -> tuple[list[Played], list[str]]:
    played = []
    libraries, missing = installed(names)
    for library in libraries:
        if library is hazards.TypedDriverCopies:
            continue  # nothing that the other calls of the driver do not show
        try:
            user = library(driver)
        except Exception as error:  # noqa: BLE001, any library may fail in any way
            missing.append(f"{library.name} ({type(error).__name__}: {error})")
            continue
        for name, operation, play in situations.all_of(user):
            played.append(Played(user.name, name, operation, None))
            faulthandler.dump_traceback_later(STUCK_AFTER, exit=True)
            try:
                played[-1].found = play()
            except Exception as error:  # noqa: BLE001, the others are wanted too
                played[-1].error = f"{type(error).__name__}: {error}"
            finally:
                faulthandler.cancel_dump_traceback_later()
    return played, missing


def report_played(
    played: list[Played], missing: list[str], described: dict[str, str]
) -> str:
    head = ["library", "copy", "situation", "wrong bytes", "slowest call", ""]
    lines = [head, *(each.line() for each in played)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    parts = ["; ".join(f"{name} {value}" for name, value in described.items())]
    if missing:
        parts.append(f"Not here: {', '.join(missing)}.")
    parts.append(
        "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    )
    n_wrong = sum(not each.is_expected for each in played)
    parts.append(f"{len(played)} situations, {n_wrong} not as they should be")
    return "\n\n".join(parts)


# ---- the table -----------------------------------------------------------------------


def table(rows: list[Row], reuse: str, sizes: list[int]) -> str:
    marks = {(row.library, row.case): row.mark for row in rows}

    def cell(library: str, kind: str, room: str, operation: str, nbytes: int) -> str:
        streams = hazards.STREAMS
        cases = [Case(kind, reuse, room, nbytes, operation, x) for x in streams]
        return "".join(marks.get((library, case), LEFT_OUT) for case in cases)

    names = [numpy_rmm._core._format_nbytes(nbytes) for nbytes in sizes]
    lines = [["library", "memory", "pool", "copy", *names]]
    heads = [
        (row.library, row.case.kind, row.case.room, row.case.operation) for row in rows
    ]
    lines += [
        [*head, *(cell(*head, nbytes) for nbytes in sizes)]
        for head in dict.fromkeys(heads)  # each once, in the order of the rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def verdict(rows: list[Row], reuse: str) -> str:
    mine = [row for row in rows if row.case.reuse == reuse]
    counts = {
        mark: sum(row.mark == mark for row in mine) for mark in (WRONG, WAITED, FAILED)
    }
    wrong = sum(row.outcome.wrong for row in mine if row.outcome is not None)
    return (
        f'reuse="{reuse}": wrong bytes in {counts[WRONG]} of {len(mine)} combinations '
        f"({wrong:,} bytes); {counts[WAITED]} waited, {counts[FAILED]} failed"
    )


def machine(driver: Driver) -> dict[str, str]:
    """What is needed to read the table, and nothing that names its owner."""
    name, version = ctypes.create_string_buffer(100), ctypes.c_int()
    driver.check(
        driver.cuDeviceGetName(ctypes.cast(name, ctypes.c_char_p), len(name), 0)
    )
    driver.check(driver.cuDriverGetVersion(ctypes.byref(version)))
    found = {
        "GPU": name.value.decode(),
        "CUDA": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "numpy_rmm": numpy_rmm.__version__,
    }
    for library in hazards.PYTHON_LIBRARIES:
        module = sys.modules.get(library.name)
        if module is not None:
            found[library.name] = str(getattr(module, "__version__", "?"))
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return found
    module_version = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", text)
    return found | ({"driver": module_version[1]} if module_version else {})


def report(rows: list[Row], missing: list[str], described: dict[str, str]) -> str:
    sizes = sorted({row.case.nbytes for row in rows})
    parts = ["; ".join(f"{name} {value}" for name, value in described.items()), LEGEND]
    if missing:
        parts.append(f"Not here: {', '.join(missing)}.")
    parts += [
        f"{verdict(rows, reuse)}\n\n{table(rows, reuse, sizes)}"
        for reuse in hazards.POLICIES
    ]
    unexpected = [row for row in rows if not row.is_expected]
    if unexpected:
        lines = [
            f"{row.library} {row.case}: {row.mark} {row.error}" for row in unexpected
        ]
        parts.append("\n".join(["Not as expected:", *lines[:40]]))
    return "\n\n".join(parts)


def driver_of(simulator: bool) -> Driver:
    try:
        driver = simulate_cuda().driver if simulator else Driver()
        driver.activate()
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"needs a GPU, or --simulator: {error}") from None
    return driver


def play(driver: Driver, options: argparse.Namespace) -> int:
    played, missing = play_all(driver, options.library)
    described = machine(driver)
    print(report_played(played, missing, described))
    if options.json:
        record = {
            "machine": described,
            "missing": missing,
            "situations": [asdict(each) for each in played],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if played and all(each.is_expected for each in played) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows too")
    parser.add_argument(
        "--simulator", action="store_true", help="the simulated driver, without a GPU"
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: tuple(map(numpy_rmm._core._parse_nbytes, text.split(","))),
        default=hazards.SIZES,
        metavar="SIZES",
        help='of the arrays, as "64 KiB,1 MiB"',
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="after which no more runs are started",
    )
    parser.add_argument("--memory", choices=hazards.KINDS, help="only of this kind")
    parser.add_argument(
        "--library",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one, as the table names it; may be given again",
    )
    parser.add_argument(
        "--situations",
        action="store_true",
        help="captures, graphs, an endless kernel, a dying pool; not the table",
    )
    return parser.parse_args()


def main() -> int:
    options = parse()
    driver = driver_of(options.simulator)
    if options.situations:
        return play(driver, options)
    rows, missing = run_all(
        driver, options.sizes, options.limit, options.library, options.memory
    )
    described = machine(driver)
    print(report(rows, missing, described))
    if options.json:
        record = {
            "machine": described,
            "missing": missing,
            "rows": [row.record() for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    is_complete = bool(rows) and not any("no time" in what for what in missing)
    return 0 if is_complete and all(row.is_expected for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
