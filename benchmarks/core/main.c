/*
 * nrm_bench WORKLOAD ALLOCATOR [key=value ...]
 *
 * One workload on one allocator, in a process of its own: run.py starts them in turns.
 * The result is one line of JSON: how many samples there were, their median, 99th
 * percentile and maximum, and their quantiles in order (at most 500), from which
 * several processes' results are put together.
 */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "bench.h"
#include "nrm/options.h"

static const struct {
    const char *name;
    void (*run)(struct allocator *a);
} workloads[] = {
    {"pair", run_pair},
    {"live", run_live},
    {"churn", run_churn},
    {"random", run_random},
    {"threads", run_threads},
    {"handoff", run_handoff},
    {"grow", run_grow},
    {"replay", run_replay},
    {"usage", run_usage},
    {"multi_stream", run_multi_stream},
    {"use", run_use},
    {"park", run_park},
    {"idle_pair", run_idle_pair},
    {"copy_loop", run_copy_loop},
    {"current", run_current},
    {"stack", run_stack},
};
#define N_WORKLOADS (sizeof workloads / sizeof *workloads)

/* ---- parameters ---- */

static char **arguments;

const char *
text_parameter(const char *key, const char *otherwise)
{
    size_t length = strlen(key);
    for (char **argument = arguments; *argument != NULL; argument++) {
        if (strncmp(*argument, key, length) == 0 && (*argument)[length] == '=') {
            return *argument + length + 1;
        }
    }
    return otherwise;
}

size_t
parameter(const char *key, size_t otherwise)
{
    const char *text = text_parameter(key, NULL);
    size_t value = otherwise;
    if (text != NULL && nrm_parse_nbytes(text, &value, NULL) != NRM_OK) {
        fail("%s=%s is no number", key, text);
    }
    return value;
}

