/* First touch: every page is there afterwards, and says what it said before. */

#include "check.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/bits.h"
#include "os/memory.h"
#include "os/numa.h"
#include "os/touch.h"

static size_t
count_missing(void *ptr, size_t nbytes)
{
    static unsigned char present[65536];
    size_t n_pages = nbytes / nrm__page_size();
    size_t n_missing = 0;
    if (n_pages > sizeof present || mincore(ptr, nbytes, present) != 0) {
        return SIZE_MAX;
    }
    for (size_t i = 0; i < n_pages; i++) {
        n_missing += !(present[i] & 1);
    }
    return n_missing;
}

static const struct {
    const char *name;
    size_t nbytes;
    int n_threads;
    bool huge;
} cases[] = {
    {"a page", 4096, 1, false},
    {"a page, many threads", 4096, 64, false},
    {"1 thread", 32 * NRM__MIB, 1, false},
    {"2 threads", 32 * NRM__MIB, 2, false},
    {"7 threads", 33 * NRM__MIB + 4096, 7, false},
    {"one each core", 32 * NRM__MIB, 0, false},
    {"more than slices", 32 * NRM__MIB, 10000, false},
    {"huge, 1 thread", 32 * NRM__MIB, 1, true},
    {"huge, 4 threads", 34 * NRM__MIB, 4, true},
};

TEST_EACH(every_page_is_present_and_keeps_its_content, cases)
{
    size_t nbytes = nrm__align_up(row->nbytes, nrm__page_size());
    size_t alignment = row->huge ? NRM__HUGE_PAGE : nrm__page_size();
    char *ptr = NULL;
    REQUIRE_EQ(nrm__map(nbytes, alignment, (void **)&ptr), 0);
    nrm__advise_huge_pages(ptr, nbytes, row->huge);
    ptr[0] = 1;
    ptr[nbytes / 2] = 2;
    ptr[nbytes - 1] = 3;
    CHECK_EQ(nrm__touch(ptr, nbytes, row->n_threads), 0);
    CHECK_EQ(count_missing(ptr, nbytes), 0u);
    CHECK_EQ(ptr[nbytes / 2], 2);
    CHECK_EQ(ptr[0], 1);
    CHECK_EQ(ptr[nbytes - 1], 3);
    if (row->huge && nrm__has_transparent_huge_pages()) {
        CHECK_EQ(nrm__mapping_page_size(ptr), NRM__HUGE_PAGE);
    }
    nrm__unmap(ptr, nbytes);
}

TEST(a_range_inside_pages_touches_the_pages_that_it_lies_in)
{
    size_t page = nrm__page_size();
    char *ptr = NULL;
    REQUIRE_EQ(nrm__map(4 * page, page, (void **)&ptr), 0);
    CHECK_EQ(nrm__touch(ptr + page + 10, page, 1), 0);
    CHECK_EQ(count_missing(ptr, page), 1u);
    CHECK_EQ(count_missing(ptr + page, 2 * page), 0u);
    CHECK_EQ(count_missing(ptr + 3 * page, page), 1u);
    CHECK_EQ(nrm__touch(ptr, 0, 4), 0);
    nrm__unmap(ptr, 4 * page);
}

/* Pages that exist are written to as well: after a fork they would otherwise be
   shared. */
static char *shared_with_parent;

static void
touches_in_the_child(void)
{
    CHECK_EQ(nrm__touch(shared_with_parent, NRM__MIB, 2), 0);
    CHECK_EQ(shared_with_parent[4096], 7);
}

TEST(a_child_touches_copies_of_its_own)
{
    REQUIRE_EQ(nrm__map(NRM__MIB, nrm__page_size(), (void **)&shared_with_parent), 0);
    memset(shared_with_parent, 7, NRM__MIB);
    CHECK_IN_CHILD(touches_in_the_child);
    nrm__unmap(shared_with_parent, NRM__MIB);
}

TEST(what_the_kernel_refuses_is_an_error)
{
    size_t nbytes = 16 * NRM__MIB;
    char *ptr = NULL;
    REQUIRE_EQ(nrm__map(nbytes, nrm__page_size(), (void **)&ptr), 0);
    nrm__unmap(ptr + nbytes / 2, nrm__page_size()); /* a hole */
    CHECK_EQ(nrm__populate(ptr, nbytes, 3), ENOMEM);
    CHECK_EQ(nrm__populate(ptr, nbytes, 1), ENOMEM);
    nrm__unmap(ptr, nbytes / 2);
    nrm__unmap(ptr + nbytes / 2 + nrm__page_size(), nbytes / 2 - nrm__page_size());
}

/* ---- memory of others ---- */

TEST(prefaulted_pages_keep_what_is_in_them)
{
    size_t nbytes = 16 * NRM__MIB;
    char *ptr = NULL;
    REQUIRE_EQ(nrm__map(nbytes, nrm__page_size(), (void **)&ptr), 0);
    ptr[5 * NRM__MIB] = 7;
    nrm__prefault(ptr + 100, nbytes - 200, 3, true);
    if (count_missing(ptr, nbytes) != 0) {
        SKIP("this kernel does not make pages when asked to");
    }
    CHECK_EQ(ptr[5 * NRM__MIB], 7);
    CHECK_EQ(ptr[0], 0);
    nrm__unmap(ptr, nbytes);
}

