"""What the tests that build C programs share, and ``spin lint``.

As a program it makes the whole strict build of a compiler, or with --only-set-up makes
it ready to be made, and prints where it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MESON = [sys.executable, "-m", "mesonbuild.mesonmain"]


def run(*command: str | Path, **environ: str) -> str:
    """What a command printed; the test fails with that when the command does."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
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


def release_build(*targets: str) -> Path:
    """A release build of the core with the programs TARGETS."""
    with locked_build("release", sys.executable, os.environ.get("CC")) as build:
        if not (build / "build.ninja").exists():
            options = ["-Dtests=true", "-Dbenchmarks=true", "-Dextension=false"]
            run(*MESON, "setup", "-Dbuildtype=release", *options, build)
        for target in targets:
            run(*MESON, "compile", "-C", build, target)
    return build


@contextmanager
def strict_directory(compiler: str) -> Iterator[Path]:
    """A build of all there is in which a warning is an error, set up."""
    with locked_build("strict", sys.executable, compiler) as build:
        if not (build / "build.ninja").exists():
            options = ["-Dtests=true", "-Dbenchmarks=true", "-Dslow_asserts=true"]
            options += ["--werror", "-Ddebug=false", "-Doptimization=2"]
            run(*MESON, "setup", *options, build, CC=compiler)
        yield build


def strict_build(*targets: str, compiler: str = "gcc") -> Path:
    """TARGETS of it, or all."""
    with strict_directory(compiler) as build:
        run(*MESON, "compile", "-C", build, *targets)
    return build


if __name__ == "__main__":
    *options, compiler = sys.argv[1:]
    try:
        if options == ["--only-set-up"]:
            with strict_directory(compiler) as build:
                print(build)
        else:
            print(strict_build(compiler=compiler))
    except pytest.fail.Exception as error:
        sys.exit(str(error))
