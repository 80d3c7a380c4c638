"""Draws a suite's figures: every case a line, every way a dot on it.

    python benchmarks/plot.py core.json core.svg [--suite core] [--tables WORD]

Where a dot is says how many times the baseline of its case a way takes, on a
logarithmic scale: left of the line at 1 is faster (or, for memory, smaller). A small
bracket is what our way is meant to reach. On the right is what ours took. The figure
is written by hand as SVG, so nothing needs to be installed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

INK, FAINT, LINE = "#24292f", "#57606a", "#d8dbe0"
OURS = ["#2f8f1f", "#8fce6b", "#1b5e20", "#b7d84b"]
OTHERS = ["#8a9099", "#3d6fa5", "#d9982b", "#a05195", "#cf5a36", "#2f9a9a", "#7a5a3a"]
OTHERS += ["#e377c2", "#5b6bd6", "#111111"]
OURS_BEGIN = ("host", "numpy_rmm", "addresses", "pinned", "managed", "huge_pages")
ALONE = ("limit", "kernels alone")  # what cannot be beaten: a mark of its own

COLUMN, GUTTER, N_COLUMNS = 520, 30, 2
WIDTH = COLUMN * N_COLUMNS + GUTTER * (N_COLUMNS - 1)
LABELS, FIGURES = 185, 80  # at the sides of a panel's dots
ROW, HEAD, FOOT = 17, 40, 22

Record = dict[str, Any]


def is_ours(way: str) -> bool:
    return way.startswith(OURS_BEGIN)


def text(x: float, y: float, words: str, anchor: str = "start", **style: Any) -> str:
    more = "".join(f' {key.replace("_", "-")}="{v}"' for key, v in style.items())
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>'
        f"{escape(words)}</text>"
    )


def line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" '
        f'stroke="{colour}"/>'
    )


def shorten(words: str, width: float, letter: float) -> str:
    """Letters that fit, as nearly as can be said without a font."""
    most = int(width / letter)
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def figure(value: float, unit: str) -> str:
    """A median with a unit that suits it."""
    steps = {"ns": ("µs", 1e3), "µs": ("ms", 1e3), "ms": ("s", 1e3)}
    while value >= 1000 and unit in steps:
        unit, divisor = steps[unit]
        value /= divisor
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


# ---- what is drawn -------------------------------------------------------------------


class Row:
    """A case: where its ways lie, as ratios to the baseline."""

    def __init__(self, table: Record, case: Record, targets: Iterable[Record]) -> None:
        baseline, ways = table["baseline"], case["ways"]
        self.name = case["name"]
        if baseline not in ways:  # nobody to compare with: ours are 1
            baseline = next(iter(ways), "")
        self.ratios = {
            way: found["median"] / ways[baseline]["median"]
            for way, found in ways.items()
            if ways[baseline]["median"] > 0 and found["median"] > 0
        }
        self.ours = next((way for way in ways if is_ours(way)), "")
        self.words = ""
        if self.ours:
            self.words = figure(ways[self.ours]["median"], table["unit"])
        self.aims = [
            aim / ways[baseline]["median"]
            for aim in self.absolute_aims(ways, targets)
            if baseline
        ]

    def absolute_aims(
        self, ways: Mapping[str, Record], targets: Iterable[Record]
    ) -> Iterator[float]:
        """Targets of our first way's median, in the table's unit."""
        for target in targets:
            if target["case"] != self.name or target["way"] != self.ours:
                continue
            if target["figure"] != "median" or target["at_least"]:
                continue
            if not target["against"]:
                yield target["asked"]
            elif target["against"] in ways:
                yield target["asked"] * ways[target["against"]]["median"]


class Scale:
    """From a ratio to a place, logarithmic, with the 1 in it."""

    def __init__(self, ratios: list[float], left: float, right: float) -> None:
        low, high = min([*ratios, 1]), max([*ratios, 1])
        room = (high / low) ** 0.06 * 1.08
        self.low, self.high = math.log10(low / room), math.log10(high * room)
        if self.high - self.low < 0.5:
            middle = (self.high + self.low) / 2
            self.low, self.high = middle - 0.25, middle + 0.25
        self.left, self.right = left, right

    def __call__(self, ratio: float) -> float:
        share = (math.log10(ratio) - self.low) / (self.high - self.low)
        return self.left + (self.right - self.left) * share

    def ticks(self) -> list[float]:
        """Whole powers of ten; where there are few, also between them."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        span = self.high - self.low
        steps = (1,) if span > 2.5 else (1, 3) if span > 1.2 else (1, 1.5, 2, 3, 5, 7)
        step = max(1, round(span / 6))
        return [
            m * 10.0**power
            for power in powers
            for m in steps
            if self.low <= math.log10(m) + power <= self.high
            and (len(steps) > 1 or power % step == 0)
        ]


