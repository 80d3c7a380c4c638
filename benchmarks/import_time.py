"""What ``import numpy_rmm`` costs after ``import numpy``: time, memory, threads.

Every interpreter is a fresh one, and the clocks run around the import statement alone;
on a busy machine the wall clock counts the others' work too, the CPU's does not.
An editable installation looks for changes to rebuild on import, which is no cost of
ours: its files are copied to a plain directory first, as an ordinary installation lays
them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _bench import MIB, Report, fresh, main

RUNS = 20


def worker(directory: str) -> dict[str, Any]:
    """Imports the package from ``directory`` and looks at what came with it."""
    import time

    import numpy as np  # noqa: F401, the clock starts after it

    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if "mesonpy" not in type(finder).__module__
        and "Mesonpy" not in type(finder).__name__
    ]
    sys.path.insert(0, directory)
    modules, before = set(sys.modules), usage()
    clocks = time.perf_counter(), time.process_time()
    import numpy_rmm  # noqa: F401

    wall, cpu = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
    after = usage()
    return {
        "wall": wall * 1e3,
        "CPU": cpu * 1e3,
        "modules": sorted(set(sys.modules) - modules),
        "libraries": sorted(after["libraries"] - before["libraries"]),
        **{
            name: after[name] - before[name]
            for name in ("threads", "resident", "virtual")
        },
    }


def usage() -> dict[str, Any]:
    """This process's threads, mapped libraries, and bytes resident and mapped."""
    status = Path("/proc/self/status").read_text().split("\n")
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": int(fields["Threads"]),
        "resident": int(fields["VmRSS"].split()[0]) * 1024,
        "virtual": int(fields["VmSize"].split()[0]) * 1024,
        "libraries": {line.split()[-1] for line in maps if ".so" in line},
    }


def plain_directory(temporary: str) -> str:
    """Where the package lies as ordinary files; an editable one is copied there."""
    import numpy_rmm
    from numpy_rmm import _core

    package = Path(numpy_rmm.__file__).parent
    core = Path(_core.__file__)
    if core.parent == package:
        return str(package.parent)
    build = next(path for path in core.parents if (path / "build.ninja").exists())
    command = [sys.executable, "-m", "mesonbuild.mesonmain", "install", "--no-rebuild"]
    command += ["-C", str(build), "--destdir", temporary]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(next(Path(temporary).rglob("_core.*.so")).parents[1])


def import_times(directory: str) -> list[str]:
    """The interpreter's own account, of the modules that the package brings."""
    code = (
        "import numpy, sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Mesonpy' "
        "not in type(f).__name__]; sys.path.insert(0, sys.argv[1]); import numpy_rmm"
    )
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code, directory],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = done.stderr.splitlines()
    last_of_numpy = max(
        index for index, line in enumerate(lines) if line.endswith("| numpy")
    )
    return [lines[0], *lines[last_of_numpy + 1 :]]


def run() -> Report:
    with tempfile.TemporaryDirectory() as temporary:
        directory = plain_directory(temporary)
        fresh(__file__, directory)  # writes the bytecode
        results = [fresh(__file__, directory) for _ in range(RUNS)]
        lines = import_times(directory)
    columns = ["import numpy_rmm after numpy", "median", "smallest", "largest"]
    report = Report(f"Import, {RUNS} fresh interpreters", columns)
    for label, name, unit in (
        ("ms", "wall", 1),
        ("ms of CPU", "CPU", 1),
        ("MiB resident", "resident", MIB),
        ("MiB mapped", "virtual", MIB),
        ("threads", "threads", 1),
    ):
        values = [result[name] / unit for result in results]
        report.rows.append([label, statistics.median(values), min(values), max(values)])
    report.notes += lines
    report.details = {
        "modules": results[-1]["modules"],
        "libraries": [Path(path).name for path in results[-1]["libraries"]],
    }
    return report


if __name__ == "__main__":
    main(run, worker)
