"""Is the memory of a page-locked array handed out again while a copy still uses it?

    python examples/hazard.py [--json FILE] [--svg FILE] [--sizes A,B] [--simulator]

A stream is held, an asynchronous copy from or to an array is queued behind it, the
last reference to the array goes, six arrays of its size are made and filled, and the
stream is let go. If one of the six got the memory of the dead array too early, bytes
are wrong: on the device when the copy read them, in the new array when it wrote them.

Each way to make page-locked arrays that is installed is tried with each library's
copies, three streams, three sizes and both directions. Status 1: some bytes of
``numpy_rmm``'s arrays were wrong. Needs a GPU; with --simulator only ``numpy_rmm``
and the driver's own copies are tried, on the simulated driver.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import numpy_rmm

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "32 MiB": 32 * MIB}
DIRECTIONS = ("host to device", "device to host")
N_FRESH = 6  # arrays that are made while the stream is held
OLD, DEVICE, FRESH = 7, 3, 9  # what the dead array, the device and new arrays hold

Make = Callable[[int], np.ndarray]


# ---- the driver ----------------------------------------------------------------------


class Driver:
    """The few calls of the CUDA driver that no library has to be asked for."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} failed with error {code} of the CUDA driver")

    def use_primary_context(self) -> None:
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def new_stream(self, flags: int) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), flags)
        return stream.value or 0

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")


class Hold:
    """A word of memory that a stream waits for."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        host, self._device = ctypes.c_void_p(), ctypes.c_uint64()
        mapped = 3  # portable and mapped
        driver.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(64), mapped)
        driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(self._device), host, 0)
        self._word = ctypes.cast(host, ctypes.POINTER(ctypes.c_uint32))

    @contextmanager
    def held(self, stream: int) -> Iterator[None]:
        self._word[0] = 0
        self._driver.call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream),
                          self._device, ctypes.c_uint32(1), 0)  # fmt: skip
        try:
            yield
        finally:
            self._word[0] = 1
            self._driver.synchronize()


# ---- who copies ----------------------------------------------------------------------


class Copier(Protocol):
    """A library's asynchronous copies, between an array and memory of its own."""

    name: str
    streams: dict[str, Any]  # the three that are tried

    def handle(self, stream: Any) -> int: ...

    def device_bytes(self, nbytes: int) -> Any:
        """Memory of the device, every byte of it ``DEVICE``."""

    def to_device(self, device: Any, array: np.ndarray, stream: Any) -> None: ...

    def to_host(self, device: Any, array: np.ndarray, stream: Any) -> None: ...

    def read(self, device: Any) -> np.ndarray:
        """A copy of the device's bytes; waits."""


class DriverCopies:
    def __init__(self, driver: Driver) -> None:
        self.name = "CUDA driver"
        self._driver = driver
        self.streams = {"legacy": 0, "blocking": driver.new_stream(0)}
        self.streams["non-blocking"] = driver.new_stream(1)

    def handle(self, stream: int) -> int:
        return stream

    def device_bytes(self, nbytes: int) -> tuple[ctypes.c_uint64, int]:
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(nbytes)
        self._driver.call("cuMemAlloc_v2", ctypes.byref(address), size)
        self._driver.call("cuMemsetD8_v2", address, ctypes.c_ubyte(DEVICE), size)
        return address, nbytes

    def to_device(self, device: Any, array: np.ndarray, stream: int) -> None:
        self._copy("cuMemcpyHtoDAsync_v2", device[0], array.ctypes.data, device, stream)

    def to_host(self, device: Any, array: np.ndarray, stream: int) -> None:
        self._copy("cuMemcpyDtoHAsync_v2", array.ctypes.data, device[0], device, stream)

    def _copy(self, name: str, to: Any, source: Any, device: Any, stream: int) -> None:
        ends = [ctypes.c_void_p(x) if isinstance(x, int) else x for x in (to, source)]
        nbytes = ctypes.c_size_t(device[1])
        self._driver.call(name, *ends, nbytes, ctypes.c_void_p(stream))

    def read(self, device: Any) -> np.ndarray:
        found = np.empty(device[1], np.uint8)
        self._driver.call("cuMemcpyDtoH_v2", ctypes.c_void_p(found.ctypes.data),
                          device[0], ctypes.c_size_t(device[1]))  # fmt: skip
        self._driver.call("cuMemFree_v2", device[0])
        return found


