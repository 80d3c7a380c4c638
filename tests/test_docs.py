"""The pages: links that lead somewhere, examples that print what they say.

The examples of a page run in a process of their own, as they set handlers; on a
simulated device where the page asks for one with ``<!-- simulated device -->``. Those
of the docstrings are run by test_examples.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import numpy_rmm

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def identify(path: Path) -> str:
    return str(path.relative_to(ROOT))


def heading_anchors(text: str) -> set[str]:
    """The names under which a page's headings can be linked to."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?)\s*$", outside, re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (
            anchor and anchor not in heading_anchors(path.read_text())
        ):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_every_page_can_be_reached(page: Path) -> None:
    if page.parent == ROOT or page.name == "index.md":
        return
    others = [other.read_text() for other in PAGES if other != page]
    assert any(page.name in text for text in others)


RUN = """\
import doctest, sys
import numpy_rmm
simulated, name = sys.argv[1:]
if simulated == "yes":
    import numpy_rmm.testing
    numpy_rmm.testing.simulate_cuda().__enter__()
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
result = doctest.testfile(name, module_relative=False, optionflags=flags)
sys.exit(result.failed != 0)
"""


@pytest.mark.parametrize(
    "page", [page for page in PAGES if ">>> " in page.read_text()], ids=identify
)
def test_the_examples_of_a_page_print_what_they_say(page: Path, tmp_path: Path) -> None:
    is_simulated = "<!-- simulated device -->" in page.read_text()
    command = [sys.executable, "-c", RUN, "yes" if is_simulated else "no", page]
    environ = {key: os.environ[key] for key in os.environ if "NUMPY_RMM_" not in key}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def plain_blocks(page: Path) -> list[str]:
    """The Python of a page that is no session and wants no other library, in order."""
    pattern = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    blocks = pattern.findall(page.read_text())
    return [block for block in blocks if not re.search(r">>> |\btorch\b", block)]


@pytest.mark.parametrize("page", [p for p in PAGES if plain_blocks(p)], ids=identify)
def test_the_python_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    tests = "for name in [x for x in globals() if x[:5] == 'test_']: globals()[name]()"
    script.write_text("\n".join([*plain_blocks(page), tests]))
    environ = {key: os.environ[key] for key in os.environ if "NUMPY_RMM_" not in key}
    environ["NUMPY_RMM_CUDA_LIBRARY"] = "simulator"
    command = [sys.executable, script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_index_lists_every_name() -> None:
    index = (ROOT / "docs" / "index.md").read_text().partition("## All names")[2]
    names = {name for cell in re.findall(r"`(\w+)`", index) for name in cell.split()}
    assert set(numpy_rmm.__all__) - names == set()


def test_the_tables_are_what_the_core_says() -> None:
    command = [sys.executable, ROOT / ".spin" / "tables.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
