"""The benchmarks: each suite runs, and its figures are what they say they are.

The sizes are tiny and the figures mean nothing; what is held is how they are made:
every ratio is of two medians of one case, a peer that is not here is named, and nothing
in a file says on whose machine it was made.
"""

from __future__ import annotations

import getpass
import json
import math
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmark_runs import (
    BENCHMARKS,
    ROOT,
    Record,
    cases,
    command,
    run_suite,
    shared_library,
    table_of,
)

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
