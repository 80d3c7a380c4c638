/* A test printer in a header of its own. A test program is a list of TEST functions and
   CHECK_MAIN; it prints TAP (one `ok` or `not ok` line a test, the plan last), so that
   pytest, `prove` and a person can read it, and exits 0 only when every test passed.

       #include "check.h"

       TEST(addition_is_exact)
       {
           CHECK(1 + 1 == 2);          // goes on after a failure, is a bool itself
           CHECK_EQ(sum(2, 2), 4);     // prints both values
           REQUIRE(pointer != NULL);   // leaves the test function
       }

       static const struct { const char *name; int in, out; } doubles[] = {
           {"zero", 0, 0}, {"one", 1, 2},
       };
       TEST_EACH(doubling, doubles)    // a line a row, named by its first field
       {
           CHECK_EQ(2 * row->in, row->out);
       }

       CHECK_MAIN

   `./test_x` runs all, `./test_x word…` those with a word in their name, `--list` names
   them. Checks may be made in any thread; SKIP and REQUIRE return from the function
   that they stand in. A test that runs longer than CHECK_TIMEOUT seconds (environment;
   120) or dies by a signal ends the program with a line that names it. Nothing here
   allocates, so that the heap under test is the program's own. */

#ifndef CHECK_H
#define CHECK_H

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check_values.h"

#ifdef NRM_VALGRIND
#include <valgrind/valgrind.h>
#endif

/* Not inlined, as the compiler would at each of thousands of checks. */
#define CHECK__CALLED __attribute__((noinline, unused))
#define CHECK__PRINTF(text, first) __attribute__((format(printf, text, first)))

/* ---- what a program looks like --------------------------------------------------- */

struct check__test {
    const char *name;
    void (*run)(const void *row);
    const void *rows; /* NULL: a test without a table */
    size_t n_rows;
    size_t row_nbytes;
    struct check__test *next;
};

