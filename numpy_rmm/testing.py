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
import gc
import operator
import re
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path

from numpy_rmm._driver import CALLS, Driver, handle_of
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

_MAX_DEVICES = 16

# ---- the simulator -------------------------------------------------------------------

_ATTRIBUTES = {
    "multiprocessor_count": 16,
    "integrated": 18,
    "can_map_host_memory": 19,
    "compute_mode": 20,
    "pci_bus_id": 33,
    "pci_device_id": 34,
    "async_engine_count": 40,
    "unified_addressing": 41,
    "pci_domain_id": 50,
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "managed_memory": 83,
    "pageable_memory_access": 88,
    "concurrent_managed_access": 89,
    "can_use_host_pointer_for_registered_mem": 91,
    "host_register_supported": 99,
    "pageable_memory_access_uses_host_page_tables": 100,
    "direct_managed_mem_access_from_host": 101,
    "virtual_memory_management_supported": 102,
    "read_only_host_register_supported": 113,
    "memory_pools_supported": 115,
    "mempool_supported_handle_types": 119,
    "host_numa_id": 134,
}


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("devices", c_int),
        ("driver", c_int),
        ("init_result", c_int),
        ("manual", c_int),
        ("memory_nbytes", c_uint64),
        ("page_locked_nbytes", c_uint64),
        ("seed", c_uint64),
        ("check", c_int),
    ]


class _Area(ctypes.Structure):
    _fields_ = [("start", c_size_t), ("nbytes", c_size_t), ("writes", c_int)]


def _area(memory):
    """Where a kernel's argument is, and how long."""
    if isinstance(memory, tuple):
        return memory
    import numpy as np

    array = np.asarray(memory)
    low, high = array.ctypes.data, array.ctypes.data
    for length, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return (low, high + array.itemsize - low) if array.size else (low, 0)


_OUTSTANDING = (
    "registrations",
    "host_allocations",
    "managed_allocations",
    "device_allocations",
    "streams",
    "events",
    "operations",
    "graphs",
    "reservations",
    "physical",
    "mappings",
    "pools",
    "pool_allocations",
    "advice",
)
# of them, those that a program has to give back
_LEAKABLE = (*_OUTSTANDING[:4], *_OUTSTANDING[8:11], "pool_allocations")

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def _integer(name, value, low, high):
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {number}")
    return number


def _nbytes(name, value):
    if not isinstance(value, str):
        return _integer(name, value, 1, 2**45)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    factor = None if match is None else _UNITS.get(match[2].lower())
    if factor is None:
        raise ValueError(f'{name} must be like 1073741824 or "1 GiB", not {value!r}')
    return _integer(name, int(float(match[1]) * factor), 1, 2**45)


def _attribute(name):
    try:
        return _ATTRIBUTES[name]
    except KeyError:
        known = ", ".join(sorted(_ATTRIBUTES))
        raise TypeError(
            f"no device attribute is called {name!r}; known: {known}"
        ) from None


def _find_simulator():
    """Beside the extension, or where a build directory has it."""
    from numpy_rmm import _core

    folder = Path(_core.__file__).resolve().parent
    places = [folder, folder.parent / "cudasim"]
    for place in places:
        path = place / "libnumpy_rmm_cudasim.so"
        if path.exists():
            return path
    looked = " and ".join(map(str, places))
    raise FileNotFoundError(f"libnumpy_rmm_cudasim.so was not found in {looked}")


@functools.cache
def _controls():
    library = ctypes.CDLL(str(_find_simulator()))
    library.nrm_cudasim_reset.argtypes = [POINTER(_Config)]
    library.nrm_cudasim_set_attribute.argtypes = [c_int, c_int, c_int]
    library.nrm_cudasim_set_sticky.argtypes = [c_int, c_int]
    library.nrm_cudasim_fail.argtypes = [c_char_p, c_uint64, c_int, c_uint64]
    library.nrm_cudasim_error_code.argtypes = [c_char_p]
    library.nrm_cudasim_hold_stream.argtypes = [c_void_p]
    library.nrm_cudasim_release_stream.argtypes = [c_void_p]
    library.nrm_cudasim_step.argtypes = [c_void_p]
    library.nrm_cudasim_call_count.argtypes = [c_char_p]
    library.nrm_cudasim_call_count.restype = c_uint64
    library.nrm_cudasim_log_read.argtypes = [POINTER(c_uint64), c_char_p, c_size_t]
    library.nrm_cudasim_log_clear.restype = None
    library.nrm_cudasim_fault_count.restype = c_uint64
    library.nrm_cudasim_fault_text.argtypes = [c_uint64, c_char_p, c_size_t]
    library.nrm_cudasim_launch.argtypes = [c_void_p, POINTER(_Area), c_size_t]
    library.nrm_cudasim_race_count.restype = c_uint64
    library.nrm_cudasim_race_text.argtypes = [c_uint64, c_char_p, c_size_t]
    library.nrm_cudasim_host_access.argtypes = [c_void_p, c_size_t, c_int]
    library.nrm_cudasim_outstanding.argtypes = [
        c_int,
        POINTER(c_uint64),
        POINTER(c_uint64),
    ]
    return library


