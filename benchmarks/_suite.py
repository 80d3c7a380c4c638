"""What the suites share: settings, cases with several ways to do one thing, their
results, and the run that they are part of.

A case is a row of a table: the same work done in several ways, in turns. A way's
result is put together from what its rounds measured: the median of the rounds' medians,
and the 99th percentile of all samples, where each round counts the same. Ratios are
between the medians of one case, so they never mix two runs.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import targets
from _bench import Report, forked, fresh, machine
from _progress import Clock, Failed, OutOfTime, Output, turns

RUN = Path(__file__).with_name("run.py")
MAX_SAMPLES = 500
FORKED = "NUMPY_RMM_BENCH_FORKED"  # of the tests, which have no time for interpreters

Measured = dict[str, Any]  # {"samples": [...], "extra": {...}} of a round


@dataclass
class Settings:
    """What the command line says."""

    quick: bool = False
    brief: bool = False  # only what the targets ask for
    rounds: int = 7
    clock: Clock = field(default_factory=Clock)
    sizes: list[int] = field(default_factory=list)  # empty: the suite's own
    cases: list[str] = field(default_factory=list)  # empty: all
    handlers: list[str] = field(default_factory=lambda: ["host"])
    peers: dict[str, str] = field(default_factory=dict)  # name: library, or ""
    absent: dict[str, str] = field(default_factory=dict)  # name: why, and how to get it
    versions: dict[str, str] = field(default_factory=dict)
    works: dict[str, str] = field(default_factory=dict)  # a way was tried: what it said
    simulator: bool = False
    build: Path | None = None
    program: Path | None = None  # nrm_bench, built elsewhere
    trace: Path | None = None

    def wants(self, case: str) -> bool:
        return not self.cases or case in self.cases

    def pick(self, quick: int, full: int) -> int:
        return quick if self.quick else full

    def new_process(
        self,
        suite: str,
        function: str,
        *args: object,
        environ: Mapping[str, str] | None = None,
    ) -> Any:
        """``function(*args)`` of a suite in a fresh interpreter."""
        timeout = self.clock.timeout()
        try:
            if os.environ.get(FORKED) and not environ:
                module = importlib.import_module(f"suites.{suite}")
                return forked(getattr(module, function), *args)
            return fresh(RUN, suite, function, *args, environ=environ, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise OutOfTime("the time was up while it was measured") from None
        except SystemExit as error:
            words = [word for word in str(error).split() if "/" not in word]
            raise Failed(f"failed: {' '.join(words)}") from None

    def in_turns(
        self, name: str, ways: Mapping[str, Callable[[], Measured]], rounds: int = 0
    ) -> Case:
        """A case whose ways take turns."""
        return Case.of(name, turns(ways, rounds or self.rounds, self.clock))


@dataclass
class Case:
    """One row: what each way measured."""

    name: str
    ways: dict[str, dict[str, Any]]

    failed: dict[str, str] = field(default_factory=dict)  # way: its first error

    @classmethod
    def of(cls, name: str, rounds: Mapping[str, Sequence[Measured]]) -> Case:
        """A way with an error in any round has no figures, and is named."""
        case = cls(name, {})
        for way, found in rounds.items():
            errors = [one["error"] for one in found if "error" in one]
            if errors:
                case.failed[way] = errors[0]
            else:
                case.ways[way] = summary(found)
        return case

    def ratio(self, way: str, baseline: str) -> float | None:
        if way not in self.ways or baseline not in self.ways:
            return None
        below = self.ways[baseline]["median"]
        return self.ways[way]["median"] / below if below > 0 else None


@dataclass
class Table:
    """Cases of one kind, in one unit; less is better."""

    title: str
    unit: str
    baseline: str
    cases: list[Case] = field(default_factory=list)
    limit: str = ""  # a way that cannot be beaten
    notes: list[str] = field(default_factory=list)
    suite: str = ""
    key: str = ""  # of the suite's cases
    missed: dict[str, str] = field(default_factory=dict)  # case: why there is none
    has_failed: bool = False  # some of these for another reason than time
    changed: Callable[[], object] = lambda: None  # after each case

    def measure(
        self, names: str | Sequence[str], make: Callable[[], Case | Sequence[Case]]
    ) -> None:
        """Adds a row, or several that are measured together; or says why not."""
        try:
            found = make()
        except (OutOfTime, Failed) as error:
            self.has_failed = self.has_failed or isinstance(error, Failed)
            self.missed |= dict.fromkeys(
                [names] if isinstance(names, str) else names, str(error)
            )
        else:
            self.cases += [found] if isinstance(found, Case) else found
        self.changed()

    def bases(self) -> list[str]:
        return [name for name in (self.baseline, self.limit) if name]

    def report(self) -> Report:
        extras = list(
            dict.fromkeys(
                name
                for case in self.cases
                for found in case.ways.values()
                for name in found["extra"]
            )
        )
        columns = ["case", "way", f"median {self.unit}", f"p99 {self.unit}"]
        columns += [*(f"× {name}" for name in self.bases()), *map(words, extras)]
        report = Report(self.title, columns, notes=list(self.notes))
        report.notes += [
            f"{name}: not measured: {w}" for name, w in self.missed.items()
        ]
        for case in self.cases:
            for way, why in case.failed.items():
                report.notes.append(f"{case.name}: {way} failed: {why}")
            for way, found in case.ways.items():
                ratios = [case.ratio(way, base) for base in self.bases()]
                figures = [number(found["extra"].get(name)) for name in extras]
                report.rows.append(
                    [case.name, way, found["median"], found["p99"], *ratios, *figures]
                )
        return report

    def record(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "baseline": self.baseline,
            "limit": self.limit,
            "notes": self.notes,
            "not_measured": self.missed,
            "cases": [
                {
                    "name": case.name,
                    "ways": case.ways,
                    "failed": case.failed,
                    "ratios": {
                        base: {way: case.ratio(way, base) for way in case.ways}
                        for base in self.bases()
                    },
                }
                for case in self.cases
            ],
        }


def number(value: float | None) -> float | None:
    """A count is shown as other figures are."""
    return None if value is None else float(value)


def words(name: str) -> str:
    return name.replace("_", " ")


def quantile(values: Sequence[float], q: float) -> float:
    """Between the two nearest of the sorted values."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def thin(samples: Sequence[float]) -> list[float]:
    """At most 500 values with the same distribution, the smallest and largest among
    them."""
    if len(samples) <= MAX_SAMPLES:
        return list(samples)
    steps = MAX_SAMPLES - 1
    return [quantile(samples, index / steps) for index in range(MAX_SAMPLES)]


