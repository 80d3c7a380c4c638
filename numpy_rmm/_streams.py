"""What a new stream can be, by RMM's names."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CudaStreamFlags"]


class CudaStreamFlags(IntEnum):
    """Whether a new stream is ordered with the legacy default stream.

    >>> import numpy_rmm
    >>> int(numpy_rmm.CudaStreamFlags.NON_BLOCKING)
    1
    """

    SYNC_DEFAULT = 0
    NON_BLOCKING = 1
