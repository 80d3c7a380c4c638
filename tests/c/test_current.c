/* The current resource of each device, while others look it up. */
#include "core/current.h"
#include "core/ops.h"
#include "core/registry.h"
#include "fixtures.h"
#include "simulator.h"
#include "workers.h"

enum { N_THREADS = 4 };

static struct counting counting[2];

/* Host memory that calls itself a device's: no driver is asked for it. */
static nrm_resource *
source(int i, nrm_kind kind)
{
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    nrm_resource *mr = NULL;
    counting[i] = (struct counting){0};
    options.kind = kind;
    options.allocate = counting_allocate;
    options.deallocate = counting_deallocate;
    options.destroy = counting_destroy;
    options.context = &counting[i];
    CHECK_OK(nrm_callback_create(&options, &mr));
    return mr;
}

static uint64_t
n_references(nrm_resource *mr)
{
    return atomic_load(&mr->refcount);
}

/* What is current for device 3, and goes with this reference. */
static nrm_resource *
look_up(void)
{
    nrm_resource *mr = NULL;
    if (CHECK_OK(nrm_get_per_device_resource(3, &mr))) {
        nrm_resource_release(mr);
    }
    return mr;
}

TEST(what_was_set_is_found_until_another_is_set)
{
    nrm_resource *first = source(0, NRM_KIND_DEVICE);
    nrm_resource *second = source(1, NRM_KIND_MANAGED);
    REQUIRE_OK(nrm_set_per_device_resource(3, first));
    CHECK(look_up() == first);
    CHECK(nrm__registry_peek_device(3) == first);
    REQUIRE_OK(nrm_set_per_device_resource(3, second));
    CHECK(look_up() == second);
    CHECK_EQ(n_references(first), 1);
    REQUIRE_OK(nrm_set_per_device_resource(3, NULL));
    CHECK_EQ(n_references(second), 1);
    CHECK(nrm__registry_peek_device(3) == NULL);
    nrm_resource_release(first);
    nrm_resource_release(second);
    CHECK_EQ(counting[0].n_destroyed + counting[1].n_destroyed, 2);
}

/* Every 16,384 look-ups the table has to hold more. */
TEST(references_are_right_after_many_look_ups)
{
    enum { N = 100000 };
    nrm_resource *mr = source(0, NRM_KIND_DEVICE), *found = NULL;
    REQUIRE_OK(nrm_set_per_device_resource(3, mr));
    for (int i = 0; i < N; i++) {
        REQUIRE_OK(nrm_get_per_device_resource(3, &found));
    }
    REQUIRE_OK(nrm_set_per_device_resource(3, NULL));
    CHECK_EQ(n_references(mr), N + 1);
    for (int i = 0; i < N; i++) {
        nrm_resource_release(found);
    }
    CHECK_EQ(n_references(mr), 1);
    nrm_resource_release(mr);
    CHECK_EQ(counting[0].n_destroyed, 1);
}

TEST(a_resource_that_is_set_again_is_not_lost)
{
    nrm_resource *mr = source(0, NRM_KIND_DEVICE);
    REQUIRE_OK(nrm_set_per_device_resource(3, mr));
    nrm_resource_release(mr); /* the table has it */
    REQUIRE_OK(nrm_set_per_device_resource(3, look_up()));
    CHECK_EQ(counting[0].n_destroyed, 0);
    REQUIRE_OK(nrm_set_per_device_resource(3, NULL));
    CHECK_EQ(counting[0].n_destroyed, 1);
}

TEST(memory_of_another_device_is_refused)
{
    simulator_start(NULL);
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    nrm_resource *mr = NULL;
    options.set_device = true;
    REQUIRE_OK(nrm_device_create(&options, &mr));
    CHECK_STATUS(nrm_set_per_device_resource(3, mr), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "device 0");
    CHECK_STR_HAS(nrm_last_error()->message, "of device 3");
    CHECK_OK(nrm_set_per_device_resource(0, mr));
    CHECK_OK(nrm_set_per_device_resource(0, NULL));
    nrm_resource_release(mr);
}

