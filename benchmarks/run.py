"""Runs a suite of benchmarks: ``numpy``, ``core``, ``pinned``, ``device``, ``reuse`` or
``device_python``; or, of all of them, what the targets ask for.

    python benchmarks/run.py all --limit 480 --json all.json
    python benchmarks/run.py numpy --json numpy.json
    python benchmarks/run.py core --peers mimalloc,jemalloc,mi3=/opt/libmimalloc.so.3
    python benchmarks/run.py device --simulator --quick

Each table is printed as soon as it is done and, with --json, the figures are written
after every case, with the date and the machine: a run that is ended keeps what it has.
docs/benchmarks.md says what each row means.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import sys
from pathlib import Path

import _peers
from _bench import GIB, KIB, MIB
from _compile import CannotCompile
from _progress import CannotRun, Clock, Failed, OutOfTime
from _suite import Run, Settings, Table, numbers

SUITES = ("numpy", "core", "pinned", "device", "reuse", "device_python")
QUICK_ROUNDS, ROUNDS = 2, 7

# What `all` measures, in this order: the cases that targets are about, and the sizes.
UP_TO_1_MIB = [4 * KIB, 64 * KIB, 256 * KIB, MIB]
ALL: tuple[tuple[str, str, list[int]], ...] = (
    ("numpy", "c_empty", [8, 64, 512, KIB, *UP_TO_1_MIB]),
    ("numpy", "c_zeros", [8, 64, 512, KIB]),
    (
        "numpy",
        "empty_together",
        [*UP_TO_1_MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB],
    ),
    ("core", "pair", [64, 64 * KIB, MIB]),
    ("core", "live", []),
    ("core", "threads", []),
    ("core", "handoff", []),
    ("core", "fragmentation", []),
    ("core", "grow", []),
    ("device", "c_pair", []),
    ("device", "c_live", []),
    ("device", "c_random", []),
    ("device", "c_multi_stream", []),
    ("device", "c_threads", []),
    ("device", "c_fragmentation", []),
    ("device", "c_grow", []),
    ("device_python", "buffer", []),
    ("device_python", "pair", []),
    ("device_python", "interface", []),
    ("device_python", "current", []),
    ("device_python", "stream", []),
    ("device_python", "wrap", []),
    ("device_python", "c_current", []),
    ("device_python", "c_stack", []),
    ("pinned", "c_pair", []),
    ("pinned", "growth", []),
    ("pinned", "c_grow", []),
    ("reuse", "use", []),
    ("reuse", "c_use", []),
    ("reuse", "c_copies", []),
    ("reuse", "endless", []),
    ("reuse", "torch_copies", []),
    ("reuse", "chain", []),
    ("reuse", "fill", []),
    ("reuse", "c_park", []),
    ("reuse", "c_idle_pair", []),
    ("numpy", "chain", [256 * KIB, MIB, 4 * MIB]),
    ("numpy", "patterns", []),
    ("numpy", "resize", []),
    ("numpy", "realloc", []),
    ("numpy", "add_together", [64 * MIB, 256 * MIB, GIB]),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=("all", *SUITES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--peers",
        metavar="A,B,NAME=PATH",
        help="peers to run, NAME=PATH preloads a library; 'none'; default: all known",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to try the script"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="for the whole run; what does not fit is named, not shortened",
    )
    parser.add_argument(
        "--targets",
        action="store_true",
        help="end with what is met and what is missed (as 'all' does)",
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
        clock=Clock(options.limit),
        sizes=options.sizes,
        cases=[word for word in options.cases.split(",") if word],
        handlers=[word for word in options.handlers.split(",") if word],
        simulator=options.simulator,
        build=options.build.resolve() if options.build else None,
        program=options.program.resolve() if options.program else None,
        trace=options.trace.resolve() if options.trace else None,
    )


def ours_failed(settings: Settings, tables: list[Table]) -> set[str]:
    """A peer may fail, ours must not."""
    names = ("numpy_rmm", "addresses", *settings.handlers)
    failed = (way for table in tables for case in table.cases for way in case.failed)
    return {way for way in failed if way.startswith(names)}


def run_one(run: Run, options: argparse.Namespace, settings: Settings) -> None:
    module = importlib.import_module(f"suites.{options.suite}")
    unknown = sorted(set(settings.cases) - set(module.CASES))
    if unknown:
        raise SystemExit(f"no case {unknown[0]}; there are {', '.join(module.CASES)}")
    look_for_peers(settings, options.peers, module.PEERS)
    run.begin(options.suite, settings)
    try:
        module.run(run)
    except OutOfTime as error:
        run.output.show(f"the rest of {options.suite} is left out: {error}")
    except CannotCompile as error:
        raise SystemExit(
            f"the {options.suite} suite cannot be built: {error}"
        ) from None


# What targets compare with; of the others a brief run has no use.
BRIEF_PEERS = {
    "core": ("mimalloc",),
    "pinned": ("librmm",),
    "device": ("librmm",),
    "reuse": ("torch",),
}


def run_all(run: Run, options: argparse.Namespace, settings: Settings) -> None:
    """Suite by suite, in turns where that is the order of `ALL`; what cannot run here
    says why and the others go on."""
    chosen = [word for word in (options.peers or "").split(",") if word]
    of_suite: dict[str, Settings] = {}
    for suite in SUITES:
        mine = of_suite[suite] = dataclasses.replace(
            settings, brief=True, peers={}, absent={}, versions={}
        )
        known = BRIEF_PEERS.get(suite, ())
        words = [w for w in chosen if w.partition("=")[0] in known]
        look_for_peers(mine, ",".join(words) if chosen else None, known)
    unable: set[str] = set()
    for suite, case, sizes in ALL:
        if suite in unable or (settings.cases and case not in settings.cases):
            continue
        mine = dataclasses.replace(
            of_suite[suite], cases=[case], sizes=[] if settings.quick else sizes
        )
        module = importlib.import_module(f"suites.{suite}")
        run.begin(suite, mine)
        try:
            module.run(run)
        except (CannotCompile, CannotRun, OutOfTime, Failed) as error:
            unable.add(suite)
            run.output.show(f"{suite} is left out: {error}")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        suite, function, *args = json.loads(sys.argv[2])
        module = importlib.import_module(f"suites.{suite}")
        print(json.dumps(getattr(module, function)(*args)))
        return
    options = parse()
    if options.simulator:
        os.environ["NUMPY_RMM_CUDA_LIBRARY"] = "simulator"
    run = Run(options.suite, options.json)
    if options.suite == "all":
        run_all(run, options, settings_of(options))
    else:
        try:
            run_one(run, options, settings_of(options))
        except CannotRun as error:
            raise SystemExit(str(error)) from None
    run.finish(with_targets=options.targets or options.suite == "all")
    if ours_failed(run.settings, run.tables) or any(t.has_failed for t in run.tables):
        raise SystemExit("something of ours failed: see the notes")


if __name__ == "__main__":
    main()
