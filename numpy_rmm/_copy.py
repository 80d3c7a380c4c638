"""Copies between NumPy arrays and memory of devices.

What the driver can do with the strides of both sides is planned in C. Here both sides
are read and compared; and where a host array would become many small pieces, which
the stream does not take as batches, or the two sides overlap, a contiguous buffer goes
between them.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from numpy_rmm import _core

__all__ = ["copyto"]

Strides = tuple[int, ...]

_TO_DEVICE, _TO_HOST, _WITHIN = 0, 1, 2

# A host array that would be copied in more calls, or narrower rows, goes over a buffer;
# unless the calls are batches of pieces that are not shorter than the last of these.
_MAX_CALLS = 16
_MIN_ROW_NBYTES = 64
_MIN_PIECE_NBYTES = 4096

# Bytes that differences of addresses can count.
_MAX_EXTENT = (1 << 63) - 1

# Older versions of the interface do not say enough.
_MIN_VERSION = 2


class _HasIndex(Protocol):
    def __index__(self) -> int: ...


class _HasCudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class _HasCudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...


class _Side:
    """One end of a copy: where its elements lie, and who said so."""

    __slots__ = (
        "_bounds",
        "address",
        "dtype",
        "owner",
        "producer",
        "readonly",
        "shape",
        "strides",
    )

    def __init__(
        self,
        owner: object,
        address: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: Strides | None = None,
        readonly: bool = False,
        producer: int | None = None,
    ) -> None:
        self.owner = owner
        self.address = address
        self.dtype = dtype
        self.shape = shape
        self.strides = _dense(shape, dtype.itemsize) if strides is None else strides
        self.readonly = readonly
        self.producer = producer
        self._bounds: tuple[int, int] | None = None

    @property
    def array(self) -> NDArray[Any] | None:
        return self.owner if isinstance(self.owner, np.ndarray) else None

    def bounds(self) -> tuple[int, int]:
        """First byte, and the one behind the last."""
        if self._bounds is None:
            low = high = self.address
            for n, stride in zip(self.shape, self.strides, strict=True):
                reach = (n - 1) * stride
                low, high = (low + reach, high) if reach < 0 else (low, high + reach)
            self._bounds = low, high + self.dtype.itemsize
        return self._bounds

    def overlaps(self, other: _Side) -> bool:
        first, second = self.bounds(), other.bounds()
        return first[0] < second[1] and second[0] < first[1]


def _dense(shape: tuple[int, ...], itemsize: int) -> Strides:
    """The strides of a C-contiguous array."""
    strides = []
    for n in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(n, 1)
    return tuple(reversed(strides))


# ---- reading an argument -------------------------------------------------------------


def _dtype_of(value: object, interface: dict[str, Any]) -> np.dtype[Any]:
    """Of ours as it is; fields of others stand in ``descr``, padding without a name."""
    if isinstance(value, _core.DeviceArray):
        return value.dtype
    dtype: np.dtype[Any] = np.dtype(interface["typestr"])
    fields = interface.get("descr") or ()
    if dtype.kind == "V" and any(field[0] for field in fields):
        dtype = np.lib.format.descr_to_dtype([tuple(field) for field in fields])
    return dtype


def _integers(name: str, what: str, values: object) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)  # type: ignore[attr-defined]
    except TypeError:
        raise TypeError(
            f"{name}: {what} of __cuda_array_interface__ must be a tuple of int, not "
            f"{values!r}"
        ) from None


def _check_interface(name: str, interface: object) -> None:
    if not isinstance(interface, dict):
        raise TypeError(
            f"{name}: __cuda_array_interface__ must be a dict, not "
            f"{type(interface).__name__}"
        )
    version = interface.get("version", 0)
    if not isinstance(version, int) or version < _MIN_VERSION:
        raise ValueError(
            f"{name}: __cuda_array_interface__ of version {version!r} is too old, "
            f"version {_MIN_VERSION} or later is needed"
        )
    missing = {"data", "shape", "typestr"} - interface.keys()
    if missing:
        raise ValueError(
            f"{name}: __cuda_array_interface__ has no {', '.join(sorted(missing))}"
        )
    if interface.get("mask") is not None:
        raise TypeError(f"{name}: an array with a mask cannot be copied")


def _data_of(name: str, interface: dict[str, Any]) -> tuple[int, bool]:
    """Address, and whether it may only be read."""
    data = interface["data"]
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(
            f"{name}: data of __cuda_array_interface__ must be (address, read-only), "
            f"not {data!r}"
        )
    return _integers(name, "data", (data[0] or 0,))[0], bool(data[1])


def _of_interface(name: str, value: object, interface: dict[str, Any]) -> _Side:
    _check_interface(name, interface)
    dtype = _dtype_of(value, interface)
    shape = _integers(name, "shape", interface["shape"])
    if shape and min(shape) < 0:
        raise ValueError(f"{name}: an axis cannot have {min(shape)} elements")
    strides = interface.get("strides")
    if strides is not None:
        strides = _integers(name, "strides", strides)
        if len(strides) != len(shape):
            raise ValueError(f"{name}: {len(shape)} axes, and {len(strides)} strides")
    producer = interface.get("stream")
    if producer == 0:
        raise ValueError(
            f"{name}: stream 0 of __cuda_array_interface__ is ambiguous; 1 is the "
            "legacy default stream, and 2 the per-thread one"
        )
    address, readonly = _data_of(name, interface)
    return _Side(value, address, dtype, shape, strides, readonly, producer)


def _is_address(value: object) -> bool:
    """An int, or what stands for one; arrays of other libraries have an index, too."""
    if isinstance(value, int | np.integer):
        return True
    is_array = any(
        hasattr(value, name)
        for name in ("__cuda_array_interface__", "__array__", "__dlpack__")
    )
    return not is_array and hasattr(value, "__index__")


def _read(name: str, value: Any, other: Any) -> _Side:
    """The side that an argument means; a bare address is read like the other side."""
    if isinstance(value, np.ndarray):
        return _Side(
            value,
            value.ctypes.data,
            value.dtype,
            value.shape,
            value.strides,
            not value.flags.writeable,
        )
    if _is_address(value):
        if _is_address(other):
            raise TypeError("copyto: of two addresses, none says a shape and a dtype")
        address = operator.index(value)
        if address < 0 or address >= 1 << 64:
            raise ValueError(f"{name}: {address} is no address")
        like = _read("src" if name == "dst" else "dst", other, None)
        _check_dtype(like.dtype)
        nbytes = math.prod(like.shape) * like.dtype.itemsize
        _core._copy_fits(name, address, nbytes)
        return _Side(value, address, like.dtype, like.shape)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _of_interface(name, value, interface)
    raise TypeError(
        f"{name} must be a numpy.ndarray, an object with __cuda_array_interface__ or "
        f"an address (int), not {type(value).__name__}"
    )


def _check_dtype(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise TypeError("copyto does not copy Python objects")


def _check_bounds(name: str, side: _Side) -> None:
    first, end = side.bounds()
    if first < 0 or end > 1 << 64 or end - first > _MAX_EXTENT:
        raise ValueError(
            f"{name}: shape {side.shape} and strides {side.strides} lead from "
            f"{side.address} to {first} and {end}, where no addresses are"
        )


def _check(dst: _Side, src: _Side) -> None:
    if dst.dtype != src.dtype:
        raise TypeError(
            f"copyto does not convert: dst has dtype {dst.dtype}, src {src.dtype}"
        )
    _check_dtype(dst.dtype)
    if dst.shape != src.shape:
        raise ValueError(
            f"copyto does not broadcast: dst has shape {dst.shape}, src {src.shape}"
        )
    if dst.readonly:
        raise ValueError("copyto: dst is read-only")
    if 0 not in dst.shape:
        _check_bounds("dst", dst)
        _check_bounds("src", src)


# ---- submitting ----------------------------------------------------------------------


def _submit(
    dst: _Side, src: _Side, stream: _core.Stream, waits: bool, between: object = None
) -> _core.Pending:
    direction = _WITHIN
    if src.array is not None:
        direction = _TO_DEVICE
    elif dst.array is not None:
        direction = _TO_HOST
    return _core._copy_submit(
        dst.owner,
        src.owner,
        between,
        dst.address,
        src.address,
        direction,
        dst.dtype.itemsize,
        dst.shape,
        dst.strides,
        src.strides,
        stream,
        waits,
    )


def _behind(dst: _Side, src: _Side, stream: _core.Stream, waits: bool) -> _core.Pending:
    """No copy, as both are the same memory: done when the stream has come that far."""
    for side in (dst, src):
        side.shape, side.strides = (0,), (0,)
    return _submit(dst, src, stream, waits)


def _is_captured(dst: _Side, src: _Side, stream: _core.Stream) -> bool:
    return _core._copy_ways(dst.owner, src.owner, src.address, stream)[0]


def _goes_over_host(dst: _Side, src: _Side, stream: _core.Stream) -> bool:
    """Whether a copy becomes pieces so small that a buffer is faster."""
    n_calls, n_rows, width = _core._copy_plan(
        dst.dtype.itemsize, dst.shape, dst.strides, src.strides
    )
    is_narrow = n_rows > 1 and width < _MIN_ROW_NBYTES
    if n_calls <= _MAX_CALLS and not is_narrow:
        return False
    host = dst if src.array is None else src
    captured, batches = _core._copy_ways(dst.owner, src.owner, host.address, stream)
    if captured:  # a graph copies what the arrays hold when it runs, not what they held
        return False
    return n_rows > 1 or not batches or width < _MIN_PIECE_NBYTES


def _buffer_like(side: _Side) -> NDArray[Any]:
    """A dense host array whose axes lie in memory as those of a side do."""
    order = sorted(range(len(side.shape)), key=lambda axis: -abs(side.strides[axis]))
    dense = np.empty(tuple(side.shape[axis] for axis in order), side.dtype)
    buffer = dense.transpose(tuple(int(axis) for axis in np.argsort(order)))
    backwards = tuple(
        slice(None, None, -1 if stride < 0 else 1) for stride in side.strides
    )
    return buffer[backwards]


def _over_host(
    dst: _Side, src: _Side, stream: _core.Stream, waits: bool
) -> _core.Pending:
    """With one host side, over a buffer in the order of the other one."""
    if src.array is not None:
        buffer = _buffer_like(dst)
        np.copyto(buffer, src.array)
        return _submit(dst, _read("src", buffer, None), stream, waits, src.owner)
    assert dst.array is not None
    buffer = _buffer_like(src)
    _submit(_read("dst", buffer, None), src, stream, True).wait()
    np.copyto(dst.array, buffer)
    return _core._copy_done(dst.owner, src.owner)


def _over_device(
    dst: _Side, src: _Side, stream: _core.Stream, waits: bool
) -> _core.Pending:
    """Between overlapping memory of a device, over memory of the pool "device"."""
    from numpy_rmm._registry import registry

    pool = registry["device"]
    nbytes = math.prod(src.shape) * src.dtype.itemsize
    address = pool.allocate(nbytes, stream)
    try:
        buffer = _Side(None, address, src.dtype, src.shape)
        _submit(buffer, src, stream, waits)
        return _submit(dst, buffer, stream, waits, src.owner)
    finally:
        pool.deallocate(address, nbytes, stream)


def _start(dst: _Side, src: _Side, stream: _core.Stream, waits: bool) -> _core.Pending:
    if dst.array is not None and src.array is not None:
        np.copyto(dst.array, src.array)
        return _core._copy_done(dst.owner, src.owner)
    if 0 in dst.shape or dst.dtype.itemsize == 0:
        return _core._copy_done(dst.owner, src.owner)
    for side in (dst, src):
        producer: Any = side.producer
        if isinstance(side.owner, _core.DeviceBuffer | _core.DeviceArray):
            producer = side.owner
        if producer is not None:
            _core._copy_wait_for(dst.owner, src.owner, stream, producer, side.address)
    has_host = dst.array is not None or src.array is not None
    if dst.overlaps(src):
        if (dst.address, dst.strides) == (src.address, src.strides):
            return _behind(dst, src, stream, waits)
        if has_host and not _is_captured(dst, src, stream):
            return _over_host(dst, src, stream, waits)
        return _over_device(dst, src, stream, waits)
    if has_host and _goes_over_host(dst, src, stream):
        return _over_host(dst, src, stream, waits)
    return _submit(dst, src, stream, waits)


_Stream = _core.Stream | _HasCudaStream | int
_End = NDArray[Any] | _HasCudaArray | _HasIndex


@overload
def copyto(
    dst: _End, src: _End, *, stream: _Stream = ..., blocking: Literal[True] = ...
) -> None: ...
@overload
def copyto(
    dst: _End, src: _End, *, stream: _Stream = ..., blocking: Literal[False]
) -> _core.Pending: ...
@overload
def copyto(
    dst: _End, src: _End, *, stream: _Stream = ..., blocking: bool
) -> _core.Pending | None: ...
def copyto(
    dst: _End,
    src: _End,
    *,
    stream: _Stream = _core.DEFAULT_STREAM,
    blocking: bool = True,
) -> _core.Pending | None:
    """Copy an array to another one, of which one may be on a device.

    Parameters
    ----------
    dst, src : numpy.ndarray, object with ``__cuda_array_interface__``, or int
        Where to, and where from, with equal shapes and dtypes: nothing is broadcast or
        converted. Any strides. An address of device memory is taken as a C-contiguous
        array like the other side. Two NumPy arrays are copied by :func:`numpy.copyto`.
    stream : Stream, object with ``__cuda_stream__``, or int
        On which the copy is made, after what was submitted to it, after what the
        streams that the arrays name in ``__cuda_array_interface__`` have been given,
        and those of a DeviceBuffer or DeviceArray.
    blocking : bool
        Whether to wait for the copy.

    Returns
    -------
    Pending or None
        With ``blocking=False`` an object with ``wait()``, ``done`` and ``result()``,
        which keeps both ends alive.

    Raises
    ------
    TypeError
        For dtypes that differ, Python objects, masks, and what is no array or stream.
    ValueError
        For shapes that differ, a `dst` that is read-only, an address in a block of
        ours that the other side does not fit into, and strides that lead beyond all
        addresses.
    NotImplementedError
        For a copy on a stream that is captured, when it is `blocking` or between
        devices that do not reach each other's memory. Nothing is captured then.
    CudaError
        When the driver failed.

    Notes
    -----
    The use of pinned and managed memory is noted, as by :func:`record_use`. A copy is
    as few calls of the driver as the strides allow, with many pieces in one call where
    the stream takes batches, which the legacy default one does not. A host array that
    would fall into many small pieces goes over a contiguous buffer, and so do arrays
    that overlap; a copy to the host over a buffer is waited for in any case. With
    pageable host memory the driver may wait in the call: only page-locked memory is
    copied while the program goes on.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> x, y = np.arange(6).reshape(2, 3), np.empty((3, 2), int)
    >>> numpy_rmm.copyto(y, x.T)
    >>> y.tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    if not isinstance(stream, _core.Stream):
        stream = _core._copy_stream(stream)
    to, source = _read("dst", dst, src), _read("src", src, dst)
    _check(to, source)
    pending = _start(to, source, stream, bool(blocking))
    if not blocking:
        return pending
    pending.wait()
    return None
