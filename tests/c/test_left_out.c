/* What a fork leaves out of the child: seen at the moment of the fork, from the child,
   and in the parent afterwards. The simulated driver locks no pages, so nothing is
   copied here at once; what the kernel was told is read from its own table. */
#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>

#include "core/left_out.h"
#include "core/pin.h"
#include "fixtures.h"
#include "fork_scenes.h"
#include "nrm/pin.h"
#include "nrm/sources.h"
#include "nrm/uses.h"
#include "streams.h"
#include "workers.h"

/* ---- a fork that fails: first, as its parent must not have initialised CUDA ---- */

static void
cannot_fork(void)
{
    struct rlimit none = {0, 0};
    begin(&kinds[0]);
    CHECK_EQ(setrlimit(RLIMIT_NPROC, &none), 0);
    if (getuid() == 0) { /* whom the limit does not bind */
        CHECK_EQ(setresuid(65534, 65534, 65534), 0);
        CHECK_EQ(prctl(PR_SET_DUMPABLE, 1), 0); /* or its own table would be root's */
    }
    errno = 0;
    CHECK_EQ(fork(), -1);
    CHECK_EQ(errno, EAGAIN);
    CHECK_GE(watched[1].seen.nbytes, BLOCK - 2 * PAGE);
    check_parent();
    check_all();
}

TEST(the_parent_has_all_of_it_back_when_the_fork_fails)
{
    n_watched = 0;
    CHECK_EQ(in_child(cannot_fork), 0);
}

/* ---- the child ---- */

static void
check_live_in_child(void)
{
    for (size_t i = 0; i < N_BLOCKS; i++) {
        if (is_idle(i)) {
            CHECK_EQ(n_readable(scene.ptrs[i], BLOCK), 0u);
        }
        else {
            CHECK(has_pattern(scene.ptrs[i], BLOCK, (unsigned)i, BLOCK));
        }
    }
}

/* Everything that a child may do with what it has inherited. */
static void
use_up(void)
{
    void *ptr = NULL;
    size_t nbytes = 0;
    nrm_statistics statistics;
    CHECK_EQ(nrm_resource_allocate(scene.mr, BLOCK, 0, NULL, &ptr),
             NRM_CUDA_UNAVAILABLE);
    check_all();
    CHECK_OK(nrm_resource_statistics(scene.mr, &statistics));
    CHECK_EQ(statistics.current_count, (int64_t)N_BLOCKS / 2);
    give_the_rest_back();
    CHECK_EQ(nrm_resource_allocate(scene.mr, BLOCK, 0, NULL, &ptr),
             NRM_CUDA_UNAVAILABLE);
    CHECK_OK(nrm_resource_trim(scene.mr, 0, &nbytes));
    check_all();
    CHECK_EQ(nrm__left_out_copied_nbytes(), 0u);
    nrm_resource_release(scene.mr);
    (void)nrm__retired_drain(0);
}

static void
has_live_blocks_only(void)
{
    check_live_in_child();
    use_up();
}

TEST_EACH(idle_memory_is_not_in_the_child, kinds)
{
    begin(row);
    CHECK_EQ(in_child(has_live_blocks_only), 0);
    for (size_t i = 0; i < N_BLOCKS; i++) {
        size_t whole_pages = is_idle(i) ? BLOCK - 2 * PAGE : 0;
        CHECK_GE(watched[i].seen.nbytes, whole_pages);
        CHECK(is_idle(i) || watched[i].seen.nbytes == 0);
    }
    check_parent();
    end();
}

TEST_EACH(a_process_may_fork_again_and_again, kinds)
{
    begin(row);
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(in_child(check_live_in_child), 0);
        check_parent();
    }
    end();
}

TEST(neighbours_are_left_out_as_one)
{
    begin(&kinds[0]);
    give_the_rest_back();
    watched[0].nbytes = N_BLOCKS * BLOCK; /* they lie side by side */
    n_watched = 1;
    CHECK_EQ(in_child(check_all), 0);
    CHECK_EQ(watched[0].seen.nbytes, N_BLOCKS * BLOCK);
    CHECK_EQ(watched[0].seen.n_ranges, 1u);
    for (size_t i = 0; i < N_BLOCKS; i += 2) {
        scene.ptrs[i] = allocate(scene.mr, BLOCK);
    }
    end();
}

