"""A forked child has the handles of device memory, but no memory: it is told so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CODE = """
import os, sys
import numpy_rmm
from numpy_rmm import DeviceBuffer, Stream, mr
from numpy_rmm.testing import simulate_cuda

def told(call):
    try:
        call()
    except numpy_rmm.CudaUnavailableError as error:
        return "fork" in str(error) and "spawn" in str(error)

with simulate_cuda() as machine:
    machine.driver.activate()
    source = mr.CudaMemoryResource()
    resources = [
        source,
        mr.CudaAsyncMemoryResource(),
        mr.PoolMemoryResource(source),
        mr.PoolMemoryResource(source, segments="alloc"),
        mr.FixedSizeMemoryResource(source, "64 KiB", 4),
        mr.BinningMemoryResource(source, 8, 12),
        mr.ArenaMemoryResource(source, "8 MiB"),
        mr.StatisticsResourceAdaptor(mr.PoolMemoryResource(source)),
    ]
    stream = Stream()
    kept = [DeviceBuffer(size=1000, mr=resource) for resource in resources]
    for resource in resources:  # so that the thread keeps a block
        DeviceBuffer(size=1000, mr=resource)
        DeviceBuffer(size=1000, mr=resource, stream=stream)
    if os.fork() == 0:
        for resource, buffer in zip(resources, kept):
            calls = [
                lambda: DeviceBuffer(size=1000, mr=resource),
                lambda: DeviceBuffer(size=1000, mr=resource, stream=stream),
                lambda: resource.allocate(50_000),
                buffer.copy,
                buffer.tobytes,
                lambda: buffer.resize(60_000),
            ]
            print(all(told(call) for call in calls), buffer.size)
        del kept, buffer
        sys.exit(0)
    os.wait()
    again = [DeviceBuffer(size=1000, mr=resource).tobytes() for resource in resources]
    print(len(again))
"""


def test_nothing_is_handed_out_in_a_child(run_python: Callable[..., Any]) -> None:
    done = run_python(CODE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["True 1000"] * 8 + ["8"]
