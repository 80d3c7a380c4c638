"""Copies between host and GPU, from arrays of three kinds, and the first pinned GiB.

The claim is a ratio of one run: arrays made under ``pinned()`` against memory that the
driver itself page-locked (cuMemHostAlloc), with ordinary arrays beside them. Every
copy is an asynchronous one on the same stream, timed by the CPU until the stream is
done; the ways take turns. The first GiB is measured in a fresh process each time, with
CUDA initialised before, on all cores and on one.

    python benchmarks/copies.py [--json PATH] [--simulator]

The simulated driver is good for trying this script, not for its figures.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
from functools import partial
from typing import Any

from _bench import GIB, KIB, MIB, Report, fresh, interleaved, main, medians, size
from _bench import seconds as seconds_of

SIZES = [64 * KIB, 1 * MIB, 16 * MIB, 256 * MIB]
CLAIMED_SIZE = 256 * MIB
ROUNDS = 25
FIRST_ROUNDS = 5

PINNED, DRIVER, DEFAULT = "pinned", "cuMemHostAlloc", "default"
WAYS = (PINNED, DRIVER, DEFAULT)


class Machine:
    """The driver's own calls, with the primary context and a stream."""

    def __init__(self) -> None:
        from numpy_rmm.testing import Driver, simulate_cuda

        library = os.environ.get("NUMPY_RMM_CUDA_LIBRARY")
        self.driver = (
            simulate_cuda().driver if library == "simulator" else Driver(library)
        )
        self.driver.activate()
        self.stream = self.driver.create_stream()

    def host_allocate(self, nbytes: int) -> Any:
        """An array over memory of cuMemHostAlloc, which lives as long as the
        process."""
        import numpy as np

        pointer = ctypes.c_void_p()
        self.driver.check(self.driver.cuMemHostAlloc(ctypes.byref(pointer), nbytes, 0))
        buffer = (ctypes.c_ubyte * nbytes).from_address(pointer.value or 0)
        return np.frombuffer(buffer, np.uint8)

    def copy(self, call: str, target: int, source: int, nbytes: int) -> None:
        """One copy from its call until it is done."""
        driver = self.driver
        driver.check(getattr(driver, call)(target, source, nbytes, self.stream))
        driver.check(driver.cuStreamSynchronize(self.stream))


def arrays_of(machine: Machine, nbytes: int) -> dict[str, Any]:
    import numpy as np

    import numpy_rmm

    with numpy_rmm.pinned():
        arrays = {PINNED: np.ones(nbytes, np.uint8)}
    if numpy_rmm.memory_kind(arrays[PINNED]) != "pinned":
        raise SystemExit(
            f"no page-locked array of {size(nbytes)} could be had: "
            f"{numpy_rmm.array_info(arrays[PINNED]).reason}"
        )
    arrays[DRIVER] = machine.host_allocate(nbytes)
    arrays[DRIVER].fill(1)
    arrays[DEFAULT] = np.ones(nbytes, np.uint8)
    return arrays


def rates(machine: Machine, nbytes: int, to_device: bool) -> dict[str, float]:
    """GB/s of each way: the median of turns."""
    arrays = arrays_of(machine, nbytes)
    device = machine.driver.allocate(nbytes)
    copies = {}
    for way, array in arrays.items():
        host = array.__array_interface__["data"][0]
        copy = (
            partial(machine.copy, "cuMemcpyHtoDAsync", device, host, nbytes)
            if to_device
            else partial(machine.copy, "cuMemcpyDtoHAsync", host, device, nbytes)
        )
        copy()  # what is only done once is not to be measured
        copies[way] = partial(seconds_of, copy)
    times = medians(interleaved(copies, ROUNDS))
    machine.driver.check(machine.driver.cuMemFree(device))
    return {way: nbytes / times[way] / 1e9 for way in WAYS}


def copies(machine: Machine, to_device: bool) -> Report:
    columns = ["size", *(f"{way} GB/s" for way in WAYS), f"{PINNED} / {DRIVER}"]
    title = "Copies from host to GPU" if to_device else "Copies from GPU to host"
    report = Report(title, columns)
    for nbytes in SIZES:
        found = rates(machine, nbytes, to_device)
        ratio = found[PINNED] / found[DRIVER]
        report.rows.append([size(nbytes), *(found[way] for way in WAYS), ratio])
        if nbytes == CLAIMED_SIZE:
            speedup = found[PINNED] / found[DEFAULT]
            report.notes.append(
                f"{size(nbytes)}: {ratio:.1%} of the rate of {DRIVER} memory, "
                f"{speedup:.1f} times that of ordinary arrays"
            )
            report.details |= {"ratio": ratio, "speedup": speedup}
    return report


# ---- the first pinned GiB ------------------------------------------------------------


def worker(way: str, nbytes: int, n_cores: int) -> float:
    """Seconds to get a first array whose pages are there and locked."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n_cores])
    import numpy as np

    import numpy_rmm

    machine = Machine()
    if way == DRIVER:
        return seconds_of(lambda: machine.host_allocate(nbytes))
    made = []
    with numpy_rmm.pinned():
        seconds = seconds_of(lambda: made.append(np.empty(nbytes, np.uint8)))
    if numpy_rmm.memory_kind(made[0]) != "pinned":
        raise SystemExit(f"not page-locked: {numpy_rmm.array_info(made[0]).reason}")
    return seconds


def first_pinned() -> Report:
    cores = len(os.sched_getaffinity(0))
    columns = ["cores", "pinned ms", "cuMemHostAlloc ms", "times faster"]
    report = Report("The first page-locked GiB", columns)
    for n_cores in sorted({1, cores}):
        ways = {
            way: partial(fresh, __file__, way, GIB, n_cores) for way in (PINNED, DRIVER)
        }
        results = interleaved(ways, FIRST_ROUNDS)
        times = {way: statistics.median(results[way]) for way in ways}
        ours, theirs = times[PINNED], times[DRIVER]
        report.rows.append([n_cores, ours * 1e3, theirs * 1e3, theirs / ours])
        report.details[f"seconds on {n_cores}"] = results
    return report


def run() -> list[Report]:
    try:
        machine = Machine()
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"this benchmark needs a GPU: {error}") from None
    reports = [
        copies(machine, to_device=True),
        copies(machine, to_device=False),
        first_pinned(),
    ]
    if os.environ.get("NUMPY_RMM_CUDA_LIBRARY") == "simulator":
        for report in reports:
            report.notes.append("On the simulated driver: these are no figures.")
    return reports


if __name__ == "__main__":
    if "--simulator" in sys.argv:
        sys.argv.remove("--simulator")
        os.environ["NUMPY_RMM_CUDA_LIBRARY"] = "simulator"
    main(run, worker)