/* ---- live blocks ---- */

static void
has_nothing(void)
{
    for (size_t i = 0; i < N_BLOCKS; i++) {
        CHECK_EQ(n_readable(scene.ptrs[i], BLOCK), 0u);
    }
    use_up();
}

TEST_EACH(live_blocks_are_left_out_when_the_option_says_so, kinds)
{
    begin(row);
    set_fork("dontfork");
    CHECK_EQ(nrm__left_out_copied_nbytes(), 0u);
    CHECK_EQ(in_child(has_nothing), 0);
    for (size_t i = 0; i < N_BLOCKS; i++) {
        CHECK_GE(watched[i].seen.nbytes, BLOCK - 2 * PAGE);
    }
    check_parent();
    /* It is read at each fork. */
    set_fork("copy");
    CHECK_EQ(in_child(has_live_blocks_only), 0);
    check_parent();
    end();
}

/* ---- children and their children ---- */

static void
is_a_grandchild(void)
{
    check_live_in_child();
    use_up();
}

static void
forks_again(void)
{
    CHECK_EQ(in_child(is_a_grandchild), 0);
    check_live_in_child();
    use_up();
}

TEST_EACH(a_child_forks_again, kinds)
{
    begin(row);
    CHECK_EQ(in_child(forks_again), 0);
    check_parent();
    end();
}

/* What is free beside a block is not there to grow into; the block stays what it is. */
static void
cannot_grow(void)
{
    void *ptr = scene.ptrs[0];
    CHECK_EQ(nrm_resource_reallocate(scene.mr, ptr, BLOCK + BLOCK / 2, 0, NULL, &ptr),
             NRM_CUDA_UNAVAILABLE);
    CHECK_EQ(ptr, scene.ptrs[0]);
    CHECK(has_pattern(ptr, BLOCK, 0, BLOCK));
    CHECK_OK(nrm_resource_reallocate(scene.mr, ptr, BLOCK / 4, 0, NULL, &ptr));
    CHECK(has_pattern(ptr, BLOCK / 4, 0, BLOCK));
    CHECK_EQ(ptr, scene.ptrs[0]);
    check_all();
}

static void
and_neither_can_its_child(void)
{
    CHECK_EQ(in_child(cannot_grow), 0);
    cannot_grow();
}

static const struct kind growing[] = {
    {"immediate", immediate_pool},
    {"recorded", recorded_pool},
};

TEST_EACH(a_block_does_not_grow_into_what_a_child_lacks, growing)
{
    begin(row);
    nrm__cache_drain(scene.mr); /* so that its neighbour is free */
    CHECK_EQ(in_child(and_neither_can_its_child), 0);
    check_parent();
    void *ptr = scene.ptrs[0]; /* here it does */
    CHECK_OK(nrm_resource_reallocate(scene.mr, ptr, BLOCK + BLOCK / 2, 0, NULL, &ptr));
    CHECK_EQ(ptr, scene.ptrs[0]);
    end();
}

/* ---- addresses ---- */

/* Ordinary memory that the child takes lies elsewhere: pools of the parent's still
   describe what was there. */
static void
takes_other_addresses(void)
{
    nrm_resource *host = pool_over(host_source(), 0);
    void *ptrs[64];
    for (size_t i = 0; i < 64; i++) {
        ptrs[i] = allocate(host, 3 * MIB);
        write_pattern(ptrs[i], 3 * MIB, (unsigned)i);
        for (size_t k = 0; k < N_BLOCKS; k++) {
            uintptr_t start = (uintptr_t)scene.ptrs[k];
            CHECK((uintptr_t)ptrs[i] + 3 * MIB <= start ||
                  (uintptr_t)ptrs[i] >= start + BLOCK);
        }
    }
    for (size_t i = 0; i < 64; i++) {
        CHECK(has_pattern(ptrs[i], 3 * MIB, (unsigned)i, 3 * MIB));
        CHECK_OK(nrm_resource_deallocate(host, ptrs[i], 0, NULL));
    }
    nrm_resource_release(host);
    check_live_in_child();
    use_up();
}

