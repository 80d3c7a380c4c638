"""Handlers: which memory new arrays get. Where that holds is in test_handler_scopes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import warnings
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import numpy_rmm
from handlers import DEFAULT, current
from numpy_rmm import mr

# ---- setting and getting -------------------------------------------------------------


def test_numpy_default_is_a_handler_without_a_resource() -> None:
    handler = numpy_rmm.get_handler()
    assert handler.name == DEFAULT
    assert handler.resource is None
    assert handler.statistics() is None
    assert handler.threshold is None
    assert handler.fallback is None
    assert handler.trim() == 0


def test_set_handler_returns_the_previous_one() -> None:
    first = numpy_rmm.set_handler("host")
    second = numpy_rmm.set_handler("huge_pages")
    assert first.name == DEFAULT
    assert second.name.startswith("numpy_rmm:host#")
    numpy_rmm.set_handler(second)
    assert numpy_rmm.get_handler() == second
    numpy_rmm.set_handler(first)
    assert current() == DEFAULT


def test_a_handler_is_named_after_its_resource(handler: numpy_rmm.Handler) -> None:
    assert handler.resource is not None
    assert handler.name.startswith(f"numpy_rmm:{handler.resource.name}#")
    array = np.empty(10)
    names = (
        np._core.multiarray
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0"
        else (np.core.multiarray)
    )
    assert names.get_handler_name(array) == handler.name
    assert len(handler.name.encode()) <= 126


def test_the_name_of_a_resource_without_a_name_is_its_class() -> None:
    with numpy_rmm.use_handler(mr.HostMemoryResource()) as handler:
        assert handler.name.startswith("numpy_rmm:HostMemoryResource#")


def test_arrays_get_their_memory_from_the_resource(handler: numpy_rmm.Handler) -> None:
    array = np.empty(1000)
    assert numpy_rmm.array_info(array).resource is handler.resource
    assert numpy_rmm.memory_kind(array) == handler.resource.kind


def test_arrays_keep_their_memory_when_the_handler_changes(handler_name: str) -> None:
    with numpy_rmm.use_handler(handler_name):
        array = np.arange(1000)
    more = array.copy()
    assert numpy_rmm.get_handler_name(more) == DEFAULT
    array.resize(100_000, refcheck=False)
    assert numpy_rmm.get_handler_name(array).startswith(f"numpy_rmm:{handler_name}#")
    assert np.array_equal(array[:1000], more)
    assert not array[1000:].any()


def test_equal_arguments_share_one_capsule() -> None:
    one = numpy_rmm.use_handler("host").handler
    two = numpy_rmm.use_handler("host").handler
    assert one == two
    assert hash(one) == hash(two)
    assert one.capsule is two.capsule


def test_other_arguments_make_another_handler(cuda: object) -> None:
    one = numpy_rmm.pinned().handler
    two = numpy_rmm.pinned(threshold=0).handler
    three = numpy_rmm.pinned(fallback=False).handler
    assert len({one, two, three}) == 3
    assert one.resource is two.resource is three.resource
    assert [handler.threshold for handler in (one, two, three)] == [65536, 0, 65536]


def test_a_resource_and_a_handler_can_be_given() -> None:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource())
    numpy_rmm.set_handler(pool)
    handler = numpy_rmm.get_handler()
    assert handler.resource is pool
    numpy_rmm.reset_handler()
    numpy_rmm.set_handler(handler)
    assert np.zeros(3).sum() == 0
    assert pool.statistics().total_count >= 1


def test_auto_is_host_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numpy_rmm._core._cuda_expect", _unavailable)
    numpy_rmm.set_handler()
    assert current().startswith("numpy_rmm:host#")


def _unavailable() -> None:
    raise numpy_rmm.CudaUnavailableError("none")


def test_auto_is_pinned_with_a_device(cuda: object) -> None:
    numpy_rmm.set_handler("auto")
    assert current().startswith("numpy_rmm:pinned#")


def test_shorthands(cuda: object) -> None:
    for shorthand in (numpy_rmm.pinned, numpy_rmm.managed, numpy_rmm.host):
        with shorthand() as handler:
            assert handler.resource is numpy_rmm.registry[shorthand.__name__]


# ---- bad input: an error that says what is allowed, and nothing changes --------------


@pytest.mark.parametrize(
    ("handler", "error", "match"),
    [
        (
            "nope",
            ValueError,
            r"unknown handler 'nope'; known names: .*'host'.*'pinned'",
        ),
        (
            3,
            TypeError,
            "must be a name, a Handler, a MemoryResource, a capsule .* not int",
        ),
        (np.zeros(3), TypeError, "not numpy.ndarray"),
        (object, TypeError, "not type"),
    ],
)
def test_something_that_is_no_handler(handler: object, error: type, match: str) -> None:
    numpy_rmm.set_handler("host")
    before = numpy_rmm.get_handler()
    for attempt in (numpy_rmm.set_handler, numpy_rmm.use_handler):
        with pytest.raises(error, match=match):
            attempt(handler)
    assert numpy_rmm.get_handler() == before
    assert np.empty(3).shape == (3,)


def new_capsule(name: bytes | None) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(id(new_capsule), name, None)


@pytest.mark.parametrize("name", [b"mem_handlers", b"", b"numpy_rmm", None])
def test_a_capsule_of_another_name(name: bytes | None) -> None:
    capsule = new_capsule(name)
    with pytest.raises(ValueError, match="capsule is named 'mem_handler', not"):
        numpy_rmm.set_handler(capsule)
    assert current() == DEFAULT
    assert np.empty(3).shape == (3,)


def test_another_handlers_capsule_is_taken_as_it_is() -> None:
    theirs = numpy_rmm.get_handler().capsule  # NumPy's own stands for other people's
    numpy_rmm.set_handler("host")
    numpy_rmm.set_handler(theirs)
    assert current() == DEFAULT


@pytest.mark.parametrize("name", ["device", "device_direct"])
def test_device_only_memory_is_refused(cuda: object, name: str) -> None:
    with pytest.raises(ValueError, match=r"MemoryResource .* device-only"):
        numpy_rmm.set_handler(name)
    assert current() == DEFAULT


@pytest.mark.parametrize("wrap", [lambda x: x, mr.PoolMemoryResource])
def test_a_resource_that_calls_python_is_refused(wrap) -> None:  # type: ignore[no-untyped-def]
    host = mr.HostMemoryResource()
    resource = mr.CallbackMemoryResource(host.allocate, host.deallocate, kind="host")
    with pytest.raises(TypeError, match="calls Python functions"):
        numpy_rmm.use_handler(wrap(resource))


def test_a_threshold_is_for_pinned_handlers() -> None:
    with pytest.raises(ValueError, match="threshold is for pinned handlers"):
        numpy_rmm.set_handler("host", threshold=0)
    assert current() == DEFAULT


@pytest.mark.parametrize("threshold", [-1, 2**64, "many", 1.5])
def test_a_threshold_that_is_no_size(cuda: object, threshold: object) -> None:
    with pytest.raises((TypeError, ValueError), match="threshold"):
        numpy_rmm.pinned(threshold=threshold)  # type: ignore[arg-type]


def test_a_fallback_that_is_none(cuda: object) -> None:
    for fallback, error in [("nope", ValueError), (3, TypeError), (True, TypeError)]:
        with pytest.raises(error, match="fallback"):
            numpy_rmm.pinned(fallback=fallback)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="host memory is needed"):
        numpy_rmm.pinned(fallback="managed")


def test_threshold_and_fallback_do_not_go_with_a_handler() -> None:
    handler = numpy_rmm.host().handler
    for arguments in ({"threshold": 3}, {"fallback": False}):
        with pytest.raises(TypeError, match="threshold and fallback go with"):
            numpy_rmm.set_handler(handler, **arguments)  # type: ignore[arg-type]


def test_a_scope_that_is_none() -> None:
    with pytest.raises(ValueError, match="'context' or 'process', not 'thread'"):
        numpy_rmm.set_handler("host", scope="thread")  # type: ignore[arg-type]
    assert current() == DEFAULT


def test_pinned_of_an_array_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"use pin\(array\)"):
        numpy_rmm.pinned(np.zeros(3))  # type: ignore[arg-type]


def test_handlers_are_not_made_by_hand_nor_pickled() -> None:
    import copy
    import pickle

    with pytest.raises(TypeError):
        numpy_rmm.Handler()
    for function in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            function(numpy_rmm.host().handler)


# ---- lifetime ------------------------------------------------------------------------


def test_a_handler_lives_as_long_as_its_last_array() -> None:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource())
    source = pool.upstream
    with numpy_rmm.use_handler(pool):
        array = np.ones(100_000)
    dead = weakref.ref(pool)
    del pool
    gc.collect()
    assert dead() is None
    assert array.sum() == 100_000
    assert numpy_rmm.array_info(array).resource.upstream is source
    del array
    gc.collect()
    assert source.statistics().current_bytes == 0


def test_arrays_in_a_reference_cycle_outlive_their_handler() -> None:
    class Node:
        me: Node
        array: np.ndarray

    source = mr.HostMemoryResource()
    pool = mr.PoolMemoryResource(source)
    with numpy_rmm.use_handler(pool):
        node = Node()
        node.me, node.array = node, np.ones(10_000)
    del pool, node
    gc.collect()
    assert source.statistics().current_count == 0


def test_scopes_leak_nothing() -> None:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource())
    scope = numpy_rmm.use_handler(pool)
    for _ in range(3):
        with scope:
            np.ones(10)
    handler = weakref.ref(scope.handler)
    capsule_count = sys.getrefcount(scope.handler.capsule)
    for _ in range(100):
        with scope:
            np.ones(10)
    capsule_count_after = sys.getrefcount(scope.handler.capsule)
    assert capsule_count_after == capsule_count
    del scope, pool
    gc.collect()
    assert handler() is None


# ---- exhaustion ----------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The one warning of a process that memory fell back may come here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def full_pool() -> mr.PoolMemoryResource:
    return mr.PoolMemoryResource(mr.HostMemoryResource(), maximum_pool_size="4 MiB")


def test_a_memory_error_says_why() -> None:
    with pytest.raises(MemoryError) as caught, numpy_rmm.use_handler(full_pool()):
        np.empty((1000, 1000))
    assert "shape (1000, 1000)" in str(caught.value)
    (note,) = caught.value.__notes__
    assert "4 MiB" in note
    last = numpy_rmm.last_error()
    assert last.status == "OUT_OF_MEMORY"
    assert last.requested_nbytes == 8_000_000


def test_a_memory_error_of_others_gets_no_note() -> None:
    with pytest.raises(MemoryError) as caught, numpy_rmm.use_handler(full_pool()):
        raise MemoryError
    assert not hasattr(caught.value, "__notes__")


def test_an_array_survives_a_resize_that_fails() -> None:
    with numpy_rmm.use_handler(full_pool()):
        array = np.arange(1000)
        with pytest.raises(MemoryError):
            array.resize(10_000_000, refcheck=False)
    assert np.array_equal(array, np.arange(1000))


def test_a_fallback_that_is_asked_for_serves_and_is_told() -> None:
    with numpy_rmm.use_handler(full_pool(), fallback="host") as handler:
        array = np.ones((1000, 1000))
        with quiet():
            assert handler.fallback is numpy_rmm.registry["host"]
        assert handler.statistics().fallbacks == 1
    info = numpy_rmm.array_info(array)
    assert info.resource is numpy_rmm.registry["host"]
    assert info.reason.startswith("fell back: ")
    assert "4 MiB" in info.reason


def test_exhausted_page_locking_falls_back_with_one_warning(
    run_python, simulator: object
) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import warnings
        import numpy as np, numpy_rmm
        from numpy_rmm.testing import simulate_cuda
        with simulate_cuda(page_locked="16 MiB"), numpy_rmm.pinned() as handler:
            arrays = [np.ones(1_000_000) for _ in range(10)]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                kinds = [numpy_rmm.memory_kind(array) for array in arrays]
            assert kinds[0] == "pinned" and kinds[-1] == "host", kinds
            assert [w.category for w in caught] == [RuntimeWarning], caught
            assert handler.statistics().fallbacks == kinds.count("host")
            assert "fell back" in numpy_rmm.array_info(arrays[-1]).reason
        """
    )
    assert done.returncode == 0, done.stderr


def test_small_requests_never_fail() -> None:
    """NumPy takes a failure inside a structured comparison for "equal"."""
    pool = mr.PoolMemoryResource(mr.HostMemoryResource(), maximum_pool_size="2 MiB")
    with numpy_rmm.use_handler(pool) as handler:
        keep = []
        with contextlib.suppress(MemoryError):
            while len(keep) < 10_000:
                keep.append(np.empty(1 << 14, np.uint8))
        assert len(keep) < 10_000
        small = [np.full(n, n % 256, np.uint8) for n in range(1, 4097, 97)]
        with quiet():
            assert handler.statistics().fallbacks >= len(small) - 1
    assert all((array == len(array) % 256).all() for array in small)
    assert "fell back" in numpy_rmm.array_info(small[-1]).reason
    del keep, small
    assert handler.statistics().current_count == 0
