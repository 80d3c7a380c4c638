"""Where the C headers are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["get_include"]


def get_include() -> str:
    """Directory of the C headers, for extensions that include ``nrm/import.h``.

    Returns
    -------
    str
        An absolute path.

    Examples
    --------
    >>> import os, numpy_rmm
    >>> os.path.exists(os.path.join(numpy_rmm.get_include(), "nrm", "import.h"))
    True
    """
    package = Path(__file__).resolve().parent
    installed = package / "include"
    # An editable install leaves the headers in the source tree.
    return str(installed if installed.is_dir() else package.parent / "src" / "include")
