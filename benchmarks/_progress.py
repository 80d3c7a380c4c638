"""A run under way: the time that is left, tables that print themselves when they are
done, and a file that holds what has been measured so far.

A run with a limit measures its cases in their order. A case has at least seven turns or
none: after its first turn it is known whether seven fit into the time that is left, and
what does not fit is named as not measured. Turns beyond the seventh are left out when a
case has had a twentieth of the limit.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
FEWEST_TURNS = 7
SHARE = 1 / 20


class OutOfTime(Exception):
    """Why a case is not measured."""


class Failed(Exception):
    """Why a case has no figures: the process that measured it ended with an error."""


class CannotRun(Exception):
    """Why a suite has nothing to measure here."""


@dataclass
class Clock:
    """The seconds that a run may take."""

    limit_s: float = math.inf
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.limit_s - (time.monotonic() - self.start)

    def timeout(self) -> float | None:
        """For a process, which is ended when nothing is left."""
        left = self.left()
        if left <= 0:
            raise OutOfTime("the time was up")
        return None if math.isinf(left) else left


def turns(
    ways: Mapping[str, Callable[[], Result]], rounds: int, clock: Clock
) -> dict[str, list[Result]]:
    """Each way's results; the ways take turns, and every turn starts with another
    one."""
    names = list(ways)
    results: dict[str, list[Result]] = {name: [] for name in names}
    begin = time.monotonic()
    for number in range(rounds):
        spent = time.monotonic() - begin
        if number >= FEWEST_TURNS and spent > clock.limit_s * SHARE:
            break
        fewest = min(FEWEST_TURNS, rounds)
        if 0 < number < fewest and (needed := spent / number * (fewest - number)) > (
            left := clock.left()
        ):
            raise OutOfTime(
                f"{fewest} turns take {needed + spent:.0f} s; {left + spent:.0f} were "
                "left"
            )
        start = number % len(names)
        for name in names[start:] + names[:start]:
            results[name].append(ways[name]())
    return results


class Output:
    """Where tables go: each one to the terminal when it is done, all of them into a
    file after every case."""

    def __init__(self, document: Callable[[], dict[str, Any]], path: Path | None):
        self.document = document
        self.path = path

    def show(self, text: str) -> None:
        sys.stdout.write(f"{text}\n\n")
        sys.stdout.flush()

    def write(self) -> None:
        """At once or not at all: a reader never sees half a file."""
        if self.path is None:
            return
        text = json.dumps(self.document(), indent=1) + "\n"
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        part.write_text(text)
        part.replace(self.path)
