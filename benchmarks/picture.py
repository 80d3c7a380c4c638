"""Draws the picture of the README from the figures of ``arithmetic`` and ``copies``.

    python benchmarks/picture.py arithmetic.json copies.json docs/picture.svg

Left: the speed of arithmetic on temporaries, as a share of what it would be if memory
cost nothing; right: the rate of copies to the GPU. Without the second file there is
only the left half. Under each half stands the machine it was measured on. Needs
matplotlib (``pip install --group bench``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

GREY, GREEN, INK = "#b4b8bf", "#4a9c2d", "#24292f"
NAMED = ("CPU", "GPU", "driver", "Linux", "NumPy", "numpy_rmm")
BAR = 0.38

Record = dict[str, Any]


def load(path: Path, word: str) -> Record:
    """The record of a benchmark's file whose title has this word."""
    records = json.loads(path.read_text())
    return next(record for record in records if word in record["title"])


def column(record: Record, name: str) -> list[Any]:
    index = record["columns"].index(name)
    return [row[index] for row in record["rows"]]


def bars(axes: Any, sizes: list[str], default: list[float], ours: list[float]) -> None:
    for shift, values, colour, label in (
        (-BAR / 2, default, GREY, "NumPy's default"),
        (BAR / 2, ours, GREEN, "numpy_rmm"),
    ):
        places = [place + shift for place in range(len(sizes))]
        drawn = axes.bar(places, values, BAR, color=colour, label=label)
        axes.bar_label(drawn, fmt="%.0f", padding=2, fontsize=8, color=INK)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelleft=False, bottom=False)
    axes.margins(y=0.12)


def draw_arithmetic(axes: Any, record: Record) -> None:
    sizes = column(record, "size")
    limit = column(record, "limit ms")
    name = "pinned ms" if "pinned ms" in record["columns"] else "host ms"
    shares = [
        [100 * least / ms for least, ms in zip(limit, column(record, way), strict=True)]
        for way in ("default ms", name)
    ]
    bars(axes, sizes, *shares)
    axes.set_title("(a + b) * (a - b) + a * 2", fontsize=10, family="monospace")
    axes.set_xlabel("% of the speed with memory for nothing, by array size", fontsize=9)


def draw_copies(axes: Any, record: Record) -> None:
    rates = [column(record, f"{way} GB/s") for way in ("default", "pinned")]
    bars(axes, column(record, "size"), *rates)
    axes.set_title("copies from host to GPU", fontsize=10)
    axes.set_xlabel("GB/s, by array size", fontsize=9)


def caption(machine: dict[str, str]) -> str:
    """What the figures were made on, in two lines."""
    words = [f"{name} {machine[name]}" for name in NAMED if name in machine]
    half = (len(words) + 1) // 2
    return "\n".join("   ".join(line) for line in (words[:half], words[half:]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the picture of the README.")
    parser.add_argument(
        "files", nargs="+", type=Path, help="arithmetic, copies, output"
    )
    *inputs, output = parser.parse_args().files
    records = [
        load(path, word)
        for path, word in zip(inputs, ("later", "Copies"), strict=False)
    ]
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "numpy_rmm"})
    mpl.rcParams.update({"text.color": INK, "axes.labelcolor": INK, "font.size": 9})
    figure, axes = plt.subplots(
        1, len(records), figsize=(5 * len(records), 3.6), squeeze=False
    )
    for place, record, draw in zip(
        axes[0], records, (draw_arithmetic, draw_copies), strict=False
    ):
        draw(place, record)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=2, frameon=False)
    for place, record in zip(axes[0], records, strict=True):
        place.text(
            0.5,
            -0.32,
            caption(record["machine"]),
            transform=place.transAxes,
            ha="center",
            va="top",
            fontsize=7,
            color="#57606a",
        )
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    metadata = {"Date": None} if output.suffix == ".svg" else None
    figure.savefig(output, dpi=160, metadata=metadata)


if __name__ == "__main__":
    main()
