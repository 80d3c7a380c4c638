/* Small programs that use memory of pools on streams, free it with work pending, and
   take memory again, for tests that explore their schedules (explore.h). Nothing is
   wrong with them: whatever the GPU does when, nobody gets what it still uses. */
#ifndef NRM_TESTS_REUSE_PROGRAMS_H
#define NRM_TESTS_REUSE_PROGRAMS_H

#include "reuse_steps.h"

/* ---- memory that the host sees ---- */

static inline void
copy_and_free_twice(void)
{
    for (int i = 0; i < 2; i++) {
        take(i, NULL);
        read_on(it.a, i);
        give(i, NULL);
    }
    take(0, NULL);
    take(1, NULL);
}

static inline void
copy_back_and_free(void)
{
    for (int i = 0; i < 3; i++) {
        take(0, NULL);
        write_on(it.a, 0);
        give(0, NULL);
    }
    take(0, NULL);
}

static inline void
copy_on_two_streams(void)
{
    take(0, NULL);
    read_on(it.a, 0);
    read_on(it.b, 0);
    give(0, NULL);
    take(1, NULL);
    write_on(it.b, 1);
    give(1, NULL);
    take(0, NULL);
    take(1, NULL);
}

static inline void
copy_one(void)
{
    take(0, NULL);
    read_on(it.a, 0);
    give(0, NULL);
}

/* Of those that it has from the beginning. */
static inline void
copy_and_free(void)
{
    read_on(it.a, 0);
    give(0, NULL);
}

static inline void
take_two(void)
{
    take(1, NULL);
    take(2, NULL);
}

static inline void
copy_another(void)
{
    take(3, NULL);
    write_on(it.b, 3);
    give(3, NULL);
}

static inline void
enter_second(void)
{
    explore_step();
    make_current(1);
    CHECK_EQ(cuda.cuStreamCreate(&it.raw, NRM_CU_STREAM_NON_BLOCKING), 0);
}

static inline void
leave_second(void)
{
    explore_step();
    CHECK_EQ(cuda.cuStreamDestroy(it.raw), NRM_CUDA_SUCCESS);
    it.raw = NULL;
    make_current(0);
}

/* The memory of the first device can be named on the second. */
static inline void
copy_on_the_second_device(void)
{
    CHECK_EQ(cuda.cuStreamDestroy(it.raw), NRM_CUDA_SUCCESS);
    take(0, NULL);
    enter_second();
    read_on_raw(it.raw, 0);
    leave_second();
    give(0, NULL);
    take(0, NULL);
    take(1, NULL);
}

static inline void
copy_on_both_devices(void)
{
    CHECK_EQ(cuda.cuStreamDestroy(it.raw), NRM_CUDA_SUCCESS);
    take(0, NULL);
    take(1, NULL);
    read_on(it.a, 0);
    enter_second();
    read_on_raw(it.raw, 1);
    leave_second();
    give(0, NULL);
    give(1, NULL);
    take(0, NULL);
    take(1, NULL);
}

static inline void
copy_on_a_destroyed_stream(void)
{
    take(0, NULL);
    read_on_raw(it.raw, 0);
    destroy_raw();
    give(0, NULL);
    take(0, NULL);
    take(1, NULL);
}

static inline void
copy_on_a_reused_handle(void)
{
    nrm_CUstream old = it.raw;
    take(0, NULL);
    read_on_raw(it.raw, 0);
    destroy_raw();
    it.raw = new_handle();
    CHECK(it.raw == old);
    explore_step();
    CHECK_EQ(cuda.cuStreamSynchronize(it.raw), NRM_CUDA_SUCCESS);
    give(0, NULL);
    take(0, NULL);
    take(1, NULL);
}

static inline void
note_a_use_and_copy_elsewhere(void)
{
    take(0, NULL);
    read_on(it.a, 0);
    note(0, it.a);
    read_on(it.b, 0); /* of which nobody knows */
    synchronise(it.a);
    give(0, NULL);
    take(0, NULL);
    take(1, NULL);
}

static inline void
note_all_uses(void)
{
    take(0, NULL);
    read_on(it.a, 0);
    note(0, it.a);
    write_on(it.a, 0);
    note(0, it.a);
    give(0, NULL);
    take(0, NULL);
    take(1, NULL);
}

static inline void
note_uses_of_two_streams(void)
{
    take(0, NULL);
    read_on(it.a, 0);
    note(0, it.a);
    read_on(it.b, 0);
    note(0, it.b);
    give(0, NULL);
    take(0, NULL);
    take(1, NULL);
    take(2, NULL);
}

static inline void
synchronise_and_free(void)
{
    for (int i = 0; i < 3; i++) {
        take(0, NULL);
        write_on(it.a, 0);
        synchronise(it.a);
        give(0, NULL);
    }
}

static inline void
copy_on_default_streams(void)
{
    take(0, NULL);
    read_on_raw(NRM_CU_STREAM_LEGACY, 0);
    take(1, NULL);
    write_on_raw(NRM_CU_STREAM_PER_THREAD, 1);
    give(0, NULL);
    give(1, NULL);
    take(0, NULL);
    take(1, NULL);
}

static inline void
trim_with_work_pending(void)
{
    take(0, NULL);
    read_on(it.a, 0);
    give(0, NULL);
    explore_step();
    CHECK_OK(nrm_resource_trim(it.pool, 0, NULL));
    take(0, NULL);
    read_on(it.b, 0);
    give(0, NULL);
    explore_step();
    CHECK_OK(nrm_resource_trim(it.pool, 0, NULL));
    take(0, NULL);
}