TEST_EACH(the_addresses_are_nobodys_in_the_child, kinds)
{
    begin(row);
    CHECK_EQ(in_child(takes_other_addresses), 0);
    check_parent();
    end();
}

/* ---- what waits for the GPU ---- */

TEST(what_known_uses_keep_is_idle_too)
{
    simulator_start(NULL);
    scene.mr = recorded_pool();
    n_watched = 0;
    void *ptr = allocate(scene.mr, 4 * MIB), *other = allocate(scene.mr, 4 * MIB);
    make_current(0);
    nrm_stream *stream = new_stream();
    hold(stream);
    nrm_CUdeviceptr device = 0;
    CHECK_EQ(cuda.cuMemAlloc(&device, 4 * MIB), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(device, ptr, 4 * MIB, handle_of(stream)),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_record_use(ptr, stream));
    CHECK_OK(nrm_resource_deallocate(scene.mr, ptr, 0, NULL));
    CHECK_EQ(nrm__retired_nbytes(scene.mr), 4 * MIB);
    watch(ptr, 4 * MIB);
    watch(other, 4 * MIB);
    CHECK_EQ(in_child(check_all), 0);
    CHECK_GE(watched[0].seen.nbytes, 4 * MIB - 2 * PAGE);
    CHECK_EQ(watched[1].seen.nbytes, 0u);
    set_fork("dontfork");
    CHECK_EQ(in_child(check_all), 0);
    CHECK_GE(watched[0].seen.nbytes, 4 * MIB - 2 * PAGE);
    CHECK_GE(watched[1].seen.nbytes, 4 * MIB - 2 * PAGE);
    set_fork("copy");
    CHECK_EQ(look((uintptr_t)ptr, 4 * MIB).nbytes, 0u);
    CHECK_EQ(look((uintptr_t)other, 4 * MIB).nbytes, 0u);
    let_go(stream);
    CHECK_EQ(cuda.cuMemFree(device), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(scene.mr, other, 0, NULL));
    nrm_stream_release(stream);
    nrm_resource_release(scene.mr);
    (void)nrm__retired_drain(UINT64_MAX);
    simulator_check_faults();
}

/* ---- many ranges ---- */

#define SMALL (68 * KIB) /* 16 whole pages, wherever it starts */
#define N_SMALL 4400

/* Of more than 2048 ranges the largest are left out. */
TEST(of_many_ranges_the_largest_are_left_out)
{
    static char *ptrs[N_SMALL];
    static const size_t sizes[] = {4 * MIB, 3 * MIB, 2 * MIB};
    void *large[3], *between[3];
    simulator_start(NULL);
    nrm_resource *mr = immediate_pool();
    n_watched = 0;
    for (size_t i = 0, k = 0; i < N_SMALL; i++) {
        if (i == 0 || i > N_SMALL - 3) { /* the first of all, and the last ones */
            between[k] = allocate(mr, SMALL);
            large[k] = allocate(mr, sizes[k]);
            watch(large[k], sizes[k]);
            k++;
        }
        ptrs[i] = allocate(mr, SMALL);
    }
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, large[i], 0, NULL));
    }
    for (size_t i = 1; i < N_SMALL; i += 2) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    watch(NULL, UINTPTR_MAX / 2);
    CHECK_EQ(in_child(check_all), 0);
    for (size_t i = 0; i < 3; i++) {
        CHECK_GE(watched[i].seen.nbytes, sizes[i] - 2 * PAGE);
    }
    CHECK_GT(watched[3].seen.n_ranges, 1900u);
    CHECK_LE(watched[3].seen.n_ranges, 2048u);
    CHECK_EQ(look(0, UINTPTR_MAX / 2).nbytes, 0u);
    n_watched = 0;
    for (size_t i = 0; i < N_SMALL; i += 2) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, between[i], 0, NULL));
    }
    nrm_resource_release(mr);
    (void)nrm__retired_drain(UINT64_MAX);
}

