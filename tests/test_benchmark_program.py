"""The C program of the benchmarks: traces, random numbers, RMM's resources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmark_runs import BENCHMARKS, command, shared_library
from numpy_rmm._simulator import find_library


@pytest.fixture
def compiling(modules: Callable[[str], Any]) -> Any:
    return modules("_compile")


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
        "NUMPY_RMM_CUDA_LIBRARY": str(find_library()),
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