def _texts(count, read):
    """What a control tells one by one; it keeps the first ones only."""
    texts = []
    text = ctypes.create_string_buffer(1024)
    for index in range(count):
        if read(index, text, len(text)) != 0:
            texts.append(f"{count - index} more")
            break
        texts.append(text.value.decode())
    return texts


_active: list[SimulatedCuda] = []  # the machines of nested uses, the innermost last


class SimulatedCuda:
    """A simulated machine, as returned by `simulate_cuda`. See there."""

    def __init__(self, config, attributes):
        self._config = config
        self._attributes = attributes
        self._start()

    def _start(self):
        self._install()
        _active.append(self)

    def _install(self):
        from numpy_rmm import _core

        controls = _controls()
        _core._set_driver(str(_find_simulator()))  # lets go of the machine before it
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

    def stop(self):
        """Go back to the driver that was used before. Does nothing the second time."""
        from numpy_rmm import _core

        if self not in _active:
            return
        was_current = _active[-1] is self
        _active.remove(self)
        if was_current and _active:
            _active[-1]._install()
        elif was_current:
            _core._set_driver(None)

    def __enter__(self):
        if self not in _active:
            self._start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def __call__(self, function):
        """Decorate a function, which gets a new machine at each call."""
        self.stop()

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            with SimulatedCuda(self._config, self._attributes):
                return function(*args, **kwargs)

        return wrapper

    def __repr__(self):
        state = "active" if _active and _active[-1] is self else "not active"
        return (
            f"<SimulatedCuda: {self._config.devices} devices of "
            f"{self._config.memory_nbytes} bytes, driver {self._config.driver}, "
            f"{state}>"
        )

    @functools.cached_property
    def driver(self):
        """A `Driver` of the simulated library."""
        return Driver(_find_simulator())

    # ---- making things happen

    @staticmethod
    def _code(error):
        if isinstance(error, str):
            code = _controls().nrm_cudasim_error_code(error.encode())
            if code < 0:
                raise ValueError(f"no CUDA error is called {error!r}")
            return code
        return _integer("error", error, 0, 999)

    @staticmethod
    def _call_name(call):
        if call not in CALLS:
            raise ValueError(f"the driver has no call {call!r}")
        return call.encode()

    def fail(self, call, nth=1, error="OUT_OF_MEMORY", times=1):
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
        """
        name = self._call_name(call)
        count = 0 if times is None else _integer("times", times, 1, 2**62)
        number = _integer("nth", nth, 1, 2**62)
        _controls().nrm_cudasim_fail(name, number, self._code(error), count)

    def set_sticky(self, error="ILLEGAL_ADDRESS", device=0):
        """Make every call that involves `device` answer `error`; 0 takes it back."""
        code = self._code(error)
        _controls().nrm_cudasim_set_sticky(self._device(device), code)

    def set_attribute(self, name, value, device=0):
        """Change an attribute of a device, as ``"pageable_memory_access"``."""
        number = _integer(name, value, -(2**31), 2**31 - 1)
        _controls().nrm_cudasim_set_attribute(
            self._device(device), _attribute(name), number
        )

    def _device(self, device):
        return _integer("device", device, 0, self._config.devices - 1)

    def hold(self, stream=0):
        """Keep later work of a stream (an object or a handle) from running."""
        self._stream(_controls().nrm_cudasim_hold_stream, stream)

    def release(self, stream=0):
        """Let a held stream go on."""
        self._stream(_controls().nrm_cudasim_release_stream, stream)

    def _stream(self, control, stream):
        result = control(handle_of(stream))
        if result != 0:
            raise ValueError(f"{stream!r} is no stream here ({result})")

    def step(self, stream=0):
        """Run a stream's next operation if it is ready; says whether it was."""
        return _controls().nrm_cudasim_step(handle_of(stream)) == 1

    def launch(self, stream=0, *, reads=(), writes=()):
        """Submit a kernel that touches some memory, and does nothing.

        It takes its turn in the stream and keeps its memory in use like a real one.

        Parameters
        ----------
        stream : object or int
            Where, an object or a handle.
        reads, writes : sequence
            NumPy arrays and other buffers of page-locked or managed memory, and
            ``(address, nbytes)`` of device memory.
        """
        areas = [(*_area(each), 0) for each in reads]
        areas += [(*_area(each), 1) for each in writes]
        result = _controls().nrm_cudasim_launch(
            handle_of(stream), (_Area * len(areas))(*areas), len(areas)
        )
        if result != 0:
            raise ValueError(
                f"the stream, or memory of the kernel, is not known to the driver "
                f"({result})"
            )

    # ---- asking what has happened

    def calls(self, call=None):
        """How often a driver call was made, failed ones included; None: all calls."""
        name = None if call is None else self._call_name(call)
        return _controls().nrm_cudasim_call_count(name)

    def log(self):
        """The latest driver calls with arguments and result, oldest first."""
        lines = []
        cursor = c_uint64()
        text = ctypes.create_string_buffer(256)
        while _controls().nrm_cudasim_log_read(byref(cursor), text, len(text)) == 1:
            lines.append(text.value.decode())
        return lines

    def clear_log(self):
        """Forget the log, but not the counts."""
        _controls().nrm_cudasim_log_clear()

    def faults(self):
        """What a real driver passes in silence or dies of, as texts.

        For instance a copy from memory that was unmapped while it was registered.
        """
        controls = _controls()
        return _texts(
            controls.nrm_cudasim_fault_count(), controls.nrm_cudasim_fault_text
        )

    def races(self):
        """Uses of memory that nothing puts in order, as texts that name both sides.

        Always empty without ``check=True``. See `assert_no_races`.
        """
        controls = _controls()
        return _texts(controls.nrm_cudasim_race_count(), controls.nrm_cudasim_race_text)

    def outstanding(self):
        """What the driver holds for the program: ``{what: (count, bytes)}``."""
        found = {}
        for index, what in enumerate(_OUTSTANDING):
            count = c_uint64()
            nbytes = c_uint64()
            _controls().nrm_cudasim_outstanding(index, byref(count), byref(nbytes))
            found[what] = (count.value, nbytes.value)
        return found


