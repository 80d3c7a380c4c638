"""CUDA without a GPU, and checks for tests.

`simulate_cuda` puts a driver in host memory in the place of the real one, with streams
that run asynchronously, memory that ends and calls that fail when told to. `Driver`
calls either of the two directly. `assert_no_leaks` compares what is allocated before
and after; `assert_no_races` looks for memory that is used again, or touched by the
program, while the GPU may still use it.

Nothing here is imported by ``import numpy_rmm``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    SupportsIndex,
    TypeVar,
)

from numpy_rmm import _simulator
from numpy_rmm._driver import CALLS, Driver, handle_of
from numpy_rmm._leaks import assert_no_leaks
from numpy_rmm._races import assert_no_races, host_read, host_write

__all__ = [
    "Driver",
    "SimulatedCuda",
    "assert_no_leaks",
    "assert_no_races",
    "host_read",
    "host_write",
    "simulate_cuda",
]

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer

    class _OnDevice(Protocol):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]: ...

    _Memory = np.ndarray[Any, Any] | Buffer | _OnDevice | tuple[int, int]

P = ParamSpec("P")
R = TypeVar("R")

_MAX_DEVICES = 16


def _interface(memory: object) -> dict[str, Any]:
    """The array interface of an array, of the host or a device, or another buffer."""
    import numpy as np

    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface: dict[str, Any] | None = getattr(memory, name, None)
        if interface is not None:
            return interface
    return np.asarray(memoryview(memory)).__array_interface__  # type: ignore[arg-type]


def _area(name: str, memory: _Memory) -> tuple[int, int]:
    """Where a kernel's argument is, and how many bytes it spans."""
    import numpy as np

    if isinstance(memory, tuple):
        try:
            address, nbytes = map(operator.index, memory)
        except (TypeError, ValueError):
            raise TypeError(f"{name} takes (address, nbytes), not {memory!r}") from None
        return address, nbytes
    try:
        interface = _interface(memory)
    except TypeError:
        raise TypeError(
            f"{name} takes arrays of the host and of devices, other buffers, and "
            f"(address, nbytes), not {memory!r}"
        ) from None
    low = high = interface["data"][0]
    shape, nbytes = interface["shape"], np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides") or [
        nbytes * math.prod(shape[i + 1 :]) for i in range(len(shape))
    ]
    for length, stride in zip(shape, strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return (low, high + nbytes - low) if math.prod(shape) else (low, 0)


def _integer(name: str, value: SupportsIndex, low: int, high: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {number}")
    return number


def _nbytes(name: str, value: str | SupportsIndex) -> int:
    if isinstance(value, str):
        from numpy_rmm import _core

        try:
            value = _core._parse_nbytes(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return _integer(name, value, 1, 2**45)


def _attribute(name: str) -> int:
    try:
        return _simulator.ATTRIBUTES[name]
    except KeyError:
        known = ", ".join(sorted(_simulator.ATTRIBUTES))
        raise TypeError(
            f"no device attribute is called {name!r}; known: {known}"
        ) from None


class SimulatedCuda:
    """A simulated machine, as returned by `simulate_cuda`. See there.

    Examples
    --------
    >>> import numpy_rmm
    >>> from numpy_rmm.testing import simulate_cuda
    >>> with simulate_cuda() as cuda:
    ...     cuda.fail("cuMemAlloc", error="UNKNOWN")
    ...     numpy_rmm.mr.CudaMemoryResource().allocate(100)
    Traceback (most recent call last):
        ...
    numpy_rmm.CudaError: ...
    """

    def __init__(self, config: _simulator.Config, attributes: dict[int, int]) -> None:
        self._config = config
        self._attributes = attributes
        self._start()

    def _start(self) -> None:
        self._install()
        _simulator.active.append(self)

    def _install(self) -> None:
        from numpy_rmm import _core

        controls = _simulator.controls()
        # lets go of the machine before it
        _core._set_driver(str(_simulator.find_library()))
        result = controls.nrm_cudasim_reset(byref(self._config))
        if result != 0:
            raise RuntimeError(
                "a child of a process that has used CUDA cannot simulate it"
                if result == 3
                else f"the simulator refused its configuration ({result})"
            )
        for attribute, value in self._attributes.items():
            for device in range(self._config.devices):
                controls.nrm_cudasim_set_attribute(device, attribute, value)

    def stop(self) -> None:
        """Go back to the driver that was used before. Does nothing the second time."""
        from numpy_rmm import _core

        if self not in _simulator.active:
            return
        was_current = _simulator.current() is self
        _simulator.active.remove(self)
        outer = _simulator.current()
        if was_current and outer is not None:
            outer._install()
        elif was_current:
            _core._set_driver(None)

    def __enter__(self) -> Self:
        if self not in _simulator.active:
            self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, which gets a new machine at each call."""
        self.stop()

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with SimulatedCuda(self._config, self._attributes):
                return function(*args, **kwargs)

        return wrapper

    def __repr__(self) -> str:
        state = "active" if _simulator.current() is self else "not active"
        return (
            f"<SimulatedCuda: {self._config.devices} devices of "
            f"{self._config.memory_nbytes} bytes, driver {self._config.driver}, "
            f"{state}>"
        )

    @functools.cached_property
    def driver(self) -> Driver:
        """A `Driver` of the simulated library."""
        return Driver(_simulator.find_library())

    # ---- making things happen

    @staticmethod
    def _code(error: str | SupportsIndex) -> int:
        if isinstance(error, str):
            code = int(_simulator.controls().nrm_cudasim_error_code(error.encode()))
            if code < 0:
                raise ValueError(f"no CUDA error is called {error!r}")
            return code
        return _integer("error", error, 0, 999)

    @staticmethod
    def _call_name(call: str) -> bytes:
        if call not in CALLS:
            raise ValueError(f"the driver has no call {call!r}")
        return call.encode()

    def fail(
        self,
        call: str,
        nth: SupportsIndex = 1,
        error: str | SupportsIndex = "OUT_OF_MEMORY",
        times: SupportsIndex | None = 1,
    ) -> None:
        """Make a driver call fail.

        Parameters
        ----------
        call : str
            Its name without a version, as ``"cuMemHostRegister"``.
        nth : int
            Which call of that name from now on; 1 is the next one.
        error : str or int
            The error to answer; 0 ends an earlier plan.
        times : int or None
            How many calls in a row; None: all from the nth on.

        Raises
        ------
        TypeError, ValueError
            When there is no such call or error.
        """
        name = self._call_name(call)
        count = 0 if times is None else _integer("times", times, 1, 2**62)
        number = _integer("nth", nth, 1, 2**62)
        _simulator.controls().nrm_cudasim_fail(name, number, self._code(error), count)

    def set_sticky(
        self, error: str | SupportsIndex = "ILLEGAL_ADDRESS", device: SupportsIndex = 0
    ) -> None:
        """Make every call that involves `device` answer `error`; 0 takes it back."""
        code = self._code(error)
        _simulator.controls().nrm_cudasim_set_sticky(self._device(device), code)

    def set_attribute(
        self, name: str, value: SupportsIndex, device: SupportsIndex = 0
    ) -> None:
        """Change an attribute of a device, as ``"pageable_memory_access"``."""
        number = _integer(name, value, -(2**31), 2**31 - 1)
        _simulator.controls().nrm_cudasim_set_attribute(
            self._device(device), _attribute(name), number
        )

    def _device(self, device: SupportsIndex) -> int:
        return _integer("device", device, 0, self._config.devices - 1)

    def hold(self, stream: object = 0) -> None:
        """Keep later work of a stream (an object or a handle) from running."""
        self._stream(_simulator.controls().nrm_cudasim_hold_stream, stream)

    def release(self, stream: object = 0) -> None:
        """Let a held stream go on."""
        self._stream(_simulator.controls().nrm_cudasim_release_stream, stream)

    def _stream(self, control: Callable[[int], int], stream: object) -> None:
        result = control(handle_of(stream))
        if result != 0:
            raise ValueError(f"{stream!r} is no stream here ({result})")

    def step(self, stream: object = 0) -> bool:
        """Run a stream's next operation if it is ready; says whether it was."""
        return bool(_simulator.controls().nrm_cudasim_step(handle_of(stream)) == 1)

    def launch(
        self,
        stream: object = 0,
        *,
        reads: Sequence[_Memory] = (),
        writes: Sequence[_Memory] = (),
    ) -> None:
        """Submit a kernel that touches some memory, and does nothing.

        It takes its turn in the stream and keeps its memory in use like a real one.

        Parameters
        ----------
        stream : object or int
            Where, an object or a handle.
        reads, writes : sequence
            NumPy arrays and other buffers of page-locked or managed memory, device
            arrays, and ``(address, nbytes)``.

        Raises
        ------
        TypeError
            For anything else.
        ValueError
            When the driver does not know the stream, or some of the memory.
        """
        areas = [_simulator.Area(*_area("reads", each), 0) for each in reads]
        areas += [_simulator.Area(*_area("writes", each), 1) for each in writes]
        result = _simulator.controls().nrm_cudasim_launch(
            handle_of(stream), (_simulator.Area * len(areas))(*areas), len(areas)
        )
        if result != 0:
            raise ValueError(
                f"the stream, or memory of the kernel, is not known to the driver "
                f"({result})"
            )

    # ---- asking what has happened

    def calls(self, call: str | None = None) -> int:
        """How often a driver call was made, failed ones included; None: all calls."""
        name = None if call is None else self._call_name(call)
        return int(_simulator.controls().nrm_cudasim_call_count(name))

    def log(self) -> list[str]:
        """The latest driver calls with arguments and result, oldest first."""
        lines = []
        cursor = c_uint64()
        text = ctypes.create_string_buffer(256)
        read = _simulator.controls().nrm_cudasim_log_read
        while read(byref(cursor), text, len(text)) == 1:
            lines.append(text.value.decode())
        return lines

    def clear_log(self) -> None:
        """Forget the log, but not the counts."""
        _simulator.controls().nrm_cudasim_log_clear()

    def faults(self) -> list[str]:
        """What a real driver passes in silence or dies of, as texts.

        For instance a copy from memory that was unmapped while it was registered.
        """
        controls = _simulator.controls()
        return _simulator.texts(
            controls.nrm_cudasim_fault_count(), controls.nrm_cudasim_fault_text
        )

    def races(self) -> list[str]:
        """Uses of memory that nothing puts in order, as texts that name both sides.

        Always empty without ``check=True``. See `assert_no_races`.
        """
        controls = _simulator.controls()
        return _simulator.texts(
            controls.nrm_cudasim_race_count(), controls.nrm_cudasim_race_text
        )

    def outstanding(self) -> dict[str, tuple[int, int]]:
        """What the driver holds for the program: ``{what: (count, bytes)}``."""
        ask = _simulator.controls().nrm_cudasim_outstanding
        found = {}
        for index, what in enumerate(_simulator.OUTSTANDING):
            count, nbytes = c_uint64(), c_uint64()
            ask(index, byref(count), byref(nbytes))
            found[what] = (count.value, nbytes.value)
        return found


def simulate_cuda(
    devices: SupportsIndex = 1,
    memory: str | SupportsIndex = "8 GiB",
    driver: SupportsIndex = 13000,
    *,
    page_locked: str | SupportsIndex | None = None,
    init_error: str | SupportsIndex = 0,
    manual: bool | Literal["calls"] = False,
    seed: SupportsIndex = 0,
    check: bool = False,
    **attributes: SupportsIndex,
) -> SimulatedCuda:
    """Use a simulated CUDA driver from now on.

    The simulator keeps device memory in host memory and runs streams in a thread of its
    own; what it accepts, refuses and orders follows a real driver. It takes effect at
    once. As a context manager it ends with the block, as a decorator it is in effect
    while the function runs, and otherwise until `SimulatedCuda.stop`.

    Parameters
    ----------
    devices : int
        How many there are, 0 to 16. ``CUDA_VISIBLE_DEVICES`` is honoured.
    memory : int or str
        Of each device, in bytes or as ``"8 GiB"``. It is only used as it is written to.
    driver : int
        The driver's CUDA version, 13000 for 13.0. Newer calls are missing.
    page_locked : int or str, optional
        How many bytes of host memory can be page-locked.
    init_error : str or int
        The error that ``cuInit`` answers, as ``"SYSTEM_DRIVER_MISMATCH"``.
    manual : bool or "calls"
        Run work only in `SimulatedCuda.step`, and where a call waits for it; with
        ``"calls"`` also at the beginning of calls, chosen by `seed`: a program of one
        thread then meets the same order each time.
    seed : int
        If not 0, what runs next among ready work is random, the same for the same seed.
    check : bool
        Look for memory that is handed out again, or touched by the program, while
        nothing says that the GPU is done with it: `SimulatedCuda.races`,
        `assert_no_races`. Slower.
    **attributes : int
        Attributes of all devices, as ``pageable_memory_access=1``.

    Returns
    -------
    SimulatedCuda
        Controls the machine and tells what has happened on it.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong. Nothing has changed then.
    RuntimeError
        In a child forked after its parent used CUDA.

    Examples
    --------
    >>> from numpy_rmm.testing import simulate_cuda
    >>> with simulate_cuda(devices=2, memory="1 GiB") as cuda:
    ...     context = cuda.driver.activate()
    ...     address = cuda.driver.allocate(1024)
    ...     cuda.outstanding()["device_allocations"]
    (1, 1024)
    """
    if not isinstance(manual, bool) and manual != "calls":
        raise ValueError(f"manual must be True, False or 'calls', not {manual!r}")
    config = _simulator.Config(
        size=ctypes.sizeof(_simulator.Config),
        devices=_integer("devices", devices, 0, _MAX_DEVICES),
        driver=_integer("driver", driver, 1000, 99990),
        manual=2 if manual == "calls" else bool(manual),
        memory_nbytes=_nbytes("memory", memory),
        page_locked_nbytes=0
        if page_locked is None
        else _nbytes("page_locked", page_locked),
        seed=_integer("seed", seed, 0, 2**64 - 1),
        check=bool(check),
    )
    numbers = {
        _attribute(name): _integer(name, value, -(2**31), 2**31 - 1)
        for name, value in attributes.items()
    }
    config.init_result = SimulatedCuda._code(init_error)
    return SimulatedCuda(config, numbers)
