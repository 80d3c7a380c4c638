"""``numpy-rmm run``: an unchanged program, with its arrays under a handler.

The program must not notice: ``__main__`` is a module of its own that stays in place for
threads and exit handlers, ``sys.argv`` and ``sys.path[0]`` are what ``python`` itself
would set, the exit status and signals are the interpreter's own doing, and a traceback
begins at the program's first frame.
"""

from __future__ import annotations

import atexit
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType

import numpy_rmm
from numpy_rmm._cli import UsageError


def run(arguments: Sequence[str]) -> int:
    """Run a program as its arguments say; returns when its main part has ended."""
    handler, stats, target = _parse(arguments)
    is_module = target[0] == "-m"
    if not is_module and not os.path.exists(target[0]):
        raise UsageError(f"can't open file {target[0]!r}: no such file or directory")
    try:
        numpy_rmm.set_handler(handler, scope="process")
    except (ValueError, numpy_rmm.CudaUnavailableError) as error:
        raise UsageError(f"--handler {handler}: {error}") from None
    if stats:
        # The first to register runs last: after the program's threads and exit
        # handlers.
        atexit.register(_print_statistics, numpy_rmm.get_handler())
    try:
        if is_module:
            _run_module(target[1], target[2:])
        else:
            _run_script(target[0], target[1:])
    except BaseException:
        _hide_own_frames()
        raise
    return 0


def _parse(arguments: Sequence[str]) -> tuple[str, bool, list[str]]:
    """Our options end where the program begins."""
    handler, stats = "auto", False
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        option, has_value, value = rest.pop(0).partition("=")
        if option == "--stats" and not has_value:
            stats = True
        elif option == "--handler" and (has_value or rest):
            handler = value if has_value else rest.pop(0)
        elif option == "--":
            break
        elif option == "--handler":
            raise UsageError("--handler needs a name, such as pinned or host")
        else:
            raise UsageError(f"run knows --handler NAME and --stats, not {option}")
    if not rest or (rest[0] == "-m" and len(rest) == 1):
        raise UsageError("run needs a program: SCRIPT or -m MODULE")
    return handler, stats, rest


def _run_module(name: str, arguments: Sequence[str]) -> None:
    _replace_main()
    _set_argv(["-m", *arguments], path0=os.getcwd())
    # What `python -m` itself calls; its frames stand in a traceback there, too.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_script(script: str, arguments: Sequence[str]) -> None:
    if pkgutil.get_importer(script) is not None:  # a directory or zip: its __main__.py
        _replace_main()
        _set_argv([script, *arguments], path0=script)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    path = os.path.abspath(script)
    _set_argv([script, *arguments], path0=os.path.dirname(os.path.realpath(script)))
    code = _read(path)
    main = _replace_main()
    loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
    main.__dict__.update(__file__=path, __loader__=loader("__main__", path))
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None
    exec(code, main.__dict__)


def _read(path: str) -> CodeType:
    with io.open_code(path) as file:
        if path.endswith(".pyc"):
            code: CodeType | None = pkgutil.read_code(file)
            if code is None:
                raise UsageError(f"{path} was compiled by another version of Python")
            return code
        return compile(file.read(), path, "exec", dont_inherit=True)


def _replace_main() -> ModuleType:
    """A fresh ``__main__``, so that the program sees none of our names."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main


def _set_argv(argv: list[str], path0: str) -> None:
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = path0


def _hide_own_frames() -> None:
    """Have an error shown from the program's first frame on, by whoever shows it.

    The error itself goes on to the interpreter, which alone knows how to end a process
    after SystemExit or KeyboardInterrupt.
    """
    show = sys.excepthook

    def show_program(
        kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        own = frames
        while own is not None:
            if own.tb_frame.f_code.co_filename == __file__:
                frames = own.tb_next
            own = own.tb_next
        error.__traceback__ = frames
        show(kind, error, frames)

    sys.excepthook = show_program


def _print_statistics(handler: numpy_rmm.Handler) -> None:
    statistics = handler.statistics()
    if statistics is None:
        return
    peak = f"{_size(statistics.peak_bytes)} in {statistics.peak_count:,} arrays"
    total = f"{_size(statistics.total_bytes)} in {statistics.total_count:,} arrays"
    counts = (
        f"{statistics.waits:,} waits, {statistics.fallbacks:,} fallbacks, "
        f"{statistics.errors:,} errors"
    )
    print(
        f"numpy-rmm: {handler.name}: peak {peak}; total {total}; {counts}",
        file=sys.stderr,
        flush=True,
    )


def _size(nbytes: int) -> str:
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{nbytes} B"