#define TEST(test_name)                                                                \
    static void test_name(void);                                                       \
    static void test_name##__run(const void *row)                                      \
    {                                                                                  \
        (void)row;                                                                     \
        test_name();                                                                   \
    }                                                                                  \
    __attribute__((constructor)) static void test_name##__add(void)                    \
    {                                                                                  \
        static struct check__test test = {                                             \
            .name = #test_name, .run = test_name##__run, .n_rows = 1};                 \
        check__add(&test);                                                             \
    }                                                                                  \
    static void test_name(void)

/* `table` is an array of structs whose first field is the row's name. */
#define TEST_EACH(test_name, table)                                                    \
    static void test_name(const __typeof__((table)[0]) *row);                          \
    static void test_name##__run(const void *row)                                      \
    {                                                                                  \
        test_name(row);                                                                \
    }                                                                                  \
    __attribute__((constructor)) static void test_name##__add(void)                    \
    {                                                                                  \
        static struct check__test test = {.name = #test_name,                          \
                                          .run = test_name##__run,                     \
                                          .rows = (table),                             \
                                          .n_rows = sizeof(table) / sizeof(table)[0],  \
                                          .row_nbytes = sizeof(table)[0]};             \
        check__add(&test);                                                             \
    }                                                                                  \
    static void test_name(const __typeof__((table)[0]) *row)

#define CHECK_MAIN                                                                     \
    int main(int argc, char **argv)                                                    \
    {                                                                                  \
        return check__main(argc, argv);                                                \
    }

/* ---- checks: each is an expression, true when it held ---------------------------- */

#define CHECK(condition) check__true((condition), #condition, __FILE__, __LINE__)

/* The same, with words of your own: CHECK_MSG(n < 9, "n is %zu in round %d", n,
   round) */
#define CHECK_MSG(condition, ...)                                                      \
    check__message((condition), __FILE__, __LINE__, __VA_ARGS__)

/* Integers of any type, booleans, enumerators, doubles and pointers. Signed and
   unsigned are compared by value: CHECK_EQ(-1, SIZE_MAX) fails. */
#define CHECK_EQ(a, b) CHECK__COMPARE(a, #a, "==", b, #b)
#define CHECK_NE(a, b) CHECK__COMPARE(a, #a, "!=", b, #b)
#define CHECK_LT(a, b) CHECK__COMPARE(a, #a, "<", b, #b)
#define CHECK_LE(a, b) CHECK__COMPARE(a, #a, "<=", b, #b)
#define CHECK_GT(a, b) CHECK__COMPARE(a, #a, ">", b, #b)
#define CHECK_GE(a, b) CHECK__COMPARE(a, #a, ">=", b, #b)

#define CHECK_STR_EQ(a, b) check__strings((a), (b), #a, #b, true, __FILE__, __LINE__)
#define CHECK_STR_HAS(a, b) check__strings((a), (b), #a, #b, false, __FILE__, __LINE__)
#define CHECK_MEM_EQ(a, b, nbytes)                                                     \
    check__bytes((a), (b), (nbytes), #a, #b, __FILE__, __LINE__)

#define CHECK_ALIGNED(pointer, alignment)                                              \
    CHECK_MSG((uintptr_t)(pointer) % (alignment) == 0,                                 \
              "%s = %p is not a multiple of %zu", #pointer, (const void *)(pointer),   \
              (size_t)(alignment))

/* Leave the function when it does not hold: for what the rest of a test stands on. */
#define REQUIRE(condition)                                                             \
    do {                                                                               \
        if (!CHECK(condition)) {                                                       \
            return;                                                                    \
        }                                                                              \
    } while (0)

#define REQUIRE_EQ(a, b)                                                               \
    do {                                                                               \
        if (!CHECK_EQ(a, b)) {                                                         \
            return;                                                                    \
        }                                                                              \
    } while (0)

/* For calls that return an nrm_status: prints both names and the last error's
   message. */
#define CHECK_STATUS(call, expected)                                                   \
    __extension__({                                                                    \
        nrm_status check__got = (call);                                                \
        CHECK_MSG(check__got == (expected), "%s gave %s, not %s: %s", #call,           \
                  nrm_status_name(check__got), nrm_status_name(expected),              \
                  nrm_last_error()->message);                                          \
    })
#define CHECK_OK(call) CHECK_STATUS(call, NRM_OK)
#define REQUIRE_OK(call)                                                               \
    do {                                                                               \
        if (!CHECK_OK(call)) {                                                         \
            return;                                                                    \
        }                                                                              \
    } while (0)

/* SKIP("this kernel has no %s", name): the line says so, and counts as passed. */
#define SKIP(...)                                                                      \
    do {                                                                               \
        check__skip(__VA_ARGS__);                                                      \
        return;                                                                        \
    } while (0)

/* Runs `function` in a forked child; its failed checks are ours, and so is its
   death. */
#define CHECK_IN_CHILD(function)                                                       \
    check__in_child((function), #function, __FILE__, __LINE__)

/* The child must die by `signal` (an assertion that fires: SIGABRT). */
#define CHECK_DIES(function, signal)                                                   \
    check__dies((function), #function, (signal), __FILE__, __LINE__)

/* A remark, shown with the test's result. */
#define NOTE(...) check__note(__VA_ARGS__)

/* ---- how it works ---------------------------------------------------------------- */

enum { CHECK__SHOWN_FAILURES = 20, CHECK__MAX_THREADS = 256 };

static struct {
    struct check__test *first;
    struct check__test *last;
    char name[256];         /* of the running test */
    atomic_uint n_failures; /* of the running test */
    char skip_reason[256];  /* empty: not skipped */
    unsigned n_run;
    unsigned n_failed;
    unsigned n_skipped;
} check__;

static inline void
check__add(struct check__test *test)
{
    if (check__.last == NULL) {
        check__.first = test;
    }
    else {
        check__.last->next = test;
    }
    check__.last = test;
}

CHECK__PRINTF(1, 2)
CHECK__CALLED static void
check__note(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    flockfile(stdout);
    fputs("# ", stdout);
    vprintf(format, args);
    putchar('\n');
    funlockfile(stdout);
    va_end(args);
}

CHECK__PRINTF(3, 0)
CHECK__CALLED static void
check__failed_v(const char *file, int line, const char *format, va_list args)
{
    unsigned n = atomic_fetch_add(&check__.n_failures, 1);
    if (n > CHECK__SHOWN_FAILURES) {
        return;
    }
    flockfile(stdout);
    if (n == CHECK__SHOWN_FAILURES) {
        printf("# (further failures of this test are only counted)\n");
    }
    else {
        const char *base = strrchr(file, '/');
        printf("# %s:%d: ", base == NULL ? file : base + 1, line);
        vprintf(format, args);
        putchar('\n');
    }
    funlockfile(stdout);
}

/* Counts a failure and prints it; always false. */
CHECK__PRINTF(3, 4)
CHECK__CALLED static bool
check__failed(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    check__failed_v(file, line, format, args);
    va_end(args);
    return false;
}

CHECK__PRINTF(4, 5)
CHECK__CALLED static bool
check__message(bool holds, const char *file, int line, const char *format, ...)
{
    if (!holds) {
        va_list args;
        va_start(args, format);
        check__failed_v(file, line, format, args);
        va_end(args);
    }
    return holds;
}

CHECK__CALLED static bool
check__true(bool holds, const char *text, const char *file, int line)
{
    return holds ? true : check__failed(file, line, "%s does not hold", text);
}

CHECK__CALLED static bool
check__compare(struct check__value a, struct check__value b, const char *a_text,
               const char *sign, const char *b_text, const char *file, int line)
{
    if (check__sign_holds(check__order(a, b), sign)) {
        return true;
    }
    char a_shown[64];
    char b_shown[64];
    check__show(a, a_shown, sizeof a_shown);
    check__show(b, b_shown, sizeof b_shown);
    return check__failed(file, line, "%s %s %s does not hold: %s against %s", a_text,
                         sign, b_text, a_shown, b_shown);
}

#define CHECK__COMPARE(a, a_text, sign, b, b_text)                                     \
    check__compare(CHECK__VALUE(a), CHECK__VALUE(b), a_text, sign, b_text, __FILE__,   \
                   __LINE__)

CHECK__CALLED static bool
check__strings(const char *a, const char *b, const char *a_text, const char *b_text,
               bool whole, const char *file, int line)
{
    if (a != NULL && b != NULL && (whole ? strcmp(a, b) == 0 : strstr(a, b) != NULL)) {
        return true;
    }
    return check__failed(file, line, "%s %s %s does not hold: \"%s\" against \"%s\"",
                         a_text, whole ? "==" : "contains", b_text,
                         a == NULL ? "(null)" : a, b == NULL ? "(null)" : b);
}

CHECK__CALLED static bool
check__bytes(const void *a, const void *b, size_t nbytes, const char *a_text,
             const char *b_text, const char *file, int line)
{
    const unsigned char *x = a;
    const unsigned char *y = b;
    if (memcmp(x, y, nbytes) == 0) {
        return true;
    }
    size_t i = 0;
    while (x[i] == y[i]) {
        i++;
    }
    return check__failed(file, line,
                         "%s and %s differ at byte %zu of %zu: 0x%02x against 0x%02x",
                         a_text, b_text, i, nbytes, x[i], y[i]);
}

CHECK__PRINTF(1, 2)
CHECK__CALLED static void
check__skip(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(check__.skip_reason, sizeof check__.skip_reason, format, args);
    va_end(args);
}

/* ---- children and threads -------------------------------------------------------- */

/* A child that ends in the midst of things has leaks, which Valgrind would look for in
   all that the parent had: for minutes, where much of that is not in the child. */
static inline void
check__let_leaks_be(void)
{
#if defined(NRM_VALGRIND) && defined(VALGRIND_CLO_CHANGE)
    VALGRIND_CLO_CHANGE("--leak-check=no");
#endif
}

CHECK__CALLED static int
check__fork_status(void (*function)(void), bool expect_death)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that ran too long takes it along */
        check__let_leaks_be();
        signal(SIGABRT, SIG_DFL);
        signal(SIGSEGV, SIG_DFL);
        if (expect_death) { /* what it says while it dies is not news */
            (void)!freopen("/dev/null", "w", stderr);
        }
        atomic_store(&check__.n_failures, 0);
        function();
        fflush(NULL);
        _exit(atomic_load(&check__.n_failures) == 0 ? 0 : 1);
    }
    int status = -1;
    if (pid < 0 || waitpid(pid, &status, 0) != pid) {
        return -1;
    }
    return status;
}

CHECK__CALLED static bool
check__in_child(void (*function)(void), const char *text, const char *file, int line)
{
    int status = check__fork_status(function, false);
    if (status == 0) {
        return true;
    }
    if (WIFSIGNALED(status)) {
        return check__failed(file, line, "the child in %s was killed by signal %d",
                             text, WTERMSIG(status));
    }
    return check__failed(file, line, "the child in %s ended with status %d", text,
                         WEXITSTATUS(status));
}

CHECK__CALLED static bool
check__dies(void (*function)(void), const char *text, int number, const char *file,
            int line)
{
    int status = check__fork_status(function, true);
    if (WIFSIGNALED(status) && WTERMSIG(status) == number) {
        return true;
    }
    return check__failed(file, line, "%s did not die by signal %d (wait status 0x%x)",
                         text, number, (unsigned)status);
}

struct check__thread {
    void (*function)(unsigned index, void *arg);
    void *arg;
    unsigned index;
    pthread_barrier_t *start;
};

static inline void *
check__thread_main(void *arg)
{
    struct check__thread *thread = arg;
    pthread_barrier_wait(thread->start);
    thread->function(thread->index, thread->arg);
    return NULL;
}

/* Runs `function` in `n` threads that start together, and joins them. */
static inline void
check_threads(unsigned n, void (*function)(unsigned index, void *arg), void *arg)
{
    pthread_t ids[CHECK__MAX_THREADS];
    struct check__thread threads[CHECK__MAX_THREADS];
    pthread_barrier_t start;
    if (n == 0 || n > CHECK__MAX_THREADS) {
        check__failed(__FILE__, __LINE__, "%u threads: 1 to %d are possible", n,
                      CHECK__MAX_THREADS);
        return;
    }
    pthread_barrier_init(&start, NULL, n);
    for (unsigned i = 0; i < n; i++) {
        threads[i] = (struct check__thread){function, arg, i, &start};
        if (pthread_create(&ids[i], NULL, check__thread_main, &threads[i]) != 0) {
            fprintf(stderr, "thread %u of %u could not be started\n", i, n);
            abort(); /* the ones before it wait at the barrier for ever */
        }
    }
    for (unsigned i = 0; i < n; i++) {
        pthread_join(ids[i], NULL);
    }
    pthread_barrier_destroy(&start);
}

/* A repeatable stream of numbers for random walks; seed with any constant
   (xorshift64*). */
static inline uint64_t
check_random(uint64_t *state)
{
    uint64_t x = *state == 0 ? 0x9e3779b97f4a7c15u : *state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545f4914f6cdd1du;
}

/* ---- the run --------------------------------------------------------------------- */

/* Only async-signal-safe calls: the heap may be what broke. */
static inline void
check__on_signal(int number)
{
    static const char head[] = "\nBail out! ";
    static const char slow[] = " ran too long (CHECK_TIMEOUT seconds)\n";
    static const char dead[] = " was ended by a signal\n";
    (void)!write(STDOUT_FILENO, head, sizeof head - 1);
    (void)!write(STDOUT_FILENO, check__.name, strlen(check__.name));
    if (number == SIGALRM) {
        (void)!write(STDOUT_FILENO, slow, sizeof slow - 1);
    }
    else {
        (void)!write(STDOUT_FILENO, dead, sizeof dead - 1);
    }
    signal(number, SIG_DFL);
    raise(number);
}

/* Under a sanitizer a bad access is its to report. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define CHECK__SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CHECK__SANITIZER 1
#endif

static inline void
check__run(const struct check__test *test, const void *row, unsigned timeout_s)
{
    atomic_store(&check__.n_failures, 0);
    check__.skip_reason[0] = '\0';
    alarm(timeout_s);
    test->run(row);
    alarm(0);

    check__.n_run++;
    if (atomic_load(&check__.n_failures) != 0) {
        check__.n_failed++;
        printf("not ok %u - %s\n", check__.n_run, check__.name);
    }
    else if (check__.skip_reason[0] != '\0') {
        check__.n_skipped++;
        printf("ok %u - %s # SKIP %s\n", check__.n_run, check__.name,
               check__.skip_reason);
    }
    else {
        printf("ok %u - %s\n", check__.n_run, check__.name);
    }
}

static inline bool
check__is_wanted(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strstr(name, argv[i]) != NULL) {
            return true;
        }
    }
    return argc <= 1;
}

static inline int
check__main(int argc, char **argv)
{
    const char *timeout = getenv("CHECK_TIMEOUT");
    unsigned timeout_s = timeout == NULL ? 120 : (unsigned)strtoul(timeout, NULL, 10);
    bool list_only = argc > 1 && strcmp(argv[1], "--list") == 0;

    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGABRT, check__on_signal);
    signal(SIGALRM, check__on_signal);
#ifndef CHECK__SANITIZER
    signal(SIGSEGV, check__on_signal);
    signal(SIGBUS, check__on_signal);
#endif
    for (const struct check__test *test = check__.first; test; test = test->next) {
        for (size_t i = 0; i < test->n_rows; i++) {
            const void *row = NULL;
            if (test->rows == NULL) {
                snprintf(check__.name, sizeof check__.name, "%s", test->name);
            }
            else {
                row = (const char *)test->rows + i * test->row_nbytes;
                snprintf(check__.name, sizeof check__.name, "%s[%s]", test->name,
                         *(const char *const *)row);
            }
            if (list_only) {
                printf("%s\n", check__.name);
            }
            else if (check__is_wanted(check__.name, argc, argv)) {
                check__run(test, row, timeout_s);
            }
        }
    }
    if (list_only) {
        return 0;
    }
    if (check__.n_run == 0) {
        printf("Bail out! no test has such a name\n");
        return 1;
    }
    printf("1..%u\n# %u passed, %u failed, %u skipped\n", check__.n_run,
           check__.n_run - check__.n_failed - check__.n_skipped, check__.n_failed,
           check__.n_skipped);
    return check__.n_failed == 0 ? 0 : 1;
}

#endif /* CHECK_H */
