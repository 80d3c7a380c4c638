"""The benchmarks: each suite runs, and its figures are what they say they are.

The sizes are tiny and the figures mean nothing; what is held is how they are made:
every ratio is of two medians of one case, a peer that is not here is named, and nothing
in a file says on whose machine it was made.
"""

from __future__ import annotations

import getpass
import importlib
import json
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import types
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import numpy_rmm.testing

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
Record = dict[str, Any]

# What each suite runs here, one turn of each way; all cases would take minutes.
SUITES: dict[str, list[str]] = {
    "numpy": [
        *("--cases", "chain,empty_together,patterns,c_empty"),
        *("--sizes", "64KiB", "--peers", "none"),
    ],
    "core": ["--peers", "none", "--cases", "pair,live,random,fragmentation,replay"],
    "pinned": ["--simulator", "--cases", "growth,shrink,pair,growing,c_pair"],
    "device_python": ["--simulator", "--peers", "none"],
    "device": [
        *("--simulator", "--cases"),
        "pair,multi_stream,random,c_pair,c_multi_stream,c_threads",
    ],
    "reuse": [
        *("--simulator", "--peers", "none", "--sizes", "64KiB", "--cases"),
        "c_use,use,c_park,c_idle_pair,fill,chain,c_copies,endless",
    ],
}


