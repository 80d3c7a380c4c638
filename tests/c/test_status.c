/* Statuses, the last-error record, and the thread states that hold it. */

#include "check.h"

#include "base/error.h"
#include "base/thread_state.h"
#include "nrm/status.h"
#include "os/fork.h"

TEST(every_status_has_a_name_and_a_text)
{
    CHECK_STR_EQ(nrm_status_name(NRM_OK), "OK");
    CHECK_STR_EQ(nrm_status_name(NRM_OUT_OF_MEMORY), "OUT_OF_MEMORY");
    CHECK_STR_EQ(nrm_status_text(NRM_NOT_OWNED), "address not of this resource");
    CHECK_STR_EQ(nrm_status_name((nrm_status)999), "UNKNOWN");
    CHECK_STR_EQ(nrm_status_name((nrm_status)-1), "UNKNOWN");
}

TEST(an_error_is_recorded_with_its_numbers)
{
    CHECK_EQ(nrm__error(NRM_INVALID_VALUE, "%d is not %s", 7, "eight"),
             NRM_INVALID_VALUE);
    nrm__error_request(4096, "pinned");
    const nrm_error *error = nrm_last_error();
    CHECK_EQ(error->status, NRM_INVALID_VALUE);
    CHECK_STR_EQ(error->message, "7 is not eight");
    CHECK_STR_EQ(error->native_name, "");
    CHECK_EQ(error->native_code, 0);
    CHECK_EQ(error->requested_nbytes, 4096u);
    CHECK_STR_EQ(error->resource, "pinned");
}

TEST(a_new_error_keeps_nothing_of_the_last)
{
    (void)nrm__error_native(NRM_CUDA_ERROR, 2, "CUDA_ERROR_OUT_OF_MEMORY", "first");
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OUT_OF_MEMORY");
    nrm__error_request(1, "device");
    (void)nrm__error(NRM_NOT_FOUND, "second");
    CHECK_EQ(nrm_last_error()->native_code, 0);
    CHECK_STR_EQ(nrm_last_error()->native_name, "");
    CHECK_EQ(nrm_last_error()->requested_nbytes, 0u);
    CHECK_STR_EQ(nrm_last_error()->resource, "");
}

TEST(errno_codes_come_with_their_name)
{
    (void)nrm__error_errno(NRM_OS_ERROR, 12, "no luck");
    CHECK_EQ(nrm_last_error()->native_code, 12);
    CHECK_STR_EQ(nrm_last_error()->native_name, "ENOMEM");
    CHECK_STR_EQ(nrm__errno_name(100000), "");
}

TEST(a_message_may_quote_the_one_that_it_replaces)
{
    (void)nrm__error(NRM_OS_ERROR, "cause");
    (void)nrm__error(NRM_OUT_OF_MEMORY, "effect (%s)", nrm_last_error()->message);
    CHECK_STR_EQ(nrm_last_error()->message, "effect (cause)");
}

TEST(a_long_message_is_cut)
{
    char text[1000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    (void)nrm__error_native(NRM_OS_ERROR, 1, text, "%s", text);
    nrm__error_request(1, text);
    CHECK_EQ(strlen(nrm_last_error()->message), sizeof nrm_last_error()->message - 1);
    CHECK_EQ(strlen(nrm_last_error()->native_name),
             sizeof nrm_last_error()->native_name - 1);
    CHECK_EQ(strlen(nrm_last_error()->resource), sizeof nrm_last_error()->resource - 1);
}

TEST(a_cleared_record_is_empty)
{
    (void)nrm__error(NRM_OS_ERROR, "gone");
    nrm_clear_last_error();
    CHECK_EQ(nrm_last_error()->status, NRM_OK);
    CHECK_STR_EQ(nrm_last_error()->message, "");
}

/* ---- threads ---- */

#define N_THREADS 8

static uint64_t ids[N_THREADS];

static void
fails_with_its_index(unsigned index, void *arg)
{
    char text[16];
    (void)arg;
    snprintf(text, sizeof text, "thread %u", index);
    for (int i = 0; i < 1000; i++) {
        (void)nrm__error(NRM_OS_ERROR, "thread %u", index);
        CHECK_STR_EQ(nrm_last_error()->message, text);
    }
    ids[index] = nrm__thread_id();
}

TEST(every_thread_has_a_record_and_a_number_of_its_own)
{
    (void)nrm__error(NRM_NOT_FOUND, "of the main thread");
    check_threads(N_THREADS, fails_with_its_index, NULL);
    CHECK_STR_EQ(nrm_last_error()->message, "of the main thread");
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_NE(ids[i], 0u);
        CHECK_NE(ids[i], nrm__thread_id());
        for (int j = 0; j < i; j++) {
            CHECK_NE(ids[i], ids[j]);
        }
    }
}

