"""What the tests of device buffers share."""

from __future__ import annotations

from typing import Any

from numpy_rmm import DeviceBuffer, mr


def live(resource: mr.MemoryResource) -> tuple[int, int]:
    statistics = resource.statistics()
    return statistics.current_count, statistics.current_bytes


class Theirs:
    """Memory of another library."""

    def __init__(self, buffer: DeviceBuffer, **more: object) -> None:
        self.buffer = buffer
        self.more = more

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.buffer.__cuda_array_interface__, **self.more}