def percentile(rounds: Sequence[Sequence[float]], q: float) -> float:
    """Of all rounds together, each with the same weight however many samples it has."""
    weighted = sorted(
        (value, 1 / len(samples)) for samples in rounds for value in samples
    )
    left = q * len(rounds)
    for value, weight in weighted:
        left -= weight
        if left <= 1e-9:
            return value
    return weighted[-1][0]


def summary(rounds: Sequence[Measured]) -> dict[str, Any]:
    medians = [statistics.median(found["samples"]) for found in rounds]
    names = dict.fromkeys(name for found in rounds for name in found.get("extra", {}))
    return {
        "median": statistics.median(medians),
        "p99": percentile([found["samples"] for found in rounds], 0.99),
        "max": max(max(found["samples"]) for found in rounds),
        "n": sum(found.get("n", len(found["samples"])) for found in rounds),
        "rounds": medians,
        "extra": {
            name: statistics.median(found["extra"][name] for found in rounds)
            for name in names
        },
    }


def reason(error: BaseException) -> str:
    """An error in a line, without the paths that are in it."""
    words = f"{type(error).__name__}: {error}".split()
    return " ".join(word for word in words if "/" not in word)[:200]


def preload(library: str) -> dict[str, str]:
    return {"LD_PRELOAD": library} if library else {}


# ---- a run ---------------------------------------------------------------------------

machine = functools.cache(machine)  # it may ask other programs


class Run:
    """What one start of ``run.py`` measures, of one suite or of several."""

    def __init__(self, name: str, path: Path | None = None) -> None:
        self.name = name
        self.suite = name
        self.settings = Settings()
        self.tables: list[Table] = []
        self.used: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self.output = Output(self.document, path)

    def begin(self, suite: str, settings: Settings) -> None:
        machine()  # asked before anything is timed
        self.suite, self.settings = suite, settings
        self.look_at_peers()

    def look_at_peers(self) -> None:
        versions = self.settings.versions
        self.used |= {name: versions.get(name, "") for name in self.settings.peers}
        self.absent |= self.settings.absent

    def table(
        self, key: str, title: str, unit: str, baseline: str, limit: str = ""
    ) -> Table:
        """A new one, which is in the file from its first case on."""
        table = Table(title, unit, baseline, limit=limit, suite=self.suite, key=key)
        table.changed = self.output.write
        if self.settings.simulator:
            table.notes.append("On the simulated driver: these are no figures.")
        self.tables.append(table)
        return table

    def done(self, table: Table) -> None:
        self.look_at_peers()  # a way may turn out not to work
        self.output.show(table.report().text())
        self.output.write()

    def document(self) -> dict[str, Any]:
        tables = [table.record() for table in self.tables]
        return {
            "suite": self.name,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "quick": self.settings.quick,
            "simulated": self.settings.simulator,
            "rounds": self.settings.rounds,
            "limit_s": self.limit_s(),
            "peers": {"used": self.used, "absent": self.absent},
            "machine": machine(),
            "tables": tables,
            "targets": targets.judge(tables, machine(), self.wanted()),
        }

    def wanted(self) -> list[targets.Target]:
        """The targets that this run is about: of one suite its own."""
        return [
            target
            for target in targets.TARGETS
            if self.name in ("all", target.table.partition("/")[0])
        ]

    def limit_s(self) -> float | None:
        limit_s = self.settings.clock.limit_s
        return None if limit_s == float("inf") else limit_s

    def finish(self, with_targets: bool) -> None:
        """What stands under the tables."""
        found = self.document()
        if with_targets:
            notes = []
            if self.settings.quick or self.settings.simulator:
                notes.append("Tiny sizes, or simulated: these are no figures.")
            self.output.show(targets.report(found["targets"], notes).text())
        lines = [f"peer {n}: {v or 'present'}" for n, v in self.used.items()]
        lines += [f"peer {n} is absent: {why}" for n, why in self.absent.items()]
        lines.append("; ".join(f"{n} {value}" for n, value in machine().items()))
        self.output.show("\n".join(lines))
        self.output.write()


def numbers(text: str) -> list[int]:
    """``8,64 KiB,1MiB`` in bytes."""
    units = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        digits = word.rstrip("bBkKmMgGiI ")
        unit = word[len(digits) :].strip().lower()
        if unit not in units or not digits.isdigit():
            raise argparse.ArgumentTypeError(f"{word!r} is no size")
        found.append(int(digits) * units[unit])
    return found
