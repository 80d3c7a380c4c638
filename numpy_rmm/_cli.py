"""The command ``numpy-rmm``: ``info``, ``demo`` and ``run``.

The command line is read by hand, since what follows the program's name in ``run``
belongs to the program: an option parser would look for its own options there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

USAGE = """\
usage: numpy-rmm COMMAND

  info            what works on this machine, and why the rest does not
  demo [FILE.npy] normalise images under NumPy's default memory and under the best
                  handler here, and compare; FILE.npy: images of your own
  run [--handler NAME] [--stats] SCRIPT [ARGUMENT ...]
  run [--handler NAME] [--stats] -m MODULE [ARGUMENT ...]
                  run an unchanged program with its NumPy arrays under a handler;
                  --stats prints the peak and the counts to stderr at the end
"""


class UsageError(Exception):
    """What the user typed cannot be carried out; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status (2: it was asked for wrongly)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else ""
    is_help = command in ("-h", "--help", "help") or bool(
        {"-h", "--help"} & set(arguments[:1])
    )
    try:
        if command == "run" and not is_help:
            from numpy_rmm._run import run

            return run(arguments)
        return report("help" if is_help else command, arguments)
    except UsageError as error:
        print(f"numpy-rmm: {error}", file=sys.stderr)
        return 2


def report(command: str, arguments: Sequence[str]) -> int:
    """Run one of the commands that print something of their own."""
    try:
        status = print_report(command, arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has enough: nothing is left to be flushed at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def print_report(command: str, arguments: Sequence[str]) -> int:
    if command == "help":
        print(USAGE, end="")
        return 0
    if command == "info":
        return info(arguments)
    if command == "demo":
        from numpy_rmm._demo import demo

        return demo(arguments)
    if command == "--version":
        return version()
    given = f"unknown command {command!r}" if command else "no command given"
    raise UsageError(f"{given}; the commands are info, demo and run")


def info(arguments: Sequence[str]) -> int:
    import numpy_rmm

    if arguments:
        raise UsageError(f"info takes no arguments, {arguments[0]!r} was given")
    # So that the devices can be listed; why they cannot is part of what is printed.
    with contextlib.suppress(numpy_rmm.CudaError):
        numpy_rmm._core._cuda_initialize()
    print(numpy_rmm.info())
    return 0


def version() -> int:
    import numpy_rmm

    print(f"numpy-rmm {numpy_rmm.__version__}")
    return 0
