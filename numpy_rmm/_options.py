"""Options: the rows of the core's table as a mapping."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from types import TracebackType

from numpy_rmm import _core

__all__ = ["options"]

Value = int | float | bool | str


class OptionScope:
    """Options set for a while: what ``options(name=value)`` returns."""

    def __init__(self, values: dict[str, Value]) -> None:
        for name in values:
            _core._option_get(name)  # an unknown name raises before anything changes
        self._values = values
        self._before: list[dict[str, Value]] = []

    def __enter__(self) -> None:
        before = {name: _core._option_get(name) for name in self._values}
        try:
            for name, value in self._values.items():
                _core._option_set(name, value)
        except BaseException:
            _set_all(before)
            raise
        self._before.append(before)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _set_all(self._before.pop())


def _set_all(values: dict[str, Value]) -> None:
    for name, value in values.items():
        _core._option_set(name, value)


class Options(MutableMapping[str, Value]):
    """Policy with numbers: ``options["pinned_threshold"] = "1 MiB"``.

    The same rows are the environment variables ``NUMPY_RMM_<NAME>``, which are read
    once. Sizes are int (bytes) and can be set from text such as "64 KiB"; times are
    float (seconds), or text such as "20 ms". A change holds for resources and handlers
    made later; "fork" is read at each fork. Options belong to the process, not to a
    context or a thread.

    Raises
    ------
    KeyError
        For a name that is no option.
    TypeError, ValueError
        For a value that the option cannot have; nothing changes.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.options["pinned_threshold"]
    65536
    >>> with numpy_rmm.options(pinned_threshold="1 MiB"):
    ...     numpy_rmm.options["pinned_threshold"]
    1048576
    """

    def __getitem__(self, name: str) -> Value:
        return _core._option_get(name)

    def __setitem__(self, name: str, value: Value) -> None:
        _core._option_set(name, value)

    def __delitem__(self, name: str) -> None:
        """Restore the default."""
        _core._option_set(name, _core._option_row(name)[2])

    def __iter__(self) -> Iterator[str]:
        return iter(_core._option_names())

    def __len__(self) -> int:
        return len(_core._option_names())

    def __call__(self, **values: Value) -> OptionScope:
        """Set options inside a ``with`` block, and put them back after it."""
        return OptionScope(values)

    def __repr__(self) -> str:
        return f"options({dict(self)!r})"


options = Options()
