"""CallbackMemoryResource: functions in Python that a resource calls."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

import numpy_rmm
from numpy_rmm import mr


def test_a_callback_sees_every_request() -> None:
    calls: list[tuple[object, ...]] = []
    host = mr.HostMemoryResource()

    def allocate(nbytes: int, stream: numpy_rmm.Stream) -> int:
        calls.append(("allocate", nbytes, stream))
        return host.allocate(nbytes)

    def deallocate(ptr: int, nbytes: int, stream: numpy_rmm.Stream) -> None:
        calls.append(("deallocate", ptr, nbytes, stream))
        host.deallocate(ptr, nbytes)

    made = mr.CallbackMemoryResource(allocate, deallocate, kind="host")
    ptr = made.allocate(100, numpy_rmm.LEGACY_DEFAULT_STREAM)
    made.deallocate(ptr, 100)
    assert calls == [
        ("allocate", 100, numpy_rmm.LEGACY_DEFAULT_STREAM),
        ("deallocate", ptr, 100, numpy_rmm.DEFAULT_STREAM),
    ]


@pytest.mark.parametrize("wrap", [lambda x: x, mr.PoolMemoryResource])
def test_an_exception_of_a_callback_crosses_unchanged(wrap) -> None:  # type: ignore[no-untyped-def]
    class Mine(Exception):
        pass

    error = Mine("no")

    def allocate(nbytes: int, stream: object) -> int:
        raise error

    made = wrap(mr.CallbackMemoryResource(allocate, print, kind="host"))
    with pytest.raises(Mine) as caught:
        made.allocate(100)
    assert caught.value is error
    names = [entry.name for entry in caught.traceback]
    assert names[-1] == "allocate"


def test_an_exception_of_a_deallocate_callback_reaches_the_caller() -> None:
    host = mr.HostMemoryResource()

    def deallocate(ptr: int, nbytes: int, stream: object) -> None:
        host.deallocate(ptr, nbytes)
        raise OSError("told")

    made = mr.CallbackMemoryResource(host.allocate, deallocate, kind="host")
    ptr = made.allocate(100)
    with pytest.raises(OSError, match="told"):
        made.deallocate(ptr, 100)
    assert made.statistics().current_count == 0


@pytest.mark.parametrize(
    ("result", "error"),
    [(None, TypeError), ("0", TypeError), (-1, ValueError), (0, MemoryError)],
)
def test_what_a_callback_must_return(result: object, error: type) -> None:
    made = mr.CallbackMemoryResource(lambda *_: result, print, kind="host")  # type: ignore
    with pytest.raises(error):
        made.allocate(100)


def test_a_callback_that_fails_first_and_then_serves() -> None:
    """A pool asks for less after a failure: the first error is then none."""
    host = mr.HostMemoryResource()

    def allocate(nbytes: int, stream: object) -> int:
        if nbytes > 4 << 20:
            raise MemoryError("too much")
        return host.allocate(nbytes)

    made = mr.PoolMemoryResource(
        mr.CallbackMemoryResource(allocate, host.deallocate, kind="host")
    )
    made.deallocate(made.allocate(1000), 1000)
    with pytest.raises(MemoryError):
        made.allocate(32 << 20)


@pytest.mark.parametrize("arguments", [(None, print), (print, None), (3, 4)])
def test_callbacks_must_be_callable(arguments: tuple[object, object]) -> None:
    with pytest.raises(TypeError, match="must be callable"):
        mr.CallbackMemoryResource(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind must be one of"):
        mr.CallbackMemoryResource(print, print, kind="stone")  # type: ignore[arg-type]


def test_a_callback_resource_in_a_cycle_is_collected() -> None:
    class Functions:
        def __init__(self) -> None:
            self.mr = mr.CallbackMemoryResource(self.allocate, self.deallocate)

        def allocate(self, nbytes: int, stream: object) -> int:
            return 0

        def deallocate(self, ptr: int, nbytes: int, stream: object) -> None:
            pass

    dead = weakref.ref(Functions())
    gc.collect()
    numpy_rmm.last_error()
    numpy_rmm.trim()  # what the core let go of is dropped at the next call of ours
    assert dead() is None


def test_callbacks_are_released_with_the_resource() -> None:
    def allocate(nbytes: int, stream: object) -> int:
        return 0

    before = sys.getrefcount(allocate)
    for _ in range(10):
        mr.CallbackMemoryResource(allocate, print)
    numpy_rmm.trim()
    after = sys.getrefcount(allocate)
    assert after == before
