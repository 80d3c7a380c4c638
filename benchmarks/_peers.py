"""The allocators that ours are compared with: where they are, and how to get them.

A peer that is not there is named in the output together with the way to install it.
One that replaces malloc is preloaded into processes of its own, and whether the loader
did so is looked up there, not assumed: it goes on without a library that it cannot
find.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from _compile import RMM_LIBRARY, CannotCompile, rmm_library


@dataclass(frozen=True)
class Peer:
    how: str  # to get it
    library: str = ""  # that is preloaded
    module: str = ""  # that is imported
    version: str = "getattr(module, '__version__', '')"
    works: str = "True"  # an expression over the module
    needs_gpu: bool = False


_GPU = "and a GPU"
PEERS = {
    "mimalloc": Peer(
        "apt install libmimalloc2.0, or --peers mimalloc=PATH of a newer one, such as "
        "that of pip install cmeel-mimalloc",
        library="mimalloc",
    ),
    "jemalloc": Peer("apt install libjemalloc2", library="jemalloc"),
    "tcmalloc": Peer("apt install libtcmalloc-minimal4", library="tcmalloc_minimal"),
    "numpy-allocator": Peer(
        "pip install numpy-allocator", module="numpy_allocator", version="''"
    ),
    "cupy": Peer(
        f"pip install cupy-cuda13x {_GPU}",
        module="cupy",
        works="module.cuda.runtime.getDeviceCount() > 0",
        needs_gpu=True,
    ),
    "torch": Peer(
        f"pip install torch {_GPU}",
        module="torch",
        works="module.cuda.is_available()",
        needs_gpu=True,
    ),
    "librmm": Peer(
        f"pip install librmm-cu13 {_GPU}, or {RMM_LIBRARY}=FILE of rmm_peer.cpp",
        needs_gpu=True,
    ),
    "rmm": Peer(
        f"pip install rmm-cu13 {_GPU}",
        module="rmm",
        works="bool(module.DeviceBuffer(size=8).size)",
        needs_gpu=True,
    ),
}

# What a preloaded process says of itself: the version, where one can be asked for.
_PRELOADED = """
import ctypes, sys
stem = sys.argv[1]
if not any(stem in line for line in open("/proc/self/maps")):
    sys.exit("the loader did not take it")
library = ctypes.CDLL(None)
if hasattr(library, "mi_version"):
    number = library.mi_version()  # 209 is 2.0.9; newer ones have two digits a part
    if number < 10000:
        print("mimalloc", *str(number))
    else:
        print("mimalloc", number // 10000, number // 100 % 100, number % 100)
elif hasattr(library, "mallctl"):
    text, size = ctypes.c_char_p(), ctypes.c_size_t(8)
    library.mallctl(b"version", ctypes.byref(text), ctypes.byref(size), None, 0)
    print("jemalloc", text.value.decode().split("-")[0])
elif hasattr(library, "tc_version"):
    library.tc_version.restype = ctypes.c_char_p
    print(library.tc_version(None, None, None).decode().replace(".", " ", 1))
"""

_IMPORTED = """
import importlib, sys
name, version, works = sys.argv[1:]
module = importlib.import_module(name)
if not eval(works):
    sys.exit("it does not work here")
print(eval(version))
"""


@dataclass(frozen=True)
class Found:
    library: str = ""
    version: str = ""
    absent: str = ""  # why; empty: it is there


def find(name: str, path: str = "", simulator: bool = False) -> Found:
    """A peer by its name, or any library that replaces malloc by its path."""
    peer = PEERS.get(name)
    if path or (peer and peer.library):
        return _find_preloaded(path, peer)
    if peer is None:
        raise SystemExit(f"no peer is named {name}; NAME=PATH preloads a library")
    if peer.needs_gpu and simulator:
        return Found(absent="it does not run on the simulated driver")
    if name == "librmm":
        return _find_librmm(peer)
    answer, error = _ask(_IMPORTED, peer.module, peer.version, peer.works)
    if error:
        return Found(absent=f"{error}; {peer.how}")
    return Found(version=answer)


# RMM's part needs a device as soon as a resource is made.
_OPENED = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.rmm_peer_open.restype = ctypes.c_void_p
library.rmm_peer_error.restype = ctypes.c_char_p
if not library.rmm_peer_open(b"async", ctypes.c_size_t(0)):
    sys.exit(library.rmm_peer_error().decode())
"""


def _find_librmm(peer: Peer) -> Found:
    """RMM's C++ resources, as a library that nrm_bench opens."""
    try:
        library = rmm_library()
    except CannotCompile as error:
        return Found(absent=f"{_without_paths(str(error))}; {peer.how}")
    _, error = _ask(_OPENED, str(library))
    if error:
        return Found(absent=f"{error}; {peer.how}")
    return Found(library=str(library), version=_version_of("librmm-cu13"))


def _version_of(distribution: str) -> str:
    try:
        return f"librmm {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return "librmm, built elsewhere"


def _find_preloaded(path: str, peer: Peer | None) -> Found:
    library = path
    if path and not Path(path).is_file():
        return Found(absent="there is no such file")
    if not path:
        library = ctypes.util.find_library(peer.library if peer else "") or ""
    if not library:
        return Found(absent=f"not installed; {peer.how}" if peer else "not found")
    library = str(Path(library).resolve()) if path else library
    stem = Path(library).name.split(".so")[0]
    answer, error = _ask(_PRELOADED, stem, LD_PRELOAD=library)
    if error:
        return Found(absent=error)
    words = answer.split()
    version = f"{words[0]} {'.'.join(words[1:])}" if words else "version unknown"
    return Found(library=library, version=version)


def _ask(code: str, *args: str, **environ: str) -> tuple[str, str]:
    """What a program prints, or why it did not."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    return done.stdout.strip(), "" if done.returncode == 0 else _without_paths(
        lines[-1]
    )


def _without_paths(line: str) -> str:
    """An error goes into files that others read."""
    return " ".join(word for word in line.split() if "/" not in word)
