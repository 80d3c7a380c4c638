"""numpy_rmm under RMM's names, for RMM's own tests: renames only. See ../README.md."""

import contextlib
import sys
from types import ModuleType

import numpy_rmm
from numpy_rmm import *  # noqa: F403
from numpy_rmm import allocators, statistics

with contextlib.suppress(ImportError):  # tests that want it are for a GPU
    from cuda.bindings import runtime

__git_commit__ = ""


def _module(name: str, *sources: ModuleType, **names: object) -> ModuleType:
    module = sys.modules[f"rmm.{name}"] = ModuleType(f"rmm.{name}")
    for source in sources:
        shown = {x: getattr(source, x) for x in source.__all__}
        vars(module).update(shown, __all__=source.__all__)
    vars(module).update(names)
    return module


flush = numpy_rmm.mr._flush_logs
mr = _module("mr", numpy_rmm.mr, experimental=numpy_rmm.mr, _flush_logs=flush)
pylibrmm = _module(
    "pylibrmm",
    numpy_rmm,
    cuda_stream_pool=_module("pylibrmm.cuda_stream_pool", numpy_rmm),
    device_buffer=_module(
        "pylibrmm.device_buffer", numpy_rmm, to_device=numpy_rmm.DeviceBuffer.to_device
    ),
    logger=_module("pylibrmm.logger", numpy_rmm),
    memory_resource=_module(
        "pylibrmm.memory_resource",
        mr,
        _memory_resource=_module(
            "pylibrmm.memory_resource._memory_resource", mr, _flush_logs=flush
        ),
    ),
    stream=_module("pylibrmm.stream", numpy_rmm),
)
_cuda = _module("_cuda", gpu=_module("_cuda.gpu"))
_cuda.gpu.getDevice = lambda: runtime.cudaGetDevice()[1]
_cuda.gpu.getDeviceAttribute = lambda *which: runtime.cudaDeviceGetAttribute(*which)[1]
_cuda.gpu.runtimeGetVersion = lambda: runtime.getLocalRuntimeVersion()[1]
sys.modules["rmm.allocators"] = allocators  # and with its path what is in it
sys.modules["rmm.statistics"] = statistics

mr.set_current_device_resource(mr.CudaMemoryResource())
