"""Page-locked memory and os.fork: what children have of it, and what is said before."""

from __future__ import annotations

import textwrap

import pytest

# A child says what it finds by its exit status: 0, or the line of a failed assertion.
PRELUDE = """
import gc, os, sys, threading, traceback, warnings
import numpy as np, numpy_rmm
from numpy_rmm import mr

MIB = 1 << 20
source = mr.PinnedHostMemoryResource()

def mappings(name):
    with open(f"/proc/self/{name}") as file:
        for line in file:
            words = line.split()
            if "-" in words[0] and len(words) > 1 and len(words[1]) == 4:
                low, high = (int(word, 16) for word in words[0].split("-"))
                rights, is_file = words[1], len(words) > 5 and words[5][0] == "/"
            elif words[0] == "VmFlags:" and not is_file:  # no driver's mapping
                yield low, high, words[1:]
            if name == "maps":
                yield low, high, rights

def rights_of(address):
    return {rights for low, high, rights in mappings("maps") if low <= address < high}

def kept_from_children():
    return sum(high - low for low, high, flags in mappings("smaps") if "dc" in flags)

def in_child(function, *args):
    child = os.fork()
    if child == 0:
        status = 0
        try:
            function(*args)
        except BaseException:
            traceback.print_exc()
            status = 1
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def address(array):
    return array.__array_interface__["data"][0]

def arrays(n=6):
    return [np.full(MIB, i, np.uint8) for i in range(n)]

def check(arrays, addresses, readable=True):
    for i, array in enumerate(arrays):
        if readable:
            assert array.tobytes() == bytes([i]) * MIB  # makes no array
        else:
            assert rights_of(address(array)) == {"---p"}
    for start in addresses:
        assert rights_of(start + MIB // 2) == {"---p"}, hex(start)

def halve(arrays):
    '''Frees the last half; where they were.'''
    n = len(arrays) // 2
    addresses = [address(array) for array in arrays[n:]]
    del arrays[n:]
    return addresses
"""


@pytest.fixture
def run(run_python):  # type: ignore[no-untyped-def]
    def run(code: str, **environ: str) -> str:
        done = run_python(PRELUDE + textwrap.dedent(code), **environ)
        if done.returncode != 0:
            pytest.fail(done.stderr)  # whole
        assert done.stderr == ""
        text: str = done.stdout
        return text

    return run


