"""The registry: names to resources."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from numpy_rmm import _core
from numpy_rmm._core import MemoryResource

__all__ = ["registry"]


class Registry(MutableMapping[str, MemoryResource]):
    """Names to resources, of host and device memory: one table for the process.

    The built-in names are pools ("host", "huge_pages", "pinned", "managed", "device")
    and the bare sources under them ("host_direct", "pinned_direct", "managed_direct",
    "device_direct"), and "device_async", of the driver's own pool. ``registry[name]``
    makes what a built-in name stands for at its first use; iteration, ``in``, ``len``
    and ``repr`` make nothing. Assigning to a name
    holds for handlers made from now on, deleting a built-in name restores what it stood
    for. Names have 1 to 64 printable ASCII characters, without ':' and '#'.

    Raises
    ------
    KeyError
        For a name that is not known; the message lists those that are.
    CudaUnavailableError
        For a known name that cannot work here.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.registry["small"] = numpy_rmm.mr.PoolMemoryResource(
    ...     numpy_rmm.registry["host_direct"], maximum_pool_size="1 GiB")
    >>> with numpy_rmm.use_handler("small") as handler:
    ...     handler.resource is numpy_rmm.registry["small"]
    True
    >>> del numpy_rmm.registry["small"]
    """

    def __getitem__(self, name: str) -> MemoryResource:
        return _core._registry_get(name)

    def __setitem__(self, name: str, resource: MemoryResource) -> None:
        _core._registry_set(name, resource)

    def __delitem__(self, name: str) -> None:
        _core._registry_delete(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_core._registry_names())

    def __len__(self) -> int:
        return len(_core._registry_names())

    def __contains__(self, name: object) -> bool:
        return _core._registry_contains(name)

    def __repr__(self) -> str:
        rows = []
        for name in self:
            made = _core._registry_peek(name)
            state = "not made yet" if made is None else repr(made)
            rows.append(f"  {name!r}: {state},\n")
        return f"registry({{\n{''.join(rows)}}})"


registry = Registry()
