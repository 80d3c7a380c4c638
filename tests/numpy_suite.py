"""NumPy's own tests with all arrays under one of our handlers, and once without it.

    python tests/numpy_suite.py host
    python tests/numpy_suite.py pinned --threshold 1 --simulator
    python tests/numpy_suite.py managed --simulator -k mem_policy

Each run has a process of its own. The handler is set after collection, in the main
context, as NumPy's test of handler policies compares with the handler that it found.
As many tests must pass as without, and none fail; when pytest and the tests' modules
are gone, our resource must have served over 99 % of the requests, no call may have gone
wrong, and no byte may be alive.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MODULES = [
    "test_multiarray",
    "test_numeric",
    "test_umath",
    "test_mem_policy",
    "test_indexing",
]
SERVED = 0.99
IDLE_LIMIT = 1 << 30  # bytes that a pool may keep between two tests
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")

Counts = dict[str, int]


# ---- one run, in a process of its own ------------------------------------------------


class HandlerPlugin:
    """Sets the handler for the tests, and counts their outcomes."""

    def __init__(self, name: str | None, threshold: int | None) -> None:
        self.name = name
        self.threshold = threshold
        self.handler: Any = None
        self.counts: Counts = {}

    def pytest_collection_finish(self) -> None:
        import numpy_rmm

        if self.name is not None:
            numpy_rmm.set_handler(self.name, threshold=self.threshold)
            self.handler = numpy_rmm.get_handler()

    def pytest_runtest_setup(self) -> None:
        # NumPy's tests of large arrays skip themselves when little memory is free,
        # and do not know that what a pool keeps would be used again.
        if self.handler is not None:
            resource = self.handler.resource
            statistics = resource.statistics()
            if statistics.reserved_bytes - statistics.current_bytes > IDLE_LIMIT:
                resource.trim(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
        result = yield
        # pytest's loader keeps every item for ever, and an item the object of its
        # test, which may have arrays as attributes.
        for name in ("_instance", "_obj"):
            vars(item).pop(name, None)
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        stats = terminalreporter.stats
        self.counts = {name: len(stats.get(name, [])) for name in OUTCOMES}


def run_tests(
    handler: str | None, threshold: int | None, arguments: list[str]
) -> dict[str, Any]:
    """Run NumPy's tests here; their counts, and what our resource did."""
    import numpy_rmm

    plugin = HandlerPlugin(handler, threshold)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        common = ["-q", "--tb=short", "-p", "no:cacheprovider", "-c", os.devnull]
        status = pytest.main([*common, "--rootdir", directory, *arguments], [plugin])
        os.chdir("/")
    result = {"status": int(status), "counts": plugin.counts}
    if plugin.handler is not None:
        numpy_rmm.reset_handler()
        for name in list(sys.modules):
            if name.rpartition(".")[2].startswith("test_"):
                del sys.modules[name]
        gc.collect()
        of_handler = plugin.handler.statistics()
        of_resource = plugin.handler.resource.statistics()
        result["requests"] = of_handler.total_count
        result["served"] = of_resource.total_count
        result["errors"] = of_handler.errors + of_resource.errors
        result["alive"] = of_handler.current_bytes
    return result


# ---- the two runs --------------------------------------------------------------------


def in_process(
    handler: str | None, threshold: int | None, simulator: bool, arguments: list[str]
) -> dict[str, Any]:
    """The result of :func:`run_tests` in a new interpreter."""
    path = Path(sys.executable).parent  # meson, for the tests that build an extension
    environ = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    if simulator:
        environ["NUMPY_RMM_CUDA_LIBRARY"] = "simulator"
    words = json.dumps([handler, threshold, arguments])
    with tempfile.NamedTemporaryFile("w+") as output:
        command = [sys.executable, __file__, "--worker", words, output.name]
        done = subprocess.run(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        text = output.read()
    result: dict[str, Any] = json.loads(text or "{}")
    if done.returncode != 0 or result["status"] != 0:
        print(done.stdout)
    if not result:
        raise SystemExit(f"the tests' process ended with status {done.returncode}")
    return result


def complaints(without: dict[str, Any], under: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    found = []
    for words, result in (("without", without), ("under", under)):
        if result["status"] != 0:
            found.append(f"{words} the handler pytest ended with {result['status']}")
    if under["counts"] != without["counts"]:
        found.append(f"{under['counts']} under it, {without['counts']} without")
    if not under["served"] > SERVED * under["requests"]:
        found.append(f"served {under['served']:,} of {under['requests']:,} requests")
    if under["errors"]:
        found.append(f"{under['errors']} calls went wrong")
    if under["alive"]:
        found.append(f"{under['alive']:,} bytes are still alive")
    return found


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        result = run_tests(*json.loads(sys.argv[2]))
        Path(sys.argv[3]).write_text(json.dumps(result))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("handler", help="a name of the registry")
    parser.add_argument("--threshold", type=int, help="bytes from which it serves")
    parser.add_argument("--simulator", action="store_true", help="a simulated driver")
    parser.add_argument("--modules", default=",".join(MODULES), help="of NumPy's tests")
    options, rest = parser.parse_known_args()

    import numpy as np

    is_new = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
    package = "numpy._core.tests" if is_new else "numpy.core.tests"
    modules = [f"{package}.{module}" for module in options.modules.split(",")]
    arguments = [*rest, "--pyargs", *modules]
    without = in_process(None, None, False, arguments)
    under = in_process(options.handler, options.threshold, options.simulator, arguments)
    wrong = complaints(without, under)
    passed, passed_without = under["counts"]["passed"], without["counts"]["passed"]
    print(
        f"NumPy {np.__version__} under {options.handler}: {passed:,} tests passed "
        f"({passed_without:,} without); our resource served {under['served']:,} of "
        f"{under['requests']:,} requests; " + ("; ".join(wrong) or "all as it must be")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
