"""What NumPy really does to a handler, and what must not come of it."""

from __future__ import annotations

import ctypes
import gc
import io
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr

Pattern = Callable[..., np.ndarray]
RANDOM = np.random.default_rng(0)  # made outside of all handlers, as it keeps an array

# ---- the four functions, called as C does --------------------------------------------


@dataclass
class Functions:
    """The functions of a handler: attached they keep the thread state, else they lose
    it, as NumPy's text parser does."""

    context: int
    malloc: Callable[[int, int], int | None]
    calloc: Callable[[int, int, int], int | None]
    realloc: Callable[[int, int | None, int], int | None]
    free: Callable[[int, int | None, int], None]


def functions_of(handler: numpy_rmm.Handler, *, attached: bool) -> Functions:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get(handler.capsule, b"mem_handler")
    context, *functions = (ctypes.c_void_p * 5).from_address(address + 128)
    make = ctypes.PYFUNCTYPE if attached else ctypes.CFUNCTYPE
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    types = [
        make(pointer, pointer, size),
        make(pointer, pointer, size, size),
        make(pointer, pointer, pointer, size),
        make(None, pointer, pointer, size),
    ]
    return Functions(context, *(t(f) for t, f in zip(types, functions, strict=True)))


@pytest.fixture(params=[True, False], ids=["attached", "detached"])
def functions(handler: numpy_rmm.Handler, request: pytest.FixtureRequest) -> Functions:
    return functions_of(handler, attached=request.param)


def test_calloc_gives_zeros_also_where_memory_was_used(functions: Functions) -> None:
    f = functions
    for nbytes in (1, 8, 1000, 4097, 70_000, 3 << 20):
        for _ in range(4):
            ptr = f.calloc(f.context, nbytes, 1)
            assert ctypes.string_at(ptr, nbytes) == bytes(nbytes)
            ctypes.memset(ptr, 0xFF, nbytes)
            f.free(f.context, ptr, nbytes)


def test_calloc_that_overflows_gives_null(
    handler: numpy_rmm.Handler, functions: Functions
) -> None:
    before = handler.statistics().current_count
    assert functions.calloc(functions.context, 2**33, 2**33) is None
    assert functions.calloc(functions.context, 2**64 - 1, 2) is None
    assert handler.statistics().current_count == before
    assert numpy_rmm.last_error().status == "OUT_OF_MEMORY"


@pytest.mark.parametrize("nbytes", [2**63 - 1, 2**63, 2**64 - 4, 2**64 - 1])
def test_malloc_of_more_than_there_is_gives_null(
    functions: Functions, nbytes: int
) -> None:
    assert functions.malloc(functions.context, nbytes) is None
    ptr = functions.malloc(functions.context, 64)
    assert ptr is not None
    assert functions.realloc(functions.context, ptr, nbytes) is None
    functions.free(functions.context, ptr, 64)


def test_zero_bytes_give_a_real_pointer(functions: Functions) -> None:
    f = functions
    pointers = [
        f.malloc(f.context, 0),
        f.calloc(f.context, 0, 8),
        f.calloc(f.context, 8, 0),
    ]
    pointers.append(f.realloc(f.context, f.malloc(f.context, 8), 0))
    assert all(pointers)
    assert len(set(pointers)) == 4
    for ptr in pointers:
        f.free(f.context, ptr, 0)


def test_null_is_freed_and_reallocated(
    handler: numpy_rmm.Handler, functions: Functions
) -> None:
    errors = handler.statistics().errors
    functions.free(functions.context, None, 800)
    ptr = functions.realloc(functions.context, None, 100)
    assert ptr
    functions.free(functions.context, ptr, 100)
    assert handler.statistics().errors == errors


def test_the_size_given_to_free_is_only_a_hint(
    handler: numpy_rmm.Handler, functions: Functions
) -> None:
    f = functions
    before = handler.statistics()
    for nbytes, claimed in [(8, 1), (4096, 8), (1, 1 << 20), (100_000, 1), (64, 0)]:
        ptr = f.malloc(f.context, nbytes)
        f.free(f.context, ptr, claimed)
    after = handler.statistics()
    assert after.current_bytes == before.current_bytes
    assert after.current_count == before.current_count
    assert after.errors == before.errors


