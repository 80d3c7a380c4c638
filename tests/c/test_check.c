/* The test printer itself: a check that cannot fail would make every other test
   worthless. What must fail does so in a child, whose failures are wanted and not
   counted here. */

#include "check.h"

static void
fails_by_value(void)
{
    CHECK_EQ(-1, SIZE_MAX);
}

static void
fails_by_order(void)
{
    CHECK_LT(2.0, 1);
}

static void
fails_by_string(void)
{
    CHECK_STR_EQ("pinned", "managed");
}

static void
fails_by_null(void)
{
    CHECK_STR_HAS(NULL, "managed");
}

static void
fails_by_byte(void)
{
    CHECK_MEM_EQ("abc", "abd", 3);
}

static void
fails_by_pointer(void)
{
    int x;
    CHECK_EQ(&x, NULL);
}

static void
fails_by_alignment(void)
{
    CHECK_ALIGNED((void *)96, 64);
}

static void
fails_by_nan(void)
{
    CHECK_EQ(__builtin_nan(""), __builtin_nan(""));
}

static void
fails_in_a_thread_body(unsigned index, void *arg)
{
    CHECK_NE(index, 3u);
}

static void
fails_in_a_thread(void)
{
    check_threads(4, fails_in_a_thread_body, NULL);
}

static const struct {
    const char *name;
    void (*function)(void);
} failing[] = {
    {"value", fails_by_value},         {"order", fails_by_order},
    {"string", fails_by_string},       {"null string", fails_by_null},
    {"byte", fails_by_byte},           {"pointer", fails_by_pointer},
    {"alignment", fails_by_alignment}, {"nan", fails_by_nan},
    {"thread", fails_in_a_thread},
};

TEST_EACH(a_failed_check_is_counted, failing)
{
    int status = check__fork_status(row->function, true);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

TEST(integers_of_any_type_compare_by_value)
{
    CHECK_EQ((unsigned char)200, 200);
    CHECK_LT(-1, SIZE_MAX);
    CHECK_GT((uint64_t)INT64_MAX + 1, INT64_MAX);
    CHECK_LE(INT64_MIN, (short)0);
    CHECK_GE(1.5, 1u);
    CHECK_EQ(true, 1);
}

TEST(a_check_tells_whether_it_held)
{
    CHECK(CHECK_EQ(1, 1));
    CHECK(CHECK_STR_HAS("numpy_rmm:pinned#1", "pinned"));
}

static void
dies(void)
{
    abort();
}

TEST(a_death_is_seen)
{
    CHECK_DIES(dies, SIGABRT);
}

static void
counts(unsigned index, void *arg)
{
    atomic_fetch_add((atomic_uint *)arg, index);
}

TEST(all_threads_run)
{
    atomic_uint sum = 0;
    check_threads(16, counts, &sum);
    CHECK_EQ(atomic_load(&sum), 120u);
}

CHECK_MAIN
