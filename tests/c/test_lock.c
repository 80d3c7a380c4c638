/* Locks with ranks: what may be taken after what, and over a fork. */

#include "check.h"

#include "base/assert.h"
#include "base/lock.h"

static struct nrm__lock outer = NRM__LOCK_INIT(NRM__RANK_POOL);
static struct nrm__lock inner = NRM__LOCK_INIT(NRM__RANK_NODES);

TEST(locks_are_taken_in_ascending_rank)
{
    nrm__lock_acquire(&outer);
    nrm__lock_acquire(&inner);
    nrm__lock_release(&inner);
    nrm__lock_release(&outer);
    nrm__assert_no_locks();
}

TEST(locks_are_released_in_any_order)
{
    nrm__lock_acquire(&outer);
    nrm__lock_acquire(&inner);
    nrm__lock_release(&outer);
    nrm__lock_release(&inner);
    nrm__assert_no_locks();
}

#ifndef NDEBUG

static void
takes_them_in_the_wrong_order(void)
{
    nrm__lock_acquire(&inner);
    nrm__lock_acquire(&outer);
}

static void
takes_two_of_a_rank(void)
{
    struct nrm__lock other;
    nrm__lock_init(&other, NRM__RANK_POOL);
    nrm__lock_acquire(&outer);
    nrm__lock_acquire(&other);
}

static void
calls_the_driver_under_a_lock(void)
{
    nrm__lock_acquire(&outer);
    nrm__assert_no_locks();
}

static void
releases_what_it_does_not_hold(void)
{
    nrm__lock_release(&outer);
}

static const struct {
    const char *name;
    void (*function)(void);
} wrong[] = {
    {"wrong order", takes_them_in_the_wrong_order},
    {"two of a rank", takes_two_of_a_rank},
    {"under a lock", calls_the_driver_under_a_lock},
    {"not held", releases_what_it_does_not_hold},
};

TEST_EACH(a_broken_rule_aborts, wrong)
{
    CHECK_DIES(row->function, SIGABRT);
}

#endif

static void
asserts(void)
{
    NRM_ASSERT(1 + 1 == 3);
}

TEST(a_failed_assert_aborts)
{
    CHECK_DIES(asserts, SIGABRT);
}

#define N_THREADS 4
#define N_ROUNDS 20000

static uint64_t counter;

static void
counts(unsigned index, void *arg)
{
    (void)index;
    for (int i = 0; i < N_ROUNDS; i++) {
        nrm__lock_acquire(arg);
        counter++;
        nrm__lock_release(arg);
    }
}

TEST(one_thread_at_a_time)
{
    struct nrm__lock lock;
    nrm__lock_init(&lock, NRM__RANK_LEAF);
    check_threads(N_THREADS, counts, &lock);
    CHECK_EQ(counter, (uint64_t)N_THREADS * N_ROUNDS);
    nrm__lock_finish(&lock);
}

static struct nrm__lock many[20];

static void
uses_new_locks(void)
{
    for (int i = 20; i-- > 0;) {
        nrm__lock_fork_child(&many[i]);
    }
    for (int i = 0; i < 20; i++) {
        nrm__lock_acquire(&many[i]);
        nrm__lock_release(&many[i]);
    }
}

TEST(a_fork_may_hold_any_number_in_any_order)
{
    for (int i = 0; i < 20; i++) {
        nrm__lock_init(&many[i], NRM__RANK_SLAB);
        nrm__lock_fork_prepare(&many[i]);
    }
    CHECK_IN_CHILD(uses_new_locks);
    for (int i = 20; i-- > 0;) {
        nrm__lock_fork_parent(&many[i]);
        nrm__lock_acquire(&many[i]);
        nrm__lock_release(&many[i]);
    }
}

CHECK_MAIN
