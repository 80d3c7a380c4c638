"""What a statistics adaptor counts, as RMM's callers expect it.

>>> from numpy_rmm import Statistics
>>> Statistics(100, 1, 200, 2, 300, 3).peak_bytes
200
"""

from __future__ import annotations

from typing import NamedTuple


class Statistics(NamedTuple):
    """Counts of a scope of a :class:`~numpy_rmm.mr.StatisticsResourceAdaptor`.

    Attributes
    ----------
    current_bytes, current_count : int
        Live blocks, in requested bytes. Negative in a scope that freed more of what it
        found than it allocated.
    peak_bytes, peak_count : int
        The largest of these so far, at least 0.
    total_bytes, total_count : int
        All blocks so far.
    """

    current_bytes: int
    current_count: int
    peak_bytes: int
    peak_count: int
    total_bytes: int
    total_count: int
