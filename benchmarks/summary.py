"""Writes the tables of docs/benchmarks.md from the files in benchmarks/results/.

    python benchmarks/summary.py

A target is judged by the last of the runs below in which one of its cases was measured,
and the page names the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import targets

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- made by summary.py -->\n", "<!-- until here -->\n"
Record = dict[str, Any]

# Files in benchmarks/results/, the oldest first.
RUNS = (
    *("targets_host", "targets_core", "targets_device", "targets_pinned"),
    *("targets_numpy", "later_host", "later_device", "later_device_python"),
    *("peers_numpy", "peers_numpy_python", "peers_core", "peers_device"),
    *("peers_pinned", "last_device", "last_core", "last_pinned"),
    *("reuse", "device_python", "last_reuse", "last_python"),
)
SUITES = ("numpy", "core", "device", "pinned", "reuse", "device_python")
OURS = ("host", "numpy_rmm", "addresses", "pinned")
# Ways that nobody would use in the place of ours.
NO_PEERS = ("limit", "one buffer", "driver's calls", "kernels alone", "bare call")
MOST_CASES = 3  # of which each has its own figure
SCRIPTS = ("copies", "first_fill", "arithmetic")


def read(name: str) -> Any:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text())


def last_rows() -> dict[targets.Target, tuple[str, list[Record], Record]]:
    """Each target with the last file that has it, its rows there, and that file."""
    found: dict[targets.Target, tuple[str, list[Record], Record]] = {}
    for name in RUNS:
        record: Record = read(name)
        for target in targets.TARGETS:
            rows = targets.judge(record["tables"], record["machine"], [target])
            measured = [row for row in rows if row["measured"] is not None]
            if measured:
                found[target] = name, measured, record
    return found


def short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def label(row: Record, rows: Sequence[Record]) -> str:
    """What tells a row from the others: its case, its way, both or neither."""
    parts = [
        row[key] for key in ("case", "way") if len({other[key] for other in rows}) > 1
    ]
    return ", ".join(parts)


def asked(target: targets.Target) -> str:
    sign = "≥" if target.at_least else "≤"
    of = ""
    if target.against:
        of = " × " + ("RMM's best" if len(target.against) > 1 else target.against[0])
    return f"{sign} {short(target.most)}{of}"


def measured(rows: Sequence[Record]) -> str:
    of = "× " if rows[0]["against"] else ""
    values = [row["measured"] for row in rows]
    if len(rows) == 1:
        return of + short(values[0])
    if len(rows) > MOST_CASES:
        return f"{of}{short(min(values))} to {short(max(values))}"
    parts = [f"{label(row, rows)}: {of}{short(row['measured'])}" for row in rows]
    return "; ".join(parts)


def best_of_others(rows: Sequence[Record], record: Record) -> Iterator[str]:
    """The best peer of each case, by the same figure."""
    cases = {
        (f"{table['suite']}/{table['key']}", case["name"]): case
        for table in record["tables"]
        for case in table["cases"]
    }
    for row in rows:
        figures = [
            (value, way)
            for way, found in cases[row["table"], row["case"]]["ways"].items()
            if not way.startswith(OURS)
            and way not in NO_PEERS
            and (value := targets.figure(found, row["figure"])) is not None
        ]
        if figures:
            value, way = (max if row["at_least"] else min)(figures)
            yield f"{way} {short(value)}"


def others(rows: Sequence[Record], record: Record) -> str:
    if rows[0]["against"]:
        return ", ".join(dict.fromkeys(row["against"] for row in rows))
    return "; ".join(dict.fromkeys(best_of_others(rows[:MOST_CASES], record)))


def result(rows: Sequence[Record]) -> str:
    n_met = sum(row["met"] for row in rows)
    if n_met == len(rows):
        return "met"
    return f"met in {n_met} of {len(rows)}" if n_met else "missed"


def of_suite(suite: str) -> Iterator[str]:
    found = last_rows()
    yield f"\n### `{suite}`, measured\n"
    yield "| target | asked | measured | the best of others | | file |"
    yield "|---|---|---|---|---|---|"
    for target in targets.TARGETS:
        if target.table.partition("/")[0] != suite:
            continue
        cells = (target.path.replace("__", r"\_\_"), asked(target))
        if target in found:
            name, rows, record = found[target]
            cells += (measured(rows), others(rows, record), result(rows), f"`{name}`")
        else:
            cells += ("", "", "found no time", "")
        yield f"| {' | '.join(cells)} |"


def of_script(name: str) -> Iterator[str]:
    for table in read(name):
        machine = table["machine"]
        where = [machine[key] for key in ("GPU", "CPU") if key in machine]
        yield f"\n{table['title']} (`{name}`; {', '.join(where)}):\n"
        yield f"| {' | '.join(table['columns'])} |"
        yield "|---" * len(table["columns"]) + "|"
        for row in table["rows"]:
            cells = [cell if isinstance(cell, str) else f"{cell:.3g}" for cell in row]
            yield f"| {' | '.join(cells)} |"


def lines() -> Iterator[str]:
    for suite in SUITES:
        yield from of_suite(suite)
    yield "\n### The scripts, measured"
    for name in SCRIPTS:
        yield from of_script(name)
    yield ""


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(lines()) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(page())
