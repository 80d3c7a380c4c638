"""Copies between host and GPU, from arrays of three kinds, and the first pinned GiB.

The claim is a ratio of one run: arrays made under ``pinned()`` against memory that the
driver itself page-locked (cuMemHostAlloc), with ordinary arrays beside them. Every
copy is an asynchronous one on the same stream, timed by the CPU until the stream is
done; the ways take turns. The first GiB is measured in a fresh process each time, with
CUDA initialised before, on all cores and on one.

Copies in many pieces are those of ``copyto``, which chooses among three ways: one call
for all (a box, or a batch), one call each, and a pass of NumPy over a buffer. Beside
what it chooses stand the ways that it can be made to take, and CuPy, where it is
installed: a temporary array there, and a kernel within the GPU.

    python benchmarks/copies.py [--json PATH] [--simulator]

The simulated driver is good for trying this script, not for its figures.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
from collections.abc import Callable, Iterator
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


# ---- many pieces ---------------------------------------------------------------------

COPYTO, AT_ONCE, ONE_BY_ONE, BUFFER = "copyto", "at once", "one by one", "buffer"
CUPY = "CuPy"
PIECE_WAYS = (COPYTO, AT_ONCE, ONE_BY_ONE, BUFFER, CUPY)
N_PIECES = 256
PIECE_SIZES = [64, 512, 4 * KIB, 32 * KIB]
PIECE_ROUNDS = 15
LEGACY = 1  # the stream that takes no batches


class DeviceView:
    """Memory of the GPU, laid out as a view of an array."""

    def __init__(self, machine: Machine, view: Any) -> None:
        base = view if view.base is None else view.base
        self.view = view
        self.address = machine.driver.allocate(base.nbytes)
        offset = view.ctypes.data - base.ctypes.data
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": view.shape,
            "typestr": view.dtype.str,
            "data": (self.address + offset, False),
            "strides": view.strides,
        }


def cupy_copy(dst: Any, src: Any) -> Callable[[], object] | None:
    """The same copy by CuPy, waited for; None: it is not there."""
    if os.environ.get("NUMPY_RMM_CUDA_LIBRARY") == "simulator":
        return None
    try:
        import cupy
    except ImportError:
        return None

    def copy() -> None:
        if isinstance(dst, DeviceView):
            target = cupy.asarray(dst)
            target[...] = cupy.asarray(src)
        else:
            dst[...] = cupy.asnumpy(cupy.asarray(src))
        cupy.cuda.get_current_stream().synchronize()

    return copy


def piece_times(machine: Machine, dst: Any, src: Any) -> dict[str, float]:
    """Seconds of each way that there is."""
    import numpy_rmm
    from numpy_rmm import _copy

    own, legacy = numpy_rmm.Stream(machine.stream), numpy_rmm.Stream(LEGACY)
    sides = _copy._read("dst", dst, src), _copy._read("src", src, dst)
    ways: dict[str, Callable[[], object]] = {
        COPYTO: lambda: numpy_rmm.copyto(dst, src, stream=own),
        AT_ONCE: lambda: _copy._submit(*sides, own).wait(),
        ONE_BY_ONE: lambda: _copy._submit(*sides, legacy).wait(),
    }
    if sides[0].array is not None or sides[1].array is not None:
        ways[BUFFER] = lambda: _copy._over_host(*sides, own).wait()
    if (peer := cupy_copy(dst, src)) is not None:
        ways[CUPY] = peer
    for way in ways.values():
        way()
    timed = {name: partial(seconds_of, way) for name, way in ways.items()}
    return medians(interleaved(timed, PIECE_ROUNDS))


def host_array(shape: tuple[int, ...], pinned: bool = True) -> Any:
    import numpy as np

    import numpy_rmm

    if pinned:
        return numpy_rmm.zeros_pinned(shape, np.uint8)
    with numpy_rmm.use_handler("host"):
        return np.ones(shape, np.uint8)


def piece_cases(machine: Machine) -> Iterator[tuple[str, Any, Any]]:
    """(name, destination, source) of each: rows in reverse, and boxes."""
    for nbytes in PIECE_SIZES:
        shape, pieces = (N_PIECES, nbytes), f"{N_PIECES} x {size(nbytes)}"
        device = DeviceView(machine, host_array(shape))
        for pinned in (True, False):
            kind = "page-locked" if pinned else "ordinary"
            reversed_rows = host_array(shape, pinned)[::-1]
            yield f"{pieces}, {kind} to GPU", device, reversed_rows
            yield f"{pieces}, GPU to {kind}", reversed_rows, device
        yield (
            f"{pieces}, within the GPU",
            device,
            DeviceView(machine, host_array(shape)[::-1]),
        )
    box = host_array((64, 80, 2 * KIB))[:, 8:72, : 1 * KIB]
    device = DeviceView(machine, host_array((64, 64, 1 * KIB)))
    yield "64 planes of 64 x 1 KiB to GPU", device, box
    yield "GPU to 64 planes of 64 x 1 KiB", box, device
    # No whole number of rows from plane to plane: there one call copies one plane.
    odd = host_array((64, 80 * 2 * KIB + 16))[:, : 80 * 2 * KIB]
    planes = odd.reshape(64, 80, 2 * KIB)[:, 8:72, : 1 * KIB]
    yield "the same, a call a plane, to GPU", device, planes
    yield "the same, a call a plane, to host", planes, device


def pieces(machine: Machine) -> Report:
    columns = ["pieces", *(f"{way} us" for way in PIECE_WAYS)]
    report = Report("Copies in many pieces", columns)
    for name, dst, src in piece_cases(machine):
        times = piece_times(machine, dst, src)
        found = [times.get(way) for way in PIECE_WAYS]
        report.rows.append([name, *(t if t is None else t * 1e6 for t in found)])
    report.notes.append(
        f"{ONE_BY_ONE}: on the legacy stream, which takes no batches; boxes are one "
        "call there, too"
    )
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
        pieces(machine),
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
