"""Page-locked, managed, huge-page and pooled memory for unchanged NumPy programs.

>>> import numpy as np, numpy_rmm
>>> with numpy_rmm.use_handler("host"):
...     x = np.ones((1000, 1000))
>>> numpy_rmm.memory_kind(x)
'host'

New arrays get their memory from the handler of the current context: set one with
:func:`set_handler`, or for a while with :func:`use_handler`. On a machine with a GPU,
``numpy_rmm.pinned()`` makes copies to and from it run at full rate.
"""

from __future__ import annotations

TYPE_CHECKING = False  # of typing, which need not be imported for it

try:
    from numpy_rmm._core import (
        DEFAULT_STREAM,
        LEGACY_DEFAULT_STREAM,
        PER_THREAD_DEFAULT_STREAM,
        ArrayInfo,
        CudaError,
        CudaUnavailableError,
        DeviceArray,
        DeviceBuffer,
        DeviceScalar,
        ErrorInfo,
        Event,
        Handler,
        OutOfMemoryError,
        Pending,
        ResourceStatistics,
        Stream,
        StreamPool,
        __version__,
        array_info,
        as_dlpack_pinned,
        copy_device_to_ptr,
        copy_host_to_ptr,
        copy_ptr_to_host,
        get_handler,
        get_handler_name,
        is_pinned,
        last_error,
        memory_kind,
        pin,
        record_use,
        to_device,
        trim,
    )
except ModuleNotFoundError as error:
    if error.name != "numpy_rmm._core":
        raise
    raise ImportError(
        "numpy_rmm is not built: in its source folder run `python -m pip install "
        "--no-build-isolation -e .` with meson-python, ninja and numpy>=2.0 installed"
    ) from None

if TYPE_CHECKING:
    from numpy_rmm import allocators, mr, statistics, testing
    from numpy_rmm._capture import stream_capture
    from numpy_rmm._copy import copyto
    from numpy_rmm._creation import (
        empty_like_pinned,
        empty_pinned,
        zeros_like_pinned,
        zeros_pinned,
    )
    from numpy_rmm._handlers import (
        assert_active,
        host,
        managed,
        pinned,
        reset_handler,
        set_handler,
        use_handler,
    )
    from numpy_rmm._include import get_include
    from numpy_rmm._info import info
    from numpy_rmm._log_levels import (
        flush_logger,
        get_flush_level,
        get_logging_level,
        level_enum,
        set_flush_level,
        set_logging_level,
        should_log,
    )
    from numpy_rmm._logging import (
        disable_logging,
        enable_logging,
        get_log_filenames,
    )
    from numpy_rmm._options import options
    from numpy_rmm._registry import registry
    from numpy_rmm._reinitialize import (
        RMMError,
        is_initialized,
        register_reinitialize_hook,
        reinitialize,
        unregister_reinitialize_hook,
    )
    from numpy_rmm._statistics import Statistics
    from numpy_rmm._streams import CudaStreamFlags

__all__ = [
    "DEFAULT_STREAM",
    "LEGACY_DEFAULT_STREAM",
    "PER_THREAD_DEFAULT_STREAM",
    "ArrayInfo",
    "CudaError",
    "CudaStreamFlags",
    "CudaStreamPool",
    "CudaUnavailableError",
    "DeviceArray",
    "DeviceBuffer",
    "DeviceScalar",
    "ErrorInfo",
    "Event",
    "Handler",
    "OutOfMemoryError",
    "Pending",
    "RMMError",
    "ResourceStatistics",
    "Statistics",
    "Stream",
    "StreamPool",
    "__version__",
    "allocators",
    "array_info",
    "as_dlpack_pinned",
    "assert_active",
    "copy_device_to_ptr",
    "copy_host_to_ptr",
    "copy_ptr_to_host",
    "copyto",
    "disable_logging",
    "empty_like_pinned",
    "empty_pinned",
    "enable_logging",
    "flush_logger",
    "get_flush_level",
    "get_handler",
    "get_handler_name",
    "get_include",
    "get_log_filenames",
    "get_logging_level",
    "host",
    "info",
    "is_initialized",
    "is_pinned",
    "last_error",
    "level_enum",
    "managed",
    "memory_kind",
    "mr",
    "options",
    "pin",
    "pinned",
    "record_use",
    "register_reinitialize_hook",
    "registry",
    "reinitialize",
    "reset_handler",
    "set_flush_level",
    "set_handler",
    "set_logging_level",
    "should_log",
    "statistics",
    "stream_capture",
    "testing",
    "to_device",
    "trim",
    "unregister_reinitialize_hook",
    "use_handler",
    "zeros_like_pinned",
    "zeros_pinned",
]

CudaStreamPool = StreamPool  # as RMM calls it

from numpy_rmm import _capture_hooks  # noqa: E402 - where a build is missing it says less

_capture_hooks.watch()

# Where the names live that are made at their first use (PEP 562).
_MODULES = {"allocators", "mr", "statistics", "testing"}
_PLACES = {
    "CudaStreamFlags": "_streams",
    "RMMError": "_reinitialize",
    "Statistics": "_statistics",
    "assert_active": "_handlers",
    "copyto": "_copy",
    "disable_logging": "_logging",
    "empty_like_pinned": "_creation",
    "empty_pinned": "_creation",
    "enable_logging": "_logging",
    "flush_logger": "_log_levels",
    "get_flush_level": "_log_levels",
    "get_include": "_include",
    "get_log_filenames": "_logging",
    "get_logging_level": "_log_levels",
    "host": "_handlers",
    "info": "_info",
    "is_initialized": "_reinitialize",
    "level_enum": "_log_levels",
    "managed": "_handlers",
    "options": "_options",
    "pinned": "_handlers",
    "register_reinitialize_hook": "_reinitialize",
    "registry": "_registry",
    "reinitialize": "_reinitialize",
    "reset_handler": "_handlers",
    "set_flush_level": "_log_levels",
    "set_handler": "_handlers",
    "set_logging_level": "_log_levels",
    "should_log": "_log_levels",
    "stream_capture": "_capture",
    "unregister_reinitialize_hook": "_reinitialize",
    "use_handler": "_handlers",
    "zeros_like_pinned": "_creation",
    "zeros_pinned": "_creation",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"numpy_rmm.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'numpy_rmm' has no attribute {name!r}")
    value: object = getattr(import_module(f"numpy_rmm.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
