/*
 * RMM's resources behind a few C functions, so that nrm_bench can call them through the
 * pointers through which it calls everybody. Compiled by run.py against the headers of
 * the wheel librmm; nrm_bench opens it at run time, so it is built without any of this.
 *
 * Sizes are those of RMM's own benchmarks: half of the device's free memory for the pool,
 * its default for the arena, bins of 256 KiB to 4 MiB over such a pool. No exception
 * leaves these functions: a request that fails is NULL, and rmm_peer_error says why.
 */
#include <rmm/cuda_device.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/binning_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/limiting_resource_adaptor.hpp>
#include <rmm/mr/pinned_host_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <rmm/mr/statistics_resource_adaptor.hpp>

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include <cstddef>
#include <cstring>
#include <exception>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using resource = cuda::mr::any_resource<cuda::mr::device_accessible>;

constexpr int percent_of_free = 50;
constexpr int smallest_bin = 18, largest_bin = 22; // powers of two

thread_local std::string last_error;

rmm::mr::pool_memory_resource
pool_of_device()
{
    return rmm::mr::pool_memory_resource{
        rmm::mr::cuda_memory_resource{},
        rmm::percent_of_free_device_memory(percent_of_free)};
}

resource
make(const std::string &name, std::size_t nbytes)
{
    if (name == "pool") {
        return pool_of_device();
    }
    if (name == "arena") {
        return rmm::mr::arena_memory_resource{rmm::mr::cuda_memory_resource{}};
    }
    if (name == "binning") {
        return rmm::mr::binning_memory_resource{pool_of_device(), smallest_bin,
                                                largest_bin};
    }
    if (name == "async") {
        return rmm::mr::cuda_async_memory_resource{};
    }
    if (name == "statistics") {
        std::size_t limit = rmm::percent_of_free_device_memory(percent_of_free);
        return rmm::mr::statistics_resource_adaptor{
            rmm::mr::limiting_resource_adaptor{pool_of_device(), limit}};
    }
    if (name == "pinned") {
        return rmm::mr::pool_memory_resource{rmm::mr::pinned_host_memory_resource{},
                                             nbytes};
    }
    throw std::runtime_error{"there is no resource of this name"};
}

} // namespace

/* Which functions these are; raised with each change of their meaning. */
EXPORT int
rmm_peer_version()
{
    return 1;
}

EXPORT const char *
rmm_peer_error()
{
    return last_error.c_str();
}

/* `nbytes`: of the page-locked pool, which cannot take half of anything. */
EXPORT void *
rmm_peer_open(const char *name, std::size_t nbytes)
{
    try {
        return new resource{make(name, nbytes)};
    }
    catch (const std::exception &error) {
        last_error = error.what();
        return nullptr;
    }
}

EXPORT void
rmm_peer_close(void *mr)
{
    delete static_cast<resource *>(mr);
}

EXPORT void *
rmm_peer_allocate(void *mr, std::size_t nbytes, void *stream)
{
    try {
        return static_cast<resource *>(mr)->allocate(
            cuda::stream_ref{static_cast<cudaStream_t>(stream)}, nbytes,
            rmm::CUDA_ALLOCATION_ALIGNMENT);
    }
    catch (const std::exception &error) {
        last_error = error.what();
        return nullptr;
    }
}

EXPORT void
rmm_peer_deallocate(void *mr, void *ptr, std::size_t nbytes, void *stream)
{
    static_cast<resource *>(mr)->deallocate(
        cuda::stream_ref{static_cast<cudaStream_t>(stream)}, ptr, nbytes,
        rmm::CUDA_ALLOCATION_ALIGNMENT);
}
