"""The hazard in situations of its own: captures, graphs, kernels without end, devices.

Each function plays one with one library and says what came of it. `proof.py` makes a
table of them, `tests/gpu/test_situations.py` a test of each, and
`tests/test_situations.py` runs those of the driver on the simulated one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

import numpy_rmm
from hazards import (
    FRESH_BYTES,
    MIB,
    Case,
    Hold,
    Program,
    count_wrong,
    make_pool,
    pattern,
)
from libraries import MODES, PYTHON_LIBRARIES, DriverCopies, Library, address_of
from numpy_rmm.testing import Driver, simulate_cuda

N_LAUNCHES = 100
N_TEMPORARIES = 60
LONGEST_CALL = 0.025  # seconds, of each call but the first that waits for a kernel
WAIT = 0.02  # `wait_limit`: a call that takes as long has waited all of it


@dataclass(frozen=True)
class Found:
    """What came of a situation."""

    wrong: int  # bytes
    slowest: float = 0.0  # seconds of a call, where it matters
    n_returned: int = 1  # blocks that came back in the end; 0 is a leak

    @property
    def is_right(self) -> bool:
        return self.wrong == 0 and self.slowest <= LONGEST_CALL and self.n_returned == 1


def program_of(
    library: Library,
    operation: str,
    reuse: str = "context",
    stream: str = "non-blocking",
) -> Program:
    """Warmed up, with bytes on the device that a copy to the host shall bring."""
    case = Case("pinned", reuse, "below", MIB, operation, "non-blocking")
    program = Program(library, case)
    program.queue(program.make_first())
    program.synchronize()
    program.set_device()
    return program


def note(library: Library, array: np.ndarray, handle: int) -> None:
    """A library whose captures nobody notices says what the graph uses."""
    if not library.captures_are_noticed:
        numpy_rmm.record_use(array, handle)


# ---- graphs --------------------------------------------------------------------------


def graph_after_the_array(
    library: Library, operation: str, mode: str = "global", reuse: str = "context"
) -> Found:
    """The array dies in the capture; the graph is launched many times, each time after
    other arrays of its size were made and filled."""
    program = program_of(library, operation, reuse)
    array = program.make_first()
    address = address_of(array)
    with library.captured(program.lane, mode) as graph:
        program.queue(array)
        note(library, array, program.lane.handle)
        del array
    wrong = 0
    for _ in range(N_LAUNCHES):
        if program.is_upload:
            program.set_device()
        program.overwrite()
        graph.launch(program.lane)
        program.synchronize()
        wrong += program.count()
        program.fresh.clear()
    graph.close()
    gc.collect()
    n_returned = comes_back(program, address)
    program.close()
    return Found(wrong, n_returned=n_returned)


def comes_back(program: Program, address: int) -> int:
    """Whether the memory is handed out again, now that the graph is gone; the driver
    says so in a thread of its own, and a little later."""
    for _ in range(100):
        arrays = [program.make() for _ in range(2 * len(FRESH_BYTES))]
        if address in map(address_of, arrays):
            return 1
        time.sleep(0.01)
    return 0


def capture_beside(library: Library, operation: str, mode: str = "global") -> Found:
    """Another thread captures all the while, and its capture is whole in the end."""
    program = program_of(library, operation)
    first = [program.make_first()]
    context = ctypes.c_void_p()
    program.driver.check(program.driver.cuCtxGetCurrent(ctypes.byref(context)))
    other = library.open("non-blocking")
    kept, target = program.make_first(), library.device(MIB, other)
    library.queue("H2D", target, kept, other)
    program.synchronize()
    hold = Hold(program.driver, program.lane.handle)
    begun, over = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def capture() -> None:
        try:
            program.driver.check(program.driver.cuCtxSetCurrent(context))
            with library.captured(other, mode) as graph:
                begun.set()
                library.queue("H2D", target, kept, other)
                assert over.wait(20)
            graph.close()
        except BaseException as error:  # noqa: BLE001, for the other thread
            failures.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(20)
    program.queue(first.pop())
    program.overwrite()
    over.set()
    thread.join()
    was_held = not hold.is_over
    hold.close()
    if failures:
        raise failures[0]
    assert was_held
    wrong = program.count()
    other.close()
    program.close()
    return Found(wrong)


# ---- copies that are pending ---------------------------------------------------------


def finished_copy_of_ours(library: Library, operation: str = "H2D") -> Found:
    """What our own finished copy says of the array says nothing of a pending one."""
    program = program_of(library, operation)
    raw = DriverCopies(program.driver)
    lane = raw.open("non-blocking")
    ours = raw.device(MIB, lane)
    first = [program.make_first()]
    hold = Hold(program.driver, program.lane.handle)
    program.queue(first[0])
    raw.queue("H2D", ours, first[0], lane)
    numpy_rmm.record_use(first[0], lane.handle)
    program.driver.check(program.driver.cuStreamSynchronize(lane.handle))
    first.clear()
    program.overwrite()
    hold.close()
    wrong = program.count()
    lane.close()
    program.close()
    return Found(wrong)


def pool_dies(library: Library, operation: str) -> Found:
    """The last reference to the pool goes while the copy is pending."""
    program = program_of(library, operation)
    first = [program.make_first()]
    hold = Hold(program.driver, program.lane.handle)
    program.queue(first.pop())
    program.handler = numpy_rmm.use_handler("pinned").handler
    numpy_rmm.trim()
    program.overwrite()
    # What the system would give to others, had the pages been unmapped.
    mapped = [np.full(MIB, byte, np.uint8) for byte in FRESH_BYTES]
    hold.close()
    wrong = program.count()
    wrong += sum(map(count_wrong, mapped, FRESH_BYTES))
    program.close()
    return Found(wrong)


def kernel_without_end(library: Library, operation: str = "H2D") -> Found:
    """A loop of temporaries beside work that does not end: how long each call takes.

    The first that waits may do so; where a GPU was slow before, waits last longer, so
    this is played `in_a_fresh_process`.
    """
    program = program_of(library, operation)
    hold = Hold(program.driver, program.lane.handle)
    times = []
    for _ in range(N_TEMPORARIES):
        start = time.perf_counter()
        array = program.make()
        times.append(time.perf_counter() - start)
        array.fill(1)
        program.queue(array)
        start = time.perf_counter()
        del array
        times[-1] = max(times[-1], time.perf_counter() - start)
    if program.is_upload:  # the last copy of all brings what is looked at
        program.queue(program.make_first())
    program.overwrite()
    hold.close()
    wrong = program.count()
    program.close()
    first = next((i for i, seconds in enumerate(times) if seconds >= WAIT), 0)
    return Found(wrong, slowest=max(times[:first] + times[first + 1 :]))


def in_a_fresh_process(library: Library, operation: str) -> Found:
    command = [sys.executable, __file__, library.name, operation]
    if is_simulated():
        command.append("--simulator")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-500:])
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def is_simulated() -> bool:
    return bool(numpy_rmm.info()["cuda"].get("simulated"))


# ---- devices -------------------------------------------------------------------------


def device_activated_later(driver: Driver) -> Found:
    """An array of before is copied to a device whose context came only then."""
    pool = make_pool("pinned", "context", "below", MIB)
    handler = numpy_rmm.use_handler(pool).handler
    array = handler.run(np.empty, MIB, np.uint8)
    array[:] = pattern(MIB)
    context = ctypes.c_void_p()
    driver.check(driver.cuCtxGetCurrent(ctypes.byref(context)))
    driver.activate(1)
    target, stream = driver.allocate(MIB), driver.create_stream()
    hold = Hold(driver, stream)
    driver.check(driver.cuMemcpyAsync(target, address_of(array), MIB, stream))
    driver.check(driver.cuCtxSetCurrent(context))
    del array
    fresh = [handler.run(np.full, MIB, byte, np.uint8) for byte in FRESH_BYTES]
    driver.activate(1)
    hold.close()
    wrong = count_wrong(np.frombuffer(driver.read(target, MIB), np.uint8), pattern(MIB))
    wrong += sum(map(count_wrong, fresh, FRESH_BYTES))
    driver.check(driver.cuMemFree(target))
    driver.check(driver.cuStreamDestroy(stream))
    driver.check(driver.cuCtxSetCurrent(context))
    for _ in range(2):
        driver.check(driver.cuDevicePrimaryCtxRelease(1))
    return Found(wrong)


# ---- all of them ---------------------------------------------------------------------


def all_of(library: Library) -> Iterator[tuple[str, str, Callable[[], Found]]]:
    """The name, the operation and the function of what a library can be asked."""
    for operation in ("H2D", "D2H"):
        for mode in MODES:
            yield (
                f"graph launched {N_LAUNCHES} times, captured {mode}",
                operation,
                lambda o=operation, m=mode: graph_after_the_array(library, o, m),
            )
            yield (
                f"a capture in another thread, {mode}",
                operation,
                lambda o=operation, m=mode: capture_beside(library, o, m),
            )
        for name, play in (
            ("our copy finished, theirs pending", finished_copy_of_ours),
            ("the pool dies", pool_dies),
            ("a kernel without end", in_a_fresh_process),
        ):
            yield name, operation, lambda o=operation, play=play: play(library, o)


def main() -> None:
    """`kernel_without_end` of a library and an operation."""
    name, operation, *simulator = sys.argv[1:]
    driver = simulate_cuda().driver if simulator else Driver()
    driver.activate()
    libraries = {kind.name: kind for kind in (DriverCopies, *PYTHON_LIBRARIES)}
    print(json.dumps(asdict(kernel_without_end(libraries[name](driver), operation))))


if __name__ == "__main__":
    main()
