"""The tables of the pages that the core knows by itself: options and resources.

python .spin/tables.py          # writes them into docs/
python .spin/tables.py --check  # says where they are not what the core says
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy_rmm
from numpy_rmm import _core

DOCS = Path(__file__).resolve().parents[1] / "docs"


def options() -> Iterator[str]:
    yield "| option | default | choices | what it means |"
    yield "|---|---|---|---|"
    for name in _core._option_names():
        _, _, default, _, choices, meaning = _core._option_row(name)
        listed = ", ".join(f"`{choice}`" for choice in choices.split("|") if choice)
        shown = f"`{default}`" if default else "none"
        yield f"| `{name}` | {shown} | {listed} | {meaning} |"


def resources() -> Iterator[str]:
    yield "| resource | memory | what it is |"
    yield "|---|---|---|"
    for _, name, kind, signature in _core._resource_rows():
        said = (getattr(numpy_rmm.mr, name).__doc__ or "").partition("\n")[0]
        memory = {"upstream": "its upstream's", "any": "as told"}.get(kind, kind)
        yield f"| `{name}({signature})` | {memory} | {said} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "options": options,
    "resources": resources,
}


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    stale = []
    for name, rows in TABLES.items():
        page = DOCS / f"{name}.md"
        text = page.read_text()
        table = "\n".join([f"<!-- table: {name} -->", *rows(), "<!-- end -->"])
        pattern = rf"<!-- table: {name} -->.*?<!-- end -->"
        new = re.sub(pattern, lambda _, table=table: table, text, flags=re.DOTALL)
        if new != text:
            stale.append(page.name)
            if not check:
                page.write_text(new)
    if check and stale:
        print(f"not what the core says: {', '.join(stale)}; run .spin/tables.py")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
