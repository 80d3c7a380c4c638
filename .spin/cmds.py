"""The developers' commands: ``spin test``, ``spin lint`` and so on (``spin
--help``)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
PASSED_ON = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


def run(*command: str | Path, **environ: str) -> None:
    """Run a command in the root with this interpreter's own tools first on the path."""
    words = [str(word) for word in command]
    click.secho("$ " + " ".join(words), bold=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, **environ}
    status = subprocess.run(words, cwd=ROOT, env=env, check=False).returncode
    if status != 0:
        raise SystemExit(status)


def python(*arguments: str | Path, **environ: str) -> None:
    run(sys.executable, *arguments, **environ)


@click.command(context_settings=PASSED_ON)
@click.argument("arguments", nargs=-1)
def test(arguments: tuple[str, ...]) -> None:
    """Run every test, C tests included; ARGUMENTS go to pytest."""
    run("pytest", "-n", "auto", *arguments)


@click.command()
@click.option("--fix", is_flag=True, help="Format and mend what can be mended.")
def lint(fix: bool) -> None:
    """Check formats, types, stubs, and that both compilers have nothing to say."""
    sources = [
        path
        for folder in ("src", "tests", "benchmarks")
        for pattern in ("*.c", "*.h")
        for path in sorted((ROOT / folder).rglob(pattern))
    ]
    if fix:
        run("ruff", "check", "--fix", ".")
        run("ruff", "format", ".")
        run("clang-format", "-i", *sources)
    run("ruff", "check", ".")
    run("ruff", "format", "--check", ".")
    run("clang-format", "--dry-run", "--Werror", *sources)
    run("mypy")
    python("-m", "mypy.stubtest", "numpy_rmm", "--allowlist", ".spin/stubtest.txt")
    # Some of gcc's warnings come of what its optimiser finds out; none of clang's do.
    if shutil.which("gcc") is not None:
        python("tests/builds.py", "gcc")
    if shutil.which("clang") is not None:
        check_with_clang()


def check_with_clang() -> None:
    """Have clang read every file with the options that it is compiled with."""
    words = [sys.executable, "tests/builds.py", "--only-set-up", "clang"]
    build = Path(subprocess.check_output(words, cwd=ROOT, text=True).strip())
    entries = json.loads((build / "compile_commands.json").read_text())

    def check(entry: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [*shlex.split(entry["command"]), "-fsyntax-only"]
        folder = entry["directory"]
        return subprocess.run(
            command, cwd=folder, stderr=subprocess.PIPE, text=True, check=False
        )

    click.secho(f"$ clang -fsyntax-only, {len(entries)} files", bold=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(check, entries))
    print(*(one.stderr for one in done if one.stderr), sep="", end="")
    if any(one.returncode != 0 for one in done):
        raise SystemExit(1)


@click.command(context_settings=PASSED_ON)
@click.argument("arguments", nargs=-1)
def asan(arguments: tuple[str, ...]) -> None:
    """Run the C tests under AddressSanitizer and UndefinedBehaviorSanitizer."""
    sanitize("address,undefined", arguments)


@click.command(context_settings=PASSED_ON)
@click.argument("arguments", nargs=-1)
def tsan(arguments: tuple[str, ...]) -> None:
    """Run the C tests under ThreadSanitizer."""
    sanitize("thread", arguments)


@click.command(context_settings=PASSED_ON)
@click.argument("arguments", nargs=-1)
def valgrind(arguments: tuple[str, ...]) -> None:
    """Run the C tests under Valgrind's memcheck, which takes half an hour or so."""
    sanitize("valgrind", arguments)


def sanitize(names: str, arguments: tuple[str, ...]) -> None:
    words = ["pytest", "-n", "auto", "tests/test_c.py", *arguments]
    run(*words, NUMPY_RMM_TEST_SANITIZE=names)


@click.command(context_settings=PASSED_ON)
@click.argument("arguments", nargs=-1)
def numpy_suite(arguments: tuple[str, ...]) -> None:
    """Run NumPy's own tests under a handler: ``spin numpy-suite host``."""
    python("tests/numpy_suite.py", *arguments)


@click.command(context_settings=PASSED_ON)
@click.argument("checkout", type=click.Path(exists=True))
@click.argument("arguments", nargs=-1)
def rmm_suite(checkout: str, arguments: tuple[str, ...]) -> None:
    """Run RMM's own Python tests of CHECKOUT, a copy of rapidsai/rmm; --gpu: all of
    them."""
    python("tests/compat/run.py", Path(checkout).resolve(), *arguments)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--json", "folder", type=click.Path(), help="Folder for the figures.")
def bench(names: tuple[str, ...], folder: str | None) -> None:
    """Run the benchmarks NAMES, scripts and suites, or all that need no GPU."""
    suites = ("all", "numpy", "core", "pinned", "device", "reuse", "device_python")
    for name in names or ("arithmetic", "first_fill", "import_time", "numpy", "core"):
        words = ["run.py", name] if name in suites else [f"{name}.py"]
        arguments = (
            ["--json", Path(folder).resolve() / f"{name}.json"] if folder else []
        )
        python(f"benchmarks/{words[0]}", *words[1:], *arguments)


@click.command()
def docs() -> None:
    """Check the pages: every link leads somewhere, every example says what it
    prints."""
    python(".spin/tables.py")
    run("pytest", "-q", "tests/test_docs.py", "tests/test_examples.py")
