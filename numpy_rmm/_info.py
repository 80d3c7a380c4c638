"""What works here, and why the rest does not."""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np

from numpy_rmm import _capture_hooks, _core

__all__ = ["Info", "info"]


class Info(dict[str, Any]):
    """Nested dicts, printed as a page."""

    def __repr__(self) -> str:
        return "\n".join(_lines(self, ""))


def info() -> Info:
    """What works here and why not, as a dict that prints as a page.

    CUDA is asked, but not initialised: devices stand there once something has used
    them.

    Returns
    -------
    dict
        With the keys "numpy_rmm", "handler", "process_scope", "registry", "cuda",
        "system", "options" and "errors". Sizes are in bytes; the page has units.

    Examples
    --------
    >>> import numpy_rmm
    >>> page = numpy_rmm.info()
    >>> page["options"]["pinned_threshold"]["value"]
    '64 KiB'
    """
    return Info(
        numpy_rmm=_versions(),
        handler=_handler(),
        process_scope=_process_scope(),
        registry=_registry(),
        cuda=_cuda(),
        system=_core._system_info(),
        options=_options(),
        errors=_errors(),
    )


# ---- the parts -----------------------------------------------------------------------


def _versions() -> dict[str, Any]:
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return {
        "version": _core.__version__,
        "python": platform.python_version() + ("" if gil else " (free-threaded)"),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def _handler() -> dict[str, Any]:
    handler = _core.get_handler()
    described: dict[str, Any] = {"name": handler.name}
    if handler.resource is not None:
        described["resource"] = repr(handler.resource)
        if handler.threshold is not None:
            described["threshold_nbytes"] = handler.threshold
        described["fallback"] = repr(handler.fallback)
        described |= _counters(handler.statistics())
    return described


def _process_scope() -> dict[str, Any]:
    module = sys.modules.get("numpy_rmm._process_scope")
    if module is None:
        return {"handler": None, "reached": [], "not_reached": []}
    report: dict[str, Any] = module.report()
    return report


def _counters(statistics: _core.ResourceStatistics | None) -> dict[str, int]:
    """Those that are not zero."""
    if statistics is None:
        return {}
    names = _core.ResourceStatistics.__match_args__
    return {name: value for name in names if (value := getattr(statistics, name))}


def _registry() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    unavailable = _unavailable()
    for name in _core._registry_names():
        made = _core._registry_peek(name)
        if made is not None:
            rows[name] = {"resource": repr(made), **_counters(made.statistics())}
        elif unavailable and _core._registry_needs_cuda(name):
            rows[name] = "cannot work here"
        else:
            rows[name] = "not made yet"
    return rows


def _unavailable() -> str:
    """Why no device can be expected; empty: one can."""
    try:
        _core._cuda_expect()
    except _core.CudaUnavailableError as error:
        return str(error)
    return ""


def _cuda() -> dict[str, Any]:
    why_not = _unavailable()
    if why_not:
        return {"available": False, "reason": why_not}
    driver = _core._cuda_driver()
    major, minor = divmod(driver["version"], 1000)
    cuda: dict[str, Any] = {
        "available": True,
        "library": driver["library"],
        "driver_version": f"{major}.{minor // 10}" if major else None,
        "simulated": driver["simulated"],
        "initialized": driver["initialized"],
    }
    if driver["missing"]:
        cuda["missing"] = driver["missing"]
    if driver["forked"]:
        cuda["forked"] = "this process was forked after cuInit, and cannot use CUDA"
    if _capture_hooks.hooked:
        cuda["capture_hooks"] = dict(_capture_hooks.hooked)
    for device in range(driver["n_devices"]):
        cuda[f"device {device}"] = _core._cuda_device(device)
    return cuda


def _options() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in _core._option_names():
        environment, value, default, source, choices, meaning = _core._option_row(name)
        rows[name] = {
            "value": value,
            "default": default,
            "source": source,
            "environment": environment,
            "choices": choices.split("|") if choices else [],
            "meaning": meaning,
        }
    return rows


def _errors() -> dict[str, Any]:
    first, count = _core._lost_error()
    errors: dict[str, Any] = {"wrong_frees": count}
    if first is not None:
        errors["first_wrong_free"] = first.message
    last = _core.last_error()
    if last is not None:
        errors["last_in_this_thread"] = last.message
    return errors


# ---- the page ------------------------------------------------------------------------


def _lines(value: dict[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for key, item in value.items():
        if indent == "" and lines:
            lines.append("")
        lines += _row(key, item, indent)
    return lines


def _row(key: str, item: Any, indent: str) -> list[str]:
    if isinstance(item, dict) and set(item) >= {"value", "source", "meaning"}:
        return [f"{indent}{key}: {_option_text(item)}"]
    if isinstance(item, dict) and key == "attributes":
        return [f"{indent}{key}:", *_attributes(item, indent + "  ")]
    if isinstance(item, dict):
        return [f"{indent}{key}:", *_lines(item, indent + "  ")]
    if isinstance(item, list):
        return [f"{indent}{key}: {'; '.join(map(str, item)) or '-'}"]
    return [f"{indent}{key.removesuffix('_nbytes')}: {_text(key, item)}"]


def _option_text(option: dict[str, Any]) -> str:
    value = option["value"] or '""'
    if option["source"] == "default":
        return f"{value} ({option['meaning']})"
    source = option["source"]
    if source in ("environment", "invalid"):
        source = f"{option['environment']}"
        source += " could not be read" if option["source"] == "invalid" else ""
    default = option["default"] or '""'
    return f"{value} (from {source}; default {default}; {option['meaning']})"


def _attributes(attributes: dict[str, int], indent: str) -> list[str]:
    """Several to a line; those that the driver does not have are left out."""
    lines, line = [], indent
    for name, value in attributes.items():
        if value < 0:
            continue
        part = f"{name.lower()} {value}, "
        if len(line) + len(part) > 88:
            lines.append(line.rstrip())
            line = indent
        line += part
    return [*lines, line.rstrip(", ")]


def _size(nbytes: int) -> str:
    """Rounded, as a person wants it."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _text(key: str, item: Any) -> str:
    if item is None:
        return "no limit" if "limit" in key else "-"
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, int) and key.endswith(("_nbytes", "_bytes")):
        return _size(item)
    if isinstance(item, tuple):
        return ".".join(map(str, item))
    return str(item)
