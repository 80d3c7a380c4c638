"""Records what a NumPy program allocates and frees, as a trace.

    python benchmarks/record.py program.trace program.py [arguments]
    python benchmarks/run.py core --trace program.trace

The program runs as ``python program.py`` would; every array that it makes goes through
a handler that notes sizes and the order, and asks NumPy's default for the memory.
docs/benchmarks.md describes the format. Needs a C compiler.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _compile import CannotCompile, extension, load


def lines_of(notes: Any) -> Iterator[str]:
    """The trace's lines; blocks get numbers in the order in which they were made.

    What the program had before, or got otherwise, is freed here without a number.
    """
    numbers: dict[int, int] = {}
    n_blocks = 0
    yield "nrm-trace 1"
    for what, old, new, nbytes in notes.tolist():
        kind = chr(what)
        nbytes = max(nbytes, 1)
        if kind == "+" or (kind == "=" and old not in numbers):
            numbers[new] = n_blocks
            n_blocks += 1
            yield f"+{nbytes}"
        elif kind == "=":
            number = numbers.pop(old)
            numbers[new] = number
            yield f"={number} {nbytes}"
        elif old in numbers:
            yield f"-{numbers.pop(old)}"


def record(program: str, arguments: list[str]) -> Any:
    """The notes of one run of a program, an array of four columns."""
    import numpy as np

    import numpy_rmm

    with tempfile.TemporaryDirectory() as folder:
        recorder = load(extension("npy_record", Path(folder)))
        sys.argv = [program, *arguments]
        sys.path[0] = str(Path(program).resolve().parent)
        try:
            with numpy_rmm.use_handler(recorder.start()):
                runpy.run_path(program, run_name="__main__")
        except SystemExit as ending:
            if ending.code not in (None, 0):
                raise
        notes = recorder.stop()
    return np.frombuffer(notes, np.uint64).reshape(-1, 4)


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    trace, program, *arguments = sys.argv[1:]
    target = Path(trace).resolve()
    try:
        lines = list(lines_of(record(program, arguments)))
    except CannotCompile as error:
        raise SystemExit(f"nothing can be recorded: {error}") from None
    target.write_text("\n".join(lines) + "\n")
    print(f"{len(lines) - 1} operations", file=sys.stderr)


if __name__ == "__main__":
    main()
