"""How many instructions an allocation and a free take together, or another call: a time
that no other program on the machine can spoil.

A release build of tests/c/pairs.c runs under Valgrind's callgrind, and no case may take
more than its ceiling. One that does got slower; when that is wanted, the table changes
in the same commit. The kernel's membarrier is missing under Valgrind, so threads fence,
and the figures are a few instructions above those of a program that runs by itself.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from pathlib import Path

import pytest

from builds import MESON, release_build, run

# The rows of so many have room in a log, until another thread writes them.
N_PAIRS = 1500

# Instructions of a pair, at most: what gcc 12 needs on x86-64, and three in a hundred.
# Those of a bare handle are the simulated driver's for the most part, and of those of
# parked blocks from 1 MiB four in five: a record, a query and five calls beside. Of
# 64 KiB it is a sixteenth of that. "routed" is what stands behind page-locked arrays.
# What has to be aligned more than all memory is, here to a page, goes the long way.
CEILINGS = {
    "pool_0_B": 123,
    "pool_64_B": 164,
    "pool_4_KiB": 164,
    "pool_64_KiB": 283,
    "pool_1_MiB": 283,
    "pool_4_MiB": 543,
    "aligned_64_B": 2565,
    "aligned_64_KiB": 3280,
    "route_64_B": 179,
    "route_64_KiB": 301,
    "zeroed_64_B": 194,
    "scoped_64_B": 584,
    "scoped_64_KiB": 690,
    "scope": 570,
    "adaptors_64_B": 288,
    "adaptors_64_KiB": 404,
    "logged_64_B": 414,
    "logged_64_KiB": 467,
    "device_64_KiB": 346,
    "device_default_64_KiB": 358,
    "device_logged_64_KiB": 611,
    "fixed_64_KiB": 346,
    "pinned_64_KiB": 289,
    "parked_64_KiB": 662,
    "parked_1_MiB": 5934,
    "routed_64_KiB": 770,
    "routed_1_MiB": 6061,
    "handle_64_KiB": 2640,
    "current_of_device": 75,
    "current": 130,
    "wrap": 90,
    "use": 98,
    "use_handle": 1757,
}


def require_what_the_ceilings_are_for() -> None:
    if platform.machine() != "x86_64":
        pytest.skip(f"the ceilings are for x86-64, this is {platform.machine()}")
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    for name in ("CFLAGS", "LDFLAGS", "NUMPY_RMM_TEST_SANITIZE"):
        if os.environ.get(name):
            pytest.skip(f"the ceilings are for a plain release build, {name} is set")


def build_release() -> Path:
    """The directory of a release build with the program in it, kept and updated."""
    build = release_build()
    compilers = json.loads(run(*MESON, "introspect", "--compilers", build))
    if compilers["host"]["c"]["id"] != "gcc":
        pytest.skip(f"the ceilings are for gcc, this is {compilers['host']['c']}")
    return release_build("pairs")


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Instructions of a pair of each case."""
    require_what_the_ceilings_are_for()
    build = build_release()
    profile = tmp_path_factory.mktemp("callgrind") / "profile"
    run(
        "valgrind",
        "--tool=callgrind",
        f"--callgrind-out-file={profile}",
        "--compress-strings=no",
        "--compress-pos=no",
        build / "tests" / "c" / "pairs",
        str(N_PAIRS),
    )
    # The call of a function, and on the next line where from and what it cost in all.
    calls = re.findall(
        r"^cfn=(\w+)\ncalls=1 .*\n\S+ (\d+)$", profile.read_text(), re.MULTILINE
    )
    return {name: int(n) / N_PAIRS for name, n in calls if name in CEILINGS}


@pytest.mark.parametrize("case", CEILINGS)
def test_a_pair_stays_under_its_ceiling(case: str, counts: dict[str, float]) -> None:
    assert 0 < counts[case] <= CEILINGS[case]
