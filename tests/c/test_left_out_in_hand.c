/* A fork while a thread is in the driver, which page-locks memory or unlocks it: what
   is in that thread's hands is left out of the child like what is idle, and is whole in
   the parent. See test_left_out.c for the rest. */
#include "fork_scenes.h"
#include "nrm/uses.h"
#include "workers.h"

/* ---- a thread that stops in a call of the driver ---- */

static struct {
    const char *call;
    int moment;
    atomic_bool stops;
    atomic_int n_stopped;
} stop;

static int
stop_there(void *unused, int moment, const char *call)
{
    (void)unused;
    if (moment == stop.moment && strcmp(call, stop.call) == 0) {
        atomic_fetch_add(&stop.n_stopped, 1);
        while (atomic_load(&stop.stops)) {
            usleep(200);
        }
    }
    return 1;
}

static void
begin_to_stop(const char *call, int moment)
{
    stop.call = call;
    stop.moment = moment;
    atomic_store(&stop.n_stopped, 0);
    atomic_store(&stop.stops, true);
    sim.set_chooser(stop_there, NULL);
}

static void
await_stopped(void)
{
    for (int i = 0; i < 20000 && atomic_load(&stop.n_stopped) == 0; i++) {
        usleep(200);
    }
    CHECK_GT(atomic_load(&stop.n_stopped), 0);
}

static void
go_on(void)
{
    atomic_store(&stop.stops, false);
}

/* ---- the tests ---- */

static const char *const modes[] = {"copy", "dontfork"};

static void
does_nothing(void)
{
}

static void
drain(void *unused)
{
    (void)unused;
    (void)nrm__retired_drain(UINT64_MAX);
}

static void
release(void)
{
    set_fork("copy");
    nrm_resource_release(scene.mr);
    for (int i = 0; i < 2000 && simulator_count(NRM_CUDASIM_REGISTRATIONS) != 0; i++) {
        drain(NULL);
        usleep(1000); /* the background thread may hold the last one */
    }
    CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 0u);
    CHECK_EQ(look(0, UINTPTR_MAX / 2).nbytes, 0u);
    CHECK_EQ(nrm__left_out_copied_nbytes(), 0u);
    simulator_check_faults();
}

/* The driver has one of the blocks, or two: the background thread unlocks them too.
   Others wait for their turn. */
TEST(what_is_being_unlocked_is_not_in_the_child)
{
    for (size_t i = 0; i < 2; i++) {
        struct worker worker;
        simulator_start(NULL);
        scene.mr = pinned_source();
        n_watched = 0;
        for (size_t k = 0; k < N_BLOCKS; k++) {
            scene.ptrs[k] = allocate(scene.mr, BLOCK);
            watch(scene.ptrs[k], BLOCK);
        }
        begin_to_stop("cuMemHostUnregister", NRM_CUDASIM_CALL_BEGINS);
        set_fork(modes[i]);
        for (size_t k = 0; k < N_BLOCKS; k++) {
            CHECK_OK(nrm_resource_deallocate(scene.mr, scene.ptrs[k], 0, NULL));
        }
        worker_start(&worker);
        worker_ask(&worker, drain, NULL);
        await_stopped();
        CHECK_EQ(in_child(does_nothing), 0);
        for (size_t k = 0; k < N_BLOCKS; k++) {
            CHECK_EQ(watched[k].seen.nbytes, BLOCK);
            CHECK_EQ(look(watched[k].start, BLOCK).nbytes, 0u);
        }
        go_on();
        worker_wait(&worker);
        worker_end(&worker);
        sim.set_chooser(NULL, NULL);
        release();
    }
}

static void
allocate_one(void *out)
{
    *(void **)out = allocate(scene.mr, 8 * BLOCK);
}

TEST(what_is_being_locked_is_not_in_the_child)
{
    for (size_t i = 0; i < 2; i++) {
        struct worker worker;
        void *ptr = NULL;
        simulator_start(NULL);
        scene.mr = pinned_source();
        void *other = allocate(scene.mr, BLOCK);
        begin_to_stop("cuMemHostRegister", NRM_CUDASIM_CALL_ENDS);
        worker_start(&worker);
        set_fork(modes[i]);
        worker_ask(&worker, allocate_one, &ptr);
        await_stopped();
        n_watched = 0;
        watch(NULL, UINTPTR_MAX / 2);
        CHECK_EQ(in_child(does_nothing), 0);
        CHECK_EQ(watched[0].seen.nbytes, (i == 0 ? 8 : 9) * BLOCK);
        CHECK_EQ(look(0, UINTPTR_MAX / 2).nbytes, 0u);
        go_on();
        worker_wait(&worker);
        worker_end(&worker);
        sim.set_chooser(NULL, NULL);
        REQUIRE(ptr != NULL);
        write_pattern(ptr, 8 * BLOCK, 3);
        CHECK_EQ(in_child(does_nothing), 0); /* now it is a live one */
        CHECK_EQ(watched[0].seen.nbytes, (i == 0 ? 0 : 9) * BLOCK);
        CHECK(has_pattern(ptr, 8 * BLOCK, 3, 8 * BLOCK));
        CHECK_OK(nrm_resource_deallocate(scene.mr, ptr, 0, NULL));
        CHECK_OK(nrm_resource_deallocate(scene.mr, other, 0, NULL));
        release();
    }
}

CHECK_MAIN
