"""Arrays in page-locked memory, at any size."""

from __future__ import annotations

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import empty_like_pinned, empty_pinned, zeros_like_pinned, zeros_pinned


def test_new_arrays_are_pinned_at_any_size(cuda: object) -> None:
    for shape in ((), 1, 3, (0,), (2, 3), 100_000):
        for function in (empty_pinned, zeros_pinned):
            array = function(shape)
            assert array.shape == np.empty(shape).shape
            assert array.dtype == np.float64
            assert numpy_rmm.is_pinned(array)
    assert numpy_rmm.get_handler().resource is None


@pytest.mark.parametrize("order", ["C", "F"])
def test_type_and_order(cuda: object, order: str) -> None:
    array = zeros_pinned((3, 5), np.int16, order)  # type: ignore[arg-type]
    assert array.dtype == np.int16
    assert array.flags[f"{order}_CONTIGUOUS"]
    assert not array.any()


def test_zeros_in_memory_that_was_used(cuda: object) -> None:
    for _ in range(20):
        array = zeros_pinned(50_000)
        assert not array.any()
        array[:] = 7
        del array


PROTOTYPES = {
    "C": np.ones((3, 4)),
    "F": np.asfortranarray(np.ones((3, 4))),
    "transposed": np.ones((3, 4, 5)).transpose(1, 2, 0),
    "negative": np.ones((3, 4))[::-1],
    "broadcast": np.broadcast_to(np.ones(4), (3, 4)),
    "scalar": np.array(1.0),
    "structured": np.ones(3, [("a", "i4"), ("b", "f8", 2)]),
    "sliced": np.ones((9, 9))[::2, 1:4],
    "objects": np.array([None, "a"]),
}


@pytest.mark.parametrize("prototype", PROTOTYPES.values(), ids=PROTOTYPES)
def test_arrays_like_others(cuda: object, prototype: np.ndarray) -> None:
    for ours, theirs in [
        (empty_like_pinned, np.empty_like),
        (zeros_like_pinned, np.zeros_like),
    ]:
        array, expected = ours(prototype), theirs(prototype)
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
        assert array.strides == expected.strides
        assert numpy_rmm.is_pinned(array)
    array = empty_like_pinned(prototype)
    array[...] = prototype
    assert np.array_equal(array, prototype)


def test_arguments_of_like(cuda: object) -> None:
    class Sub(np.ndarray):
        pass

    prototype = np.ones((3, 4)).view(Sub)
    assert type(empty_like_pinned(prototype)) is Sub
    assert type(zeros_like_pinned(prototype, subok=False)) is np.ndarray
    assert zeros_like_pinned(prototype, "i1", "F", shape=(2, 2)).dtype == np.int8
    assert empty_like_pinned([1, 2, 3]).shape == (3,)


def test_a_handler_that_is_set_stays(cuda: object) -> None:
    with numpy_rmm.host() as handler:
        assert numpy_rmm.is_pinned(empty_pinned(3))
        assert numpy_rmm.get_handler() == handler
        with pytest.raises(TypeError):
            empty_pinned("three")  # type: ignore[arg-type]
        assert numpy_rmm.get_handler() == handler


def test_without_a_device(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import numpy_rmm
        try:
            numpy_rmm.empty_pinned(3)
        except numpy_rmm.CudaUnavailableError:
            print("said so")
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.stdout == "said so\n", done.stderr
