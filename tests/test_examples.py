"""The examples in the docstrings of all modules, also of the private ones."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import numpy_rmm

NOT_MODULES = ("__main__", "libnumpy_rmm_cudasim")  # a program, and a plain library
MODULES = sorted(
    f"numpy_rmm.{name}"
    for _, name, _ in pkgutil.iter_modules(numpy_rmm.__path__)
    if name not in NOT_MODULES
)
MODULES.append("numpy_rmm")  # where the types of the core say that they are


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name: str) -> None:
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, optionflags=flags)
    assert result.failed == 0
