/* Fork hooks: their order, their locks, and the depth. Hooks stay for the life of the
   process, so all tests share the ones below. */

#include "check.h"

#include "os/fork.h"

static char calls[64];
static struct nrm__lock own = NRM__LOCK_INIT(NRM__RANK_LEAF);

static void
note(char c)
{
    size_t n = strlen(calls);
    if (n + 1 < sizeof calls) {
        calls[n] = c;
        calls[n + 1] = '\0';
    }
}

#define CALLS(name, letter, capital, digit)                                            \
    static void name##_prepare(void)                                                   \
    {                                                                                  \
        note(letter);                                                                  \
    }                                                                                  \
    static void name##_parent(void)                                                    \
    {                                                                                  \
        note(capital);                                                                 \
    }                                                                                  \
    static void name##_child(void)                                                     \
    {                                                                                  \
        note(digit);                                                                   \
    }

CALLS(low, 'a', 'A', '1')
CALLS(middle, 'b', 'B', '2')
CALLS(high, 'c', 'C', '3')

static const struct nrm__fork_hook hook_high = {
    .rank = 30, .prepare = high_prepare, .parent = high_parent, .child = high_child};
static const struct nrm__fork_hook hook_low = {
    .rank = 10, .prepare = low_prepare, .parent = low_parent, .child = low_child};
static const struct nrm__fork_hook hook_middle = {.rank = 20,
                                                  .prepare = middle_prepare,
                                                  .parent = middle_parent,
                                                  .child = middle_child};
static const struct nrm__fork_hook hook_lock = {.rank = 25, .lock = &own};
static const struct nrm__fork_hook hook_empty = {.rank = 5};

__attribute__((constructor)) static void
add_hooks(void)
{
    nrm__fork_hook_add(&hook_high);
    nrm__fork_hook_add(&hook_low);
    nrm__fork_hook_add(&hook_middle);
    nrm__fork_hook_add(&hook_lock);
    nrm__fork_hook_add(&hook_empty);
}

static void
saw_the_child_hooks(void)
{
    CHECK_STR_EQ(calls, "abc321");
    CHECK_EQ(nrm__fork_depth(), 1u);
    nrm__lock_acquire(&own);
    nrm__lock_release(&own);
}

TEST(hooks_run_up_before_and_down_after)
{
    calls[0] = '\0';
    CHECK_EQ(nrm__fork_depth(), 0u);
    CHECK_IN_CHILD(saw_the_child_hooks);
    CHECK_STR_EQ(calls, "abcCBA");
    CHECK_EQ(nrm__fork_depth(), 0u);
    nrm__lock_acquire(&own); /* was released */
    nrm__lock_release(&own);
}

static void
is_a_grandchild(void)
{
    CHECK_EQ(nrm__fork_depth(), 2u);
}

static void
forks_again(void)
{
    CHECK_EQ(nrm__fork_depth(), 1u);
    CHECK_IN_CHILD(is_a_grandchild);
    CHECK_EQ(nrm__fork_depth(), 1u);
}

TEST(the_depth_counts_generations)
{
    CHECK_IN_CHILD(forks_again);
}

/* ---- with threads that use the lock meanwhile ---- */

static atomic_bool stop;
static uint64_t guarded[2];

static void *
keeps_two_numbers_equal(void *arg)
{
    (void)arg;
    while (!atomic_load(&stop)) {
        nrm__lock_acquire(&own);
        guarded[0]++;
        guarded[1]++;
        nrm__lock_release(&own);
    }
    return NULL;
}

static void
finds_them_equal(void)
{
    nrm__lock_acquire(&own);
    CHECK_EQ(guarded[0], guarded[1]);
    nrm__lock_release(&own);
}

TEST(a_child_never_sees_what_a_lock_guards_half_done)
{
    pthread_t threads[2];
    atomic_store(&stop, false);
    for (int i = 0; i < 2; i++) {
        REQUIRE_EQ(pthread_create(&threads[i], NULL, keeps_two_numbers_equal, NULL), 0);
    }
    for (int i = 0; i < 50; i++) {
        CHECK_IN_CHILD(finds_them_equal);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
}

static void
forks(unsigned index, void *arg)
{
    (void)index;
    (void)arg;
    for (int i = 0; i < 10; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            _exit(nrm__fork_depth() == 1 ? 0 : 1);
        }
        int status = -1;
        CHECK_EQ(waitpid(pid, &status, 0), pid);
        CHECK_EQ(status, 0);
    }
}

TEST(threads_may_fork_at_the_same_time)
{
    check_threads(4, forks, NULL);
}

CHECK_MAIN