static void *
keeps_its_state(void *arg)
{
    *(struct nrm__thread_state **)arg = nrm__thread_state();
    (void)nrm__error(NRM_OS_ERROR, "of a thread that ended");
    return NULL;
}

static void *
has_no_error(void *arg)
{
    CHECK_EQ(nrm_last_error()->status, NRM_OK);
    return keeps_its_state(arg);
}

TEST(the_state_of_an_ended_thread_is_used_again)
{
    struct nrm__thread_state *first, *second;
    pthread_t thread;
    REQUIRE_EQ(pthread_create(&thread, NULL, keeps_its_state, &first), 0);
    pthread_join(thread, NULL);
    uint64_t id = first->id;
    REQUIRE_EQ(pthread_create(&thread, NULL, has_no_error, &second), 0);
    pthread_join(thread, NULL);
    CHECK_EQ(first, second);
    CHECK_NE(second->id, id);
}

/* Keys are destroyed in the order in which they were made: ours exists already. */
static pthread_key_t late_key;
static atomic_int n_late;

static void
uses_us_after_our_destructor(void *round)
{
    (void)nrm__error(NRM_OS_ERROR, "late");
    CHECK(!nrm__thread_state_is_shared(nrm__thread_state()) || (uintptr_t)round >= 3);
    CHECK_EQ(nrm_last_error()->status == NRM_OS_ERROR,
             !nrm__thread_state_is_shared(nrm__thread_state()));
    if (atomic_fetch_add(&n_late, 1) < 2) {
        pthread_setspecific(late_key, (char *)round + 1);
    }
}

static void *
ends_late(void *arg)
{
    (void)arg;
    (void)nrm__thread_state();
    pthread_setspecific(late_key, (void *)1);
    return NULL;
}

TEST(destructors_of_other_keys_still_have_a_state)
{
    pthread_t thread;
    (void)nrm__thread_state();
    REQUIRE_EQ(pthread_key_create(&late_key, uses_us_after_our_destructor), 0);
    REQUIRE_EQ(pthread_create(&thread, NULL, ends_late, NULL), 0);
    pthread_join(thread, NULL);
    pthread_key_delete(late_key);
    CHECK_EQ(atomic_load(&n_late), 3);
}

/* ---- fork ---- */

static struct nrm__thread_state *held_state;
static pthread_barrier_t held, done;

static void *
holds_a_state(void *arg)
{
    (void)arg;
    held_state = nrm__thread_state();
    pthread_barrier_wait(&held);
    pthread_barrier_wait(&done);
    return NULL;
}

#ifdef CHECK__SANITIZER /* allows no threads in a child of a process with threads */

static void
gives_the_state_to_a_new_thread(void)
{
}

#else

#define N_CHILD_THREADS 64
static _Atomic(struct nrm__thread_state *) taken[N_CHILD_THREADS];
static atomic_bool may_end;

static void *
takes_a_state(void *arg)
{
    atomic_store((_Atomic(struct nrm__thread_state *) *)arg, nrm__thread_state());
    while (!atomic_load(&may_end)) {
        usleep(100);
    }
    return NULL;
}

/* The thread that has this state does not exist in the child: others get it. */
static void
gives_the_state_to_a_new_thread(void)
{
    pthread_t threads[N_CHILD_THREADS];
    bool found = false;
    int n = 0;
    for (; n < N_CHILD_THREADS && !found; n++) {
        REQUIRE_EQ(pthread_create(&threads[n], NULL, takes_a_state, &taken[n]), 0);
        while (atomic_load(&taken[n]) == NULL) {
            usleep(100);
        }
        CHECK_NE(atomic_load(&taken[n]), nrm__thread_state());
        found = atomic_load(&taken[n]) == held_state;
    }
    CHECK(found);
    atomic_store(&may_end, true);
    while (n-- > 0) {
        pthread_join(threads[n], NULL);
    }
}

#endif

static void
sees_its_own_record(void)
{
    CHECK_EQ(nrm__fork_depth(), 1u); /* and so the fork hooks are linked */
    gives_the_state_to_a_new_thread();
    CHECK_STR_EQ(nrm_last_error()->message, "before the fork");
    CHECK_OK(nrm__error(NRM_OK, "in the child"));
}

TEST(a_child_keeps_the_record_of_the_forking_thread)
{
    pthread_t thread;
    pthread_barrier_init(&held, NULL, 2);
    pthread_barrier_init(&done, NULL, 2);
    REQUIRE_EQ(pthread_create(&thread, NULL, holds_a_state, NULL), 0);
    pthread_barrier_wait(&held);
    (void)nrm__error(NRM_NOT_FOUND, "before the fork");
    CHECK_IN_CHILD(sees_its_own_record);
    CHECK_STR_EQ(nrm_last_error()->message, "before the fork");
    pthread_barrier_wait(&done);
    pthread_join(thread, NULL);
}

CHECK_MAIN
