"""Memory of devices on machines of another kind: two devices, old drivers."""

from __future__ import annotations

import os

import pytest

import numpy_rmm
from numpy_rmm import DeviceBuffer, Stream
from numpy_rmm.testing import simulate_cuda

ON_GPU = os.environ.get("NUMPY_RMM_TEST_GPU") == "1"
pytestmark = pytest.mark.skipif(ON_GPU, reason="needs the simulated driver")


def test_two_devices() -> None:
    with simulate_cuda(devices=2) as machine:
        machine.driver.activate(1)
        first = DeviceBuffer.to_device(b"abc")
        stream = Stream()
        on_stream = DeviceBuffer.to_device(b"abc", stream)
        assert first.mr.device == on_stream.mr.device == 1
        assert first.__dlpack_device__() == (2, 1)
        machine.driver.activate(0)
        assert DeviceBuffer(size=1).mr.device == 0
        for buffer in (first, on_stream):
            buffer.copy_from_host(b"xyz")
            buffer.resize(1000)
            other = buffer.copy()
            assert other.mr is buffer.mr
            assert other.tobytes()[:3] == b"xyz"
            other.reserve(5000, buffer.stream)
        del first, on_stream, buffer, other
        assert machine.faults() == []


def test_a_driver_that_cannot_prefetch() -> None:
    with simulate_cuda(driver=12000) as machine:
        machine.driver.activate()
        DeviceBuffer(size=10, mr=numpy_rmm.registry["managed"]).prefetch()
