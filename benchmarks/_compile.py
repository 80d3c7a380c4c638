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

COMPILERS = {
    "C": ("CC", "cc", "gcc", "clang"),
    "C++": ("CXX", "c++", "g++", "clang++"),
}
RMM_LIBRARY = "NUMPY_RMM_BENCH_RMM"  # a library made of rmm_peer.cpp elsewhere


class CannotCompile(Exception):
    """With what is missing."""


def compiler(language: str = "C") -> str:
    variable, *names = COMPILERS[language]
    for name in (os.environ.get(variable, ""), *names):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise CannotCompile(
        f"there is no {language} compiler here: apt install {names[1]}, "
        f"or set {variable}"
    )


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


def program(build: Path | None, buildtype: str = "release") -> Path:
    """``nrm_bench``, built in ``build`` (or build/benchmarks); in release mode, but for
    tests of the benchmarks."""
    if importlib.util.find_spec("mesonbuild") is None:
        raise CannotCompile("meson is not here: pip install meson ninja")
    build = build or ROOT / "build" / "benchmarks"
    build.mkdir(parents=True, exist_ok=True)
    with (build.parent / f"{build.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (build / "build.ninja").exists():
            options = ["-Dbenchmarks=true", "-Dextension=false"]
            _run([*MESON, "setup", f"--buildtype={buildtype}", *options, str(build)])
        _run([*MESON, "compile", "-C", str(build), "benchmarks"])
    return build / "benchmarks" / "core" / "nrm_bench"


# ---- RMM's resources in C++ ----------------------------------------------------------


def rmm_library(folder: Path | None = None) -> Path:
    """The library of rmm_peer.cpp: the one that the environment names, or one that is
    compiled in ``folder`` (build/benchmarks) against the wheel librmm and CUDA's
    headers."""
    made_elsewhere = os.environ.get(RMM_LIBRARY)
    if made_elsewhere:
        if not Path(made_elsewhere).is_file():
            raise CannotCompile(f"{RMM_LIBRARY} names no file")
        return Path(made_elsewhere).resolve()
    source = CORE / "rmm_peer.cpp"
    folder = folder or ROOT / "build" / "benchmarks"
    target = folder / "librmm_peer.so"
    if target.exists() and target.stat().st_mtime > source.stat().st_mtime:
        return target
    rmm, logger = _package("librmm"), _package("rapids_logger")
    cuda_include, cuda_runtime = _cuda()
    includes = [rmm / "include", rmm / "include" / "rapids", logger / "include"]
    libraries = [
        rmm / "lib64" / "librmm.so",
        logger / "lib64" / "librapids_logger.so",
        cuda_runtime,
    ]
    command = [compiler("C++"), "-std=c++20", "-O2", "-shared", "-fPIC", "-pthread"]
    command += ["-fvisibility=hidden"]
    command += [f"-I{path}" for path in (*includes, cuda_include)]
    command += ["-o", str(target), str(source), *map(str, libraries), "-ldl", "-lrt"]
    found_at = dict.fromkeys(["$ORIGIN", *(str(path.parent) for path in libraries)])
    command += [f"-Wl,-rpath,{path}" for path in found_at]
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise CannotCompile(f"rmm_peer.cpp does not compile: {lines[:1]}")
    return target


def _package(name: str) -> Path:
    """Where a wheel that is no more than headers and a library has them."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise CannotCompile(f"{name} is not here: pip install librmm-cu13")
    return Path(next(iter(spec.submodule_search_locations)))


def _cuda() -> tuple[Path, Path]:
    """The headers of CUDA's runtime, and its library: of a toolkit or of a wheel."""
    roots = [
        Path(os.environ[name])
        for name in ("CUDA_HOME", "CUDA_PATH")
        if name in os.environ
    ]
    roots += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))]
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        roots += sorted(Path(place).glob("cu*"))
    for root in roots:
        if not (root / "include" / "cuda_runtime_api.h").exists():
            continue
        for name in ("libcudart_static.a", "libcudart.so", "libcudart.so.1?"):
            for folder in ("lib64", "lib"):
                found = sorted((root / folder).glob(name))
                if found:
                    return root / "include", found[-1]
    raise CannotCompile(
        "the headers of CUDA's runtime are not here: a CUDA toolkit, or pip install "
        "nvidia-cuda-runtime nvidia-cuda-crt"
    )


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