HANDLERS = {
    "pinned": '"pinned"',
    "pinned_direct": '"pinned_direct"',
    "immediate": 'mr.PoolMemoryResource(source, reuse="immediate")',
    "recorded": 'mr.PoolMemoryResource(source, reuse="recorded")',
    "fixed": "mr.FixedSizeMemoryResource(source)",
    "arena": "mr.ArenaMemoryResource(source, 64 * MIB)",
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_child_has_the_arrays_but_not_what_is_free(handler: str, run) -> None:  # type: ignore[no-untyped-def]
    run(
        f"""
        numpy_rmm.set_handler({HANDLERS[handler]})
        live = arrays()
        free = halve(live)
        for _ in range(2):
            assert in_child(check, live, free) == 0
            assert kept_from_children() == 0
        check(live, [])
        """
    )


@pytest.mark.parametrize("handler", HANDLERS)
def test_arrays_are_left_out_when_the_option_says_so(handler: str, run) -> None:  # type: ignore[no-untyped-def]
    run(
        f"""
        assert numpy_rmm.options["fork"] == "dontfork"
        numpy_rmm.set_handler({HANDLERS[handler]})
        live = arrays()
        free = halve(live)
        assert in_child(check, live, free, False) == 0
        assert in_child(lambda: live[0].sum()) == -11  # there is nothing to read
        def drops_them():
            live.clear()
            gc.collect()
            numpy_rmm.trim()
        assert in_child(drops_them) == 0
        assert kept_from_children() == 0
        check(live, [])
        with numpy_rmm.options(fork="copy"):
            assert in_child(check, live, free) == 0
        """,
        NUMPY_RMM_FORK="dontfork",
    )


@pytest.mark.parametrize("mode", ["copy", "dontfork"])
def test_a_child_may_end_in_the_usual_way(mode: str, run) -> None:  # type: ignore[no-untyped-def]
    """With everything that the end of an interpreter frees."""
    text = run(
        f"""
        numpy_rmm.options["fork"] = {mode!r}
        numpy_rmm.set_handler("pinned", scope="process")
        live = arrays()
        free = halve(live)
        child = os.fork()
        if child == 0:
            numpy_rmm.trim()
            more = [np.ones(MIB) for _ in range(20)]
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert text == "5\n"


def test_an_array_grows_in_the_child(run) -> None:  # type: ignore[no-untyped-def]
    """Not into memory beside it that is not there."""
    run(
        """
        warnings.simplefilter("ignore")
        pool = mr.PoolMemoryResource(source, reuse="immediate")
        numpy_rmm.set_handler(pool, fallback=numpy_rmm.registry["host"])
        first, second = np.full(5 * MIB, 1, np.uint8), np.full(5 * MIB, 2, np.uint8)
        del second
        pool.trim()
        def grow():
            first.resize(8 * MIB, refcheck=False)
            assert (first[: 5 * MIB] == 1).all() and (first[5 * MIB :] == 0).all()
        assert in_child(grow) == 0
        grow()
        """
    )


def test_what_threads_keep_is_free(run) -> None:  # type: ignore[no-untyped-def]
    """And stays with them in the parent, who need not ask the pool for it again."""
    run(
        """
        handler = numpy_rmm.use_handler("pinned").handler
        live = handler.run(arrays)
        freed, may_go_on, ready = [], threading.Event(), threading.Barrier(4)
        def work():
            mine = arrays(8)
            freed.extend(address(array) for array in mine)
            del mine
            ready.wait()
            may_go_on.wait()
            again = arrays(8)
            assert all((array == i).all() for i, array in enumerate(again))
        threads = [threading.Thread(target=handler.run, args=(work,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        ready.wait()
        before = handler.resource.statistics()
        for _ in range(3):
            assert in_child(check, live, freed) == 0
        assert handler.resource.statistics() == before
        may_go_on.set()
        for thread in threads:
            thread.join()
        check(live, [])
        assert kept_from_children() == 0
        """
    )


def test_workers_read_an_array_of_the_parent(run) -> None:  # type: ignore[no-untyped-def]
    """Of a GiB, the most that is not warned of."""
    text = run(
        """
        import multiprocessing
        numpy_rmm.set_handler("pinned")
        free = arrays()
        shared = np.arange(128 * MIB)
        assert shared.nbytes == 1 << 30
        del free
        def total(part):
            return int(shared[part].sum()), numpy_rmm.memory_kind(shared)
        n = shared.size
        with multiprocessing.get_context("fork").Pool(4) as pool:
            quarters = [slice(i * n // 4, (i + 1) * n // 4) for i in range(4)]
            parts = pool.map(total, quarters)
        print(sum(part for part, _ in parts) == n * (n - 1) // 2)
        print({kind for _, kind in parts})
        """
    )
    assert text == "True\n{'pinned'}\n"


LOADER = '''
import multiprocessing, queue, sys, threading
import numpy as np, numpy_rmm

N_BATCHES = 24
N_VALUES = 1 << 17

def load(tasks, batches):
    numpy_rmm.reset_handler()  # or it would warn: there is no CUDA in a forked child
    for n in iter(tasks.get, None):
        batches.put((n, np.full(N_VALUES, n, np.int64)))

class Loader:
    """A worker makes batches, and a thread copies them to page-locked memory."""

    def __init__(self, context):
        self.tasks, self.batches = queues = context.Queue(), context.Queue()
        self.ready = queue.Queue(4)
        self.worker = context.Process(target=load, args=queues)
        self.worker.start()
        for n in [*range(N_BATCHES), None]:
            self.tasks.put(n)
        handler = numpy_rmm.use_handler("pinned").handler
        self.thread = threading.Thread(target=handler.run, args=(self.pin,))
        self.thread.start()

    def pin(self):
        for _ in range(N_BATCHES):
            n, batch = self.batches.get(timeout=60)
            self.ready.put((n, batch.copy()))

    def __iter__(self):
        for _ in range(N_BATCHES):
            yield self.ready.get(timeout=60)
        self.thread.join()
        self.worker.join()
        assert self.worker.exitcode == 0

def main(method):
    context = multiprocessing.get_context(method)
    numpy_rmm.set_handler("pinned")
    # The second one's worker is made while the first one's thread works.
    loaders, seen = [Loader(context)], []
    for n, batch in loaders[0]:
        assert numpy_rmm.memory_kind(batch) == "pinned"
        assert (batch == n).all()
        seen.append(n)
        del batch
        if len(seen) == 4:
            loaders.append(Loader(context))
    for n, batch in loaders[1]:
        assert (batch == n).all()
        seen.append(n)
    assert sorted(seen) == sorted(2 * list(range(N_BATCHES)))

if __name__ == "__main__":
    main(METHOD)
'''


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_loader_of_batches(method: str, run_python) -> None:  # type: ignore[no-untyped-def]
    """As programs feed GPUs: workers fill them, a thread of the parent locks them."""
    done = run_python(LOADER.replace("METHOD", repr(method)))
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_allocate_while_the_process_forks(run) -> None:  # type: ignore[no-untyped-def]
    run(
        """
        handler = numpy_rmm.use_handler("pinned").handler
        kept = handler.run(arrays)
        stop = threading.Event()
        def work():
            rng = np.random.default_rng(threading.get_ident())
            while not stop.is_set():
                n = int(rng.integers(70_000, 3 * MIB))
                array = np.full(n, n % 251, np.uint8)
                assert array[0] == array[-1] == n % 251
        threads = [threading.Thread(target=handler.run, args=(work,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(25):
                assert in_child(check, kept, []) == 0
        finally:
            stop.set()
        for thread in threads:
            thread.join()
        check(kept, [])
        assert kept_from_children() == 0
        """
    )


def test_a_process_that_is_spawned_is_none_of_it(run) -> None:  # type: ignore[no-untyped-def]
    run(
        """
        import subprocess
        numpy_rmm.set_handler("pinned")
        live = arrays()
        free = halve(live)
        for options in ({}, {"close_fds": False}, {"preexec_fn": int}):
            subprocess.run([sys.executable, "-c", ""], check=True, **options)
            assert kept_from_children() == 0
        check(live, [])
        """
    )


# ---- what is said before -------------------------------------------------------------

# Memory that is mapped for reading takes no pages, however large it is.
LARGE = """
import mmap
numpy_rmm.set_handler("pinned")
def pin(nbytes, shared=False):
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    return numpy_rmm.pin(mmap.mmap(-1, nbytes, prot=mmap.PROT_READ, flags=flags))
def warned(n=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(n):
            assert in_child(int) == 0
    return [
        (w.category.__name__, str(w.message), w.filename)
        for w in caught
        if w.category is not DeprecationWarning  # of Python: a driver has threads
    ]
"""


def test_a_fork_that_copies_much_is_warned_of(run) -> None:  # type: ignore[no-untyped-def]
    run(
        LARGE
        + textwrap.dedent(
            """
            live = np.ones(MIB, np.uint8)
            small = pin(1024 * MIB - live.nbytes)
            assert numpy_rmm.info()["system"]["copied_at_fork_nbytes"] == 1024 * MIB
            assert warned() == []
            more = np.ones(MIB, np.uint8)
            (category, text, filename), = warned()
            assert (category, filename) == ("RuntimeWarning", __file__)
            assert "copies 1025 MiB of page-locked memory" in text
            assert "expect 0.7 s" in text and '"dontfork"' in text
            del more  # free memory of the pool is not copied
            assert warned() == []
            """
        )
    )


def test_the_warning_follows_the_option(run) -> None:  # type: ignore[no-untyped-def]
    run(
        LARGE
        + textwrap.dedent(
            """
            live = np.ones(MIB, np.uint8)
            pinned = pin(1024 * MIB)
            with numpy_rmm.options(fork="dontfork"):
                assert warned() == []
                other = pin(MIB)
                (_, text, _), = warned()
                assert "copies 1025 MiB" in text and "pin()" in text
                assert '"dontfork"' not in text
            """
        )
    )


def test_shared_memory_is_not_copied(run) -> None:  # type: ignore[no-untyped-def]
    run(
        LARGE
        + textwrap.dedent(
            """
            live = np.ones(MIB, np.uint8)
            pinned = pin(64 * MIB, shared=True)
            assert numpy_rmm.info()["system"]["copied_at_fork_nbytes"] == live.nbytes
            """
        )
    )


def test_a_warning_that_is_an_error_does_not_stop_the_fork(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        PRELUDE
        + LARGE
        + textwrap.dedent(
            """
            pinned = pin(1025 * MIB)
            warnings.simplefilter("error", RuntimeWarning)
            print(in_child(int))
            """
        )
    )
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert "RuntimeWarning: os.fork copies 1025 MiB" in done.stderr


def test_the_default_filter_shows_it_once(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        PRELUDE
        + LARGE
        + textwrap.dedent(
            """
            pinned = pin(1025 * MIB)
            for _ in range(3):
                assert in_child(int) == 0
            """
        )
    )
    assert done.returncode == 0
    assert done.stderr.count("RuntimeWarning") == 1
