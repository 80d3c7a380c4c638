"""The rules of the CUDA driver, on the simulated driver and on a real one.

Each program of tests/gpu/rules states rules with their expected answers. What the
simulator may claim is what a GPU answers, so both run the same programs and must print
the same.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from builds import MESON, ROOT, locked_build, run
from numpy_rmm import _driver, _simulator

RULES = ROOT / "tests" / "gpu" / "rules"
GROUPS = sorted(path.stem for path in RULES.glob("*.c"))
ABI = "".join(
    (ROOT / "src" / "cuda" / name).read_text() for name in ("abi_types.h", "abi.h")
)


@pytest.fixture(scope="module")
def programs() -> Path:
    """The directory of the built rule programs."""
    with locked_build("rules", sys.prefix, os.environ.get("CC")) as build:
        if not (build / "build.ninja").exists():
            run(*MESON, "setup", build, RULES)
        run(*MESON, "compile", "-C", build)
    return build


PROBE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
raise SystemExit(driver.cuInit(0))
"""


@pytest.fixture(scope="module")
def gpu() -> None:
    """Asks in a child: a process that has called cuInit can no longer fork tests."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("there is no GPU, or no driver for it")


def answers_of(program: Path, driver: str, devices: int = 1) -> str:
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NUMPY_RMM_", "CUDA_VISIBLE"))
    }
    environ["NUMPY_RMM_SIMULATED_DEVICES"] = str(devices)
    done = subprocess.run(
        [program, driver],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=200,
        check=False,
    )
    print(done.stdout)
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if line.startswith(("not ok", "Bail out!"))]
    assert not wrong, "\n".join(wrong)
    assert done.returncode == 0, f"{program.name} ended with status {done.returncode}"
    results = [line for line in lines if line.startswith("ok ")]
    assert f"1..{len(results)}" in lines, f"{program.name} printed no plan"
    assert results, f"{program.name} was skipped: {done.stdout}"
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", GROUPS)
def test_the_simulator_keeps_the_rules(group: str, programs: Path) -> None:
    devices = 2 if group == "peers" else 1
    out = answers_of(programs / group, str(_simulator.find_library()), devices)
    assert "# SKIP" not in out


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("group", GROUPS)
def test_a_gpu_keeps_the_rules(group: str, programs: Path) -> None:
    real = answers_of(programs / group, "libcuda.so.1")
    devices = 2 if group == "peers" and "# SKIP" not in real else 1
    assert real == answers_of(programs / group, str(_simulator.find_library()), devices)


def test_every_program_is_built() -> None:
    listed = re.search(
        r"rule_groups = \[(.*?)\]", (RULES / "meson.build").read_text(), re.DOTALL
    )
    assert listed is not None
    assert re.findall(r"'(\w+)'", listed[1]) == GROUPS


# ---- the tables of numpy_rmm.testing are those of abi.h ------------------------------


def entry_points() -> dict[str, tuple[str, int, str]]:
    text = ABI.replace("\\\n", " ")
    rows = re.findall(
        r"X\((cu\w+),\s*(cu\w+),\s*(\d+),\s*[01],\s*nrm_CUresult,\s*\((.*?)\)\)", text
    )
    return {name: (symbol, int(n), args) for name, symbol, n, args in rows}


# The letters of `_driver.TYPES`; of all other types it is that of a pointer.
LETTERS = {
    "unsigned int": "u",
    "int": "i",
    "uint32_t": "u",
    "uint64_t": "Q",
    "size_t": "z",
    "unsigned char": "b",
    "nrm_CUdevice": "i",
    "nrm_CUdeviceptr": "Q",
    "nrm_CUresult": "i",
    "nrm_CUdevice_attribute": "i",
    "nrm_CUpointer_attribute": "i",
    "nrm_CUstreamCaptureMode": "u",
    "nrm_CUmemAllocationType": "u",
    "nrm_CUmemPool_attribute": "u",
    "nrm_CUmem_advise": "u",
    "nrm_CUmem_range_attribute": "u",
    "unsigned long long": "Q",
    "nrm_CUmemGenericAllocationHandle": "Q",
    "nrm_CUmemLocation": "Q",  # 8 bytes by value, in one register
    "nrm_CUmemGenericAllocationHandle*": "D",
    "nrm_CUmemAllocationGranularity_flags": "u",
    "const char*": "s",
    "char*": "s",
    "const char**": "S",
    "int*": "I",
    "nrm_CUdevice*": "I",
    "unsigned int*": "U",
    "nrm_CUstreamCaptureMode*": "U",
    "nrm_CUstreamCaptureStatus*": "U",
    "nrm_CUdriverProcAddressQueryResult*": "U",
    "size_t*": "Z",
    "nrm_CUdeviceptr*": "D",
    "unsigned long long*": "D",
    "void**": "P",
    "nrm_CUcontext*": "P",
    "nrm_CUstream*": "P",
    "nrm_CUevent*": "P",
    "nrm_CUmemoryPool*": "P",
    "nrm_CUgraph*": "P",
    "nrm_CUgraphExec*": "P",
    "nrm_CUuserObject*": "P",
    "uint64_t*": "D",
}


def letter(argument: str) -> str:
    """That of one declared argument."""
    declared = " ".join(argument.split()[:-1]) + "*" * argument.split()[-1].count("*")
    return LETTERS.get(declared, "p")


def test_the_calls_of_the_python_face_are_the_declared_ones() -> None:
    declared = {
        name: (
            symbol,
            version,
            "" if args == "void" else "".join(letter(x) for x in args.split(",")),
        )
        for name, (symbol, version, args) in entry_points().items()
    }
    assert declared == _driver.CALLS


def test_the_attributes_of_the_python_face_are_the_declared_ones() -> None:
    block = ABI[ABI.index("#define NRM_CU_DEVICE_ATTRIBUTES") :].split("\n\n")[0]
    declared = {
        name.lower(): int(value)
        for name, value in re.findall(r"X\((\w+), (\d+)\)", block)
    }
    assert declared == _simulator.ATTRIBUTES