/* ---- where nothing is left out ---- */

TEST(other_memory_is_let_be)
{
    simulator_start(NULL);
    scene.mr = pool_over(host_source(), 0);
    void *ptr = allocate(scene.mr, 16 * MIB);
    CHECK_OK(nrm_resource_deallocate(scene.mr, ptr, 0, NULL));
    n_watched = 0;
    watch(ptr, 16 * MIB);
    CHECK_EQ(in_child(check_all), 0);
    CHECK_EQ(watched[0].seen.nbytes, 0u);
    CHECK_EQ(nrm__left_out_copied_nbytes(), 0u);
    nrm_resource_release(scene.mr);
}

/* Memory of cuMemHostAlloc is a mapping of the driver's, which the kernel does not
   copy, and would not let come back: MADV_DOFORK is refused for it. */
TEST(memory_of_the_driver_is_let_be)
{
    simulator_start(NULL);
    nrm_resource *registered = tracked_pool(); /* so that there is something */
    void *other = allocate(registered, MIB);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 0);
    scene.mr = tracked_pool();
    void *ptr = allocate(scene.mr, 4 * MIB);
    CHECK_EQ(simulator_count(NRM_CUDASIM_HOST_ALLOCATIONS), 1u);
    CHECK_OK(nrm_resource_deallocate(scene.mr, ptr, 0, NULL));
    n_watched = 0;
    watch(ptr, 4 * MIB);
    static const char *const modes[] = {"dontfork", "copy"};
    for (size_t i = 0; i < 2; i++) {
        set_fork(modes[i]);
        CHECK_EQ(in_child(check_all), 0);
        CHECK_EQ(watched[0].seen.nbytes, 0u);
    }
    CHECK_OK(nrm_resource_deallocate(registered, other, 0, NULL));
    nrm_resource_release(registered);
    nrm_resource_release(scene.mr);
    (void)nrm__retired_drain(UINT64_MAX);
}

static nrm_pin *
pin(void *ptr, size_t nbytes)
{
    nrm_pin *out = NULL;
    CHECK_OK(nrm_pin_create(ptr, nbytes, NULL, &out));
    return out;
}

/* They belong to an allocator of other people, which may write to them in the child. */
TEST(pins_are_let_be)
{
    simulator_start(NULL);
    int flags = MAP_ANONYMOUS, rights = PROT_READ | PROT_WRITE;
    char *own = mmap(NULL, 4 * MIB, rights, flags | MAP_PRIVATE, -1, 0);
    char *shared = mmap(NULL, 4 * MIB, rights, flags | MAP_SHARED, -1, 0);
    REQUIRE(own != MAP_FAILED && shared != MAP_FAILED);
    scene.mr = tracked_pool();
    void *ptr = allocate(scene.mr, MIB); /* so that something is registered */
    nrm_pin *pins[] = {pin(own, 3 * MIB), pin(shared, 3 * MIB)};
    n_watched = 0;
    watch(own, 4 * MIB);
    watch(shared, 4 * MIB);
    static const char *const modes[] = {"dontfork", "copy"};
    for (size_t i = 0; i < 2; i++) {
        set_fork(modes[i]);
        CHECK_EQ(in_child(check_all), 0);
        CHECK_EQ(watched[0].seen.nbytes, 0u);
        CHECK_EQ(watched[1].seen.nbytes, 0u);
        /* A fork copies the private one. */
        CHECK_EQ(nrm__left_out_copied_nbytes(), 3 * MIB + i * MIB);
    }
    nrm_pin_destroy(pins[0]);
    nrm_pin_destroy(pins[1]);
    CHECK_EQ(nrm__left_out_copied_nbytes(), MIB);
    CHECK_OK(nrm_resource_deallocate(scene.mr, ptr, 0, NULL));
    nrm_resource_release(scene.mr);
    (void)nrm__retired_drain(UINT64_MAX);
    munmap(own, 4 * MIB);
    munmap(shared, 4 * MIB);
}

/* ---- how much would be copied ---- */