TEST(prefaulting_writes_to_nothing_that_is_only_to_be_read)
{
    size_t nbytes = 8 * NRM__MIB;
    char *ptr = NULL;
    REQUIRE_EQ(nrm__map(nbytes, nrm__page_size(), (void **)&ptr), 0);
    memset(ptr, 5, NRM__MIB);
    nrm__unmap(ptr + nbytes / 2, nrm__page_size()); /* a hole */
    REQUIRE_EQ(mprotect(ptr, nbytes / 2, PROT_READ), 0);
    nrm__prefault(ptr, nbytes, 2, true);
    nrm__prefault(ptr, nbytes, 2, false);
    CHECK_EQ(ptr[NRM__MIB - 1], 5);
    CHECK_EQ(ptr[NRM__MIB], 0);
    nrm__unmap(ptr, nbytes / 2);
    nrm__unmap(ptr + nbytes / 2 + nrm__page_size(), nbytes / 2 - nrm__page_size());
}

/* ---- NUMA ---- */

static void
stays_on_its_node(void)
{
    cpu_set_t one;
    size_t nbytes = 64 * NRM__MIB;
    char *ptr = NULL;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    cpu_set_t all;
    sched_getaffinity(0, sizeof all, &all);
    REQUIRE_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    int node = nrm__numa_local_node();
    REQUIRE_EQ(sched_setaffinity(0, sizeof all, &all), 0);
    REQUIRE_EQ(nrm__map(nbytes, nrm__page_size(), (void **)&ptr), 0);
    REQUIRE_EQ(nrm__touch(ptr, nbytes, 8), 0);
    size_t n_elsewhere = 0;
    for (size_t at = 0; at < nbytes; at += NRM__MIB) {
        n_elsewhere += nrm__numa_node_of(ptr + at) != node;
    }
    CHECK_LE(n_elsewhere, 4u); /* the caller itself may have been moved meanwhile */
    nrm__unmap(ptr, nbytes);
}

TEST(helpers_make_pages_on_the_node_of_the_caller)
{
    if (nrm__numa_n_nodes() == 1) {
        SKIP("there is one node");
    }
    CHECK_IN_CHILD(stays_on_its_node);
}

/* ---- threads and signals ---- */

static void
cannot_make_threads(void)
{
    struct rlimit none = {0, 0};
    char *ptr = NULL;
    REQUIRE_EQ(nrm__map(32 * NRM__MIB, nrm__page_size(), (void **)&ptr), 0);
    if (setuid(65534) != 0 || setrlimit(RLIMIT_NPROC, &none) != 0) {
        NOTE("the number of threads cannot be limited here");
    }
    CHECK_EQ(nrm__touch(ptr, 32 * NRM__MIB, 8), 0);
    CHECK_EQ(count_missing(ptr, 32 * NRM__MIB), 0u);
}

TEST(without_threads_the_caller_does_it_alone)
{
    CHECK_IN_CHILD(cannot_make_threads);
}

static atomic_int n_signals_elsewhere;
static pthread_t main_thread;

static void
on_signal(int number)
{
    (void)number;
    if (!pthread_equal(pthread_self(), main_thread)) {
        atomic_fetch_add(&n_signals_elsewhere, 1);
    }
}

static void *
sends_signals(void *stop)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    while (!atomic_load((atomic_bool *)stop)) {
        kill(getpid(), SIGUSR1);
        usleep(500);
    }
    return NULL;
}

TEST(helpers_take_no_signals_and_signals_do_no_harm)
{
    struct sigaction action = {.sa_handler = on_signal};
    atomic_bool stop = false;
    pthread_t sender;
    sigset_t before, after;
    main_thread = pthread_self();
    sigaction(SIGUSR1, &action, NULL);
    REQUIRE_EQ(pthread_create(&sender, NULL, sends_signals, &stop), 0);
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    for (int i = 0; i < 10; i++) {
        char *ptr = NULL;
        REQUIRE_EQ(nrm__map(32 * NRM__MIB, nrm__page_size(), (void **)&ptr), 0);
        CHECK_EQ(nrm__touch(ptr, 32 * NRM__MIB, 4), 0);
        CHECK_EQ(count_missing(ptr, 32 * NRM__MIB), 0u);
        nrm__unmap(ptr, 32 * NRM__MIB);
    }
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    atomic_store(&stop, true);
    pthread_join(sender, NULL);
    signal(SIGUSR1, SIG_DFL);
    CHECK_EQ(atomic_load(&n_signals_elsewhere), 0);
    CHECK_EQ(sigismember(&before, SIGUSR1), sigismember(&after, SIGUSR1));
}

static void
touches_its_own(unsigned index, void *arg)
{
    char *ptr = NULL;
    (void)arg;
    REQUIRE_EQ(nrm__map(16 * NRM__MIB, nrm__page_size(), (void **)&ptr), 0);
    ptr[100] = (char)index;
    CHECK_EQ(nrm__touch(ptr, 16 * NRM__MIB, 2), 0);
    CHECK_EQ(ptr[100], (char)index);
    nrm__unmap(ptr, 16 * NRM__MIB);
}

TEST(several_threads_touch_at_once)
{
    check_threads(4, touches_its_own, NULL);
}

CHECK_MAIN
