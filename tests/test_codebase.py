"""The rules that the source keeps by agreement, so that they are kept."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import numpy_rmm
from numpy_rmm import _core

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"

# Who may include whom, besides its own folder and the public headers nrm/*.h.
BELOW_POOLS = ("base", "os", "cuda", "core")
MAY_INCLUDE: dict[str, tuple[str, ...]] = {
    "include": (),
    "base": (),
    "os": ("base",),
    "cuda": ("base", "os"),
    "core": ("base", "os", "cuda"),
    "sources": BELOW_POOLS,
    "pools": BELOW_POOLS,
    "adaptors": BELOW_POOLS,
    "builtin.c": (*BELOW_POOLS, "sources", "pools", "adaptors"),
    "python": (*BELOW_POOLS, "sources", "pools", "adaptors"),
    "cudasim": ("cuda/abi.h",),
}
LIBRARIES = re.compile(
    r"lib(c|m|dl|pthread|rt|gcc_s|asan|ubsan|tsan)\.so\.\d+|ld-linux-.*\.so\.\d+"
)


def sources() -> list[Path]:
    return sorted([*SRC.rglob("*.[ch]"), *SRC.rglob("*.def")])


def includes(path: Path) -> Iterator[tuple[str, bool]]:
    """The names that a file includes, and whether in quotes."""
    pattern = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)
    for quote, name in pattern.findall(path.read_text()):
        yield name, quote == '"'


def layer(path: Path) -> str:
    return path.relative_to(SRC).parts[0]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(SRC)))
def test_a_file_includes_only_what_its_layer_may(path: Path) -> None:
    own = layer(path)
    sees_python = own == "python" or path.name == "import.h"  # for other extensions
    allowed = MAY_INCLUDE.get(own, ())
    wrong = []
    for name, is_quoted in includes(path):
        if not is_quoted:
            if name == "Python.h" or name.startswith("numpy/"):
                wrong += [] if sees_python else [name]
            wrong += [name] if name.startswith(("cuda", "nv")) else []
        elif "/" not in name:  # beside the file, or a table of the root
            found = (path.parent / name).exists() or (SRC / name).exists()
            wrong += [] if found else [name]
        elif name.startswith("nrm/"):
            wrong += [name] if own == "cudasim" else []
        elif not (name.split("/")[0] in (own, *allowed) or name in allowed):
            wrong.append(name)
    assert wrong == []


def test_a_line_of_c_has_88_columns_at_most() -> None:
    """clang-format sees to the code, but not to comments; text may stand as it is."""
    long = {
        f"{path.relative_to(ROOT)}:{number}": line
        for folder in ("src", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.[ch]")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 88 and '"' not in line and not line.endswith("\\")
    }
    assert long == {}


def test_a_c_test_has_600_lines_at_most() -> None:
    files = (ROOT / "tests" / "c").glob("*.[ch]")
    lengths = {path.name: path.read_text().count("\n") for path in files}
    assert {name: n for name, n in lengths.items() if n > 600} == {}


def test_python_h_comes_first() -> None:
    for path in SRC.glob("python/*.c"):
        first = next(includes(path), ("", False))[0]
        assert first == "Python.h" or first.endswith(".h"), path.name
        if first != "Python.h":  # its own header then begins with it
            header = path.parent / Path(first).name
            assert next(includes(header))[0] == "Python.h", path.name


def test_only_the_abi_test_sees_the_toolkit() -> None:
    seen = {
        path.name
        for path in [*sources(), *(ROOT / "tests" / "c").glob("*.[ch]")]
        for name, _ in includes(path)
        if name == "cuda.h"
    }
    assert seen <= {"test_abi.c"}


# ---- the extension -------------------------------------------------------------------


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_extension_exports_its_init_and_the_api_only() -> None:
    lines = tool("nm", "-D", "--defined-only", _core.__file__).splitlines()
    exported = {line.split()[-1].split("@")[0] for line in lines}
    headers = "".join(path.read_text() for path in SRC.rglob("*.h"))
    pattern = r"NRM_API\b[^;{]*?\b(nrm_+\w+)\s*(?:\(|;|\[)"
    assert "PyInit__core" in exported
    assert exported - {"PyInit__core"} <= set(re.findall(pattern, headers))


def test_the_extension_needs_no_driver() -> None:
    dynamic = tool("readelf", "-d", _core.__file__)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert [name for name in needed if not LIBRARIES.fullmatch(name)] == []


# ---- the version ---------------------------------------------------------------------


def test_the_version_is_one() -> None:
    meson = (ROOT / "meson.build").read_text()
    declared = re.search(r"^  version: '(.+)',$", meson, re.MULTILINE)
    assert declared is not None
    assert numpy_rmm.__version__ == declared[1]
    assert _core.__version__ == declared[1]


def test_the_installed_version_is_the_same() -> None:
    from importlib import metadata

    try:
        installed = metadata.version("numpy-rmm")
    except metadata.PackageNotFoundError:
        pytest.skip("imported from a path, not installed")
    assert installed == numpy_rmm.__version__


def test_the_changelog_has_a_heading_for_the_version() -> None:
    version = numpy_rmm.__version__.partition(".dev")[0]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


# ---- the public names ----------------------------------------------------------------

PUBLIC_MODULES = [
    "numpy_rmm",
    "numpy_rmm.allocators",
    "numpy_rmm.mr",
    "numpy_rmm.statistics",
    "numpy_rmm.testing",
]


def public_names() -> list[tuple[str, str]]:
    return [
        (name, attribute)
        for name in PUBLIC_MODULES
        for attribute in getattr(__import__(name, fromlist=["_"]), "__all__", [])
    ]


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_a_public_module_lists_its_names(name: str) -> None:
    module = __import__(name, fromlist=["_"])
    assert module.__doc__
    assert len(module.__all__) == len(set(module.__all__))
    assert [x for x in module.__all__ if not hasattr(module, x)] == []
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize(("module", "name"), public_names())
def test_a_public_name_says_what_it_is(module: str, name: str) -> None:
    value = getattr(__import__(module, fromlist=["_"]), name)
    if callable(value) or isinstance(value, types.ModuleType):
        assert inspect.getdoc(value), f"{module}.{name} has no docstring"
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", pages) or re.search(
        rf"^.*\b{name}\b.*$", "".join(code_blocks(pages)), re.MULTILINE
    ), f"{module}.{name} is on no page of docs/"
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", changes), f"{name} is no change"


@pytest.mark.parametrize(("module", "name"), public_names())
def test_a_public_name_tells_its_parameters(module: str, name: str) -> None:
    value = getattr(__import__(module, fromlist=["_"]), name)
    is_base = inspect.isclass(value) and (
        issubclass(value, Exception)
        or "has no constructor" in (inspect.getdoc(value) or "")
    )
    if callable(value) and not is_base:
        inspect.signature(value)


def code_blocks(pages: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)


def test_the_extension_has_a_stub_for_every_name() -> None:
    tree = ast.parse((ROOT / "numpy_rmm" / "_core.pyi").read_text())
    stubbed = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            stubbed.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            stubbed.add(node.target.id)
        elif isinstance(node, ast.Assign):
            stubbed |= {x.id for x in node.targets if isinstance(x, ast.Name)}
    ours = {name for name in vars(_core) if not name.startswith("__")}
    assert ours - stubbed == set()


def test_every_python_file_is_installed() -> None:
    """A file that meson.build does not name works in an editable install only."""
    package = ROOT / "numpy_rmm"
    named = set(re.findall(r"'([\w./]+)'", (package / "meson.build").read_text()))
    there = {
        str(path.relative_to(package))
        for pattern in ("*.py", "*.pyi", "py.typed")
        for path in package.rglob(pattern)
    }
    assert there - named == set()
