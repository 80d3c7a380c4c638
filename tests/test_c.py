"""The C tests: every program of tests/c, built once a session and run here.

NUMPY_RMM_TEST_SANITIZE=address,undefined (or thread) builds them with that sanitizer,
"valgrind" runs them under Valgrind's memcheck, CC chooses the compiler. The build is
kept in build/ and updated, so a second run is quick. Asserts that walk whole pools are
left out under Valgrind, where they would take very long. NUMPY_RMM_TEST_STRICT=1 takes
the build of ``spin lint``, in which a warning is an error: .ci/run needs both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from builds import MESON, ROOT, locked_build, run, strict_build

CHECKER = os.environ.get("NUMPY_RMM_TEST_SANITIZE", "")
SANITIZE = "" if CHECKER == "valgrind" else CHECKER
# One thread at a time, fairly: a thread that polls must not keep the others out.
VALGRIND = [
    "valgrind",
    "--quiet",
    "--error-exitcode=99",
    "--leak-check=full",
    "--fair-sched=yes",
    f"--suppressions={ROOT / 'tests' / 'c' / 'valgrind.supp'}",
]
TOPICS = sorted(path.stem for path in (ROOT / "tests" / "c").glob("test_*.c"))


@pytest.fixture(scope="session")
def programs() -> Path:
    """The directory of the built test programs."""
    flags = [os.environ.get(name) for name in ("CC", "CFLAGS", "LDFLAGS")]
    is_strict = os.environ.get("NUMPY_RMM_TEST_STRICT") == "1"
    if is_strict and not CHECKER and not any(flags):
        return strict_build("c-tests") / "tests" / "c"
    setup: list[str | Path] = [*MESON, "setup", "-Dextension=false", "-Dtests=true"]
    setup += ["-Dvalgrind=true" if CHECKER == "valgrind" else "-Dslow_asserts=true"]
    environ: dict[str, str] = {}
    if SANITIZE:
        setup += [f"-Db_sanitize={SANITIZE}", "-Db_lundef=false", "-Doptimization=1"]
        setup += ["-Ddebug=false"]  # lines are enough for a stack
        environ = {"CFLAGS": f"{os.environ.get('CFLAGS', '')} -g1"}
    with locked_build("c-tests", sys.executable, flags, CHECKER) as build:
        if not (build / "build.ninja").exists():
            run(*setup, build, **environ)
        run(*MESON, "compile", "-C", build, "c-tests")
    return build / "tests" / "c"


def environment() -> dict[str, str]:
    """Ours without the user's options, which the tests would otherwise run under."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("NUMPY_RMM_")
    }
    environ["ASAN_OPTIONS"] = "allocator_may_return_null=1"
    environ["UBSAN_OPTIONS"] = "halt_on_error=1:print_stacktrace=1"
    # A fork holds more locks of ours than ThreadSanitizer follows, and a forked child
    # may start our background thread.
    environ["TSAN_OPTIONS"] = "halt_on_error=1:detect_deadlocks=0:die_after_fork=0"
    if CHECKER:  # .ci/run has them beside other programs, with the lowest priority
        environ["CHECK_TIMEOUT"] = "1800" if CHECKER == "valgrind" else "600"
    return environ


@pytest.mark.timeout(3600 if CHECKER == "valgrind" else 900)
@pytest.mark.parametrize("topic", TOPICS)
def test_program(topic: str, programs: Path) -> None:
    # ThreadSanitizer of some compilers does not start under much address randomisation.
    prefix = ["setarch", "-R"] if "thread" in SANITIZE else []
    prefix += VALGRIND if CHECKER == "valgrind" else []
    done = subprocess.run(
        [*prefix, programs / topic],
        env=environment(),
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    print(done.stdout)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("not ok", "Bail out!"))]
    assert not failed, "\n".join(failed)
    assert done.returncode == 0, f"{topic} ended with status {done.returncode}"
    results = [line for line in lines if line.startswith("ok ")]
    assert f"1..{len(results)}" in lines, f"{topic} printed no plan, or lost lines"
    reasons = {line.partition("# SKIP ")[2] for line in results}
    if "" not in reasons:
        pytest.skip("; ".join(sorted(reasons)))


def test_every_program_is_built() -> None:
    text = (ROOT / "tests" / "c" / "meson.build").read_text()
    listed = re.search(r"test_topics = \[(.*?)\]", text, re.DOTALL)
    assert listed is not None
    of_their_own = re.findall(r"executable\(\n  'test_(\w+)',", text)
    assert sorted([*re.findall(r"'(\w+)'", listed[1]), *of_their_own]) == [
        topic.removeprefix("test_") for topic in TOPICS
    ]
