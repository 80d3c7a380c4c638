/*
 * The options table: values, where they come from, and their text.
 *
 * The environment is read once, at the first use of any option, as reading it later
 * would race with a program that changes it. A variable that cannot be read is not an
 * error of whoever happens to come first: the default holds and `info` shows the row as
 * invalid. Numbers are atomics, so getting one is a load; texts and sources change
 * under the lock.
 */
#include "nrm/options.h"

#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/lock.h"
#include "base/units.h"

#define TEXT_SIZE sizeof((nrm_option_info *)0)->text

struct row {
    const char *name;
    const char *environment;
    nrm_option_type type;
    int64_t number;   /* the default */
    const char *text; /* the choices, or the default of a TEXT option */
    const char *doc;
};

static const struct row rows[NRM_OPT_COUNT] = {
#define OPTION_ROW(id, name, type, number, text, doc)                                  \
    {name, "NUMPY_RMM_" #id, NRM_OPTION_##type, number, text, doc},
    NRM_OPTION_ROWS(OPTION_ROW)
#undef OPTION_ROW
};

struct bounds {
    int64_t low;
    int64_t high;
};

#define SIZE_BOUND ((int64_t)1 << 56)

/* Rows without an entry: what their type allows. */
static const struct bounds narrower[NRM_OPT_COUNT] = {
    [NRM_OPT_SEGMENT_NBYTES] = {64 * 1024, SIZE_BOUND},
    [NRM_OPT_DEVICE] = {0, 1023},
    [NRM_OPT_TOUCH_THREADS] = {0, 256},
};

static struct {
    struct nrm__lock lock;
    pthread_once_t once;
    atomic_int_least64_t numbers[NRM_OPT_COUNT];
    nrm_option_source sources[NRM_OPT_COUNT];
    char texts[NRM_OPT_COUNT][TEXT_SIZE]; /* of TEXT options */
} options = {.lock = NRM__LOCK_INIT(NRM__RANK_LEAF), .once = PTHREAD_ONCE_INIT};

static struct bounds
bounds_of(nrm_option option)
{
    if (narrower[option].high != 0) {
        return narrower[option];
    }
    switch (rows[option].type) {
    case NRM_OPTION_SIZE:
        return (struct bounds){0, SIZE_BOUND};
    case NRM_OPTION_TIME:
        return (struct bounds){0, INT64_C(3600) * 1000000000};
    default:
        return (struct bounds){INT_MIN, INT_MAX};
    }
}

/* ---- from text ---- */

static const char *
parse_int(const char *text, int64_t *out)
{
    char *end;
    long long value = strtoll(text, &end, 10);
    if (end == text || end[strspn(end, " \t\n")] != '\0') {
        return "is not a whole number";
    }
    *out = value; /* what does not fit a long long is out of every bounds */
    return NULL;
}

static const char *
parse_bool(const char *text, int64_t *out)
{
    static const char *const words[][2] = {
        {"0", "1"}, {"false", "true"}, {"no", "yes"}, {"off", "on"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        for (int value = 0; value < 2; value++) {
            if (strcasecmp(text, words[i][value]) == 0) {
                *out = value;
                return NULL;
            }
        }
    }
    return "is neither true nor false";
}

/* The i-th of "a|b|c"; the length 0: there is none. */
static const char *
nth_choice(const char *choices, int64_t i, size_t *out_length)
{
    for (; i > 0 && *choices != '\0'; i--) {
        choices += strcspn(choices, "|");
        choices += *choices == '|';
    }
    *out_length = strcspn(choices, "|");
    return choices;
}

static const char *
parse_choice(const char *text, const char *choices, int64_t *out)
{
    size_t length;
    for (int64_t i = 0;; i++) {
        const char *choice = nth_choice(choices, i, &length);
        if (length == 0) {
            return "is not one of";
        }
        if (strlen(text) == length && strncmp(text, choice, length) == 0) {
            *out = i;
            return NULL;
        }
    }
}

static const char *
parse_quantity(const char *text, nrm_option_type type, int64_t *out)
{
    bool is_time = type == NRM_OPTION_TIME;
    uint64_t value = 0;
    const char *problem = nrm__quantity_parse(
        text, is_time ? nrm__time_units : nrm__size_units, is_time, &value);
    *out = value > INT64_MAX ? INT64_MAX : (int64_t)value;
    return problem;
}

/* NULL: the number is set; otherwise what is wrong with the text. */
static const char *
parse_number(nrm_option option, const char *text, int64_t *out)
{
    const struct row *row = &rows[option];
    switch (row->type) {
    case NRM_OPTION_INT:
        return parse_int(text, out);
    case NRM_OPTION_BOOL:
        return parse_bool(text, out);
    case NRM_OPTION_CHOICE:
        return parse_choice(text, row->text, out);
    default:
        return parse_quantity(text, row->type, out);
    }
}

/* ---- to text ---- */

static void
format_number(nrm_option option, int64_t number, char *out, size_t size)
{
    const struct row *row = &rows[option];
    size_t length;
    const char *choice;
    switch (row->type) {
    case NRM_OPTION_SIZE:
        nrm__quantity_format((uint64_t)number, nrm__size_units, out, size);
        break;
    case NRM_OPTION_TIME:
        nrm__quantity_format((uint64_t)number, nrm__time_units, out, size);
        break;
    case NRM_OPTION_BOOL:
        snprintf(out, size, "%s", number != 0 ? "true" : "false");
        break;
    case NRM_OPTION_CHOICE:
        choice = nth_choice(row->text, number, &length);
        snprintf(out, size, "%.*s", (int)length, choice);
        break;
    default:
        snprintf(out, size, "%" PRId64, number);
        break;
    }
}

/* ---- setting ---- */

/* What stands in the message behind the name and the text that was given. */
struct problem {
    char text[128];
};

static void
store_locked(nrm_option option, int64_t number, const char *text,
             nrm_option_source source)
{
    if (rows[option].type == NRM_OPTION_TEXT) {
        snprintf(options.texts[option], TEXT_SIZE, "%s", text);
    }
    else {
        atomic_store_explicit(&options.numbers[option], number, memory_order_relaxed);
    }
    options.sources[option] = source;
}

static bool
check_bounds(nrm_option option, int64_t number, struct problem *out)
{
    struct bounds bounds = bounds_of(option);
    char low[32];
    char high[32];
    if (number >= bounds.low && number <= bounds.high) {
        return true;
    }
    format_number(option, bounds.low, low, sizeof low);
    format_number(option, bounds.high, high, sizeof high);
    snprintf(out->text, sizeof out->text, "is out of range: %s to %s", low, high);
    return false;
}

static bool
check(nrm_option option, const char *text, int64_t *out, struct problem *problem)
{
    const struct row *row = &rows[option];
    *out = 0;
    if (row->type == NRM_OPTION_TEXT) {
        snprintf(problem->text, sizeof problem->text, "is longer than %zu bytes",
                 TEXT_SIZE - 1);
        return strlen(text) < TEXT_SIZE;
    }
    const char *what = parse_number(option, text, out);
    if (what == NULL) {
        return check_bounds(option, *out, problem);
    }
    snprintf(problem->text, sizeof problem->text, "%s%s%s", what,
             row->type == NRM_OPTION_CHOICE ? " " : "",
             row->type == NRM_OPTION_CHOICE ? row->text : "");
    return false;
}

static void
read_environment(void)
{
    nrm__lock_acquire(&options.lock);
    for (nrm_option option = 0; option < NRM_OPT_COUNT; option++) {
        const struct row *row = &rows[option];
        const char *text = getenv(row->environment);
        struct problem ignored;
        int64_t number;
        store_locked(option, row->number, row->text, NRM_OPTION_DEFAULT);
        if (text == NULL || *text == '\0') {
            continue;
        }
        if (check(option, text, &number, &ignored)) {
            store_locked(option, number, text, NRM_OPTION_ENVIRONMENT);
        }
        else {
            options.sources[option] = NRM_OPTION_INVALID;
        }
    }
    nrm__lock_release(&options.lock);
}

static void
start(void)
{
    pthread_once(&options.once, read_environment);
}

int64_t
nrm_option_get(nrm_option option)
{
    NRM_DEBUG_ASSERT(option < NRM_OPT_COUNT && rows[option].type != NRM_OPTION_TEXT);
    start();
    return atomic_load_explicit(&options.numbers[option], memory_order_relaxed);
}

void
nrm_option_get_text(nrm_option option, char *out, size_t size)
{
    NRM_DEBUG_ASSERT(option < NRM_OPT_COUNT && rows[option].type == NRM_OPTION_TEXT);
    start();
    nrm__lock_acquire(&options.lock);
    snprintf(out, size, "%s", options.texts[option]);
    nrm__lock_release(&options.lock);
}

nrm_status
nrm_option_set(nrm_option option, const char *text)
{
    struct problem problem;
    int64_t number;
    if ((unsigned)option >= NRM_OPT_COUNT) {
        return nrm__error(NRM_NOT_FOUND, "there is no option number %u",
                          (unsigned)option);
    }
    if (text == NULL) {
        return nrm__error(NRM_INVALID_VALUE, "no text was given for the option %s",
                          rows[option].name);
    }
    start();
    if (!check(option, text, &number, &problem)) {
        return nrm__error(NRM_INVALID_VALUE, "%s: \"%.80s\" %s", rows[option].name,
                          text, problem.text);
    }
    nrm__lock_acquire(&options.lock);
    store_locked(option, number, text, NRM_OPTION_PROGRAM);
    nrm__lock_release(&options.lock);
    return NRM_OK;
}

/* ---- looking ---- */

nrm_status
nrm_option_find(const char *name, nrm_option *out)
{
    for (nrm_option option = 0; option < NRM_OPT_COUNT; option++) {
        if (strcmp(rows[option].name, name) == 0) {
            *out = option;
            return NRM_OK;
        }
    }
    return nrm__error(NRM_NOT_FOUND, "there is no option \"%.80s\"", name);
}

void
nrm_option_info_get(nrm_option option, nrm_option_info *out)
{
    NRM_ASSERT((unsigned)option < NRM_OPT_COUNT);
    const struct row *row = &rows[option];
    bool is_text = row->type == NRM_OPTION_TEXT;
    start();
    *out = (nrm_option_info){
        .name = row->name,
        .environment = row->environment,
        .type = row->type,
        .choices = row->type == NRM_OPTION_CHOICE ? row->text : "",
        .doc = row->doc,
    };
    nrm__lock_acquire(&options.lock);
    out->source = options.sources[option];
    if (is_text) {
        memcpy(out->text, options.texts[option], TEXT_SIZE);
    }
    else {
        format_number(option, atomic_load(&options.numbers[option]), out->text,
                      TEXT_SIZE);
    }
    nrm__lock_release(&options.lock);
    if (is_text) {
        snprintf(out->default_text, sizeof out->default_text, "%s", row->text);
    }
    else {
        format_number(option, row->number, out->default_text, sizeof out->default_text);
    }
}

/* ---- fork ---- */

void
nrm__options_fork_prepare(void)
{
    nrm__lock_fork_prepare(&options.lock);
}

void
nrm__options_fork_parent(void)
{
    nrm__lock_fork_parent(&options.lock);
}

void
nrm__options_fork_child(void)
{
    nrm__lock_fork_child(&options.lock);
}
