/* Slabs that several threads use: who wins a cell, whose slab it is of, cells that go
   from thread to thread in batches, and what a forked child has of them. */
#include "slab_owner.h"

/* ---- threads ---- */

static void
walks(unsigned index, void *arg)
{
    struct owner *owner = arg;
    struct slot slots[40] = {{NULL, 0}};
    uint64_t seed = index + 1;
    size_t trimmed = 0;
    for (int step = 0; step < 6000; step++) {
        size_t i = check_random(&seed) % 40;
        unsigned char key = (unsigned char)(index * 40 + i);
        if (slots[i].ptr != NULL) {
            empty_slot(owner, &slots[i], key);
        }
        else {
            fill_slot(owner, &slots[i], random_nbytes(&seed) % NRM__SLAB_MAX + 1, key);
        }
        if (step % 500 == 0) {
            nrm__slabs_trim(&owner->slabs, 0, &trimmed);
            nrm__slabs_check(&owner->slabs);
        }
    }
    for (size_t i = 0; i < 40; i++) {
        if (slots[i].ptr != NULL) {
            empty_slot(owner, &slots[i], (unsigned char)(index * 40 + i));
        }
    }
}

TEST(threads_walk_side_by_side)
{
    struct owner *owner = create_owner();
    check_threads(4, walks, owner);
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

struct race {
    struct owner *owner;
    _Atomic(void *) target;
    atomic_uint n_wins;
    pthread_barrier_t start, end;
};

#define N_RACES 2000

static void
frees_the_same(unsigned index, void *arg)
{
    struct race *race = arg;
    struct nrm__block block;
    for (int i = 0; i < N_RACES; i++) {
        if (index == 0) {
            atomic_store(&race->target, allocate(race->owner, NRM__SLAB_MAX, &block));
        }
        pthread_barrier_wait(&race->start);
        if (release(race->owner, atomic_load(&race->target))) {
            atomic_fetch_add(&race->n_wins, 1);
        }
        if (index == 1 && i % 7 == 0) { /* the chunk may leave while others look */
            size_t trimmed = 0;
            nrm__slabs_trim(&race->owner->slabs, 0, &trimmed);
        }
        pthread_barrier_wait(&race->end);
    }
}

TEST(of_threads_that_free_one_cell_exactly_one_wins)
{
    struct race race = {.owner = create_owner()};
    pthread_barrier_init(&race.start, NULL, 4);
    pthread_barrier_init(&race.end, NULL, 4);
    check_threads(4, frees_the_same, &race);
    CHECK_EQ(atomic_load(&race.n_wins), (unsigned)N_RACES);
    nrm__slabs_check(&race.owner->slabs);
    nrm_resource_release(&race.owner->base);
    pthread_barrier_destroy(&race.start);
    pthread_barrier_destroy(&race.end);
}

#define N_MAILBOXES 64
static _Atomic(void *) mailboxes[N_MAILBOXES];

/* Puts what it allocates where another thread takes it and frees it. */
static void
exchanges(unsigned index, void *arg)
{
    uint64_t seed = index + 99;
    for (int i = 0; i < 10000; i++) {
        struct nrm__block block;
        unsigned char *mine = allocate(arg, random_nbytes(&seed) % 512 + 1, &block);
        mine[0] = 0x77;
        unsigned char *other =
            atomic_exchange(&mailboxes[check_random(&seed) % N_MAILBOXES], mine);
        if (other != NULL) {
            CHECK_EQ(other[0], 0x77);
            CHECK(release(arg, other));
        }
    }
}

TEST(what_one_thread_made_another_frees)
{
    struct owner *owner = create_owner();
    check_threads(4, exchanges, owner);
    for (size_t i = 0; i < N_MAILBOXES; i++) {
        void *ptr = atomic_exchange(&mailboxes[i], NULL);
        CHECK(ptr == NULL || release(owner, ptr));
    }
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

/* ---- threads side by side ---- */

struct spread {
    struct owner *owner;
    struct nrm__block block;
};

static void *
allocate_there(void *argument)
{
    struct spread *spread = argument;
    allocate(spread->owner, 1000, &spread->block);
    return NULL;
}

/* One thread after the other. */
static void
allocate_in_threads(struct spread *spread, int n)
{
    for (int i = 0; i < n; i++) {
        pthread_t thread;
        REQUIRE_EQ(pthread_create(&thread, NULL, allocate_there, &spread[i]), 0);
        pthread_join(thread, NULL);
    }
}

#define N_SPREAD 20

TEST(threads_have_their_cells_in_chunks_of_their_own_until_there_are_many)
{
    struct owner *owner = create_owner();
    struct spread spread[N_SPREAD];
    struct nrm__block mine, other;
    owner->slabs.spreads = true;
    for (int i = 0; i < N_SPREAD; i++) {
        spread[i].owner = owner;
    }
    allocate(owner, 1000, &mine);
    allocate_in_threads(spread, 4);
    CHECK_EQ(atomic_load(&owner->n_chunks), 5u);
    for (int i = 0; i < 4; i++) {
        CHECK(spread[i].block.record != mine.record);
    }
    allocate(owner, 1000, &other);
    CHECK_EQ(other.record, mine.record);
    allocate_in_threads(&spread[4], N_SPREAD - 4);
    CHECK_EQ(atomic_load(&owner->n_chunks), 16u);
    nrm__slabs_check(&owner->slabs);
    for (int i = 0; i < N_SPREAD; i++) {
        CHECK(release(owner, spread[i].block.ptr));
    }
    CHECK(release(owner, mine.ptr) && release(owner, other.ptr));
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

TEST(a_chunk_of_another_thread_serves_when_there_are_no_more)
{
    struct owner *owner = create_owner();
    struct spread spread = {.owner = owner};
    struct nrm__block mine, full[64];
    owner->slabs.spreads = true;
    allocate(owner, 1000, &mine);
    atomic_store(&owner->refuses, true);
    allocate_in_threads(&spread, 1);
    CHECK_EQ(spread.block.record, mine.record);
    for (int i = 0; i < 62; i++) {
        allocate(owner, 1000, &full[i]);
    }
    CHECK_STATUS(nrm__slabs_allocate(&owner->slabs, 1000, &full[62]),
                 NRM_OUT_OF_MEMORY);
    for (int i = 0; i < 62; i++) {
        CHECK(release(owner, full[i].ptr));
    }
    CHECK(release(owner, mine.ptr) && release(owner, spread.block.ptr));
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

/* ---- batches ---- */

TEST(a_batch_comes_back_as_it_was_put)
{
    struct owner *owner = create_owner();
    struct nrm__slabs *slabs = &owner->slabs;
    struct nrm__cell cells[NRM__SLAB_BATCH], again[NRM__SLAB_BATCH];
    struct nrm__block block = {0};
    size_t class = nrm__slab_class_index(100);
    slabs->spreads = true;
    allocate(owner, 100, &block);
    REQUIRE_EQ(nrm__slabs_take(slabs, class, cells, 8), 8u);
    CHECK(nrm__slabs_put_batch(slabs, class, cells, 8));
    nrm__slabs_check(slabs);
    CHECK_EQ(nrm__slabs_take_batch(slabs, class + 1, again), 0u);
    CHECK_EQ(nrm__slabs_take_batch(slabs, class, again), 8u);
    CHECK_EQ(memcmp(cells, again, 8 * sizeof *cells), 0);
    CHECK_EQ(nrm__slabs_take_batch(slabs, class, again), 0u);
    CHECK_EQ(found_nbytes(cells[0].ptr, cells[0].ptr), 0u);
    struct nrm__block live = {.owner = &owner->base};
    nrm_resource_retain(&owner->base); /* for the block */
    nrm__slabs_make_live(&cells[0], 90, &live);
    CHECK_EQ(found_nbytes(cells[0].ptr, cells[0].ptr), 90u);
    CHECK(release(owner, block.ptr));
    CHECK(release(owner, cells[0].ptr));
    nrm__slabs_put(slabs, &cells[1], 7);
    nrm__slabs_check(slabs);
    nrm_resource_release(&owner->base);
}

TEST(batches_are_bounded_and_break_up)
{
    struct owner *owner = create_owner();
    struct nrm__slabs *slabs = &owner->slabs;
    struct nrm__cell cells[NRM__SLAB_BATCH];
    struct nrm__block block;
    size_t class = nrm__slab_class_index(64), n_put = 0, nbytes = 0;
    slabs->spreads = true;
    allocate(owner, 64, &block);
    for (;;) {
        REQUIRE_EQ(nrm__slabs_take(slabs, class, cells, 32), 32u);
        if (!nrm__slabs_put_batch(slabs, class, cells, 32)) {
            break;
        }
        n_put++;
    }
    nrm__slabs_put(slabs, cells, 32);
    CHECK_EQ(n_put, 16u);
    CHECK(release(owner, block.ptr));
    nrm__slabs_trim(slabs, 0, &nbytes);
    CHECK_EQ(nbytes, 0u); /* its cells are on their way */
    nrm__slabs_break_batches(slabs);
    nrm__slabs_check(slabs);
    nrm__slabs_trim(slabs, 0, &nbytes);
    CHECK_EQ(nbytes, NRM__SLAB_CHUNK);
    nrm_resource_release(&owner->base);
}

TEST(an_owner_that_is_closed_keeps_no_batch)
{
    struct owner *owner = create_owner();
    struct nrm__slabs *slabs = &owner->slabs;
    struct nrm__cell cells[8];
    struct nrm__block block;
    size_t class = nrm__slab_class_index(64);
    allocate(owner, 64, &block);
    REQUIRE_EQ(nrm__slabs_take(slabs, class, cells, 8), 8u);
    CHECK(!nrm__slabs_put_batch(slabs, class, cells, 8)); /* as it does not spread */
    slabs->spreads = true;
    CHECK(!nrm__slabs_put_batch(slabs, class, cells, 0));
    atomic_store(&owner->base.is_closed, true);
    CHECK(!nrm__slabs_put_batch(slabs, class, cells, 8));
    nrm__slabs_put(slabs, cells, 8);
    CHECK(release(owner, block.ptr));
    nrm_resource_release(&owner->base);
}

/* ---- fork ---- */

static atomic_bool stop;
static struct owner *forked_owner;

static void *
never_rests(void *arg)
{
    uint64_t seed = 5;
    while (!atomic_load(&stop)) {
        struct nrm__block block;
        allocate(arg, random_nbytes(&seed) % 2048 + 1, &block);
        CHECK(release(arg, block.ptr));
    }
    return NULL;
}

static void
uses_the_slabs(void)
{
    struct nrm__block block;
    nrm__slabs_check(&forked_owner->slabs);
    for (size_t nbytes = 1; nbytes <= NRM__SLAB_MAX; nbytes += 13) {
        allocate(forked_owner, nbytes, &block);
        CHECK(release(forked_owner, block.ptr));
    }
}

TEST(a_child_uses_them_whatever_the_parents_threads_did)
{
    pthread_t thread;
    struct nrm__block kept;
    forked_owner = create_owner();
    allocate(forked_owner, 1000, &kept);
    atomic_store(&stop, false);
    REQUIRE_EQ(pthread_create(&thread, NULL, never_rests, forked_owner), 0);
    for (int i = 0; i < 30; i++) {
        CHECK_IN_CHILD(uses_the_slabs);
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    CHECK(release(forked_owner, kept.ptr));
    nrm_resource_release(&forked_owner->base);
}

CHECK_MAIN
