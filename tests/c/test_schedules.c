/* Every schedule of small programs, on the simulated driver that checks the order of
   things: in none of them somebody gets memory that may still be in use. */
#include "reuse_programs.h"

/* ---- that all schedules are explored ---- */

static void
begin_nothing(void)
{
    memset(&it, 0, sizeof it);
    it.raw = new_handle();
    it.a = new_stream();
    CHECK_EQ(cuda.cuMemAlloc(&it.scratch, N_WORKS * WORK), NRM_CUDA_SUCCESS);
}

static void
end_nothing(void)
{
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    nrm_stream_release(it.a);
}

static void
one_step(void)
{
    explore_step();
}

static void
two_steps(void)
{
    explore_step();
    explore_step();
}

static void
fill_on(nrm_CUstream stream, nrm_CUdeviceptr ptr)
{
    for (int i = 0; i < 2; i++) {
        explore_submit(stream);
        CHECK_EQ(cuda.cuMemsetD8Async(ptr, 1, WORK, stream), NRM_CUDA_SUCCESS);
    }
}

static void
fill_twice(void)
{
    fill_on(it.raw, it.scratch);
}

static void
fill_elsewhere(void)
{
    fill_on(handle_of(it.a), it.scratch + WORK);
}

static void
fill_the_same(void)
{
    fill_on(handle_of(it.a), it.scratch);
}

static void
ask_twice(void)
{
    fill_twice();
    explore_step();
    (void)cuda.cuStreamQuery(it.raw);
    (void)cuda.cuStreamQuery(it.raw);
}

/* Each thread has its beginning, and two steps or one. */
static const struct count {
    const char *name;
    void (*threads[EXPLORE_THREADS])(void);
    uint64_t n_all;    /* schedules */
    uint64_t n_needed; /* without those that commute */
    bool is_faulty;
} counts[] = {
    {"one", {two_steps}, 1, 1, false},
    {"two", {two_steps, two_steps}, 20, 6, false},
    {"three", {one_step, one_step, one_step}, 90, 6, false},
    {"two_streams", {fill_twice, fill_elsewhere}, 20, 1, false},
    {"one_stream", {fill_twice, fill_twice}, 20, 6, false},
    {"a_race_of_streams", {fill_twice, fill_the_same}, 20, 1, true},
    {"answers", {ask_twice}, 3, 3, false}, /* yes; no, yes; no, no */
};

TEST_EACH(so_many_schedules_are_explored, counts)
{
    struct explore_program program = {row->name, begin_nothing, {0}, end_nothing, 1};
    struct explore_result result;
    memcpy(program.threads, row->threads, sizeof program.threads);
    for (int leaves_out = 0; leaves_out < 2; leaves_out++) {
        explore_leaves_out = leaves_out;
        explore(&program, NRM_CUDASIM_CHECK_ON, false, &result);
        CHECK(result.is_complete);
        CHECK_EQ(result.n_schedules, leaves_out ? row->n_needed : row->n_all);
        CHECK_EQ(result.n_faulty, row->is_faulty ? result.n_schedules : 0);
    }
}

/* ---- the programs ---- */

static struct explore_result total;

static const struct explore_program programs[] = {
    {"copies_from_pinned", start_pinned, {copy_and_free_twice}, finish, 1},
    {"copies_to_pinned", start_pinned, {copy_back_and_free}, finish, 1},
    {"two_streams_of_pinned", start_pinned, {copy_on_two_streams}, finish, 1},
    {"two_threads_of_pinned",
     start_with_one_back,
     {copy_and_free, take_two},
     finish,
     1},
    {"two_copying_threads", start_pinned, {copy_one, copy_another}, finish, 1},
    {"the_second_device", start_pinned, {copy_on_the_second_device}, finish, 2},
    {"both_devices", start_pinned, {copy_on_both_devices}, finish, 2},
    {"a_destroyed_stream", start_pinned, {copy_on_a_destroyed_stream}, finish, 1},
    {"a_reused_handle", start_pinned, {copy_on_a_reused_handle}, finish, 1},
    {"a_known_use", start_pinned, {note_a_use_and_copy_elsewhere}, finish, 1},
    {"recorded_uses", start_recorded, {note_all_uses}, finish, 1},
    {"recorded_on_two_streams", start_recorded, {note_uses_of_two_streams}, finish, 1},
    {"immediate_reuse", start_immediate, {synchronise_and_free}, finish, 1},
    {"default_streams", start_pinned, {copy_on_default_streams}, finish, 1},
    {"a_trimmed_pool", start_pinned, {trim_with_work_pending}, finish, 1},
    {"a_shrunk_block", start_pinned, {shrink_and_copy}, finish, 1},
    {"managed_memory", start_managed, {copy_on_two_streams}, finish, 1},
    {"no_pool", start_unpooled, {copy_and_free_twice}, finish, 1},
    {"fixed_size_blocks", start_pinned_fixed, {copy_on_two_streams}, finish, 1},
    {"a_graph", start_pinned, {capture_and_launch}, finish, 1},
    {"one_stream", start_one_block, {keep_to_one_stream}, finish, 1},
    {"three_streams", start_one_block, {change_streams}, finish, 1},
    {"a_wait_for_a_third", start_two_blocks, {wait_and_pass_on}, finish, 1},
    {"a_stream_that_ends", start_one_block, {end_a_stream}, finish, 1},
    {"a_borrowed_handle", start_one_block, {borrow_a_reused_handle}, finish, 1},
    {"frees_by_the_host", start_one_block, {free_by_the_host}, finish, 1},
    {"defaults_of_a_device", start_one_block, {work_on_default_streams}, finish, 1},
    {"two_threads_of_a_device", start_one_block, {work_on_a, work_on_b}, finish, 1},
    {"two_threads_and_room", start_two_blocks, {work_on_a, work_on_b_twice}, finish, 1},
    {"fixed_size_of_a_device", start_device_fixed, {change_streams}, finish, 1},
    {"mapped_segments", start_mapped, {wait_and_pass_on}, finish, 1},
    {"a_graph_with_memory", start_two_blocks, {allocate_in_a_capture}, finish, 1},
};

TEST_EACH(a_program_is_right_in_every_schedule, programs)
{
    struct explore_result result;
    n_reuses = 0;
    explore(row, NRM_CUDASIM_CHECK_ON, false, &result);
    NOTE("%s: %" PRIu64 " schedules, %" PRIu64 " states, %" PRIu64 " reuses, %" PRIu64
         " faults",
         row->name, result.n_schedules, result.n_states, n_reuses, result.n_faulty);
    total.n_schedules += result.n_schedules;
    total.n_states += result.n_states;
    total.n_faulty += result.n_faulty;
    CHECK(result.is_complete);
    CHECK_GT(n_reuses, 0u); /* or it shows nothing */
    CHECK_GT(result.n_states, 0u);
    if (!CHECK_EQ(result.n_faulty, 0u)) {
        NOTE("%s", result.fault);
        NOTE("schedule: %s", result.schedule);
    }
}

TEST(of_all_programs)
{
    size_t n = sizeof programs / sizeof programs[0];
    NOTE("%zu programs, %" PRIu64 " schedules, %" PRIu64 " states, %" PRIu64 " faults",
         n, total.n_schedules, total.n_states, total.n_faulty);
    CHECK_GE(n, 20u);
    CHECK_EQ(total.n_faulty, 0u);
}

CHECK_MAIN