class TorchCopies:
    def __init__(self, torch: Any) -> None:
        self.name = f"PyTorch {torch.__version__.split('+')[0]}"
        self._torch = torch
        torch.zeros(1, device="cuda")
        self.streams = {"default": torch.cuda.default_stream()}
        self.streams |= {f"side {i}": torch.cuda.Stream() for i in (1, 2)}

    def handle(self, stream: Any) -> int:
        handle: int = stream.cuda_stream
        return handle

    def device_bytes(self, nbytes: int) -> Any:
        return self._torch.full((nbytes,), DEVICE, dtype=self._torch.uint8,
                                device="cuda")  # fmt: skip

    def to_device(self, device: Any, array: np.ndarray, stream: Any) -> None:
        with self._torch.cuda.stream(stream):
            device.copy_(self._torch.from_numpy(array), non_blocking=True)

    def to_host(self, device: Any, array: np.ndarray, stream: Any) -> None:
        with self._torch.cuda.stream(stream):
            self._torch.from_numpy(array).copy_(device, non_blocking=True)

    def read(self, device: Any) -> np.ndarray:
        found: np.ndarray = device.cpu().numpy()
        return found


class CupyCopies:
    def __init__(self, cupy: Any) -> None:
        self.name = f"CuPy {cupy.__version__}"
        self._cupy = cupy
        cupy.zeros(1)
        self.streams = {
            "default": cupy.cuda.Stream.null,
            "blocking": cupy.cuda.Stream(),
        }
        self.streams["non-blocking"] = cupy.cuda.Stream(non_blocking=True)

    def handle(self, stream: Any) -> int:
        handle: int = stream.ptr
        return handle

    def device_bytes(self, nbytes: int) -> Any:
        return self._cupy.full(nbytes, DEVICE, self._cupy.uint8)

    def to_device(self, device: Any, array: np.ndarray, stream: Any) -> None:
        device.set(array, stream=stream)

    def to_host(self, device: Any, array: np.ndarray, stream: Any) -> None:
        device.get(stream=stream, out=array, blocking=False)

    def read(self, device: Any) -> np.ndarray:
        found: np.ndarray = device.get()
        return found


# ---- whose arrays --------------------------------------------------------------------


def our_arrays(nbytes: int) -> np.ndarray:
    with numpy_rmm.pinned():
        return np.empty(nbytes, np.uint8)


def find(name: str) -> Any:
    """A library that is installed and sees a GPU, or None."""
    try:
        module = importlib.import_module(name)
        works = module.cuda.is_available()
    except Exception as error:  # noqa: BLE001, whatever a library raises on import
        print(f"{name} is left out: {error}", file=sys.stderr)
        return None
    return module if works else None


def makers_and_copiers(driver: Driver) -> tuple[dict[str, Make], list[Copier]]:
    makers: dict[str, Make] = {}
    copiers: list[Copier] = []
    torch, cupy = find("torch"), find("cupy")
    if torch is not None:
        copiers.append(TorchCopies(torch))
        makers[f"{copiers[-1].name}, pin_memory=True"] = lambda n: torch.empty(
            n, dtype=torch.uint8, pin_memory=True
        ).numpy()
    if cupy is not None:
        copiers.append(CupyCopies(cupy))
        cupyx = importlib.import_module("cupyx")
        makers[f"{copiers[-1].name}, empty_pinned"] = lambda n: cupyx.empty_pinned(
            n, np.uint8
        )
    copiers.append(DriverCopies(driver))
    makers[f"numpy_rmm {numpy_rmm.__version__}, pinned()"] = our_arrays
    return makers, copiers


# ---- the program ---------------------------------------------------------------------


@dataclass
class Outcome:
    arrays: str
    copies: str
    stream: str
    size: str
    direction: str
    wrong_nbytes: int


def wrong_nbytes(make: Make, copier: Copier, stream: Any, nbytes: int, to_device: bool,
                 driver: Driver, hold: Hold) -> int:  # fmt: skip
    make(nbytes)  # what dies here is in the pool, as in a program that has run a while
    array = make(nbytes)
    array[:] = OLD
    device = copier.device_bytes(nbytes)
    driver.synchronize()
    with hold.held(copier.handle(stream)):
        copy = copier.to_device if to_device else copier.to_host
        copy(device, array, stream)
        del array
        gc.collect()
        fresh = [make(nbytes) for _ in range(N_FRESH)]
        for new in fresh:
            new[:] = FRESH
    wrong = sum(int(np.count_nonzero(new != FRESH)) for new in fresh)
    arrived = copier.read(device)
    return wrong + (int(np.count_nonzero(arrived != OLD)) if to_device else 0)


def run(
    makers: dict[str, Make],
    copiers: list[Copier],
    sizes: list[str],
    driver: Driver,
) -> Iterator[Outcome]:
    hold = Hold(driver)
    for arrays, make in makers.items():
        for copier in copiers:
            for name, stream in copier.streams.items():
                for size in sizes:
                    for direction in DIRECTIONS:
                        wrong = wrong_nbytes(make, copier, stream, SIZES[size],
                                             direction == DIRECTIONS[0], driver,
                                             hold)  # fmt: skip
                        yield Outcome(arrays, copier.name, name, size, direction, wrong)


