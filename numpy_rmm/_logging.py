"""Logs of the current resources of devices, as RMM has them.

>>> import numpy_rmm
>>> numpy_rmm.get_log_filenames()  # doctest: +SKIP
{0: 'rmm_log.dev0.csv'}
"""

from __future__ import annotations

import os
import sys
from typing import Any

from numpy_rmm import _core, mr

_watched: list[Any] = []  # multiprocessing.util, once it knows of us


def _devices() -> range:
    _core._cuda_initialize()
    return range(_core._cuda_driver()["n_devices"])


def enable_logging(log_file_name: str | os.PathLike[str] | None = None) -> None:
    """Log what is allocated from the current resource of each device.

    Each one that is not a :class:`~numpy_rmm.mr.LoggingResourceAdaptor` already gets
    one over it.

    Parameters
    ----------
    log_file_name : str or os.PathLike, optional
        The file, with ``.dev0`` before its extension for device 0. None: the option
        ``log_file``.

    Raises
    ------
    ValueError
        When there is no name.
    OSError
        When a file cannot be written. Devices before it are logged.
    CudaUnavailableError
        When CUDA cannot be used.
    """
    for device in _devices():
        resource = mr.get_per_device_resource(device)
        if not isinstance(resource, mr.LoggingResourceAdaptor):
            log = mr.LoggingResourceAdaptor(resource, log_file_name)
            mr.set_per_device_resource(device, log)


def disable_logging() -> None:
    """Take the logs away that :func:`enable_logging` has put over resources.

    What was logged is in the files. Buffers that were allocated meanwhile go on with
    their logs.

    Raises
    ------
    OSError
        When rows of a log were lost; they are taken away all the same.
    """
    failures = []
    for device in _devices():
        log = mr.get_per_device_resource(device)
        if isinstance(log, mr.LoggingResourceAdaptor):
            mr.set_per_device_resource(device, log.upstream)
            try:
                log.flush()
            except OSError as error:
                failures.append(error)
    if failures:
        raise failures[0]


def get_log_filenames() -> dict[int, str | None]:
    """Return the name of the log of each device.

    Returns
    -------
    dict
        Ordinals of devices, and names of files; None where nothing is logged.
    """
    resources = {device: mr.get_per_device_resource(device) for device in _devices()}
    return {
        device: resource.get_file_name()
        if isinstance(resource, mr.LoggingResourceAdaptor)
        else None
        for device, resource in resources.items()
    }


def _watch_children() -> None:
    """Before a fork: a child of multiprocessing writes its rows when it ends."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _watched:
        _watched.append(util)
        util.register_after_fork(_core, _drain_at_end)


def _drain_at_end(core: Any) -> None:
    _watched[0].Finalize(None, core._log_drain, exitpriority=0)


def _log_outstanding(text: str) -> None:
    import logging

    logging.getLogger("numpy_rmm").debug("Outstanding allocations: %s", text)
