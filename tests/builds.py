"""What the tests that build C programs share."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MESON = [sys.executable, "-m", "mesonbuild.mesonmain"]


def run(*command: str | Path) -> str:
    """What a command printed; the test fails with that when the command does."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{done.stdout}", pytrace=False)
    return done.stdout


@contextmanager
def locked_build(name: str, *key: object) -> Iterator[Path]:
    """A directory in build/ for each name and key, kept.

    Two test runs in one checkout must not build in it at the same time.
    """
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).hexdigest()[:8]
    build = ROOT / "build" / f"{name}-{digest}"
    build.mkdir(parents=True, exist_ok=True)
    with (build.parent / f"{build.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield build