def panel(
    table: Record, colours: Mapping[str, str], left: float, top: float, rows: list[Row]
) -> list[str]:
    """A table's drawing with its left upper corner there."""
    right = left + COLUMN
    title = shorten(table["title"], COLUMN, 6.6)
    found = [text(left, top + 14, title, font_weight="bold", font_size=12)]
    drawn = [ratio for row in rows for ratio in (*row.ratios.values(), *row.aims)]
    scale = Scale(drawn, left + LABELS, right - FIGURES)
    bottom = top + HEAD + ROW * len(rows)
    for tick in scale.ticks():
        colour = INK if math.isclose(tick, 1) else LINE
        found.append(line(scale(tick), top + HEAD - 4, scale(tick), bottom, colour))
        words = f"{tick:.3g}×" if tick < 1000 else f"{tick:,.0f}×"
        found.append(text(scale(tick), bottom + 12, words, "middle", fill=FAINT))
    found.append(text(left, top + 29, f"1× is {table['baseline']}", fill=FAINT))
    found.append(text(right, top + 29, "ours", "end", fill=FAINT))
    for number, row in enumerate(rows):
        y = top + HEAD + ROW * number + ROW / 2
        found += draw_row(row, scale, colours, left, right, y)
    return found


def draw_row(
    row: Row,
    scale: Scale,
    colours: Mapping[str, str],
    left: float,
    right: float,
    y: float,
) -> Iterator[str]:
    yield text(left + LABELS - 10, y + 4, shorten(row.name, LABELS - 10, 5.6), "end")
    if row.ratios:
        first, last = min(row.ratios.values()), max(row.ratios.values())
        yield line(scale(first), y, scale(last), y, LINE)
    for aim in row.aims:
        yield bracket(scale(aim), y)
    for way in sorted(row.ratios, key=is_ours):  # ours on top
        yield dot(way, scale(row.ratios[way]), y, colours[way])
    yield text(right, y + 4, row.words, "end")


def bracket(x: float, y: float) -> str:
    """What our way is meant to reach: to the left of it."""
    return (
        f'<path d="M{x - 3:.1f} {y - 7:.1f}H{x:.1f}V{y + 7:.1f}H{x - 3:.1f}" '
        f'fill="none" stroke="{INK}" stroke-width="1.2"/>'
    )


def dot(way: str, x: float, y: float, colour: str) -> str:
    """A disc for ours, a ring for what cannot be beaten, a square for the others."""
    if way in ALONE:
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.4" fill="white" '
            f'stroke="{INK}" stroke-width="1.4"/>'
        )
    if is_ours(way):
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" stroke="white"/>'
        )
    return (
        f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2" '
        f'fill="{colour}" stroke="white" stroke-width="0.8"/>'
    )


def legend(
    colours: Mapping[str, str], has_aims: bool, top: float
) -> tuple[list[str], float]:
    found: list[str] = []
    x, y = 0.0, top
    for way, colour in colours.items():
        width = 26 + 6.0 * len(way)
        if x + width > WIDTH:
            x, y = 0.0, y + 18
        found += [dot(way, x + 5, y + 5, colour), text(x + 15, y + 9, way)]
        x += width
    if has_aims:
        x, y = (0.0, y + 18) if x + 90 > WIDTH else (x, y)
        found += [bracket(x + 5, y + 5), text(x + 15, y + 9, "target of ours")]
    return found, y + 30