def command(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def nrm_bench() -> Path:
    """The C program, built as the suites build it, but quickly: no figure counts."""
    build = ROOT / "build" / "benchmarks-test"
    done = command(
        "-c",
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import _compile; "
        f"from pathlib import Path; print(_compile.program(Path({str(build)!r}), "
        "'plain'))",
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def run_suite(path: Path, suite: str, *options: str | Path, **environ: str) -> Record:
    words = [BENCHMARKS / "run.py", suite, "--quick", "--rounds", "1"]
    done = command(*words, "--json", path, *options, **environ)
    assert done.returncode == 0, done.stderr
    record: Record = json.loads(path.read_text())
    record["printed"] = done.stdout
    return record


@pytest.fixture(scope="module", params=SUITES)
def suite(
    request: pytest.FixtureRequest, tmp_path_factory: Any, nrm_bench: Path
) -> Record:
    """The figures of each suite, whose workers are forks; those of others here are
    interpreters, as they should be."""
    name: str = request.param
    path = tmp_path_factory.mktemp(name) / "figures.json"
    options = [*SUITES[name], "--program", nrm_bench]
    return run_suite(path, name, *options, NUMPY_RMM_BENCH_FORKED="1")


def cases(record: Record) -> Iterator[tuple[Record, Record]]:
    for table in record["tables"]:
        for case in table["cases"]:
            yield table, case


@pytest.mark.timeout(600)
def test_a_suite_writes_what_it_measured(suite: Record) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", suite["date"])
    assert {"CPU", "Linux", "Python", "NumPy", "numpy_rmm"} <= set(suite["machine"])
    assert suite["simulated"] == ("--simulator" in SUITES[suite["suite"]])
    assert all(table["cases"] for table in suite["tables"]), "a table is empty"
    for table, case in cases(suite):
        assert table["title"] in suite["printed"]
        assert case["ways"], case["name"]
        assert case["failed"] == {}
        for found in case["ways"].values():
            assert found["n"] >= len(found["rounds"]) >= 1
            assert 0 < found["median"] <= found["p99"] <= found["max"]
            assert found["median"] == statistics.median(found["rounds"])


@pytest.mark.timeout(600)
def test_a_ratio_is_of_two_medians_of_one_case(suite: Record) -> None:
    n_ratios = 0
    for table, case in cases(suite):
        for base in filter(None, (table["baseline"], table["limit"])):
            for way, ratio in case["ratios"][base].items():
                if base not in case["ways"]:
                    assert ratio is None
                    continue
                ways = case["ways"]
                expected = ways[way]["median"] / ways[base]["median"]
                assert math.isclose(ratio, expected), (case["name"], way)
                n_ratios += way != base
    assert n_ratios > 0


@pytest.mark.timeout(600)
def test_every_way_had_the_same_number_of_turns(suite: Record) -> None:
    for _, case in cases(suite):
        assert len({len(found["rounds"]) for found in case["ways"].values()}) == 1


@pytest.mark.timeout(600)
def test_figures_do_not_name_their_owner(suite: Record) -> None:
    text = json.dumps(suite["tables"]) + json.dumps(suite["machine"])
    text += json.dumps(suite["peers"])
    assert str(ROOT) not in text
    assert not re.search(r"/(home|tmp|root|usr|Users|work)/", text)
    for name in (socket.gethostname(), getpass.getuser()):
        assert not re.search(rf"\b{re.escape(name)}\b", text), name


@pytest.mark.timeout(600)
def test_a_figure_can_be_drawn(suite: Record, tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    figures.write_text(json.dumps(suite))
    done = command(BENCHMARKS / "plot.py", figures, picture)
    assert done.returncode == 0, done.stderr
    words = {element.text for element in ET.parse(picture).iter() if element.text}
    for table, case in cases(suite):
        if case["ratios"][table["baseline"]].get(table["baseline"]):
            assert case["name"] in words
    assert any(suite["date"] in word for word in words)
    assert any(suite["machine"]["CPU"] in word for word in words)


def test_a_figure_is_of_one_suite_of_several(tmp_path: Path) -> None:
    tables = [table_of("core/pair", "64 B", host=2.0, malloc=4.0)]
    tables += [table_of("device/c_pair", "1 MiB", numpy_rmm=2.0)]
    for table, baseline in zip(tables, ("malloc", "numpy_rmm"), strict=True):
        table |= {"title": table["suite"], "baseline": baseline, "unit": "ns"}
    record = {"suite": "all", "date": "2026-01-01", "simulated": False}
    record |= {"machine": {}, "tables": tables, "targets": []}
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    figures.write_text(json.dumps(record))
    for options, names in ([], {"64 B", "1 MiB"}), (["--suite", "core"], {"64 B"}):
        done = command(BENCHMARKS / "plot.py", figures, picture, *options)
        assert done.returncode == 0, done.stderr
        words = {element.text for element in ET.parse(picture).iter() if element.text}
        assert words & {"64 B", "1 MiB"} == names


# ---- peers ---------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_peer_is_measured_or_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    peers = ["mimalloc", "jemalloc", "tcmalloc", "numpy-allocator"]
    options = ["--cases", "empty", "--sizes", "64", "--peers", ",".join(peers)]
    record = run_suite(tmp_path / "figures.json", "numpy", *options)
    used, absent = record["peers"]["used"], record["peers"]["absent"]
    assert set(used) | set(absent) == set(peers)
    assert not set(used) & set(absent)
    for _, case in cases(record):
        assert set(case["ways"]) == {"default", "host", *used}
    for name, why in absent.items():
        assert "install" in why
        assert f"peer {name} is absent: {why}" in record["printed"]


def test_a_library_that_is_not_there_is_no_peer(tmp_path: Path) -> None:
    options = ["--cases", "empty", "--sizes", "64", "--peers", "other=nowhere.so"]
    path = tmp_path / "figures.json"
    record = run_suite(path, "numpy", *options, NUMPY_RMM_BENCH_FORKED="1")
    assert record["peers"] == {
        "used": {},
        "absent": {"other": "there is no such file"},
    }


def test_a_peer_must_be_known() -> None:
    done = command(BENCHMARKS / "run.py", "core", "--peers", "nomalloc")
    assert done.returncode != 0
    assert "knows the peers mimalloc, jemalloc, tcmalloc" in done.stderr


def test_what_needs_a_compiler_says_so_without_one(tmp_path: Path) -> None:
    options = ["--cases", "c_empty", "--peers", "none"]
    path = tmp_path / "figures.json"
    record = run_suite(path, "numpy", *options, PATH="nowhere", CC="")
    (table,) = record["tables"]
    assert table["cases"] == []
    assert "there is no C compiler" in table["notes"][0]


FAILING_MALLOC = """\
#include <stddef.h>
void *__libc_malloc(size_t nbytes);
void *malloc(size_t nbytes) { return nbytes == 65432 ? 0 : __libc_malloc(nbytes); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.timeout(300)
def test_a_peer_that_fails_is_named_and_ends_nothing(
    tmp_path: Path, nrm_bench: Path
) -> None:
    library = shared_library(FAILING_MALLOC, tmp_path)
    options = ["--cases", "pair", "--sizes", "64,65432", "--peers", f"bad={library}"]
    options += ["--program", str(nrm_bench)]
    record = run_suite(tmp_path / "figures.json", "core", *options)
    small, large = (case for _, case in cases(record))
    assert set(small["ways"]) - set(large["ways"]) == {"bad"}
    assert {"malloc", "host", "addresses"} < set(large["ways"])
    why = "65432 bytes could not be had: the allocator says no"
    assert large["failed"] == {"bad": why}
    assert why in record["printed"]


def shared_library(code: str, folder: Path) -> Path:
    source, library = folder / "library.c", folder / "liblibrary.so"
    source.write_text(code)
    build = ["cc", "-shared", "-fPIC", "-fno-builtin", "-o", library, source]
    subprocess.run(build, check=True)
    return library


# ---- time, and what it leaves out ----------------------------------------------------

HOST_PAIR = ["core", "--peers", "none", "--cases", "pair"]


def test_a_run_that_is_killed_keeps_what_it_measured(
    tmp_path: Path, nrm_bench: Path
) -> None:
    path = tmp_path / "figures.json"
    words = [BENCHMARKS / "run.py", *HOST_PAIR, "--program", nrm_bench, "--json", path]
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True
    )
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    (table,) = json.loads(path.read_text())["tables"]
    assert 1 <= len(table["cases"]) < 9
    assert table["cases"][0]["name"] == "8 B"
    assert len(table["cases"][0]["ways"]["host"]["rounds"]) == 7


def test_a_limit_leaves_rows_out_and_names_them(
    tmp_path: Path, nrm_bench: Path
) -> None:
    path = tmp_path / "figures.json"
    words = [BENCHMARKS / "run.py", *HOST_PAIR, "--program", nrm_bench, "--json", path]
    start = time.monotonic()
    done = command(*words, "--limit", "0.7", "--targets")
    assert time.monotonic() - start < 5
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(path.read_text())["tables"]
    missed = table["not_measured"]
    assert missed
    assert len(table["cases"]) + len(missed) == 9
    for case in table["cases"]:
        assert {len(found["rounds"]) for found in case["ways"].values()} == {7}
    for name, why in missed.items():
        assert f"{name}: not measured: {why}" in done.stdout
    assert "hot pair, host, ns" in done.stdout


def test_what_targets_ask_for_is_measured_in_one_go(
    tmp_path: Path, nrm_bench: Path
) -> None:
    options = ["--cases", "pair,c_pair", "--peers", "none", "--simulator"]
    path = tmp_path / "figures.json"
    options += ["--program", str(nrm_bench)]
    record = run_suite(path, "all", *options, NUMPY_RMM_BENCH_FORKED="1")
    assert [(table["suite"], table["key"]) for table in record["tables"]] == [
        ("core", "pair"),
        ("device", "c_pair"),
        ("device_python", "pair"),
        ("pinned", "c_pair"),
    ]
    paths = {row["path"] for row in record["targets"]}
    assert {"hot pair, device, ns", "np.empty 1 KiB, from C"} <= paths
    assert "Targets" in record["printed"]


def test_a_suite_without_its_gpu_says_so(tmp_path: Path) -> None:
    words = [BENCHMARKS / "run.py", "pinned", "--peers", "none"]
    nowhere = str(tmp_path / "libcuda.so.1")
    environ = {"NUMPY_RMM_CUDA_LIBRARY": nowhere, "NUMPY_RMM_BENCH_FORKED": "1"}
    done = command(*words, **environ)
    assert done.returncode == 1
    assert "this suite needs a GPU" in done.stderr


def test_turns_are_seven_or_none(progress: Any) -> None:
    now = [0.0]

    def one_second() -> float:
        now[0] += 1
        return now[0]

    progress.time.monotonic = lambda: now[0]
    ways = {"a": one_second, "b": one_second}
    clock = progress.Clock(13.5, start=0)
    with pytest.raises(progress.OutOfTime, match="7 turns take 14 s; 14 were left"):
        progress.turns(ways, 25, clock)
    assert now[0] == 2, "it went on though it could not end in time"
    found = progress.turns(ways, 25, progress.Clock(20, start=2))
    assert [len(results) for results in found.values()] == [7, 7]
    unlimited = progress.turns(ways, 25, progress.Clock(start=0))
    assert [len(results) for results in unlimited.values()] == [25, 25]


def test_a_case_that_fails_ends_no_other(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    words = [BENCHMARKS / "run.py", "numpy", "--quick", "--rounds", "1", "--json", path]
    words += ["--cases", "patterns", "--handlers", "host,nobody", "--peers", "none"]
    done = command(*words, NUMPY_RMM_BENCH_FORKED="1")
    assert done.returncode == 1
    assert "something of ours failed" in done.stderr
    (table,) = json.loads(path.read_text())["tables"]
    assert len(table["not_measured"]) == 3
    assert all("failed" in why for why in table["not_measured"].values())
    assert "never touched: not measured: failed" in done.stdout


# ---- targets -------------------------------------------------------------------------


def table_of(key: str, name: str, **ways: float) -> Record:
    suite_name, _, key = key.partition("/")
    found = {
        way: {"median": value, "p99": 2 * value, "extra": {"times_one_thread": value}}
        for way, value in ways.items()
    }
    case = {"name": name, "ways": found, "failed": {}}
    return {"suite": suite_name, "key": key, "cases": [case], "not_measured": {}}


@pytest.mark.parametrize(
    ("table", "path", "measured", "verdict"),
    [
        (("numpy/c_empty", "64 B", {"host": 102.0, "default": 100.0}),
         "np.empty < 1 KiB, from C", 1.02, "met"),
        (("numpy/c_empty", "1 KiB", {"host": 114.0, "default": 100.0}),
         "np.empty 1 KiB, from C", 1.14, "missed by 20 %"),
        (("numpy/c_empty", "1 KiB", {"host": 95.1, "default": 100.0}),
         "np.empty 1 KiB, from C", 0.951, "missed by less than 1 %"),
        (("core/pair", "64 B", {"host": 24.0, "malloc": 12.0}),
         "hot pair, host, ns", 24.0, "missed by 100 %"),
        (("core/threads", "8 threads", {"host": 3.5}),
         "8 threads, own blocks, × one thread", 3.5, "missed by 100 %"),
        (("core/grow", "64 KiB", {"host": 1e6}),
         "p99 of a pair while the pool grows, ns", 2e6, "met"),
        (("device/c_random", "100,000 × ≤ 4 MiB",
          {"numpy_rmm": 20.0, "rmm pool": 4000.0, "rmm binning": 80.0}),
         "random_allocations 100,000 × ≤ 4 MiB", 0.25, "met"),
        (("core/handoff", "8 threads", {"host": 20.0, "malloc": 10.0}),
         "8 threads, handed to another", None,
         "not measured: nothing to compare with was measured"),
        (("core/handoff", "2 threads", {"host": 20.0, "mimalloc": 10.0}),
         "8 threads, handed to another", None, "not measured"),
    ],
)  # fmt: skip
def test_a_target_is_judged_by_the_figures(
    table: tuple[str, str, Record],
    path: str,
    measured: float | None,
    verdict: str,
    targets: Any,
) -> None:
    key, name, ways = table
    rows = targets.judge([table_of(key, name, **ways)], {"NumPy": "2.4.6"})
    (row,) = (row for row in rows if row["path"] == path)
    assert row["measured"] == pytest.approx(measured)
    assert targets.verdict(row) == verdict
    assert verdict in targets.report(rows).text()


def test_an_old_numpy_is_asked_for_less(targets: Any) -> None:
    table = table_of("numpy/c_empty", "8 B", host=1.05, default=1.0)
    for version, verdict in (("1.26.4", "met"), ("2.0.2", "missed by 3 %")):
        row = targets.judge([table], {"NumPy": version})[0]
        assert targets.verdict(row) == verdict


def test_every_target_is_about_a_table_that_is_measured(targets: Any) -> None:
    """And about ways of it: the names are compared with those of the suites."""
    import run

    measured = {f"{suite_name}/{case}" for suite_name, case, _ in run.ALL}
    assert {target.table for target in targets.TARGETS} == measured


# ---- RMM's resources in C++ ----------------------------------------------------------


def test_rmm_without_its_headers_is_absent_with_the_reason(
    compiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMPY_RMM_BENCH_RMM", raising=False)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(compiling.CannotCompile, match="librmm is not here"):
        compiling.rmm_library(Path("nowhere"))


def test_a_library_of_rmm_that_does_not_exist_is_no_peer(
    compiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMPY_RMM_BENCH_RMM", "nowhere.so")
    with pytest.raises(compiling.CannotCompile, match="NUMPY_RMM_BENCH_RMM names no"):
        compiling.rmm_library()


PEER = """\
#include <stdlib.h>
int rmm_peer_version(void) { return VERSION; }
const char *rmm_peer_error(void) { return "no more"; }
void *rmm_peer_open(const char *name, size_t n) { return *name == 'p' ? malloc(1) : 0; }
void rmm_peer_close(void *mr) { free(mr); }
void *rmm_peer_allocate(void *mr, size_t n, void *s) { return n < 999 ? malloc(n) : 0; }
void rmm_peer_deallocate(void *mr, void *p, size_t n, void *s) { free(p); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("version", "name", "nbytes", "why"),
    [
        (1, "pool", 64, ""),
        (1, "pool", 1000, "1000 bytes could not be had: no more"),
        (1, "arena", 64, "RMM's arena: no more"),
        (2, "pool", 64, "the library of RMM's resources is of another version"),
    ],
)
def test_rmm_is_called_through_its_library(
    version: int, name: str, nbytes: int, why: str, tmp_path: Path, nrm_bench: Path
) -> None:
    library = shared_library(PEER.replace("VERSION", str(version)), tmp_path)
    environ = {
        "NUMPY_RMM_BENCH_RMM": str(library),
        "NUMPY_RMM_CUDA_LIBRARY": str(numpy_rmm.testing._find_simulator()),
    }
    done = subprocess.run(
        [nrm_bench, "pair", f"rmm:{name}", f"size={nbytes}", "streams=1"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert why in done.stderr
    assert (done.returncode == 0) == (not why)
    if not why:
        assert json.loads(done.stdout)["median"] > 0


STANDARD = """\
#include <cstdio>
#include <cstdlib>
#include <random>
int main(int, char **argv) {
    std::default_random_engine engine;
    std::uniform_int_distribution<std::size_t> numbers(std::strtoull(argv[1], 0, 10),
                                                       std::strtoull(argv[2], 0, 10));
    for (int i = 0; i < 500; i++) std::printf("%zu\\n", numbers(engine));
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_random_allocations_draws_the_numbers_that_rmm_draws(
    tmp_path: Path, nrm_bench: Path
) -> None:
    source, program = tmp_path / "standard.cpp", tmp_path / "standard"
    source.write_text(STANDARD)
    subprocess.run(["g++", "-o", program, source], check=True)
    for low, high in ((0, 99), (1, 4 << 20), (1, 4 << 30), (0, 2**31 - 3), (5, 5)):
        theirs = subprocess.check_output([program, str(low), str(high)])
        words = [nrm_bench, "uniform", f"low={low}", f"high={high}", "n=500"]
        assert subprocess.check_output(words) == theirs, (low, high)


# ---- how results are put together ----------------------------------------------------


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports what lies in benchmarks/, and forgets it afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(BENCHMARKS) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


@pytest.fixture
def suite_module(modules: Callable[[str], Any]) -> Any:
    return modules("_suite")


@pytest.fixture
def targets(modules: Callable[[str], Any]) -> Any:
    return modules("targets")


@pytest.fixture
def compiling(modules: Callable[[str], Any]) -> Any:
    return modules("_compile")


@pytest.fixture
def progress(modules: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """With a clock of its own, which may be set."""
    module = modules("_progress")
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=time.monotonic))
    return module


def test_rounds_count_the_same_however_long_they_are(suite_module: Any) -> None:
    short, long = [10.0], [1.0] * 999
    assert suite_module.percentile([short, long], 0.99) == 10
    found = suite_module.summary([{"samples": short}, {"samples": long}])
    assert (found["median"], found["rounds"]) == (5.5, [10, 1])


def test_the_percentile_is_of_the_samples(suite_module: Any) -> None:
    samples = [float(value) for value in range(1, 101)]
    assert suite_module.percentile([samples], 0.99) == 99
    assert suite_module.percentile([samples, samples], 0.5) == 50


def test_thinned_samples_keep_their_distribution(suite_module: Any) -> None:
    samples = [float(value) for value in range(100_000)]
    thin = suite_module.thin(samples)
    assert len(thin) == 500
    assert (thin[0], thin[-1]) == (0, 99_999)
    assert statistics.median(thin) == pytest.approx(50_000, rel=0.01)


def test_a_way_that_failed_is_named(suite_module: Any) -> None:
    rounds = {"a": [{"samples": [1.0]}], "b": [{"samples": [1.0]}, {"error": "no"}]}
    case = suite_module.Case.of("64 B", rounds)
    table = suite_module.Table("Pairs", "ns", "a", [case])
    assert set(case.ways) == {"a"}
    assert "64 B: b failed: no" in table.report().text()
    assert table.record()["cases"][0]["failed"] == {"b": "no"}


# ---- traces --------------------------------------------------------------------------


def replay(nrm_bench: Path, trace: Path) -> subprocess.CompletedProcess[str]:
    words = [nrm_bench, "replay", "host", f"file={trace}", "samples=1"]
    return subprocess.run(words, capture_output=True, text=True, check=False)


PROGRAM = """\
import numpy as np
kept = [np.ones(1000 + i) for i in range(10)]
grown = np.empty(100, np.uint8)
grown.resize(100_000, refcheck=False)
del kept[::2], grown
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.timeout(300)
def test_a_program_is_recorded_and_played_back(tmp_path: Path, nrm_bench: Path) -> None:
    program, trace = tmp_path / "program.py", tmp_path / "program.trace"
    program.write_text(PROGRAM)
    done = command(BENCHMARKS / "record.py", trace, program)
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    assert lines[0] == "nrm-trace 1"
    made = [f"+{8 * (1000 + i)}" for i in range(10)]
    assert [line for line in lines if line in made] == made
    blocks = [line for line in lines if line.startswith("+")]  # numbered from 0
    first, grown = blocks.index("+8000"), blocks.index("+100")
    assert f"={grown} 100000" in lines
    assert {f"-{first}", f"-{grown}"} <= set(lines)
    found = json.loads(replay(nrm_bench, trace).stdout)
    assert found["extra"]["operations"] == len(lines) - 1


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["+64", "-1"], "line 3 of the trace is none: -1"),
        (["+64", "-0", "-0"], "block 0 of the trace is used after it was freed"),
        (["+64", "-0", "=0 128"], "block 0 of the trace is used after it was freed"),
        (["+0"], "line 2 of the trace is none: +0"),
        (["+64 7"], "line 2 of the trace is none: +64 7"),
        (["*64"], "line 2 of the trace is none: *64"),
        (["+64", "=0"], "line 3 of the trace is none: =0"),
        (["+64@99"], "line 2 of the trace is none: +64@99"),
    ],
)
@pytest.mark.timeout(300)
def test_a_trace_that_makes_no_sense_is_refused(
    lines: list[str], why: str, tmp_path: Path, nrm_bench: Path
) -> None:
    trace = tmp_path / "wrong.trace"
    trace.write_text("\n".join(["nrm-trace 1", *lines, ""]))
    done = replay(nrm_bench, trace)
    assert done.returncode == 1
    assert why in done.stderr


@pytest.mark.timeout(300)
def test_a_synthetic_trace_is_the_same_every_time(nrm_bench: Path) -> None:
    words = [nrm_bench, "trace", "operations=500", "live=1 MiB", "max=64 KiB"]
    texts = {
        subprocess.run(words, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    (text,) = texts
    assert len(text.splitlines()) == 501


BROKEN_MALLOC = """\
#include <stddef.h>
static char memory[1 << 24];
static size_t n;
void *malloc(size_t nbytes) { return memory + (nbytes > 100000 ? 0 : (n += 4096)); }
void *calloc(size_t a, size_t b) { return malloc(a * b); }
void *realloc(void *p, size_t nbytes) { return malloc(nbytes); }
void free(void *p) {}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.timeout(300)
def test_an_allocator_that_gives_memory_twice_is_found_out(
    tmp_path: Path, nrm_bench: Path
) -> None:
    library = shared_library(BROKEN_MALLOC, tmp_path)
    words = [nrm_bench, "live", "malloc", "n=3", "max=1 MiB", "samples=1"]
    done = subprocess.run(
        words,
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "two live blocks overlap" in done.stderr