def test_realloc_keeps_the_bytes(functions: Functions, pattern: Pattern) -> None:
    f = functions
    expected = pattern(1).tobytes()
    ptr = f.malloc(f.context, 1)
    ctypes.memmove(ptr, expected, 1)
    for nbytes in (7, 65, 1023, 4099, 65_537, 1_000_003, 9_000_001, 2_000_000, 33, 1):
        ptr = f.realloc(f.context, ptr, nbytes)
        kept = min(len(expected), nbytes)
        assert ctypes.string_at(ptr, kept) == expected[:kept]
        assert ptr % 64 == 0
        expected = pattern(nbytes, seed=nbytes).tobytes()
        ctypes.memmove(ptr, expected, nbytes)
    f.free(f.context, ptr, 1)


def test_a_wrong_free_is_counted_and_changes_nothing(
    handler: numpy_rmm.Handler, functions: Functions
) -> None:
    f = functions
    before, errors = live(handler), handler.statistics().errors
    lost = numpy_rmm.info()["errors"]["wrong_frees"]
    ptr = f.malloc(f.context, 1000)
    other = ctypes.create_string_buffer(100)
    f.free(f.context, ptr + 64, 1000)
    assert "64 B inside the live block" in numpy_rmm.last_error().message
    f.free(f.context, ctypes.addressof(other), 100)
    assert numpy_rmm.last_error().status == "NOT_OWNED"
    f.free(f.context, ptr, 1000)
    f.free(f.context, ptr, 1000)
    assert "freed already" in numpy_rmm.last_error().message
    assert handler.statistics().errors == errors + 3
    assert numpy_rmm.info()["errors"]["wrong_frees"] == lost + 3
    assert live(handler) == before


def test_the_error_indicator_is_left_alone(handler: numpy_rmm.Handler) -> None:
    """Arrays die while exceptions are on their way."""
    f = functions_of(handler, attached=True)

    def fail() -> None:
        array = np.ones(100_000)
        try:
            _ = 1 / 0
        finally:
            del array
            f.free(f.context, 64, 8)

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fail()


# ---- arrays, of every resource -------------------------------------------------------


def live(handler: numpy_rmm.Handler) -> tuple[int, int]:
    statistics = handler.statistics()
    return statistics.current_bytes, statistics.current_count


@pytest.fixture
def balanced(handler: numpy_rmm.Handler) -> Iterator[numpy_rmm.Handler]:
    """A handler whose counts must be back at the end, without an error."""
    before, errors = live(handler), handler.statistics().errors
    yield handler
    gc.collect()
    assert live(handler) == before
    assert handler.statistics().errors == errors


def test_arrays_of_no_elements(balanced: numpy_rmm.Handler) -> None:
    for _ in range(300):
        arrays = [
            np.empty((2, 0, 2)),
            np.zeros(0),
            np.empty(3, "V0"),
            np.empty(0, "S5"),
        ]
        assert [array.nbytes for array in arrays] == [0, 0, 0, 0]
        del arrays


def test_sizes_that_change_between_malloc_and_free(
    balanced: numpy_rmm.Handler, pattern: Pattern
) -> None:
    kept = [pattern(n, seed=n).copy() for n in (1, 8, 32) for _ in range(20)]
    for _ in range(300):
        x = np.arange(4.0)
        x.resize(0, refcheck=False)
        del x
    for array in kept:
        assert np.array_equal(array, pattern(len(array), seed=len(array)))
    del kept, array


def parsed(text: str) -> list[float] | str:
    try:
        return np.fromstring(text, sep=" ").tolist()
    except ValueError as error:
        return str(error)


@pytest.mark.filterwarnings(
    "ignore:string or file could not be read:DeprecationWarning"
)
def test_fromstring_of_nothing(balanced: numpy_rmm.Handler) -> None:
    for text in ("", " ", "1 2", "1 2 x"):
        with numpy_rmm.use_handler(None):
            expected = parsed(text)
        assert parsed(text) == expected


