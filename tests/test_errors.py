"""Errors: they say what was asked and what there is, and travel between processes."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import CudaError, CudaUnavailableError, OutOfMemoryError, mr
from numpy_rmm.testing import SimulatedCuda, simulate_cuda


def full() -> OutOfMemoryError:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource(), maximum_pool_size="1 MiB")
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate("2 MiB")
    return caught.value


def test_the_types() -> None:
    assert issubclass(OutOfMemoryError, MemoryError)
    assert issubclass(CudaError, RuntimeError)
    assert issubclass(CudaUnavailableError, CudaError)
    assert CudaError("x").code == OutOfMemoryError("x").requested_nbytes == 0


def test_exhausted_memory_says_what_was_asked_for() -> None:
    error = full()
    assert "2 MiB asked, limit 1 MiB" in str(error)
    assert error.requested_nbytes == 2 << 20
    assert error.resource == "PoolMemoryResource"
    assert error.args == (str(error),)


def test_an_error_of_the_driver_has_its_name(simulator: SimulatedCuda) -> None:
    simulator.fail("cuMemAlloc", error="ILLEGAL_ADDRESS")
    with pytest.raises(CudaError) as caught:
        mr.CudaMemoryResource().allocate(100)
    assert (caught.value.code, caught.value.name) == (700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(caught.value)


def test_an_error_without_a_driver_has_no_gap() -> None:
    with simulate_cuda() as machine:
        machine.driver.activate()
        stream = numpy_rmm.Stream()
        stream.close()
    with pytest.raises(CudaError, match=r"closed(: \w[^(]*)? \(CUDA_ERROR_INVALID"):
        _ = stream.handle


def test_exhausted_device_memory(simulator: SimulatedCuda) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        mr.CudaMemoryResource().allocate("9 GiB")
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert caught.value.code == 2
    assert caught.value.requested_nbytes == 9 << 30


def every_error(simulator: SimulatedCuda) -> list[Exception]:
    simulator.fail("cuMemAlloc", error="ILLEGAL_ADDRESS")
    with pytest.raises(CudaError) as driver:
        mr.CudaMemoryResource().allocate(100)
    unavailable = CudaUnavailableError("nothing")
    unavailable.code = 3
    return [full(), driver.value, unavailable, OutOfMemoryError(), CudaError("a", "b")]


def test_errors_are_pickled_with_all_they_have(simulator: SimulatedCuda) -> None:
    for error in every_error(simulator):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            again = pickle.loads(pickle.dumps(error, protocol))
            assert type(again) is type(error)
            assert again.args == error.args
            assert vars(again) == vars(error)


def test_an_error_arrives_from_another_process(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context
        from numpy_rmm import OutOfMemoryError, mr

        def fail():
            source = mr.HostMemoryResource()
            mr.PoolMemoryResource(source, maximum_pool_size="1 MiB").allocate("2 MiB")

        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                with ProcessPoolExecutor(1, get_context(method)) as pool:
                    error = pool.submit(fail).exception()
                assert type(error) is OutOfMemoryError, error
                assert error.requested_nbytes == 2 << 20
                print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("limit 1 MiB") == 2


def test_the_last_error_is_of_this_thread() -> None:
    full()
    mine = numpy_rmm.last_error()
    assert mine.status == "OUT_OF_MEMORY"
    assert mine.requested_nbytes == 2 << 20
    assert pickle.loads(pickle.dumps(mine)) == mine
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(numpy_rmm.last_error()))
    thread.start()
    thread.join()
    assert numpy_rmm.last_error() == mine
    assert found[0] != mine


def test_an_error_holds_no_resource() -> None:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource(), maximum_pool_size="1 MiB")
    saved = []
    for _ in range(3):
        try:
            pool.allocate("2 MiB")
        except MemoryError as error:
            saved.append(error.with_traceback(None))
    dead = weakref.ref(pool)
    del pool
    gc.collect()
    assert dead() is None
    assert len(saved) == 3


def test_debug_aborts_on_a_wrong_free(run_python) -> None:  # type: ignore[no-untyped-def]
    program = """
        import ctypes, numpy as np, numpy_rmm
        numpy_rmm.set_handler("host")
        array = np.ones(1000)
        address = array.ctypes.data
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        at = get(numpy_rmm.get_handler().capsule, b"mem_handler") + 128
        context, _, _, _, free = (ctypes.c_void_p * 5).from_address(at)
        free = ctypes.PYFUNCTYPE(None, *3 * [ctypes.c_void_p])(free)
        free(context, address + 64, 8)
        print("alive", numpy_rmm.info()["errors"]["wrong_frees"])
    """
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "alive 1\n"
    done = run_python(program, NUMPY_RMM_DEBUG="1")
    assert done.returncode == -6
    assert "wrong free" in done.stderr
    assert "64 B inside the live block of 8000 B at 0x" in done.stderr


def test_numpys_error_still_names_shape_and_type() -> None:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource(), maximum_pool_size="1 MiB")
    text = r"shape \(3000, 3000\) and data type float64"
    with pytest.raises(MemoryError, match=text), numpy_rmm.use_handler(pool):
        np.empty((3000, 3000))