TEST(the_current_device_is_that_of_the_callers_context)
{
    struct nrm_cudasim_config config = simulator_config();
    nrm_resource *mr = source(0, NRM_KIND_DEVICE), *found = NULL;
    nrm_CUcontext context;
    config.devices = 2;
    simulator_start(&config);
    REQUIRE_OK(nrm__builtin_init());
    REQUIRE_OK(nrm__cuda_init(NULL));
    REQUIRE(cuda.cuDevicePrimaryCtxRetain(&context, 1) == NRM_CUDA_SUCCESS);
    REQUIRE(cuda.cuCtxSetCurrent(context) == NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_set_current_device_resource(mr));
    REQUIRE_OK(nrm_get_per_device_resource(1, &found));
    CHECK(found == mr);
    nrm_resource_release(found);
    REQUIRE_OK(nrm_get_current_device_resource(&found));
    CHECK(found == mr);
    nrm_resource_release(found);
    REQUIRE(cuda.cuCtxSetCurrent(NULL) == NRM_CUDA_SUCCESS);
    REQUIRE_OK(nrm_get_current_device_resource(&found)); /* of the option `device` */
    CHECK(found != mr);
    CHECK_EQ(nrm_resource_device(found), 0);
    nrm_resource_release(found);
    CHECK_OK(nrm_set_per_device_resource(1, NULL));
    nrm_resource_release(mr);
}

TEST(a_default_is_made_once_and_restored)
{
    nrm_resource *first = NULL, *again = NULL, *mr = source(0, NRM_KIND_DEVICE);
    simulator_start(NULL);
    REQUIRE_OK(nrm__builtin_init());
    REQUIRE_OK(nrm_get_per_device_resource(0, &first));
    REQUIRE_OK(nrm_set_per_device_resource(0, mr));
    REQUIRE_OK(nrm_set_per_device_resource(0, NULL));
    REQUIRE_OK(nrm_get_per_device_resource(0, &again));
    CHECK(first == again);
    nrm_resource_release(again);
    nrm__current_forget_driver();
    CHECK_EQ(n_references(first), 1);
    CHECK(nrm__registry_peek_device(0) == NULL);
    nrm_resource_release(first);
    nrm_resource_release(mr);
}

/* ---- threads ---- */

static nrm_resource *both[2];
static atomic_bool is_over;

/* A block goes back to the resource that it came from, whatever is current by then. */
static void *
use_what_is_current(void *unused)
{
    (void)unused;
    while (!atomic_load(&is_over)) {
        nrm_resource *mr = NULL;
        if (!CHECK_OK(nrm_get_per_device_resource(3, &mr))) {
            break;
        }
        CHECK(mr == both[0] || mr == both[1]);
        void *ptr = allocate(mr, 100);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 100, NULL));
        nrm_resource_release(mr);
    }
    return NULL;
}

TEST(it_may_be_set_while_others_allocate)
{
    pthread_t threads[N_THREADS];
    both[0] = source(0, NRM_KIND_DEVICE);
    both[1] = source(1, NRM_KIND_DEVICE);
    REQUIRE_OK(nrm_set_per_device_resource(3, both[0]));
    for (int i = 0; i < N_THREADS; i++) {
        pthread_create(&threads[i], NULL, use_what_is_current, NULL);
    }
    for (int i = 0; i < 200000 / SLOW; i++) {
        CHECK_OK(nrm_set_per_device_resource(3, both[i % 2]));
    }
    atomic_store(&is_over, true);
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    REQUIRE_OK(nrm_set_per_device_resource(3, NULL));
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(n_references(both[i]), 1);
        CHECK_EQ(counting[i].n_live, 0);
        nrm_resource_release(both[i]);
        CHECK_EQ(counting[i].n_destroyed, 1);
    }
}

static void *
look_up_often(void *unused)
{
    (void)unused;
    for (int i = 0; i < 300000 / SLOW; i++) {
        CHECK(look_up() == both[0]);
    }
    return NULL;
}

TEST(threads_that_only_look_up_leave_the_count_right)
{
    pthread_t threads[N_THREADS];
    both[0] = source(0, NRM_KIND_DEVICE);
    REQUIRE_OK(nrm_set_per_device_resource(3, both[0]));
    for (int i = 0; i < N_THREADS; i++) {
        pthread_create(&threads[i], NULL, look_up_often, NULL);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    REQUIRE_OK(nrm_set_per_device_resource(3, NULL));
    CHECK_EQ(n_references(both[0]), 1);
    nrm_resource_release(both[0]);
    CHECK_EQ(counting[0].n_destroyed, 1);
}

CHECK_MAIN
