"""info() and the small helpers."""

from __future__ import annotations

import os

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import testing
from numpy_rmm.testing import Driver


def test_the_parts_of_info() -> None:
    info = numpy_rmm.info()
    assert set(info) == {
        "numpy_rmm",
        "handler",
        "process_scope",
        "registry",
        "cuda",
        "system",
        "options",
        "errors",
    }
    assert info["numpy_rmm"]["version"] == numpy_rmm.__version__
    assert info["numpy_rmm"]["numpy"] == np.__version__
    assert set(info["registry"]) == set(numpy_rmm.registry)
    assert set(info["options"]) == set(numpy_rmm.options)
    system = info["system"]
    assert 1 <= system["cores"] <= (os.cpu_count() or 1)
    assert system["memory_nbytes"] > 1 << 28


def test_info_prints_as_a_page() -> None:
    with numpy_rmm.host():
        array = np.ones(1_000_000)
        page = repr(numpy_rmm.info())
    del array
    assert "name: numpy_rmm:host#" in page
    assert "pinned_threshold: 64 KiB" in page
    assert "memlock_limit:" in page
    assert max(map(len, page.splitlines())) < 200


def test_info_says_why_cuda_is_off(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        "import numpy_rmm; print(numpy_rmm.info())",
        NUMPY_RMM_CUDA_LIBRARY="/nowhere/libcuda.so.1",
    )
    assert done.returncode == 0, done.stderr
    assert "available: no" in done.stdout
    assert "reason: " in done.stdout
    assert "/nowhere/libcuda.so.1" in done.stdout
    assert "pinned: cannot work here" in done.stdout


def test_info_shows_the_device_once_cuda_is_in_use(cuda: Driver) -> None:
    assert numpy_rmm.info()["cuda"]["available"]
    with numpy_rmm.pinned():
        array = np.ones(100_000)
    info = numpy_rmm.info()["cuda"]
    del array
    assert info["initialized"]
    device = info["device 0"]
    assert device["name"]
    assert device["total_nbytes"] > 0
    assert device["attributes"]["UNIFIED_ADDRESSING"] == 1
    assert "compute_capability_major" in repr(numpy_rmm.info())


@pytest.mark.parametrize("supported", [0, 1])
def test_info_says_whether_device_memory_can_be_mapped(supported: int) -> None:
    with testing.simulate_cuda() as cuda:
        cuda.set_attribute("virtual_memory_management_supported", supported)
        numpy_rmm._core._cuda_initialize()
        told = numpy_rmm.info()["cuda"]["device 0"]["virtual_memory"]
    assert told == (
        "available"
        if supported
        else "the device does not support virtual memory management"
    )


def test_the_headers_are_there() -> None:
    names = os.listdir(os.path.join(numpy_rmm.get_include(), "nrm"))
    assert {"import.h", "resource.h", "status.h"} <= set(names)
