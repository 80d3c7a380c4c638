"""RMM's levels, for the logger that tells what this package does.

Messages go to the logger ``numpy_rmm`` of :mod:`logging`, so that a program sends them
where it sends its own; RMM's functions are other names for what can be done with that.
"""

from __future__ import annotations

import logging
from enum import IntEnum

__all__ = [
    "flush_logger",
    "get_flush_level",
    "get_logging_level",
    "level_enum",
    "set_flush_level",
    "set_logging_level",
    "should_log",
]

logger = logging.getLogger("numpy_rmm")


class level_enum(IntEnum):
    """RMM's levels of messages.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.level_enum.info.name
    'info'
    """

    trace = 0
    debug = 1
    info = 2
    warn = 3
    error = 4
    critical = 5
    off = 6
    n_levels = 7


# What logging calls them: 10 is its DEBUG, 50 its CRITICAL, nothing has more.
_NUMBERS = (5, 10, 20, 30, 40, 50, 60, 70)
_flush_level = level_enum.info


def _number(level: level_enum) -> int:
    if not isinstance(level, level_enum):
        raise TypeError(f"level must be a level_enum, not {type(level).__name__}")
    return _NUMBERS[level]


def set_logging_level(level: level_enum) -> None:
    """Have messages of a level, and of those above it, logged.

    Parameters
    ----------
    level : level_enum
        The lowest one; ``off``: none are.

    Raises
    ------
    TypeError
        For anything but a ``level_enum``.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.set_logging_level(numpy_rmm.level_enum.warn)
    >>> numpy_rmm.get_logging_level().name
    'warn'
    """
    logger.setLevel(_number(level))


def get_logging_level() -> level_enum:
    """The lowest level that is logged; as long as none is set, that of the program.

    Examples
    --------
    See :func:`set_logging_level`.
    """
    effective = logger.getEffectiveLevel()
    return next(
        (level for level in level_enum if _NUMBERS[level] >= effective),
        level_enum.n_levels,
    )


def should_log(level: level_enum) -> bool:
    """Whether a message of this level would be logged.

    Parameters
    ----------
    level : level_enum
        Of the message.

    Returns
    -------
    bool

    Raises
    ------
    TypeError
        For anything but a ``level_enum``.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.should_log(numpy_rmm.level_enum.critical)
    True
    """
    return logger.isEnabledFor(_number(level))


def set_flush_level(level: level_enum) -> None:
    """Have messages of a level written at once by handlers that keep them back.

    These are those of the logger with a ``flushLevel``, as
    ``logging.handlers.MemoryHandler`` has; all others write at once whatever the level.

    Parameters
    ----------
    level : level_enum
        The lowest one that is written at once.

    Raises
    ------
    TypeError
        For anything but a ``level_enum``.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.set_flush_level(numpy_rmm.level_enum.warn)
    >>> numpy_rmm.get_flush_level().name
    'warn'
    >>> numpy_rmm.set_flush_level(numpy_rmm.level_enum.info)
    """
    global _flush_level
    number = _number(level)
    for handler in logger.handlers:
        if hasattr(handler, "flushLevel"):
            handler.flushLevel = number
    _flush_level = level


def get_flush_level() -> level_enum:
    """What :func:`set_flush_level` was given last; ``info`` at first.

    Examples
    --------
    See :func:`set_flush_level`.
    """
    return _flush_level


def flush_logger() -> None:
    """Have what handlers of the logger keep back written.

    Examples
    --------
    >>> import numpy_rmm
    >>> numpy_rmm.flush_logger()
    """
    for handler in logger.handlers:
        handler.flush()
