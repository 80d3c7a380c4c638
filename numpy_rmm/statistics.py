"""Counts of what a part of a program allocates, as RMM's module of this name.

>>> import numpy as np, numpy_rmm
>>> from numpy_rmm.statistics import ProfilerRecords, profiler
>>> records = ProfilerRecords()
>>> with numpy_rmm.use_handler("host"), profiler(records=records, name="load"):
...     a = np.zeros(1000)  # float64: 8000 bytes
...     b = a + a
>>> records.records["load"]
MemoryRecord(num_calls=1, memory_total=16000, memory_peak=16000)

A scope counts for the thread that began it: what that thread allocates, and what
becomes of these blocks, whichever thread frees them. What the thread frees of what it
had before makes the current counts negative.

:class:`profiler` counts arrays under any handler and memory of any resource, and
nothing has to be enabled. The functions are about the current device resource, which
counts while it is a :class:`~numpy_rmm.mr.StatisticsResourceAdaptor`: see
:func:`enable_statistics`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

from numpy_rmm import _core
from numpy_rmm._core import (
    CudaUnavailableError,
    StatisticsResourceAdaptor,
    get_current_device_resource,
    set_current_device_resource,
)
from numpy_rmm._decorate import check_function, run_inside
from numpy_rmm._statistics import Statistics

if TYPE_CHECKING:
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "MemoryRecord",
    "ProfilerContext",
    "ProfilerRecords",
    "Statistics",
    "default_profiler_records",
    "enable_statistics",
    "get_statistics",
    "pop_statistics",
    "profiler",
    "push_statistics",
    "statistics",
]


# ---- of the current device resource --------------------------------------------------


def _adaptor() -> StatisticsResourceAdaptor | None:
    """The current device resource, if it counts; without a device nothing does."""
    try:
        mr = get_current_device_resource()
    except CudaUnavailableError:
        return None
    return mr if isinstance(mr, StatisticsResourceAdaptor) else None


def enable_statistics() -> None:
    """Put a statistics adaptor over the current device resource, unless it is one.

    Raises
    ------
    CudaUnavailableError
        Where there is no device.

    Examples
    --------
    >>> import numpy_rmm
    >>> from numpy_rmm.statistics import enable_statistics, get_statistics
    >>> with numpy_rmm.testing.simulate_cuda():
    ...     enable_statistics()
    ...     buffer = numpy_rmm.DeviceBuffer(size=100)
    ...     print(get_statistics())
    ...     del buffer
    ...     numpy_rmm.mr.set_current_device_resource(None)
    Statistics(current_bytes=100, current_count=1, peak_bytes=100, peak_count=1, \
total_bytes=100, total_count=1)
    """
    mr = get_current_device_resource()
    if not isinstance(mr, StatisticsResourceAdaptor):
        set_current_device_resource(StatisticsResourceAdaptor(mr))


def get_statistics() -> Statistics | None:
    """What has been counted up to now.

    Returns
    -------
    Statistics or None
        Of the innermost scope of this thread that :func:`push_statistics` began;
        without one the ``allocation_counts`` of the adaptor, of all threads. None:
        statistics are not enabled.

    Examples
    --------
    See :func:`push_statistics`.
    """
    mr = _adaptor()
    return None if mr is None else _counts_of(mr)


def _counts_of(mr: StatisticsResourceAdaptor) -> Statistics:
    scope = _core._scope_innermost(mr)
    return _core._scope_counts(scope) if scope else mr.allocation_counts


def push_statistics() -> Statistics | None:
    """Begin a scope of this thread, which counts from zero.

    Returns
    -------
    Statistics or None
        What :func:`get_statistics` gave until now.

    Examples
    --------
    >>> import numpy_rmm
    >>> from numpy_rmm.statistics import pop_statistics, push_statistics, statistics
    >>> from numpy_rmm.testing import simulate_cuda
    >>> with simulate_cuda(), statistics():  # in place of a GPU
    ...     buffer = numpy_rmm.DeviceBuffer(size=100)
    ...     before = push_statistics()
    ...     del buffer
    ...     before.current_bytes, pop_statistics().current_bytes
    (100, -100)
    """
    mr = _adaptor()
    if mr is None:
        return None
    counts = _counts_of(mr)
    _core._scope_push(mr)
    return counts


def pop_statistics() -> Statistics | None:
    """End the innermost scope that :func:`push_statistics` began in this thread.

    Returns
    -------
    Statistics or None
        What it has counted; None: statistics are not enabled.

    Raises
    ------
    IndexError
        When no push is left to undo.
    """
    mr = _adaptor()
    if mr is None:
        return None
    scope = _core._scope_innermost(mr)
    return _core._scope_pop(scope) if scope else mr.pop_counters()


@contextmanager
def statistics() -> Iterator[None]:
    """Count inside a ``with`` block, in a scope of its own.

    Where statistics are not enabled they are inside of it, for all threads, and the
    current device resource is afterwards what it was.

    Raises
    ------
    ValueError
        At the end, when the current device resource is another one by then: it stays.
    CudaUnavailableError
        Where there is no device.
    """
    before = get_current_device_resource()
    enable_statistics()
    inside = get_current_device_resource()
    scope = _core._scope_push(inside) if inside is before else 0
    try:
        yield
    finally:
        now = get_current_device_resource()
        if scope:
            _core._scope_pop(scope)
        elif now is inside:
            set_current_device_resource(before)
        if now is not inside:
            raise ValueError(
                "the current device resource was replaced inside of statistics(): it "
                f"was {inside!r}, is {now!r}, and stays that"
            )


# ---- by name -------------------------------------------------------------------------


@dataclass
class MemoryRecord:
    """What a name has used: of all its blocks and calls so far.

    Attributes
    ----------
    num_calls : int
        How often it was entered.
    memory_total : int
        Bytes allocated in all calls.
    memory_peak : int
        The most bytes that one call had at a time, beyond what there was when it began.
    """

    num_calls: int = 0
    memory_total: int = 0
    memory_peak: int = 0

    def add(self, memory_total: int, memory_peak: int) -> None:
        """Add a call, with the bytes that it allocated and had at a time."""
        self.num_calls += 1
        self.memory_total += memory_total
        self.memory_peak = max(self.memory_peak, memory_peak)


_MemoryRecord = MemoryRecord  # inside of the next class, which has the name too


class ProfilerRecords:
    """What a profiler has recorded, by name.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> from numpy_rmm.statistics import ProfilerRecords, profiler
    >>> records = ProfilerRecords()
    >>> for n in 1000, 3000:
    ...     with numpy_rmm.use_handler("host"), profiler(records=records, name="zeros"):
    ...         x = np.zeros(n, np.uint8)
    >>> print(records.report())
    Memory Profiling, in bytes
    Ordered by: memory_peak
    <BLANKLINE>
    ncalls     memory_peak    memory_total  filename:lineno(function)
         2           3,000           4,000  zeros
    """

    MemoryRecord: type[_MemoryRecord] = MemoryRecord

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, _MemoryRecord] = {}

    def add(self, name: str, data: Statistics) -> None:
        """Add a call with its counts; from any thread."""
        with self._lock:
            record = self._records.setdefault(name, self.MemoryRecord())
            record.add(data.total_bytes, data.peak_bytes)

    @property
    def records(self) -> dict[str, _MemoryRecord]:
        """Names to what they have used up to now: a copy."""
        with self._lock:
            return {name: replace(record) for name, record in self._records.items()}

    def report(
        self,
        ordered_by: Literal["num_calls", "memory_peak", "memory_total"] = "memory_peak",
    ) -> str:
        """Return a table of all names, the largest first, in RMM's columns.

        Parameters
        ----------
        ordered_by : {'num_calls', 'memory_peak', 'memory_total'}
            By what they are compared.

        Returns
        -------
        str
            Several lines; sizes are in bytes.

        Raises
        ------
        ValueError
            For another order.
        """
        orders = MemoryRecord.__dataclass_fields__
        if ordered_by not in orders:
            raise ValueError(
                f"the order is one of {', '.join(orders)}, not {ordered_by!r}"
            )
        title = f"Memory Profiling, in bytes\nOrdered by: {ordered_by}\n"
        records = self.records
        if not records:
            return f"{title}\nNo data: nothing that a profiler names has ended yet."
        header = "ncalls     memory_peak    memory_total  filename:lineno(function)"
        lines = [title, header]
        for name in sorted(
            records, key=lambda name: getattr(records[name], ordered_by), reverse=True
        ):
            record = records[name]
            lines.append(
                f"{record.num_calls:6,d} {record.memory_peak:15,d} "
                f"{record.memory_total:15,d}  {name}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.records})"

    def __str__(self) -> str:
        return self.report()


default_profiler_records = ProfilerRecords()


def _get_descriptive_name_of_object(obj: object) -> str:
    """Return where a function is written, and its name: "file:line(name)"."""
    import inspect

    function: Any = inspect.unwrap(cast(Any, obj))
    code = getattr(function, "__code__", None)
    where = (
        f"{code.co_filename}:{code.co_firstlineno}"
        if code is not None
        else getattr(function, "__module__", "?")
    )
    return f"{where}({getattr(function, '__qualname__', repr(function))})"


class ProfilerContext:
    """What :func:`profiler` gives: a decorator, or a context manager if it has a name.

    It can be entered again, nested, and in several threads and tasks at a time. Of
    tasks of one event loop each counts what the thread does until it has ended.
    """

    def __init__(self, records: ProfilerRecords, name: str) -> None:
        self._records = records
        self._name = name
        self._entered = threading.local()  # scopes of this thread, the newest last

    def __enter__(self) -> ProfilerContext:
        if not self._name:
            raise ValueError('a block has no name of its own: profiler(name="...")')
        self._scopes().append(_core._scope_push(None))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scopes = self._scopes()
        if scopes:
            self._records.add(self._name, _core._scope_pop(scopes.pop()))
            return
        warnings.warn(
            f"profiler(name={self._name!r}) is left in a thread that did not enter it: "
            "nothing is recorded",
            RuntimeWarning,
            stacklevel=2,
        )

    def _scopes(self) -> list[int]:
        scopes: list[int] = self._entered.__dict__.setdefault("scopes", [])
        return scopes

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        check_function(
            function,
            "runs in parts, between which others would be counted: profile the loop "
            "over it, or a block in it",
        )
        name = self._name or _get_descriptive_name_of_object(function)
        return run_inside(ProfilerContext(self._records, name), function)


def profiler(
    *, records: ProfilerRecords = default_profiler_records, name: str = ""
) -> ProfilerContext:
    """Record what a function or block allocates, under a name.

    Counted is what the thread asks of any handler and any resource of this package, of
    the host and of devices together, also where no statistics are enabled.

    Parameters
    ----------
    records : ProfilerRecords
        Where it is recorded.
    name : str
        Of the block; a function has one of its own, with its file and line.

    Raises
    ------
    ValueError
        When a block without a name is entered.
    TypeError
        For generator functions.

    Warns
    -----
    RuntimeWarning
        When the block is left in another thread.

    Examples
    --------
    >>> import numpy as np, numpy_rmm
    >>> from numpy_rmm.statistics import ProfilerRecords, profiler
    >>> records = ProfilerRecords()
    >>> @profiler(records=records, name="sum")
    ... def sum_of_squares(x):
    ...     return (x * x).sum()
    >>> with numpy_rmm.use_handler("host"):
    ...     x = np.ones(1000)  # float64: 8000 bytes
    ...     for _ in range(3):
    ...         _ = sum_of_squares(x)
    >>> records.records["sum"].num_calls
    3
    """
    return ProfilerContext(records, name)