def simulate_cuda(
    devices=1,
    memory="8 GiB",
    driver=13000,
    *,
    page_locked=None,
    init_error=0,
    manual=False,
    seed=0,
    check=False,
    **attributes,
):
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
    config = _Config(
        size=ctypes.sizeof(_Config),
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


# ---- leaks ---------------------------------------------------------------------------


def _resources():
    """All live resources: those of the registry that can work here, and all others."""
    import numpy_rmm
    from numpy_rmm import mr

    found = {}
    for name in numpy_rmm.registry:
        try:
            resource = numpy_rmm.registry[name]
        except numpy_rmm.CudaUnavailableError:
            continue
        found[id(resource)] = resource
    for thing in gc.get_objects():
        if isinstance(thing, mr.MemoryResource):
            found[id(thing)] = thing
    return found


def _in_use(resource):
    statistics = resource.statistics()
    if statistics is None:
        return (0, 0)
    return (statistics.current_bytes, statistics.current_count)


@contextmanager
def assert_no_leaks():
    """Fail when memory allocated in the block is still in use after it.

    Compares the live bytes and allocations of every resource, and, where CUDA is
    simulated, what the driver holds. Garbage is collected and the pools are trimmed
    before, so that memory which is only kept for later does not count.

    Raises
    ------
    AssertionError
        Names each resource that has more in use than before, and by how much.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> from numpy_rmm.testing import assert_no_leaks
    >>> with assert_no_leaks(), numpy_rmm.host():
    ...     x = np.empty(1000)
    ...     del x
    """
    import numpy_rmm

    def settle():
        gc.collect()
        numpy_rmm.trim()

    settle()
    resources = _resources()
    in_use = {key: _in_use(resource) for key, resource in resources.items()}
    held = _active[-1].outstanding() if _active else {}
    machine = _active[-1] if _active else None
    yield
    settle()
    leaks = []
    for key, resource in _resources().items():
        nbytes, count = _in_use(resource)
        nbytes_before, count_before = in_use.get(key, (0, 0))
        if nbytes > nbytes_before or count > count_before:
            leaks.append(
                f"{resource!r}: {nbytes - nbytes_before} bytes in "
                f"{count - count_before} allocations"
            )
    if machine is not None and _active and _active[-1] is machine:
        for what, (count, nbytes) in machine.outstanding().items():
            if what in _LEAKABLE and count > held[what][0]:
                leaks.append(
                    f"the driver: {count - held[what][0]} more {what} "
                    f"({nbytes - held[what][1]} bytes)"
                )
    if leaks:
        raise AssertionError("memory is still in use:\n  " + "\n  ".join(leaks))
