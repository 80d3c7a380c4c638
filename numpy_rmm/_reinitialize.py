"""The resources of devices, set all at once as RMM does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any, ParamSpec, SupportsIndex, TypeVar

from numpy_rmm import _core
from numpy_rmm._core import MemoryResource

__all__ = [
    "RMMError",
    "is_initialized",
    "register_reinitialize_hook",
    "reinitialize",
    "unregister_reinitialize_hook",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Size = int | str

_hooks: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []


class RMMError(Exception):
    """An error with a number, by RMM's name; nothing here raises one.

    Attributes
    ----------
    errcode : int
        The number.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.RMMError(2, "no memory").errcode
    2
    """

    def __init__(self, errcode: int, msg: str) -> None:
        super().__init__(msg)
        self.errcode = errcode

    def __reduce__(self) -> tuple[type[RMMError], tuple[int, str]]:
        return type(self), (self.errcode, self.args[0])


def reinitialize(
    pool_allocator: bool = False,
    managed_memory: bool = False,
    initial_pool_size: _Size | None = None,
    maximum_pool_size: _Size | None = None,
    devices: SupportsIndex | Iterable[int] | None = 0,
    logging: bool = False,
    log_file_name: str | PathLike[str] | None = None,
) -> None:
    """Give devices new current resources, and all others their default back.

    Buffers that are alive keep their resource, and those keep working.

    Parameters
    ----------
    pool_allocator : bool
        A pool. False: the bare source, which calls the driver for each buffer.
    managed_memory : bool
        Managed memory, not that of the device.
    initial_pool_size : int or str, optional
        Bytes that the pool has from the start; None: none, where RMM takes half of
        what is free. Of no account without a pool, as is the next one.
    maximum_pool_size : int or str, optional
        Bytes that it may have. None: no limit.
    devices : int or iterable of int, optional
        Ordinals. None: 0.
    logging : bool
        Whether requests and frees are written to a file.
    log_file_name : str or os.PathLike, optional
        Its name, to which ``.dev`` and the ordinal are added before the extension.
        None: that of the option ``log_file``.

    Raises
    ------
    ValueError
        For a size that means nothing, and where no file is named.
    RuntimeError
        When the initial size exceeds the maximum.
    OutOfMemoryError
        When the initial size cannot be had.
    CudaUnavailableError
        When no CUDA device can be expected here.

    Notes
    -----
    The hooks run first, the last that was registered before the others. The old
    resources go before new ones are made, so that a pool may take what another one had;
    after an error the devices that have no new one have the default.

    ``mr.set_per_device_resource(device, None)`` restores the default, a pool that
    reserves nothing at first.

    Examples
    --------
    >>> import numpy_rmm
    >>> from numpy_rmm.testing import simulate_cuda
    >>> with simulate_cuda():
    ...     numpy_rmm.reinitialize(pool_allocator=True, maximum_pool_size="1 GiB")
    ...     numpy_rmm.mr.get_current_device_resource()
    ...     numpy_rmm.mr.set_current_device_resource(None)
    <PoolMemoryResource over <CudaMemoryResource>>
    """
    from numpy_rmm._log_levels import logger

    for function, arguments, keywords in reversed(_hooks):
        function(*arguments, **keywords)
    sizes: list[_Size | None] = [None, None]
    if pool_allocator:
        sizes = [
            _size("initial_pool_size", initial_pool_size),
            _size("maximum_pool_size", maximum_pool_size),
        ]
        _check_sizes(*sizes)
    if devices is None:
        devices = 0
    ordinals = [devices] if isinstance(devices, SupportsIndex) else list(devices)

    _core._reset_device_resources()
    for device in ordinals:
        mr = _source(managed_memory, device)
        if pool_allocator:
            mr = _core.PoolMemoryResource(mr, *sizes)
        if logging:
            mr = _core.LoggingResourceAdaptor(mr, log_file_name)
        _core.set_per_device_resource(device, mr)
        logger.info("the current resource of device %s is %r", device, mr)


def _size(name: str, size: _Size | None) -> _Size | None:
    """Bytes, or the text of a percentage."""
    if size is None or (isinstance(size, str) and "%" in size):
        return size
    try:
        return _core._parse_nbytes(size)
    except ValueError as error:
        raise ValueError(f"Could not parse {name}: {error}") from None


def _check_sizes(initial: _Size | None, maximum: _Size | None) -> None:
    """A pool says the same in its words, as a ValueError; RMM's callers expect this."""
    if isinstance(initial, int) and isinstance(maximum, int) and initial > maximum:
        raise RuntimeError(
            "Initial pool size exceeds the maximum pool size: "
            f"{_core._format_nbytes(initial)} and {_core._format_nbytes(maximum)}"
        )


def _source(managed_memory: bool, device: SupportsIndex) -> MemoryResource:
    if managed_memory:
        return _core.ManagedMemoryResource(device=device)
    return _core.CudaMemoryResource(device=device)


def is_initialized() -> bool:
    """Whether device memory can be asked for: True unless CUDA is unavailable.

    There is nothing to initialise, as each device has a resource from the start, and
    this does not initialise the driver either.

    Examples
    --------
    >>> import numpy_rmm
    >>> from numpy_rmm.testing import simulate_cuda
    >>> with simulate_cuda():
    ...     numpy_rmm.is_initialized()
    True
    """
    try:
        _core._cuda_expect()
    except _core.CudaUnavailableError:
        return False
    return True


def register_reinitialize_hook(
    func: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
) -> Callable[_P, _R]:
    """Have a function called by :func:`reinitialize` before it does anything.

    A library that keeps device memory lets go of it there. Hooks run in the reverse
    order of their registration; one that raises ends the call.

    Parameters
    ----------
    func : callable
        Called as ``func(*args, **kwargs)``; once more for each time that it is
        registered.

    Returns
    -------
    callable
        `func`.

    Raises
    ------
    TypeError
        For what cannot be called.

    Examples
    --------
    >>> import numpy_rmm
    >>> hook = numpy_rmm.register_reinitialize_hook(print, "again")
    >>> numpy_rmm.unregister_reinitialize_hook(hook)
    """
    if not callable(func):
        raise TypeError(f"a hook must be callable, not {type(func).__name__}")
    _hooks.append((func, args, kwargs))
    return func


def unregister_reinitialize_hook(func: Callable[..., Any]) -> None:
    """Forget a hook, however often it was registered; one that is none is no error.

    Parameters
    ----------
    func : callable
        As it was registered.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.unregister_reinitialize_hook(print)
    """
    _hooks[:] = [hook for hook in _hooks if hook[0] != func]