static inline void
shrink_and_copy(void)
{
    take(0, NULL);
    read_on(it.a, 0);
    explore_step();
    CHECK_OK(nrm_resource_reallocate(it.pool, it.blocks[0], it.nbytes / 2, 0, NULL,
                                     &it.blocks[0]));
    give(0, NULL);
    take(0, NULL);
    take(1, NULL);
}

static inline void
capture_and_launch(void)
{
    nrm_CUgraph graph;
    take(0, NULL);
    explore_step();
    nrm_capture_begin();
    CHECK_EQ(cuda.cuStreamBeginCapture(it.raw, NRM_CU_STREAM_CAPTURE_MODE_RELAXED), 0);
    read_on_raw(it.raw, 0);
    explore_step();
    CHECK_OK(nrm_record_use_on_handle(it.blocks[0], (uintptr_t)it.raw));
    CHECK_EQ(cuda.cuStreamEndCapture(it.raw, &graph), NRM_CUDA_SUCCESS);
    nrm_capture_end();
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&it.exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    give(0, NULL); /* the graph keeps it */
    for (int i = 0; i < 2; i++) {
        explore_step();
        CHECK_EQ(cuda.cuGraphLaunch(it.exec, handle_of(it.b)), NRM_CUDA_SUCCESS);
        take(i, NULL);
    }
    explore_step();
    CHECK_EQ(cuda.cuGraphExecDestroy(it.exec), NRM_CUDA_SUCCESS);
    it.exec = NULL;
    take(2, NULL);
    synchronise(it.b);
    explore_step();
    CHECK_OK(nrm_resource_trim(it.pool, it.nbytes, NULL)); /* it comes back */
    take(3, NULL);
}

/* ---- device memory ---- */

static inline void
keep_to_one_stream(void)
{
    for (int i = 0; i < 3; i++) {
        take(0, it.a);
        write_on(it.a, 0);
        give(0, it.a);
    }
}

static inline void
change_streams(void)
{
    nrm_stream *streams[] = {it.a, it.b, it.c, it.a};
    for (int i = 0; i < 4; i++) {
        take(0, streams[i]);
        write_on(streams[i], 0);
        give(0, streams[i]);
    }
}

/* A block of A that is recorded on, and one of B that A waits for; C wants them. */
static inline void
wait_and_pass_on(void)
{
    take(0, it.a);
    write_on(it.a, 0);
    take(1, it.b);
    write_on(it.b, 1);
    give(0, it.a);
    take(2, it.c); /* A's is not done: there is an event now */
    give(2, it.c);
    take(0, it.a);
    give(1, it.b);
    take(3, it.a); /* B's, behind a wait */
    give(3, it.a);
    take(4, it.c);
    write_on(it.c, 4);
    take(5, it.c);
    write_on(it.c, 5);
}

static inline void
end_a_stream(void)
{
    take(0, it.a);
    write_on(it.a, 0);
    give(0, it.a);
    explore_step();
    nrm_stream_release(it.a);
    it.a = NULL;
    take(0, it.b);
    write_on(it.b, 0);
}

/* The next stream has the handle of one that is gone, with its work pending. */
static inline void
borrow_a_reused_handle(void)
{
    nrm_CUstream old = it.raw;
    nrm_stream *first = bare_stream(it.raw);
    take(0, first);
    write_on_raw(it.raw, 0);
    give(0, first);
    nrm_stream_release(first);
    destroy_raw();
    it.raw = new_handle();
    CHECK(it.raw == old);
    nrm_stream *second = bare_stream(it.raw);
    take(0, second);
    write_on_raw(it.raw, 0);
    give(0, second);
    nrm_stream_release(second);
    take(0, it.a);
    write_on(it.a, 0);
}

static inline void
free_by_the_host(void)
{
    take(0, it.a);
    write_on(it.a, 0);
    give(0, NULL);
    take(0, it.b);
    write_on(it.b, 0);
    give(0, it.b);
    take(0, NULL);
}

static inline void
work_on_default_streams(void)
{
    nrm_stream *mine = NULL;
    CHECK_OK(nrm_stream_per_thread(&mine));
    take(0, nrm_stream_legacy());
    write_on_raw(NRM_CU_STREAM_LEGACY, 0);
    give(0, nrm_stream_legacy());
    take(0, mine);
    write_on_raw(NRM_CU_STREAM_PER_THREAD, 0);
    give(0, mine);
    take(0, it.a);
    write_on(it.a, 0);
    nrm_stream_release(mine);
}

static inline void
work_on_a(void)
{
    take(0, it.a);
    write_on(it.a, 0);
    give(0, it.a);
}

static inline void
work_on_b(void)
{
    take(1, it.b);
    write_on(it.b, 1);
    give(1, it.b);
}

static inline void
work_on_b_twice(void)
{
    work_on_b();
    work_on_b();
}

static inline void
allocate_in_a_capture(void)
{
    nrm_CUgraph graph;
    take(1, it.a);
    write_on(it.a, 1);
    give(1, it.a);
    explore_step();
    nrm_capture_begin();
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(it.a),
                                       NRM_CU_STREAM_CAPTURE_MODE_RELAXED),
             0);
    take(0, it.a);
    write_on(it.a, 0);
    give(0, it.a);
    explore_step();
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(it.a), &graph), NRM_CUDA_SUCCESS);
    nrm_capture_end();
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&it.exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    take(2, it.b);
    write_on(it.b, 2);
    give(2, it.b);
    explore_step();
    CHECK_EQ(cuda.cuGraphLaunch(it.exec, handle_of(it.c)), NRM_CUDA_SUCCESS);
    take(3, it.b);
    write_on(it.b, 3);
}

#endif