def test_sorts_free_what_was_never_allocated(balanced: numpy_rmm.Handler) -> None:
    random = RANDOM
    for n in (1, 10, 1000, 20_000):
        x = random.random(n)
        order = np.sort(x)
        assert np.array_equal(x[np.argsort(x)], order)
        assert np.array_equal(x[np.argsort(x, kind="stable")], order)
        np.partition(x, n // 2)
        np.argpartition(x, n // 2)
        np.sort(x.reshape(-1, 1)[::-1], axis=0)
        np.sort(x.astype(">f8"))
        del x, order


def test_sorting_structures(balanced: numpy_rmm.Handler) -> None:
    dtype = np.dtype([("a", "u1"), ("b", ">i4"), ("c", "f8")])
    random = RANDOM
    x = np.empty(60, dtype)
    x["a"], x["b"] = random.integers(0, 4, (2, 60))
    x["c"] = random.random(60)
    done = np.sort(x)
    assert done.tolist() == sorted(x.tolist())
    del x, done


DTYPES = [
    "f8",
    [("a", "i4"), ("b", "f8", 2)],
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    "V3",
    "S5",
    "M8[us]",
    [("n", [("x", "i2", (2, 3))])],
    "O",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resize_fills_the_new_part_with_zeros(
    balanced: numpy_rmm.Handler, dtype: object
) -> None:
    dirty = [np.full(100_000, 0xFF, np.uint8) for _ in range(3)]
    del dirty
    array = np.ones(100, dtype)
    old = array.tobytes()
    array.resize(1000, refcheck=False)
    assert array.tobytes()[: len(old)] == old
    assert not any(array[100:].tobytes()) or array.dtype == object
    if array.dtype == object:
        assert array[100:].tolist() == [0] * 900
    del array


def test_growth_in_odd_steps_keeps_a_pattern(
    balanced: numpy_rmm.Handler, pattern: Pattern
) -> None:
    n, seed = 64, 0
    array = pattern(n).copy()
    while n < 1 << 23:
        before, n = n, n * 3 + 17
        array.resize(n, refcheck=False)
        assert array.ctypes.data % 64 == 0
        assert np.array_equal(array[:before], pattern(before, seed))
        assert not array[before:].any()
        seed = n
        array[:] = pattern(n, seed)
    while n > 1:
        n //= 5
        array.resize(n, refcheck=False)
        assert np.array_equal(array, pattern(len(array), seed)[:n])
    del array


def test_readers_that_grow_their_arrays(
    balanced: numpy_rmm.Handler, tmp_path: object
) -> None:
    numbers = np.arange(50_000)
    text = io.StringIO("\n".join(map(str, range(50_000))))
    assert np.array_equal(np.fromiter(range(50_000), int), numbers)
    assert np.array_equal(np.loadtxt(text, dtype=int), numbers)
    assert np.array_equal(
        np.fromstring(" ".join(map(str, numbers)), int, sep=" "), numbers
    )
    del numbers


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("n", [0, 1, 100, 5000])
def test_pickles(balanced: numpy_rmm.Handler, protocol: int, n: int) -> None:
    array = np.arange(n)
    again = pickle.loads(pickle.dumps(array, protocol))
    assert np.array_equal(array, again)
    del array, again


def test_setstate_takes_the_memory_of_the_current_handler() -> None:
    first = mr.PoolMemoryResource(mr.HostMemoryResource())
    second = mr.PoolMemoryResource(mr.HostMemoryResource())
    with numpy_rmm.use_handler(first):
        array = np.arange(10)
    for n in (1, 100, 0):
        state = np.arange(n).__reduce__()[2]
        with numpy_rmm.use_handler(second):
            array.__setstate__(state)
        assert first.statistics().current_count == 0
        assert numpy_rmm.array_info(array).resource is second
        assert np.array_equal(array, np.arange(n))


def test_what_does_not_go_through_handlers(
    balanced: numpy_rmm.Handler, tmp_path: object
) -> None:
    path = f"{tmp_path}/array"
    np.zeros(1000).tofile(path)
    before = live(balanced)
    arrays = [np.memmap(path), np.frombuffer(bytes(800)), memoryview(b"abc")]
    assert live(balanced) == before
    assert [numpy_rmm.memory_kind(array) for array in arrays[:2]] == ["external"] * 2
    assert numpy_rmm.get_handler_name(arrays[0]) is None


# ---- alignment -----------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [16, 64, 256, 512, 4096])
def test_the_alignment_of_a_resource_holds_for_its_arrays(alignment: int) -> None:
    source = mr.HostMemoryResource(alignment=alignment)
    numbers = random.Random(alignment)
    with numpy_rmm.use_handler(source):
        for _ in range(300):
            array = np.empty(int(2 ** numbers.uniform(0, 23)), np.uint8)
            assert array.ctypes.data % alignment == 0
            array.resize(int(2 ** numbers.uniform(0, 20)), refcheck=False)
            assert array.ctypes.data % alignment == 0
        assert pickle.loads(pickle.dumps(np.arange(9), 2)).ctypes.data % alignment == 0


def test_every_array_is_aligned_for_vector_units(handler: numpy_rmm.Handler) -> None:
    numbers = random.Random(0)
    for _ in range(500):
        array = np.empty(int(2 ** numbers.uniform(0, 20)), np.uint8)
        assert array.ctypes.data % 64 == 0


# ---- threads -------------------------------------------------------------------------


def test_text_is_parsed_without_a_thread_state(balanced: numpy_rmm.Handler) -> None:
    """NumPy reallocates there with the GIL released, while other threads hold it."""
    n = 20_000
    text = " ".join(map(str, range(n)))

    def parse() -> bool:
        return bool((np.fromstring(text, sep=" ") == np.arange(n)).all())

    busy = threading.Event()

    def spin() -> None:
        while not busy.is_set():
            sum(range(1000))

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            work = [pool.submit(balanced.run, parse) for _ in range(8)]
            assert all(done.result() for done in work)
    finally:
        busy.set()
        spinner.join()


def test_slow_paths_without_a_thread_state(simulator: object, cuda: object) -> None:
    """Each realloc takes new page-locked memory, which gives the interpreter up."""
    with numpy_rmm.use_handler("pinned_direct", threshold=0) as handler:
        array = handler.run(np.fromstring, " ".join(["7"] * 40_000), sep=" ")
    assert array.tolist() == [7.0] * 40_000
    assert numpy_rmm.is_pinned(array)


def test_slow_paths_while_other_threads_run(simulator: object, cuda: object) -> None:
    text = " ".join(["7"] * 30_000)
    stop = threading.Event()
    counter = [0]

    def count() -> None:
        while not stop.is_set():
            counter[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        handler = numpy_rmm.use_handler("pinned_direct", threshold=0).handler
        for _ in range(3):
            assert len(handler.run(np.fromstring, text, sep=" ")) == 30_000
    finally:
        stop.set()
        thread.join()
    assert counter[0] > 0


@pytest.mark.parametrize("attached", [True, False])
def test_many_threads_allocate_and_free_each_others_blocks(
    handler: numpy_rmm.Handler, attached: bool
) -> None:
    f = functions_of(handler, attached=attached)
    before, errors = live(handler), handler.statistics().errors
    handed: list[tuple[int, int, int]] = []
    failures: list[str] = []
    end = time.monotonic() + 0.4

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        while time.monotonic() < end:
            nbytes = int(2 ** numbers.uniform(0, 17))
            fill = numbers.randrange(256)
            ptr = f.malloc(f.context, nbytes)
            ctypes.memset(ptr, fill, nbytes)
            if numbers.random() < 0.3:
                grown = nbytes * 2 + 1
                ptr = f.realloc(f.context, ptr, grown)
            handed.append((ptr, nbytes, fill))
            try:
                ptr, nbytes, fill = handed.pop(numbers.randrange(len(handed)))
            except (IndexError, ValueError):
                continue
            if ctypes.string_at(ptr, nbytes) != bytes([fill]) * nbytes:
                failures.append(f"{nbytes} B at {ptr:#x}")
            f.free(f.context, ptr, nbytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ptr, nbytes, _ in handed:
        f.free(f.context, ptr, nbytes)
    assert failures == []
    assert live(handler) == before
    assert handler.statistics().errors == errors


def test_the_extension_keeps_the_gil_off() -> None:
    """On a free-threaded build a module that says nothing would switch it on."""
    assert getattr(sys, "_is_gil_enabled", lambda: True)() == (
        not bool(getattr(sys, "_is_gil_enabled", None))
        or __import__("sysconfig").get_config_var("Py_GIL_DISABLED") != 1
    )
