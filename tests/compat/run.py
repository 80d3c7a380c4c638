"""RMM's own Python tests, with numpy_rmm in RMM's place.

    python tests/compat/run.py CHECKOUT
    python tests/compat/run.py CHECKOUT --gpu
    python tests/compat/run.py CHECKOUT -k "device_buffer and not prefetch"

CHECKOUT is a folder with the source of RMM (github.com/rapidsai/rmm), of which nothing
is changed. Without --gpu the simulated driver runs, and the files that want Numba,
CuPy, PyTorch or CUDA's own bindings are left out.

What is known to fail stands in README.md, with the reason. The status is 0 when nothing
else failed, nothing of it passed, and 95 of 100 tests that ran have passed (90 on the
simulator, where few can run).
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SHARE = {"GPU": 0.95, "simulator": 0.90}  # of 33 there two differ on purpose
NOT_HERE = {"cuda", "cupy", "numba", "torch"}  # packages that want a real driver
ROW = re.compile(r"^\| `(?P<test>[^`]+)` \| (?P<where>\w+) \| (?P<reason>.+) \|$")


@dataclass
class Known:
    """A test that fails, and why; ``*`` in its name stands for anything."""

    test: str
    where: str  # "simulator", "GPU" or "both"
    reason: str

    def means(self, test: str) -> bool:
        return fnmatch.fnmatchcase(test, self.test.replace("[", "[[]"))


def read_known(page: str, where: str) -> list[Known]:
    rows = [
        Known(**row.groupdict()) for row in map(ROW.match, page.splitlines()) if row
    ]
    for row in rows:
        if row.where not in ("simulator", "GPU", "both"):
            raise SystemExit(f"README.md: {row.where!r} of {row.test} is no place")
    return [row for row in rows if row.where in (where, "both")]


# ---- which files ---------------------------------------------------------------------


def imported(path: Path) -> set[str]:
    """Packages that a file cannot be imported without, those of its helpers too."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Assign | ast.Expr):
            names |= {name.split(".")[0] for name in asked_for(node)}
    for helper in (path.parent / f"{name}.py" for name in set(names)):
        if helper.exists() and helper != path:
            names |= imported(helper)
    return names


def asked_for(node: ast.stmt) -> set[str]:
    """Modules that ``pytest.importorskip`` is called with."""
    return {
        str(call.args[0].value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "importorskip"
        and isinstance(call.args[0], ast.Constant)
    }


def find_tests(checkout: Path) -> Path:
    folder = checkout / "python" / "rmm" / "rmm" / "tests"
    if not folder.is_dir():
        raise SystemExit(f"{checkout} is no checkout of RMM: it has no {folder}")
    return folder


# ---- one run -------------------------------------------------------------------------


@dataclass
class Outcomes:
    """What became of each test, by its name within the folder."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # test: the last line
    skipped: Counter[str] = field(default_factory=Counter)  # reason: how many

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.rsplit("/", 1)[-1]
        if report.failed:
            self.passed.discard(test)
            self.failed.setdefault(test, last_line(report.longreprtext))
        elif report.skipped:
            self.skipped[skip_reason(report)] += 1
        elif report.when == "call":
            self.passed.add(test)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            name = report.nodeid.rsplit("/", 1)[-1]
            self.failed[name] = last_line(report.longreprtext)
        elif report.skipped:
            self.skipped[skip_reason(report)] += 1


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E ")]
    return (lines or text.splitlines() or [""])[-1].removeprefix("E").strip()[:120]


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    place = report.longrepr
    text = str(place[2]) if isinstance(place, tuple) else str(place)
    return text.removeprefix("Skipped: ")


def run(folder: Path, files: list[Path], arguments: list[str]) -> Outcomes:
    outcomes = Outcomes()
    sys.path.insert(0, str(HERE))
    sys.dont_write_bytecode = True
    # RMM's own settings, where warnings are errors; nothing is written into its source.
    settings = folder.parents[1] / "pyproject.toml"
    words = ["-q", "-c", str(settings), "--rootdir", str(folder)]
    words += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    # NumPy 2.5 says this of what Numba does while it is imported.
    words += ["-W", "ignore:The 'generic' unit:DeprecationWarning"]
    words += [*arguments, *map(str, files)]
    status = pytest.main(words, plugins=[outcomes])
    if not outcomes.failed and status != pytest.ExitCode.OK:
        raise SystemExit(f"pytest ended with {pytest.ExitCode(status).name}")
    return outcomes


# ---- what it means -------------------------------------------------------------------


def judge(outcomes: Outcomes, known: list[Known], least: float) -> list[str]:
    """What is wrong, in lines; prints what is right."""
    explained = {
        test: row for test in outcomes.failed for row in known if row.means(test)
    }
    wrong = [
        f"failed: {test}: {line}"
        for test, line in sorted(outcomes.failed.items())
        if test not in explained
    ]
    wrong += [
        f"passed, and README.md says that it fails: {test}"
        for test in sorted(outcomes.passed)
        if any(row.means(test) for row in known)
    ]
    for test, row in sorted(explained.items()):
        print(f"known: {test}: {row.reason}")
    for reason, n in outcomes.skipped.most_common():
        print(f"skipped: {n} × {reason}")
    n_passed, n_ran = len(outcomes.passed), len(outcomes.passed) + len(outcomes.failed)
    share = n_passed / n_ran if n_ran else 0.0
    print(f"{n_passed} of {n_ran} passed, {share:.1%}; {len(explained)} known to fail")
    if share < least:
        wrong.append(f"less than {least:.0%} have passed")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--gpu", action="store_true", help="on the real driver, all")
    options, arguments = parser.parse_known_args()
    folder = find_tests(options.checkout)
    files = sorted(folder.glob("test_*.py"))
    files.remove(folder / "test_helpers.py")
    if not options.gpu:
        os.environ["NUMPY_RMM_CUDA_LIBRARY"] = "simulator"
        wants = {path: imported(path) & NOT_HERE for path in files}
        for path in (path for path in files if wants[path]):
            print(f"left out: {path.name} wants {', '.join(sorted(wants[path]))}")
        files = [path for path in files if not wants[path]]
    outcomes = run(folder, files, arguments)
    where = "GPU" if options.gpu else "simulator"
    known = read_known((HERE / "README.md").read_text(), where)
    wrong = judge(outcomes, known, SHARE[where])
    print(*wrong, sep="\n")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