void
fail(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fputs("nrm_bench: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    exit(1);
}

/* ---- samples ---- */

#define MAX_SAMPLES ((size_t)1 << 23)
#define MAX_QUANTILES 500
#define MAX_EXTRAS 16

static struct {
    double *values;
    size_t n;
    struct {
        const char *name;
        double value;
    } extras[MAX_EXTRAS];
    size_t n_extras;
} results;

void
sample(double value)
{
    if (results.n < MAX_SAMPLES) { /* of a very long run: the beginning */
        results.values[results.n++] = value;
    }
}

void
extra(const char *name, double value)
{
    for (size_t i = 0; i < results.n_extras; i++) {
        if (strcmp(results.extras[i].name, name) == 0) {
            results.extras[i].value = value;
            return;
        }
    }
    if (results.n_extras == MAX_EXTRAS) {
        fail("more than %d figures", MAX_EXTRAS);
    }
    results.extras[results.n_extras].name = name;
    results.extras[results.n_extras++].value = value;
}

static int
compare_values(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Between the two nearest samples. */
static double
quantile(double q)
{
    double place = q * (double)(results.n - 1);
    size_t i = (size_t)place;
    size_t j = i + 1 < results.n ? i + 1 : i;
    return results.values[i] +
           (place - (double)i) * (results.values[j] - results.values[i]);
}

static void
print_results(void)
{
    if (results.n == 0) {
        fail("nothing was measured");
    }
    qsort(results.values, results.n, sizeof *results.values, compare_values);
    printf(
        "{\"n\": %zu, \"median\": %.6g, \"p99\": %.6g, \"max\": %.6g, \"samples\": [",
        results.n, quantile(0.5), quantile(0.99), results.values[results.n - 1]);
    size_t n = results.n < MAX_QUANTILES ? results.n : MAX_QUANTILES;
    for (size_t i = 0; i < n; i++) {
        double q = n > 1 ? (double)i / (double)(n - 1) : 0.5;
        printf("%s%.6g", i ? ", " : "", quantile(q));
    }
    printf("], \"extra\": {");
    for (size_t i = 0; i < results.n_extras; i++) {
        printf("%s\"%s\": %.10g", i ? ", " : "", results.extras[i].name,
               results.extras[i].value);
    }
    printf("}}\n");
}

/* ---- tools ---- */

uint64_t
now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

void *
table(size_t n_items, size_t item_nbytes)
{
    void *ptr = mmap(NULL, n_items * item_nbytes + 1, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ptr == MAP_FAILED) {
        fail("no memory for a table of %zu items", n_items);
    }
    if (n_items <= (size_t)1 << 20) { /* larger ones are not filled as a rule */
        memset(ptr, 0, n_items * item_nbytes);
    }
    return ptr;
}

/* xorshift64*: the same numbers on every machine. */
uint64_t
random_next(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (*state * 0x2545F4914F6CDD1Du) >> 16;
}

size_t
random_between(uint64_t *state, size_t low, size_t high)
{
    return low + (size_t)(random_next(state) % (high - low + 1));
}

size_t
random_log(uint64_t *state, size_t low, size_t high)
{
    double fraction = (double)random_next(state) / (double)((uint64_t)1 << 48);
    double value = (double)low * exp(fraction * log((double)high / (double)low));
    return value >= (double)high ? high : (size_t)value;
}

/* A linear congruential engine: 16807 is its factor, 2^31 - 1 its modulus. */
#define ENGINE_MODULUS 2147483647u
#define ENGINE_RANGE (ENGINE_MODULUS - 2u) /* the largest number less the smallest */

static uint64_t
engine_next(struct standard_random *random)
{
    random->state = (uint32_t)(random->state * (uint64_t)16807 % ENGINE_MODULUS);
    return random->state - 1u;
}

/* A number of 0 to `range`. Of a small range the engine's numbers are divided, and
   those of the last, incomplete part drawn again; a larger one is put together from a
   number for its high part and one for its low. */
static uint64_t
standard_below(struct standard_random *random, uint64_t range)
{
    if (range < ENGINE_RANGE) {
        uint64_t width = ENGINE_RANGE / (range + 1), drawn;
        do {
            drawn = engine_next(random);
        } while (drawn >= width * (range + 1));
        return drawn / width;
    }
    if (range == ENGINE_RANGE) {
        return engine_next(random);
    }
    for (;;) {
        uint64_t high = standard_below(random, range / (ENGINE_RANGE + 1u));
        uint64_t base = high * (ENGINE_RANGE + (uint64_t)1);
        uint64_t drawn = base + engine_next(random);
        if (drawn <= range && drawn >= base) {
            return drawn;
        }
    }
}

uint64_t
standard_uniform(struct standard_random *random, uint64_t low, uint64_t high)
{
    return low + standard_below(random, high - low);
}

static int
compare_blocks(const void *a, const void *b)
{
    uintptr_t x = (uintptr_t)((const struct block *)a)->ptr;
    uintptr_t y = (uintptr_t)((const struct block *)b)->ptr;
    return (x > y) - (x < y);
}

void
check_disjoint(struct block *blocks, size_t n_blocks, size_t alignment)
{
    qsort(blocks, n_blocks, sizeof *blocks, compare_blocks);
    for (size_t i = 0; i < n_blocks; i++) {
        uintptr_t ptr = (uintptr_t)blocks[i].ptr;
        if (blocks[i].nbytes >= alignment && ptr % alignment != 0) {
            fail("a block of %zu bytes is not aligned to %zu", blocks[i].nbytes,
                 alignment);
        }
        if (i > 0 && (uintptr_t)blocks[i - 1].ptr + blocks[i - 1].nbytes > ptr) {
            fail("two live blocks overlap");
        }
    }
}

/* Numbers of the engine that run_random draws from, for a look at them. */
static void
print_uniform(void)
{
    struct standard_random random = STANDARD_RANDOM;
    size_t low = parameter("low", 0), high = parameter("high", 99);
    for (size_t i = 0; i < parameter("n", 10); i++) {
        printf("%" PRIu64 "\n", standard_uniform(&random, low, high));
    }
}

int
main(int argc, char **argv)
{
    struct allocator allocator;
    if (argc >= 2 && strcmp(argv[1], "trace") == 0) {
        arguments = argv + 2;
        write_trace();
        return 0;
    }
    if (argc >= 2 && strcmp(argv[1], "uniform") == 0) {
        arguments = argv + 2;
        print_uniform();
        return 0;
    }
    if (argc < 3) {
        fail(
            "usage: nrm_bench WORKLOAD ALLOCATOR [key=value ...], or trace or uniform");
    }
    arguments = argv + 3;
    results.values = table(MAX_SAMPLES, sizeof *results.values);
    for (size_t i = 0; i < N_WORKLOADS; i++) {
        if (strcmp(workloads[i].name, argv[1]) == 0) {
            allocator_open(&allocator, argv[2]);
            workloads[i].run(&allocator);
            allocator_close(&allocator);
            print_results();
            return 0;
        }
    }
    fail("there is no workload \"%s\"", argv[1]);
}
