"""Processes end, and fork, with arrays alive: as without us."""

from __future__ import annotations

import textwrap

import pytest

NAMES = ["host", "huge_pages", "host_direct", "pinned", "pinned_direct", "managed"]

HOLD = """
import atexit, sys, threading, types
import numpy as np, numpy_rmm
atexit.register(lambda: late.append(np.ones(1000) + 1))
from numpy_rmm import mr
numpy_rmm.set_handler({name!r}, scope="process")
mine = mr.PoolMemoryResource(mr.HostMemoryResource())
late = []
held = [np.ones(n) for n in (1, 100, 10_000, 1_000_000)]
local = threading.local()
local.array = np.ones(100_000)
module = types.ModuleType("holder")
module.array = np.ones(100_000)
sys.modules["holder"] = module
atexit.register(held.append, np.ones(3))
class Cycle: pass
cycle = Cycle()
cycle.me, cycle.array = cycle, np.ones(100_000)
with numpy_rmm.use_handler(mine):
    own = np.ones(10_000)
def forever():
    keep = np.ones(50_000)
    threading.Event().wait()
threading.Thread(target=forever, daemon=True).start()
"""

ENDINGS = {
    "normal": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an error": ("raise OSError('told')", 1, "OSError: told"),
    "sys.exit in a thread": (
        "t = threading.Thread(target=sys.exit); t.start(); t.join()",
        0,
        "",
    ),
    "os._exit": ("import os; os._exit(5)", 5, ""),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", NAMES)
def test_the_exit_is_as_without_us(name: str, ending: str, run_python) -> None:  # type: ignore[no-untyped-def]
    code, status, text = ENDINGS[ending]
    done = run_python(HOLD.format(name=name) + code)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1:] or [""]
    assert last[0] == text
    assert "Exception ignored" not in done.stderr


def test_a_text_parser_in_a_daemon_thread_at_exit(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import threading, time
        import numpy as np, numpy_rmm
        text = " ".join(["7"] * 3_000_000)
        handler = numpy_rmm.use_handler("pinned", threshold=0).handler
        def parse():
            while True:
                handler.run(np.fromstring, text, sep=" ")
        for _ in range(2):
            threading.Thread(target=parse, daemon=True).start()
        time.sleep(0.3)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


FORK = """
import gc, os, sys, warnings
import numpy as np, numpy_rmm
name, use_first = {name!r}, {use_first!r}
numpy_rmm.set_handler(name)
inherited = [np.full(n, n, np.int64) for n in (3, 1000, 100_000)] if use_first else []
child = os.fork()
if child == 0:
    warnings.simplefilter("ignore")
    for array in inherited:
        if {readable!r}:
            assert (array == len(array)).all()
    del inherited
    gc.collect()
    new = [np.full(n, n, np.int64) for n in (3, 1000, 100_000)]
    assert all((array == len(array)).all() for array in new)
    if use_first and name.startswith(("pinned", "managed")):
        assert numpy_rmm.memory_kind(new[-1]) == "host", numpy_rmm.array_info(new[-1])
    {ending}
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert all((array == len(array)).all() for array in inherited)
assert (np.full(100_000, 5) == 5).all()
print("parent done")
"""


@pytest.mark.parametrize("ending", ["sys.exit(7)", "os._exit(7)"])
@pytest.mark.parametrize("use_first", [True, False], ids=["used", "not used"])
@pytest.mark.parametrize("name", NAMES)
def test_a_child_frees_and_allocates(
    name: str, use_first: bool, ending: str, run_python
) -> None:  # type: ignore[no-untyped-def]
    code = FORK.format(
        name=name, use_first=use_first, ending=ending, readable=name != "managed"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "parent done\n"


def test_a_child_says_what_to_do_about_cuda(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import os, sys, warnings
        import numpy as np, numpy_rmm
        from numpy_rmm import mr
        numpy_rmm.set_handler("pinned")
        keep = np.ones(100_000)
        if os.fork() == 0:
            try:
                numpy_rmm.registry["pinned"].allocate(1 << 20)
            except RuntimeError as error:
                print("told:", error)
            array = np.ones(100_000)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                kinds = [numpy_rmm.memory_kind(array) for _ in range(3)]
            print(set(kinds), [w.category.__name__ for w in caught])
            sys.exit(0)
        os.wait()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    told, kinds = done.stdout.splitlines()
    assert "fork" in told
    assert "spawn" in told
    assert kinds == "{'host'} ['RuntimeWarning']"


def test_the_driver_is_not_called_in_a_child(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import gc, os, sys
        import numpy as np, numpy_rmm
        from numpy_rmm import mr
        from numpy_rmm.testing import simulate_cuda
        cuda = simulate_cuda()
        numpy_rmm.set_handler("pinned")
        arrays = [np.ones(100_000) for _ in range(3)]
        ptr = numpy_rmm.registry["device"].allocate(1000)
        before = cuda.calls()
        child = os.fork()
        if child == 0:
            del arrays
            gc.collect()
            numpy_rmm.registry["device"].deallocate(ptr, 1000)
            numpy_rmm.reset_handler()
            numpy_rmm.trim()
            os._exit(cuda.calls() - before)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0\n"


def test_a_pool_of_workers(run_python) -> None:  # type: ignore[no-untyped-def]
    """Importing does not initialise the driver, so workers can use it."""
    program = textwrap.dedent(
        """
        import multiprocessing, sys
        import numpy as np, numpy_rmm

        def work(n):
            with numpy_rmm.pinned(threshold=0):
                array = np.full(n, n)
            return numpy_rmm.memory_kind(array), int(array.sum())

        if __name__ == "__main__":
            with multiprocessing.get_context("METHOD").Pool(2) as pool:
                print(pool.map(work, [3, 100_000]))
        """
    )
    for method in ("fork", "forkserver", "spawn"):
        done = run_python(program.replace("METHOD", method))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "[('pinned', 9), ('pinned', 10000000000)]\n"
