"""Whose memory is it, and what kind? Of arrays, views and what others own."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided, sliding_window_view

import numpy_rmm
from numpy_rmm import mr
from numpy_rmm.testing import Driver

DEFAULT = "default_allocator"


def test_numpys_own_memory_is_host_memory() -> None:
    array = np.zeros((10, 10))
    info = numpy_rmm.array_info(array)
    assert numpy_rmm.memory_kind(array) == info.kind == "host"
    assert not numpy_rmm.is_pinned(array)
    assert info.handler == numpy_rmm.get_handler_name(array) == DEFAULT
    assert (
        info.resource is info.block_address is info.block_nbytes is info.reason is None
    )
    assert (info.address, info.nbytes) == (array.ctypes.data, 800)
    assert (info.views, info.uses) == (0, ())


def test_memory_of_each_resource(handler: numpy_rmm.Handler) -> None:
    array = np.ones((100, 100))
    info = numpy_rmm.array_info(array)
    assert info.handler == handler.name
    assert info.resource is handler.resource
    assert info.kind == handler.resource.kind
    assert numpy_rmm.is_pinned(array) == (info.kind == "pinned")
    assert info.block_address <= info.address
    assert info.address + info.nbytes <= info.block_address + info.block_nbytes
    assert info.address % info.alignment == 0
    assert info.reason is None


VIEWS = {
    "slice": lambda a: a[3:7],
    "negative": lambda a: a[::-1, ::-2],
    "transposed": lambda a: a.T,
    "reshaped": lambda a: a.reshape(-1)[5:],
    "view": lambda a: a.view(np.uint8),
    "subclass": lambda a: a.view(np.matrix)[1:],
    "broadcast": lambda a: np.broadcast_to(a, (3, *a.shape)),
    "scalar": lambda a: a[3, 4, ...],
    "empty": lambda a: a[5:5],
    "empty at the end": lambda a: a[len(a) :],
    "diagonal": np.diagonal,
    "of a view of a view": lambda a: a[1:][1:].T[::2],
    "with strides of its own": lambda a: as_strided(a, (3,), (16,)),
    "windows": lambda a: sliding_window_view(a[2:], (3, 3))[1:],
    "over a memoryview": lambda a: np.asarray(memoryview(a)[3:]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_views_are_walked_to_their_owner(handler: numpy_rmm.Handler, view) -> None:  # type: ignore[no-untyped-def]
    owner = np.ones((20, 30))
    array = view(owner)
    info = numpy_rmm.array_info(array)
    assert info.handler == numpy_rmm.get_handler_name(array) == handler.name
    assert info.kind == handler.resource.kind
    assert info.views >= 1
    assert info.nbytes == array.nbytes


def test_arrays_of_no_elements(handler: numpy_rmm.Handler) -> None:
    for array in (np.empty(0), np.empty((3, 0, 2)), np.empty(3, "V0")):
        assert numpy_rmm.memory_kind(array) == handler.resource.kind


def test_data_that_numpy_does_not_own() -> None:
    buffer = bytearray(1000)
    arrays = [
        np.frombuffer(buffer),
        np.frombuffer(mmap.mmap(-1, 4096)),
        np.ndarray(10, buffer=buffer),
        np.ctypeslib.as_array((ctypes.c_double * 3)()),
        np.asarray(memoryview(buffer)),
    ]
    for array in arrays:
        info = numpy_rmm.array_info(array[1:])
        assert info.kind == numpy_rmm.memory_kind(array) == "external"
        assert info.handler is numpy_rmm.get_handler_name(array) is None


class Elsewhere:
    """Has an array in `base`, and tells of other memory."""

    def __init__(self, base: np.ndarray, memory: bytearray) -> None:
        self.base, self.memory = base, memory
        tells = np.frombuffer(memory, np.uint8).__array_interface__
        self.__array_interface__ = tells


def test_a_walk_that_leads_back_ends() -> None:
    between = Elsewhere(np.zeros(8), bytearray(8))
    array = np.asarray(between)
    between.base = array
    assert numpy_rmm.memory_kind(array) == "external"
    assert numpy_rmm.get_handler_name(array) is None


def test_an_array_behind_an_object_counts_only_if_it_has_the_memory() -> None:
    array = np.asarray(Elsewhere(np.zeros(1000), bytearray(1000)))
    assert numpy_rmm.memory_kind(array) == "external"
    assert numpy_rmm.get_handler_name(array) is None


def test_data_in_a_block_of_ours_that_numpy_does_not_own() -> None:
    source = mr.HostMemoryResource()
    ptr = source.allocate(800)
    array = np.ctypeslib.as_array((ctypes.c_double * 100).from_address(ptr))
    info = numpy_rmm.array_info(array)
    assert info.kind == "host"
    assert info.resource is source
    assert info.handler is None
    del array
    source.deallocate(ptr, 800)


def test_data_that_leaves_its_block_is_not_ours() -> None:
    source = mr.HostMemoryResource()
    ptr = source.allocate(1 << 16)
    outside = (ctypes.c_char * (1 << 20)).from_address(ptr)
    assert numpy_rmm.memory_kind(np.frombuffer(outside, np.uint8)) == "external"
    source.deallocate(ptr, 1 << 16)


def test_the_view_of_an_array_that_moved_is_not_live(
    handler: numpy_rmm.Handler,
) -> None:
    array = np.ones(100)
    view = array[1:]
    array.resize(3_000_000, refcheck=False)
    if array.ctypes.data == view.ctypes.data - 8:
        pytest.skip("the array grew in place")
    assert numpy_rmm.memory_kind(view) == "unknown"
    assert not numpy_rmm.is_pinned(view)
    assert numpy_rmm.array_info(view).block_address is None


def test_memory_of_another_librarys_handler_is_unknown() -> None:
    functions = ctypes.create_string_buffer(168)
    name = b"theirs"
    theirs = numpy_rmm.get_handler().capsule
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    ctypes.memmove(functions, get(theirs, b"mem_handler"), 168)
    ctypes.memmove(functions, name + bytes(127 - len(name)), 127)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p] * 3
    capsule_name = ctypes.create_string_buffer(b"mem_handler")
    capsule = new(ctypes.addressof(functions), ctypes.addressof(capsule_name), None)
    with numpy_rmm.use_handler(capsule) as handler:
        assert handler.name == "theirs"
        assert handler.resource is handler.statistics() is None
        array = np.ones(10)
    assert numpy_rmm.memory_kind(array) == "unknown"
    assert numpy_rmm.get_handler_name(array) == "theirs"
    assert numpy_rmm.array_info(array).handler == "theirs"


def test_small_arrays_of_a_pinned_handler_say_why(cuda: object) -> None:
    with numpy_rmm.pinned():
        small, large = np.ones(100), np.ones(10_000)
    info = numpy_rmm.array_info(small)
    assert (info.kind, info.reason) == ("host", "below pinned_threshold (64 KiB)")
    assert numpy_rmm.array_info(large).kind == "pinned"
    with numpy_rmm.pinned(threshold="1 KiB"):
        assert numpy_rmm.is_pinned(np.ones(128))
        assert not numpy_rmm.is_pinned(np.ones(127))


def test_an_array_that_grows_over_the_threshold_is_pinned(cuda: object) -> None:
    with numpy_rmm.pinned():
        array = np.arange(1000)
    assert not numpy_rmm.is_pinned(array)
    array.resize(100_000, refcheck=False)
    assert numpy_rmm.is_pinned(array)
    assert np.array_equal(array[:1000], np.arange(1000))


def test_memory_that_others_page_locked(cuda: Driver) -> None:
    block = mmap.mmap(-1, 1 << 20)
    array = np.frombuffer(block, np.uint8)
    assert numpy_rmm.memory_kind(array) == "external"
    cuda.activate()
    cuda.check(cuda.cuMemHostRegister(array.ctypes.data, 1 << 19, 0))
    try:
        half = array[: 1 << 19]
        with numpy_rmm.pinned():
            np.ones(100_000)  # CUDA is asked once it is initialised
        assert numpy_rmm.memory_kind(half) == "registered"
        assert numpy_rmm.is_pinned(half[::-1])
        assert numpy_rmm.memory_kind(array) == "external"
    finally:
        cuda.check(cuda.cuMemHostUnregister(array.ctypes.data))


def test_a_question_does_not_initialise_cuda(simulator) -> None:  # type: ignore[no-untyped-def]
    for array in (np.ones(10), np.frombuffer(bytes(8))):
        numpy_rmm.array_info(array)
        numpy_rmm.is_pinned(array)
    numpy_rmm.info()
    assert simulator.calls("cuInit") == 0


@pytest.mark.parametrize("wrong", [None, 3, [1.0], np.float64(3), memoryview(b"abc")])
def test_a_question_about_something_else(wrong: object) -> None:
    for ask in (numpy_rmm.memory_kind, numpy_rmm.is_pinned, numpy_rmm.array_info):
        with pytest.raises(TypeError, match=r"array must be a numpy.ndarray, not"):
            ask(wrong)  # type: ignore[arg-type]
    if wrong is not None:
        with pytest.raises(TypeError, match=r"array must be a numpy.ndarray, not"):
            numpy_rmm.get_handler_name(wrong)  # type: ignore[arg-type]
