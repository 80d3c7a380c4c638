/* Faults that are known to get the reuse of memory wrong, planted in the core
   (base/planted.h), in its options or in a program: the checker of the simulated driver
   finds each of them, in the same schedules in which nobody notices anything without
   it. */
#include "base/planted.h"
#include "reuse_programs.h"

enum nrm__plant nrm__planted;

/* ---- programs that are wrong themselves ---- */

/* The copy to the host is not done when the host writes. */
static void
write_too_early(void)
{
    take(0, NULL);
    write_on(it.a, 0);
    explore_step();
    (void)sim.host_access(it.blocks[0], WORK, 1);
    give(0, NULL);
}

static void
read_too_early(void)
{
    take(0, NULL);
    write_on(it.a, 0);
    synchronise(it.b);
    (void)sim.host_access(it.blocks[0], WORK, 0);
    give(0, NULL);
}

static void
free_too_early(void)
{
    take(0, NULL);
    void *ptr = it.blocks[0];
    give(0, NULL);
    explore_submit(handle_of(it.a));
    CHECK_EQ(cuda.cuMemcpyAsync(next_place(), (uintptr_t)ptr, WORK, handle_of(it.a)),
             0);
}

/* Freed on a stream that does not wait for the one that works. */
static void
free_on_the_wrong_stream(void)
{
    take(0, it.a);
    write_on(it.b, 0);
    give(0, it.a);
    take(0, it.a);
}

/* ---- all of them ---- */

static const struct fault {
    struct explore_program program;
    enum nrm__plant plant;
    const char *first, *second; /* words for the two sides */
} faults[] = {
    {{"merge_without_record", start_two_blocks, {wait_and_pass_on}, finish, 1},
     NRM_PLANT_MERGE_WITHOUT_RECORD,
     "cuMemcpyAsync on stream",
     "handed out to stream"},
    {{"event_of_wrong_device", start_pinned, {copy_on_the_second_device}, finish, 2},
     NRM_PLANT_EVENT_OF_WRONG_DEVICE,
     "of device 1",
     "handed out to thread"},
    {{"destroyed_stream", start_one_block, {end_a_stream}, finish, 1},
     NRM_PLANT_DESTROYED_STREAM,
     "cuMemcpyAsync on stream",
     "handed out to stream"},
    {{"reused_handle", start_one_block, {borrow_a_reused_handle}, finish, 1},
     NRM_PLANT_REUSED_HANDLE,
     "cuMemcpyAsync on stream",
     "handed out to stream"},
    {{"record_before_publish",
      start_with_one_back,
      {copy_and_free, take_two},
      finish,
      1},
     NRM_PLANT_RECORD_BEFORE_PUBLISH,
     "cuMemcpyAsync on stream",
     "handed out to thread"},
    {{"known_use_shortens", start_pinned, {note_a_use_and_copy_elsewhere}, finish, 1},
     NRM_PLANT_KNOWN_USE_SHORTENS,
     "cuMemcpyAsync on stream",
     "handed out to thread"},
    {{"known_uses_alone", start_recorded, {note_a_use_and_copy_elsewhere}, finish, 1},
     NRM_PLANT_NONE,
     "cuMemcpyAsync on stream",
     "handed out to thread"},
    {{"immediate_reuse", start_immediate, {copy_and_free_twice}, finish, 1},
     NRM_PLANT_NONE,
     "cuMemcpyAsync on stream",
     "handed out to thread"},
    {{"write_during_a_copy", start_pinned, {write_too_early}, finish, 1},
     NRM_PLANT_NONE,
     "cuMemcpyAsync on stream",
     "writes 64 B"},
    {{"read_during_a_copy", start_pinned, {read_too_early}, finish, 1},
     NRM_PLANT_NONE,
     "cuMemcpyAsync on stream",
     "reads 64 B"},
    {{"work_after_the_free", start_pinned, {free_too_early}, finish, 1},
     NRM_PLANT_NONE,
     "cuMemcpyAsync on stream",
     "given back: #"},
    {{"free_on_wrong_stream", start_one_block, {free_on_the_wrong_stream}, finish, 1},
     NRM_PLANT_NONE,
     "cuMemcpyAsync on stream",
     "handed out to stream"},
};

/* TEST_EACH names a row by its first field, which begins with the program's name. */
static struct explore_result
explore_fault(const struct fault *fault, enum nrm__plant plant, int check, bool stops)
{
    struct explore_result result;
    nrm__planted = plant;
    explore(&fault->program, check, stops, &result);
    nrm__planted = NRM_PLANT_NONE;
    NOTE("%s: %" PRIu64 " schedules, %" PRIu64 " states, %" PRIu64 " faults",
         fault->program.name, result.n_schedules, result.n_states, result.n_faulty);
    return result;
}

TEST_EACH(a_fault_is_found, faults)
{
    struct explore_result result =
        explore_fault(row, row->plant, NRM_CUDASIM_CHECK_ON, true);
    CHECK_EQ(result.n_faulty, 1u);
    CHECK_STR_HAS(result.fault, row->first);
    CHECK_STR_HAS(result.fault, row->second);
    NOTE("%s", result.fault);
    NOTE("schedule: %s", result.schedule);
}

TEST_EACH(a_fault_is_missed_without_the_checker, faults)
{
    struct explore_result result =
        explore_fault(row, row->plant, NRM_CUDASIM_CHECK_OFF, false);
    CHECK(result.is_complete);
    CHECK_EQ(result.n_faulty, 0u);
}

TEST_EACH(without_the_fault_nothing_is_found, faults)
{
    if (row->plant == NRM_PLANT_NONE) {
        SKIP("the program itself is wrong");
    }
    struct explore_result result =
        explore_fault(row, NRM_PLANT_NONE, NRM_CUDASIM_CHECK_ON, false);
    CHECK(result.is_complete);
    if (!CHECK_EQ(result.n_faulty, 0u)) {
        NOTE("%s", result.fault);
    }
}

CHECK_MAIN
