"""Runs a suite of benchmarks: ``numpy``, ``core``, ``pinned`` or ``device``.

    python benchmarks/run.py numpy --json numpy.json
    python benchmarks/run.py core --peers mimalloc,jemalloc,mi3=/opt/libmimalloc.so.3
    python benchmarks/run.py device --simulator --quick

It prints tables and, with --json, writes the figures with the date and the machine.
docs/benchmarks.md says what each row means.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import _peers
from _compile import CannotCompile
from _suite import Settings, numbers, print_all

SUITES = ("numpy", "core", "pinned", "device")
QUICK_ROUNDS, ROUNDS = 2, 7


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--peers",
        metavar="A,B,NAME=PATH",
        help="peers to run, NAME=PATH preloads a library; 'none'; default: all known",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to try the script"
    )
    parser.add_argument("--rounds", type=int, help=f"turns of each way ({ROUNDS})")
    parser.add_argument("--sizes", type=numbers, default=[], metavar="8,64KiB,1MiB")
    parser.add_argument("--cases", default="", metavar="A,B", help="only these cases")
    parser.add_argument(
        "--handlers", default="host", metavar="A,B", help="names of the registry"
    )
    parser.add_argument(
        "--simulator", action="store_true", help="the simulated CUDA driver"
    )
    parser.add_argument(
        "--build", type=Path, metavar="DIR", help="for the C part (build/benchmarks)"
    )
    parser.add_argument(
        "--program", type=Path, metavar="FILE", help="an nrm_bench built elsewhere"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="core: replay this trace too"
    )
    return parser.parse_args(arguments)


def look_for_peers(
    settings: Settings, text: str | None, known: tuple[str, ...]
) -> None:
    """Fills in who is here and who is not."""
    chosen = list(known) if text is None else [x for x in text.split(",") if x]
    for word in chosen if text != "none" else []:
        name, _, path = word.partition("=")
        if not path and name not in known:
            names = ", ".join(known)
            raise SystemExit(f"this suite knows the peers {names}, not {name}")
        found = _peers.find(name, path, settings.simulator)
        if found.absent:
            settings.absent[name] = found.absent
        else:
            settings.peers[name] = found.library
            settings.versions[name] = found.version


def settings_of(options: argparse.Namespace) -> Settings:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return Settings(
        quick=options.quick,
        rounds=rounds,
        sizes=options.sizes,
        cases=[word for word in options.cases.split(",") if word],
        handlers=[word for word in options.handlers.split(",") if word],
        simulator=options.simulator,
        build=options.build.resolve() if options.build else None,
        program=options.program.resolve() if options.program else None,
        trace=options.trace.resolve() if options.trace else None,
    )


def ours(settings: Settings) -> set[str]:
    """The ways that must not fail; a peer may."""
    return {*settings.handlers, "addresses", "numpy_rmm", "numpy_rmm immediate"}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        suite, function, *args = json.loads(sys.argv[2])
        module = importlib.import_module(f"suites.{suite}")
        print(json.dumps(getattr(module, function)(*args)))
        return
    options = parse()
    if options.simulator:
        os.environ["NUMPY_RMM_CUDA_LIBRARY"] = "simulator"
    settings = settings_of(options)
    module = importlib.import_module(f"suites.{options.suite}")
    unknown = sorted(set(settings.cases) - set(module.CASES))
    if unknown:
        raise SystemExit(f"no case {unknown[0]}; there are {', '.join(module.CASES)}")
    look_for_peers(settings, options.peers, module.PEERS)
    try:
        tables = module.run(settings)
    except CannotCompile as error:
        raise SystemExit(
            f"the {options.suite} suite cannot be built: {error}"
        ) from None
    print_all(options.suite, settings, tables, options.json)
    if any(set(case.failed) & ours(settings) for t in tables for case in t.cases):
        raise SystemExit("something of ours failed: see the notes")


if __name__ == "__main__":
    main()
