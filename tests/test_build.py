"""The build stops with one clear sentence where it cannot go on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

OLD_NUMPY = """\
from pathlib import Path
def get_include():
    return str(Path(__file__).parent / "include")
"""
NO_NUMPY = "raise ImportError"


def run_setup(
    tmp_path: Path, *arguments: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mesonbuild.mesonmain", "setup", *arguments]
    return subprocess.run(
        [*command, tmp_path / "build", ROOT],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def setup(tmp_path: Path, *arguments: str, **environ: str) -> str:
    """The error that meson ends with."""
    done = run_setup(tmp_path, *arguments, **environ)
    assert done.returncode == 1, done.stdout
    found = re.search(r"ERROR: Problem encountered: (.*)", done.stdout)
    assert found is not None, done.stdout
    return found[1]


def native_file(tmp_path: Path, python: Path) -> str:
    path = tmp_path / "native.ini"
    path.write_text(f"[binaries]\npython = '{python}'\n")
    return f"--native-file={path}"


def python_with_numpy(tmp_path: Path, numpy: str) -> str:
    """This interpreter, but with a NumPy of the test's own."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "numpy.py").write_text(numpy)
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="{modules}" exec "{sys.executable}" "$@"\n'
    )
    script.chmod(0o755)
    return native_file(tmp_path, script)


def python_without_headers(tmp_path: Path) -> str:
    """This interpreter under another prefix: its library, but no headers anywhere."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    copy = tmp_path / "prefix" / "lib" / stdlib.name
    copy.mkdir(parents=True)
    for path in stdlib.iterdir():
        if path.name.startswith("_sysconfigdata"):
            text = path.read_text().replace(sysconfig.get_path("include"), "/nowhere")
            (copy / path.name).write_text(text)
        elif path.name != "__pycache__":
            (copy / path.name).symlink_to(path)
    python = tmp_path / "prefix" / "bin" / "python3"
    python.parent.mkdir()
    shutil.copy(os.path.realpath(sys.executable), python)
    return native_file(tmp_path, python)


def test_python_headers_that_are_missing(tmp_path: Path) -> None:
    error = setup(tmp_path, python_without_headers(tmp_path), PKG_CONFIG="false")
    assert error.startswith("Python.h of Python 3.")
    assert error.endswith("(python3-dev or python3-devel).")


def test_numpy_that_is_missing(tmp_path: Path) -> None:
    error = setup(tmp_path, python_with_numpy(tmp_path, NO_NUMPY))
    assert error.startswith("NumPy 2.0 or newer is needed to build")


def test_numpy_headers_that_are_too_old(tmp_path: Path) -> None:
    option = python_with_numpy(tmp_path, OLD_NUMPY)
    header = tmp_path / "modules" / "include" / "numpy" / "_numpyconfig.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define NPY_ABI_VERSION 0x01000009\n")
    error = setup(tmp_path, option)
    assert "older than 2.0" in error
    assert str(header.parents[1]) in error


@pytest.mark.parametrize("missing", ["NumPy", "headers"])
def test_the_core_alone_needs_neither(missing: str, tmp_path: Path) -> None:
    option = (
        python_with_numpy(tmp_path, NO_NUMPY)
        if missing == "NumPy"
        else python_without_headers(tmp_path)
    )
    options = ["-Dextension=false", "-Dtests=true", "-Dbenchmarks=true"]
    done = run_setup(tmp_path, option, *options, PKG_CONFIG="false")
    assert done.returncode == 0, done.stdout
    ninja = (tmp_path / "build" / "build.ninja").read_text()
    assert "nrm_bench" in ninja
    assert "src/python" not in ninja


@pytest.mark.parametrize(
    ("system", "cpu"), [("darwin", "aarch64"), ("linux", "riscv64")]
)
def test_another_platform(system: str, cpu: str, tmp_path: Path) -> None:
    cross = tmp_path / "cross.ini"
    cross.write_text(
        f"[binaries]\nc = 'cc'\n[host_machine]\nsystem = '{system}'\n"
        f"cpu_family = '{cpu}'\ncpu = '{cpu}'\nendian = 'little'\n"
    )
    error = setup(tmp_path, f"--cross-file={cross}")
    assert error == (
        f"numpy_rmm runs on Linux on x86-64 and aarch64; this is {system} on {cpu}."
    )
