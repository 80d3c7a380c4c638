"""Functions that run inside a context each time they are called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

__all__ = ["check_function", "run_inside"]

P = ParamSpec("P")
R = TypeVar("R")


def check_function(function: Any, why_no_generator: str) -> None:
    """Raise TypeError for what is no function, or runs in parts."""
    if not callable(function):
        raise TypeError(f"a function is needed, not {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"a generator {why_no_generator}")


def run_inside(
    context: AbstractContextManager[object], function: Callable[P, R]
) -> Callable[P, R]:
    """Return the function with the context entered in it, also inside a coroutine."""
    if inspect.iscoroutinefunction(function):

        async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            with context:
                return await cast(Any, function)(*args, **kwargs)

        return cast(Callable[P, R], functools.wraps(function)(call_async))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with context:
            return function(*args, **kwargs)

    return call
