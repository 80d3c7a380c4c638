"""The C parts of the benchmarks: what is compiled when it is needed, and how."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = Path(__file__).resolve().parent / "core"
MESON = [sys.executable, "-m", "mesonbuild.mesonmain"]


class CannotCompile(Exception):
    """With what is missing."""


def compiler() -> str:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise CannotCompile("there is no C compiler here: apt install gcc, or set CC")


def extension(name: str, folder: Path) -> Path:
    """The extension module of ``core/<name>.c``, compiled into ``folder``."""
    import numpy as np

    python = sysconfig.get_path("include")
    if not (Path(python) / "Python.h").exists():
        raise CannotCompile("Python.h is not here: apt install python3-dev")
    target = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [compiler(), "-O2", "-shared", "-fPIC", "-pthread"]
    command += [f"-I{np.get_include()}", f"-I{python}"]
    command += ["-o", str(target), str(CORE / f"{name}.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotCompile(f"{name}.c does not compile:\n{done.stderr}")
    return target


def load(path: str | Path):  # type: ignore[no-untyped-def]
    """A compiled extension as a module."""
    name = Path(path).name.split(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CannotCompile(f"{name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(build: Path | None) -> Path:
    """``nrm_bench``, built in release mode in ``build`` (or build/benchmarks)."""
    if importlib.util.find_spec("mesonbuild") is None:
        raise CannotCompile("meson is not here: pip install meson ninja")
    build = build or ROOT / "build" / "benchmarks"
    build.mkdir(parents=True, exist_ok=True)
    with (build.parent / f"{build.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (build / "build.ninja").exists():
            options = ["--buildtype=release", "-Dbenchmarks=true"]
            _run([*MESON, "setup", *options, str(build)])
        _run([*MESON, "compile", "-C", str(build), "benchmarks"])
    return build / "benchmarks" / "core" / "nrm_bench"


def _run(command: list[str]) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CannotCompile(f"{' '.join(command)}\n{done.stdout}")
