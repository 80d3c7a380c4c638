/* Pools that end after their simulated driver: it has taken its work along, so nothing
   is waited for and nothing is lost. */
#include "core/exchange.h"
#include "core/hooks.h"
#include "fixtures.h"
#include "streams.h"

enum when { FREED_BEFORE, FREED_AFTER };

static const struct scenario {
    const char *name;
    nrm_segments segments;
    bool own_stream;
    enum when freed;
} scenarios[] = {
    {"mapped, kept by the thread", NRM_SEGMENTS_VMM, false, FREED_BEFORE},
    {"mapped, in use", NRM_SEGMENTS_VMM, false, FREED_AFTER},
    {"mapped, kept of a stream", NRM_SEGMENTS_VMM, true, FREED_BEFORE},
    {"mapped, in use on a stream", NRM_SEGMENTS_VMM, true, FREED_AFTER},
    {"allocated, kept by the thread", NRM_SEGMENTS_ALLOC, false, FREED_BEFORE},
    {"allocated, in use", NRM_SEGMENTS_ALLOC, false, FREED_AFTER},
};

static nrm_resource *
device_pool(nrm_segments segments)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *source = NULL, *pool = NULL;
    options.segments = segments;
    CHECK_OK(nrm_device_create(NULL, &source));
    CHECK_OK(nrm_pool_create(source, &options, &pool));
    nrm_resource_release(source);
    return pool;
}

TEST_EACH(a_pool_ends_without_its_driver, scenarios)
{
    static const size_t sizes[] = {1000, 50000, 3 << 20};
    void *ptr[3];
    nrm_error error;
    uint64_t before, after;
    simulator_start(NULL);
    nrm_resource *pool = device_pool(row->segments);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    nrm_stream *stream = row->own_stream ? new_stream() : nrm_stream_default();
    for (int i = 0; i < 3; i++) {
        REQUIRE_OK(nrm_resource_allocate(pool, sizes[i], 0, stream, &ptr[i]));
        if (row->freed == FREED_BEFORE) {
            CHECK_OK(nrm_resource_deallocate(pool, ptr[i], 0, stream));
        }
    }
    cuda.cuCtxSetCurrent(NULL);
    nrm__lost_error_get(&error, &before);
    CHECK_OK(nrm__driver_exchange(NULL));
    for (int i = 0; i < 3 && row->freed == FREED_AFTER; i++) {
        CHECK_OK(nrm_resource_deallocate(pool, ptr[i], 0, stream));
    }
    nrm_resource_release(pool); /* ten seconds, and then an error, if it waits */
    nrm__lost_error_get(&error, &after);
    CHECK_EQ(after, before);
    if (row->own_stream) {
        nrm_stream_release(stream);
    }
}

CHECK_MAIN
