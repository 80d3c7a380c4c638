"""Draws a suite's figures: every way as a bar, relative to the baseline of its case.

    python benchmarks/plot.py numpy.json numpy.svg [--tables WORD]

The scale is logarithmic and the line at 1 is the baseline; bars to the left are faster
(or, for memory, smaller). The figure is written by hand as SVG, so nothing needs to be
installed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

INK, FAINT = "#24292f", "#57606a"
OURS = "#4a9c2d"
COLOURS = ["#b4b8bf", "#4c78a8", "#e0a13a", "#a05195", "#d1603d", "#3f9c9c", "#8c6d4a"]
WIDTH, LABELS, FIGURES = 900, 250, 60
BAR, GAP, HEAD = 12, 10, 46
PLOT = WIDTH - LABELS - FIGURES
HANDLERS = ("host", "numpy_rmm", "addresses", "pinned", "managed", "huge_pages")

Record = dict[str, Any]


def is_ours(way: str) -> bool:
    return way.split(" ")[0].rstrip(",").removesuffix("_direct") in HANDLERS


def ratios_of(case: Record, baseline: str) -> dict[str, float]:
    """What can be drawn: ways with a ratio to the baseline."""
    ratios = case["ratios"].get(baseline, {})
    return {way: ratio for way, ratio in ratios.items() if ratio}


def text(x: float, y: float, words: str, anchor: str = "start", **style: Any) -> str:
    more = "".join(f' {key.replace("_", "-")}="{v}"' for key, v in style.items())
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>'
        f"{escape(words)}</text>"
    )


def line(x: float, top: float, bottom: float, colour: str) -> str:
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" '
        f'stroke="{colour}"/>'
    )


class Scale:
    """From a ratio to a place, logarithmic, with whole powers of ten in it."""

    def __init__(self, ratios: list[float]) -> None:
        self.low = min(-1, math.floor(math.log10(min(ratios))))
        self.high = max(1, math.ceil(math.log10(max(ratios))))

    def __call__(self, ratio: float) -> float:
        share = (math.log10(ratio) - self.low) / (self.high - self.low)
        return LABELS + PLOT * share

    def ticks(self) -> Iterator[float]:
        yield from (10.0**power for power in range(self.low, self.high + 1))


def panel(
    table: Record, colours: dict[str, str], top: float
) -> tuple[list[str], float]:
    """A table's drawing from ``top`` down, and where it ends."""
    baseline = table["baseline"]
    cases = [(c["name"], ratios_of(c, baseline)) for c in table["cases"]]
    cases = [(name, ratios) for name, ratios in cases if ratios]
    found = [text(0, top + 16, table["title"], font_weight="bold", font_size=13)]
    if not cases:
        return [*found, text(0, top + 34, "no figures", fill=FAINT)], top + HEAD
    scale = Scale([ratio for _, ratios in cases for ratio in ratios.values()])
    bottom = top + HEAD + sum(BAR * len(ratios) + GAP for _, ratios in cases)
    for tick in scale.ticks():
        colour = INK if tick == 1 else "#d8dbe0"
        found.append(line(scale(tick), top + HEAD - 6, bottom, colour))
        words = f"{tick:g}× {baseline}" if tick == 1 else f"{tick:g}×"
        found.append(text(scale(tick), top + HEAD - 10, words, "middle", fill=FAINT))
    y = top + HEAD
    for name, ratios in cases:
        middle = y + BAR * len(ratios) / 2 + 4
        found.append(text(LABELS - 8, middle, name, "end"))
        for way, ratio in ratios.items():
            found.append(bar(scale, y, ratio, colours[way]))
            place = max(scale(ratio), scale(1)) + 4
            found.append(text(place, y + BAR - 2, f"{ratio:.3g}", fill=FAINT))
            y += BAR
        y += GAP
    return found, bottom + GAP


def bar(scale: Scale, y: float, ratio: float, colour: str) -> str:
    """From the line at 1 to the ratio; the baseline's own is a mark on the line."""
    left, right = sorted((scale(1), scale(ratio)))
    width = max(right - left, 2)
    return (
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR - 1}" '
        f'fill="{colour}"/>'
    )


def legend(colours: dict[str, str], top: float) -> tuple[list[str], float]:
    found, x, y = [], 0.0, top
    for way, colour in colours.items():
        width = 22 + 7 * len(way)
        if x + width > WIDTH:
            x, y = 0.0, y + 18
        found.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="10" height="10" fill="{colour}"/>'
        )
        found.append(text(x + 14, y + 9, way))
        x += width
    return found, y + 26


def colours_of(tables: list[Record]) -> dict[str, str]:
    ways = dict.fromkeys(
        way for table in tables for case in table["cases"] for way in case["ways"]
    )
    others = [way for way in ways if not is_ours(way)]
    found = {w: COLOURS[i % len(COLOURS)] for i, w in enumerate(others)}
    shades = [OURS, "#86c36c", "#2f6b1b", "#b5dba3"]
    ours = [way for way in ways if is_ours(way)]
    found |= {w: shades[i % len(shades)] for i, w in enumerate(ours)}
    return {way: found[way] for way in ways}


def draw(record: Record, word: str = "") -> str:
    tables = [t for t in record["tables"] if word.lower() in t["title"].lower()]
    if not tables:
        raise SystemExit(f"no table has {word!r} in its title")
    colours = colours_of(tables)
    machine = "   ".join(f"{name} {value}" for name, value in record["machine"].items())
    simulated = "simulated, no figures; " if record["simulated"] else ""
    body, y = legend(colours, 46)
    for table in tables:
        found, y = panel(table, colours, y)
        body += found
    heading = f"{record['suite']}: times relative to the baseline, less is better"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 {WIDTH + 24} '
        f'{y + 30:.0f}" font-family="sans-serif" font-size="10" fill="{INK}">',
        f'<rect x="-12" width="{WIDTH + 24}" height="{y + 30:.0f}" fill="white"/>',
        text(0, 24, heading, font_size=16),
        *body,
        text(0, y + 14, f"{simulated}{record['date']}   {machine}", fill=FAINT),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of a suite.")
    parser.add_argument("figures", type=Path, help="what run.py --json has written")
    parser.add_argument("picture", type=Path, help="an SVG file")
    parser.add_argument("--tables", default="", metavar="WORD", help="in their titles")
    options = parser.parse_args()
    record = json.loads(options.figures.read_text())
    options.picture.write_text(draw(record, options.tables))


if __name__ == "__main__":
    main()