def colours_of(tables: list[Record]) -> dict[str, str]:
    """Ours in greens and first, the others in the order in which they come."""
    ways = dict.fromkeys(
        way for table in tables for case in table["cases"] for way in case["ways"]
    )
    ours = [way for way in ways if is_ours(way)]
    others = [way for way in ways if not is_ours(way)]
    found = {way: OURS[i % len(OURS)] for i, way in enumerate(ours)}
    return found | {way: OTHERS[i % len(OTHERS)] for i, way in enumerate(others)}


def rows_of(table: Record, record: Record) -> list[Row]:
    mine = f"{table.get('suite', '')}/{table.get('key', '')}"
    targets = [t for t in record.get("targets", []) if t["table"] == mine]
    rows = [Row(table, case, targets) for case in table["cases"] if case["ways"]]
    return [row for row in rows if row.ratios]


def draw(record: Record, suite: str = "", word: str = "") -> str:
    tables = [
        table
        for table in record["tables"]
        if word.lower() in table["title"].lower()
        and (not suite or table.get("suite", record["suite"]) == suite)
    ]
    if len({table.get("suite", "") for table in tables}) > 1:
        tables = [t | {"title": f"{t['suite']}: {t['title']}"} for t in tables]
    if not tables:
        raise SystemExit(f"no table is of {suite or 'any suite'} and has {word!r}")
    colours = colours_of(tables)
    drawn = [(table, rows_of(table, record)) for table in tables]
    has_aims = any(row.aims for _, rows in drawn for row in rows)
    body, top = legend(colours, has_aims, 44)
    ends = [top] * N_COLUMNS
    for table, rows in (one for one in drawn if one[1]):
        column = ends.index(min(ends))
        body += panel(table, colours, column * (COLUMN + GUTTER), ends[column], rows)
        ends[column] += HEAD + ROW * len(rows) + FOOT + 14
    y = max(ends)
    missing = [table["title"] for table, rows in drawn if not rows]
    if missing:
        body.append(text(0, y + 12, f"Not measured: {'; '.join(missing)}.", fill=FAINT))
        y += 18
    for words in machine_lines(record):
        body.append(text(0, y + 12, words, fill=FAINT))
        y += 14
    heading = (
        f"{suite or record['suite']}: times relative to a baseline, less is better"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 0 {WIDTH + 32} '
            f'{y + 16:.0f}" font-family="DejaVu Sans, Arial, sans-serif" '
            f'font-size="10" fill="{INK}">',
            f'<rect x="-16" width="{WIDTH + 32}" height="{y + 16:.0f}" fill="white"/>',
            text(0, 24, heading, font_size=16),
            *body,
            "</svg>\n",
        ]
    )


def machine_lines(record: Record) -> list[str]:
    """What it was measured on, in lines that fit."""
    note = "simulated, no figures" if record["simulated"] else ""
    words = [note, record["date"]]
    words += [f"{name} {value}" for name, value in record["machine"].items()]
    lines = [""]
    for word in filter(None, words):
        if len(lines[-1]) + len(word) > WIDTH / 5.9:
            lines.append("")
        lines[-1] += f"{'   ' if lines[-1] else ''}{re.sub(' +', ' ', word)}"
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of a suite.")
    parser.add_argument("figures", type=Path, help="what run.py --json has written")
    parser.add_argument("picture", type=Path, help="an SVG file")
    parser.add_argument("--suite", default="", help="one of those in the figures")
    parser.add_argument("--tables", default="", metavar="WORD", help="in their titles")
    options = parser.parse_args()
    record = json.loads(options.figures.read_text())
    options.picture.write_text(draw(record, options.suite, options.tables))


if __name__ == "__main__":
    main()