TEST_EACH(what_a_fork_would_copy_is_known_before, kinds)
{
    begin(row);
    CHECK_EQ(nrm__left_out_copied_nbytes(), N_BLOCKS / 2 * BLOCK);
    set_fork("dontfork");
    CHECK_EQ(nrm__left_out_copied_nbytes(), 0u);
    set_fork("copy");
    end();
}

/* ---- while others work ---- */

static atomic_bool stop;

struct work {
    nrm_resource *mr;
    unsigned n_forks;
    void *held[4];
};

static void
allocates_and_frees(unsigned index, struct work *work)
{
    uint64_t seed = 77 + index;
    void *ptrs[8] = {0};
    size_t sizes[8] = {0};
    for (unsigned n = 0; !atomic_load(&stop); n++) {
        size_t i = next_random(&seed) % 8;
        if (ptrs[i] != NULL) {
            CHECK(has_pattern(ptrs[i], sizes[i], index, sizes[i]));
            CHECK_OK(nrm_resource_deallocate(work->mr, ptrs[i], 0, NULL));
        }
        sizes[i] = 70 * KIB + next_random(&seed) % (n % 64 == 0 ? 6 * MIB : 300 * KIB);
        ptrs[i] = allocate(work->mr, sizes[i]);
        write_pattern(ptrs[i], sizes[i], index);
        if (n % 200 == 199) { /* so that it grows again */
            CHECK_OK(nrm_resource_trim(work->mr, 0, NULL));
        }
    }
    for (size_t i = 0; i < 8; i++) {
        CHECK(ptrs[i] == NULL || has_pattern(ptrs[i], sizes[i], index, sizes[i]));
        CHECK_OK(nrm_resource_deallocate(work->mr, ptrs[i], 0, NULL));
    }
}

static struct work *the_work;

/* In a process of one thread, whose parent has several. What is given back to a source
   starts another one. */
static void
reads_what_is_held(void)
{
    nrm_statistics statistics;
    for (size_t i = 0; i < 4; i++) {
        CHECK(has_pattern(the_work->held[i], 2 * MIB, 100, 2 * MIB));
    }
    CHECK_OK(nrm_resource_statistics(the_work->mr, &statistics));
    check_all();
    if (!CHILD_HAS_THREADS) {
        return;
    }
    for (size_t i = 0; i < 4; i++) {
        CHECK_OK(nrm_resource_deallocate(the_work->mr, the_work->held[i], 0, NULL));
    }
    CHECK_OK(nrm_resource_trim(the_work->mr, 0, NULL));
    check_all();
}

static void
forks_or_works(unsigned index, void *argument)
{
    struct work *work = argument;
    if (index != 0) {
        allocates_and_frees(index, work);
        return;
    }
    for (unsigned i = 0; i < work->n_forks; i++) {
        CHECK_EQ(in_child(reads_what_is_held), 0);
    }
    atomic_store(&stop, true);
}

static const struct kind worked[] = {
    {"a_pool", tracked_pool},
    {"a_pool_whose_blocks_threads_keep", immediate_pool},
    {"a_pool_of_a_pool", pool_of_a_pool},
    {"a_source", pinned_source},
};

TEST_EACH(others_allocate_and_free_meanwhile, worked)
{
    struct work work = {.n_forks = SLOW == 1 ? 40 : 8};
    simulator_start(NULL);
    the_work = &work;
    work.mr = row->make();
    n_watched = 0;
    atomic_store(&stop, false);
    for (size_t i = 0; i < 4; i++) {
        work.held[i] = allocate(work.mr, 2 * MIB);
        write_pattern(work.held[i], 2 * MIB, 100);
    }
    set_fork("copy");
    check_threads(4, forks_or_works, &work);
    check_all();
    CHECK_EQ(look(0, UINTPTR_MAX / 2).nbytes, 0u);
    for (size_t i = 0; i < 4; i++) {
        CHECK(has_pattern(work.held[i], 2 * MIB, 100, 2 * MIB));
        CHECK_OK(nrm_resource_deallocate(work.mr, work.held[i], 0, NULL));
    }
    nrm_resource_release(work.mr);
    (void)nrm__retired_drain(UINT64_MAX);
    simulator_check_faults();
}

CHECK_MAIN
