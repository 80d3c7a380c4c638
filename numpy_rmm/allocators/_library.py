"""The libraries that the modules of this folder are for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def library(name: str, package: str) -> Any:
    """The module `name`; its absence says what to install."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install {package}", name=error.name
        ) from None
