"""``numpy-rmm demo``: the same image pipeline under two memories, and a verdict.

A batch of images is laid out channels first, made float, centred and stretched: the
arithmetic on temporaries that data loading consists of. Where there is a GPU, the
results are copied to it.
Sizes and repeats are fixed before anything is measured, and the two ways take turns.
The share of the time spent in the kernel, which is where pages come from, stands beside
it: that share is what another memory can gain.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import numpy_rmm
from numpy_rmm._cli import UsageError
from numpy_rmm._core import _copy_to_device_seconds

Images = npt.NDArray[Any]
Batch = npt.NDArray[np.float32]

ROUNDS = 25
COPIES = 5
OWN_SHAPE = (12, 480, 640, 3)  # 42 MiB as float32
MAX_VALUES = 16 << 20  # of a given array; more are left out, and said to be
WORTH_NAMING = 1.05
MEAN, DEVIATION = np.float32(0.45), np.float32(0.225)  # of photographs, about
CONTRAST, BRIGHTNESS = np.float32(1.1), np.float32(-0.05)


@dataclass
class Way:
    """One of the two memories: what it is, and what was measured with it."""

    label: str
    handler: numpy_rmm.Handler | None  # None: NumPy's default
    name: str = ""
    kind: str = ""
    seconds: list[float] = field(default_factory=list)
    system_seconds: float = 0  # of all rounds: this process's time in the kernel
    copy_seconds: list[float] = field(default_factory=list)

    def scope(self) -> AbstractContextManager[object]:
        return numpy_rmm.use_handler(self.handler)

    def median(self) -> float:
        return statistics.median(self.seconds)

    def system_share(self) -> float:
        return self.system_seconds / sum(self.seconds)

    def rate(self, nbytes: int) -> float:
        """Bytes a second of the copies to the GPU, which must have been measured."""
        return nbytes / statistics.median(self.copy_seconds)


@dataclass
class Measured:
    """What holds for both ways."""

    nbytes: int  # of one result
    why_no_copies: str  # empty: they were measured


def demo(arguments: Sequence[str]) -> int:
    """Measure, print the table and the verdict."""
    if len(arguments) > 1:
        raise UsageError(f"demo takes one file, {len(arguments)} were given")
    note = ""
    if arguments:
        images, note = load(arguments[0])
    else:
        images = own_frames()
    shape = " × ".join(map(str, images.shape))
    print(f"{shape} {images.dtype} images to normalised float32, {ROUNDS} rounds{note}")

    with numpy_rmm.use_handler("auto"):
        best = numpy_rmm.get_handler()
    ways = [Way("default", None), Way("numpy_rmm", best)]
    measured = measure(ways, images)
    print(f"\n{table(ways, measured)}\n\n{verdict(ways, measured)}")
    return 0


# ---- the work ------------------------------------------------------------------------


def normalise(images: Images) -> Batch:
    """Channels first, centred, scaled and stretched, as a network wants its images.

    Plain NumPy, a temporary for each step, and nothing of this package.
    """
    highest = 1.0 if images.dtype.kind == "f" else np.iinfo(images.dtype).max
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).astype(np.float32)
    centred = (planes / np.float32(highest) - MEAN) / DEVIATION
    stretched = centred * CONTRAST + BRIGHTNESS
    clipped: Batch = np.clip(stretched, -3, 3)
    return clipped


def own_frames() -> Images:
    """Frames that look like a camera's: gradients, moving discs and noise."""
    n, height, width, channels = OWN_SHAPE
    random = np.random.default_rng(2)
    y, x = np.mgrid[0:height, 0:width]
    frames = np.empty(OWN_SHAPE, np.uint8)
    for number in range(n):
        disc = (x - 40 * number) ** 2 + (y - height // 2) ** 2 < 90**2
        for channel in range(channels):
            ramp = (x * (channel + 1) + y) / (3 * width + height)
            frames[number, ..., channel] = 60 + 90 * ramp + 80 * disc
        frames[number] += random.integers(0, 24, frames[number].shape, np.uint8)
    return frames


def load(path: str) -> tuple[Images, str]:
    """A user's images as (number, height, width, channels), and what to say about
    them."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path} is not a .npy file of numbers: {error}") from None
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{path} holds several arrays; save one with numpy.save")
    allowed = "uint8, uint16, float32 and float64"
    if array.dtype.str.lstrip("<>=|") not in ("u1", "u2", "f4", "f8"):
        raise UsageError(f"{path} holds {array.dtype}; images are {allowed}")
    shape = array.shape
    if array.ndim == 2 or (array.ndim == 3 and shape[-1] in (1, 3, 4)):
        array = array[np.newaxis]
    if array.ndim == 3:
        array = array[..., np.newaxis]
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4) or array.size == 0:
        raise UsageError(
            f"{path} has shape {shape}; images are (height, width), (height, "
            "width, channels), (n, height, width) or (n, height, width, channels), "
            "with 1, 3 or 4 channels"
        )
    per_image = array.size // array.shape[0]
    if per_image > MAX_VALUES:
        raise UsageError(
            f"{path}: an image of {per_image:,} values is more than the demo takes "
            f"({MAX_VALUES:,})"
        )
    n = min(array.shape[0], MAX_VALUES // per_image)
    images = np.array(array[:n])
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        raise UsageError(f"{path} holds values that are not finite")
    left_out = "" if n == array.shape[0] else f" (the first {n} of {array.shape[0]})"
    return images, left_out


# ---- measuring -----------------------------------------------------------------------


def measure(ways: Sequence[Way], images: Images) -> Measured:
    """Fill in what each way took."""
    results: list[Batch] = []
    for way in ways:  # a warm-up each, and what its arrays are
        with way.scope():
            result = normalise(images)
        way.name = numpy_rmm.get_handler_name(result) or "unknown"
        way.kind = numpy_rmm.memory_kind(result)
        results.append(result)
    if not np.array_equal(results[0], results[1]):
        raise AssertionError("the two ways gave different images")
    measured = Measured(results[0].nbytes, _measure_copies(ways, results))
    results.clear()
    for number in range(ROUNDS):
        for way in ways if number % 2 == 0 else reversed(ways):
            with way.scope():
                _measure_round(way, images)
    return measured


def _measure_round(way: Way, images: Images) -> None:
    system = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    start = time.perf_counter()
    normalise(images)
    way.seconds.append(time.perf_counter() - start)
    way.system_seconds += resource.getrusage(resource.RUSAGE_SELF).ru_stime - system


def _measure_copies(ways: Sequence[Way], results: Sequence[Batch]) -> str:
    """Copy each result to the GPU a few times; or why that cannot be done here."""
    if any(numpy_rmm.array_info(result).simulated for result in results):
        return "the driver is simulated"
    try:
        _copy_to_device_seconds(results[0])  # makes the context, which takes long
    except numpy_rmm.CudaError as error:
        return str(error)
    for _ in range(COPIES):
        for way, result in zip(ways, results, strict=True):
            way.copy_seconds.append(_copy_to_device_seconds(result))
    return ""


# ---- saying it -----------------------------------------------------------------------


def table(ways: Sequence[Way], measured: Measured) -> str:
    """A row a way: the handler's name, the kind of its memory, and the figures."""
    rows = [["", "handler", "memory", "ms", "in the kernel"]]
    rows += [
        [
            way.label,
            way.name,
            way.kind,
            f"{way.median() * 1e3:.1f}",
            f"{way.system_share():.0%}",
        ]
        for way in ways
    ]
    if not measured.why_no_copies:
        rows[0].append("to the GPU, GB/s")
        for row, way in zip(rows[1:], ways, strict=True):
            row.append(f"{way.rate(measured.nbytes) / 1e9:.1f}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index > 2 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if measured.why_no_copies:
        lines.append(f"no copies to a GPU: {measured.why_no_copies}")
    return "\n".join(lines)


def verdict(ways: Sequence[Way], measured: Measured) -> str:
    """One line: what was gained with the program as it is, or why nothing was."""
    default, ours = ways
    # Neighbouring rounds share the machine's mood, so the ratio is taken by rounds.
    pairs = zip(default.seconds, ours.seconds, strict=True)
    gain = statistics.median(theirs / mine for theirs, mine in pairs)
    said = [f"array arithmetic {gain:.1f} × faster"] if gain >= WORTH_NAMING else []
    if not measured.why_no_copies:
        theirs, mine = default.rate(measured.nbytes), ours.rate(measured.nbytes)
        if mine >= WORTH_NAMING * theirs:
            rates = f"{mine / 1e9:.1f} against {theirs / 1e9:.1f} GB/s"
            said.append(f"host→GPU copies {rates}")
    if said:
        if gain < WORTH_NAMING:
            said.append(f"array arithmetic {gain:.2f} × as fast")
        return "; ".join([*said, "0 lines changed"])
    return (
        "no gain here, because getting memory takes "
        f"{default.system_share():.0%} of the default's time and "
        f"{ours.system_share():.0%} of ours; {gain:.2f} × as fast"
    )