# ---- what is shown -------------------------------------------------------------------


def table(outcomes: list[Outcome]) -> str:
    """Combinations with wrong bytes of those that were tried."""
    makers = list(dict.fromkeys(outcome.arrays for outcome in outcomes))
    copiers = list(dict.fromkeys(outcome.copies for outcome in outcomes))
    rows = [["page-locked arrays of", *(f"copied by {name}" for name in copiers)]]
    for maker in makers:
        row = [maker]
        for copier in copiers:
            of = [x for x in outcomes if (x.arrays, x.copies) == (maker, copier)]
            row.append(f"{sum(x.wrong_nbytes != 0 for x in of)} of {len(of)} wrong")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


CELL, GAP, LEFT, TOP = 15, 14, 236, 32
RIGHT_COLOUR, WRONG_COLOUR = "#8fcfb8", "#b5302a"


def picture(outcomes: list[Outcome], title: str) -> str:
    """A square for each combination, a row for each kind of array."""
    makers = list(dict.fromkeys(outcome.arrays for outcome in outcomes))
    parts, x = [], LEFT
    for copier in dict.fromkeys(outcome.copies for outcome in outcomes):
        parts.append(f'<text x="{x}" y="{TOP - 8}">copied by {copier}</text>')
        n = 0
        for y, maker in enumerate(makers):
            of = [x for x in outcomes if (x.arrays, x.copies) == (maker, copier)]
            n = len(of)
            for i, outcome in enumerate(of):
                colour = WRONG_COLOUR if outcome.wrong_nbytes else RIGHT_COLOUR
                what = f"{outcome.stream} stream, {outcome.size}, {outcome.direction}: "
                what += f"{outcome.wrong_nbytes:,} bytes wrong"
                parts.append(
                    f'<rect x="{x + i * CELL}" y="{TOP + y * (CELL + 9)}" '
                    f'width="{CELL - 2}" height="{CELL}" rx="2" fill="{colour}">'
                    f"<title>{what}</title></rect>"
                )
        x += n * CELL + GAP
    for y, maker in enumerate(makers):
        parts.append(f'<text x="0" y="{TOP + y * (CELL + 9) + 12}">{maker}</text>')
    height = TOP + len(makers) * (CELL + 9) + 48
    parts.append(f'<text x="0" y="{height - 26}" fill="#777">{title}</text>')
    parts.append(
        f'<text x="0" y="{height - 8}" fill="#777">light: every byte right; dark: '
        "bytes were wrong. A square is a stream, a size and a direction.</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 {x + 12} {height}" '
        f'width="{x + 12}" height="{height}" font-family="sans-serif" font-size="12">'
        '<rect x="-12" width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def driver_version(cuda: dict[str, Any]) -> str:
    """The release of the kernel module, else the CUDA version that it offers."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = None if cuda["simulated"] else re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else f"of CUDA {cuda['driver_version']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write every combination")
    parser.add_argument("--svg", type=Path, help="draw a square for each of them")
    parser.add_argument("--sizes", help="only these of: " + ", ".join(SIZES))
    parser.add_argument("--simulator", action="store_true", help="no GPU is needed")
    options = parser.parse_args()
    sizes = options.sizes.split(",") if options.sizes else list(SIZES)
    if not set(sizes) <= set(SIZES):
        parser.error(f"--sizes: {options.sizes!r}; known: {', '.join(SIZES)}")
    if options.simulator:
        numpy_rmm.options["cuda_library"] = "simulator"
    try:
        our_arrays(MIB)
    except numpy_rmm.CudaUnavailableError as error:
        print(f"A GPU is needed, or --simulator: {error}", file=sys.stderr)
        return 2
    cuda = numpy_rmm.info()["cuda"]
    driver = Driver(cuda["library"])
    driver.use_primary_context()
    if options.simulator:
        copiers: list[Copier] = [DriverCopies(driver)]
        makers: dict[str, Make] = {"numpy_rmm": our_arrays}
    else:
        makers, copiers = makers_and_copiers(driver)
    outcomes = list(run(makers, copiers, sizes, driver))
    date = datetime.date.today().isoformat()
    title = f"{cuda['device 0']['name']}, driver {driver_version(cuda)}, {date}"
    print(f"{title}\n\n{table(outcomes)}")
    if options.json is not None:
        record = {"machine": title, "outcomes": [asdict(x) for x in outcomes]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.svg is not None:
        options.svg.write_text(picture(outcomes, title))
    ours = [x for x in outcomes if x.arrays.startswith("numpy_rmm")]
    return int(any(x.wrong_nbytes for x in ours))


if __name__ == "__main__":
    raise SystemExit(main())
