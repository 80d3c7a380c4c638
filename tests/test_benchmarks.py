"""The benchmarks: each suite runs, and its figures are what they say they are.

The sizes are tiny and the figures mean nothing; what is held is how they are made:
every ratio is of two medians of one case, a peer that is not here is named, and nothing
in a file says on whose machine it was made.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
Record = dict[str, Any]

# What each suite runs here; all cases together would take minutes.
SUITES: dict[str, list[str]] = {
    "numpy": [
        *("--cases", "empty,chain,patterns,c_empty,realloc"),
        *("--sizes", "64KiB", "--peers", "none"),
    ],
    "core": ["--peers", "none", "--cases", "pair,live,random,fragmentation,replay"],
    "pinned": ["--simulator", "--cases", "growth,shrink,pair,growing,c_pair"],
    "device": ["--simulator", "--cases", "pair,multi_stream,random,c_pair,c_threads"],
}


def command(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def run_suite(path: Path, suite: str, *options: str, **environ: str) -> Record:
    words = [BENCHMARKS / "run.py", suite, "--quick", "--json", path, *options]
    done = command(*words, **environ)
    assert done.returncode == 0, done.stderr
    record: Record = json.loads(path.read_text())
    record["printed"] = done.stdout
    return record


@pytest.fixture(scope="module", params=SUITES)
def suite(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Record:
    """The figures of each suite; the first one that needs it builds the C program."""
    name: str = request.param
    path = tmp_path_factory.mktemp(name) / "figures.json"
    return run_suite(path, name, *SUITES[name])


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


# ---- peers ---------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_peer_is_measured_or_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    peers = ["mimalloc", "jemalloc", "tcmalloc", "numpy-allocator"]
    options = ["--cases", "empty", "--sizes", "64", "--peers", ",".join(peers)]
    record = run_suite(tmp_path / "figures.json", "numpy", *options, "--rounds", "1")
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
    record = run_suite(tmp_path / "figures.json", "numpy", *options, "--rounds", "1")
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
def test_a_peer_that_fails_is_named_and_ends_nothing(tmp_path: Path) -> None:
    library = shared_library(FAILING_MALLOC, tmp_path)
    options = ["--cases", "pair", "--sizes", "64,65432", "--peers", f"bad={library}"]
    record = run_suite(tmp_path / "figures.json", "core", *options)
    small, large = (case for _, case in cases(record))
    assert "bad" in small["ways"]
    assert set(large["ways"]) == {"malloc", "host", "addresses"}
    why = "65432 bytes could not be had: the allocator says no"
    assert large["failed"] == {"bad": why}
    assert why in record["printed"]


def shared_library(code: str, folder: Path) -> Path:
    source, library = folder / "library.c", folder / "liblibrary.so"
    source.write_text(code)
    build = ["cc", "-shared", "-fPIC", "-fno-builtin", "-o", library, source]
    subprocess.run(build, check=True)
    return library


# ---- how results are put together ----------------------------------------------------


@pytest.fixture
def suite_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _suite

    yield _suite
    for name in set(sys.modules) - before:
        if name.startswith("_"):
            del sys.modules[name]


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


@pytest.fixture(scope="module")
def nrm_bench() -> Path:
    """The C program, built as the suites build it."""
    done = command(
        "-c",
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import _compile; "
        "print(_compile.program(None))",
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


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
