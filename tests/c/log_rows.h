/* The rows of a log, read back. */

#ifndef LOG_ROWS_H
#define LOG_ROWS_H

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fixtures.h"
#include "nrm/adaptors.h"

#define LOG_HEADER "Thread,Time,Action,Pointer,Size,Stream\n"

struct row {
    int thread, hour, minute;
    double second;
    char action[24], stream[24];
    uintptr_t ptr;
    size_t nbytes;
};

struct rows {
    struct row *rows;
    size_t n;
};

static inline char *
log_path(char *out, const char *name)
{
    sprintf(out, "/tmp/nrm-log-%d-%s", (int)getpid(), name);
    return out;
}

/* False: the line is no row. */
static inline bool
parse_row(const char *line, struct row *out)
{
    char ptr[24];
    int n = 0;
    if (sscanf(line, "%d,%2d:%2d:%9lf,%23[^,],%23[^,],%zu,%23[^\n]\n%n", &out->thread,
               &out->hour, &out->minute, &out->second, out->action, ptr, &out->nbytes,
               out->stream, &n) != 8 ||
        line[n] != '\0') {
        return false;
    }
    out->ptr = strcmp(ptr, "(nil)") != 0 ? strtoull(ptr, NULL, 16) : 0;
    return true;
}

/* All of a file, which begins with the header and has nothing else but rows. */
static inline struct rows
read_rows(const char *path)
{
    char line[256] = "";
    struct rows all = {NULL, 0};
    size_t capacity = 0;
    FILE *file = fopen(path, "r");
    CHECK_MSG(file != NULL, "%s cannot be opened", path);
    if (file == NULL) {
        return all;
    }
    CHECK(fgets(line, sizeof line, file) != NULL);
    CHECK_STR_EQ(line, LOG_HEADER);
    while (fgets(line, sizeof line, file) != NULL) {
        if (all.n == capacity) {
            capacity = capacity * 2 + 64;
            all.rows = realloc(all.rows, capacity * sizeof *all.rows);
        }
        bool is_row = parse_row(line, &all.rows[all.n]);
        CHECK_MSG(is_row, "no row: %s", line);
        all.n += is_row;
    }
    fclose(file);
    return all;
}

static inline size_t
count_action(const struct rows *all, const char *action)
{
    size_t n = 0;
    for (size_t i = 0; i < all->n; i++) {
        n += strcmp(all->rows[i].action, action) == 0;
    }
    return n;
}

static inline int
compare_addresses(const void *a, const void *b)
{
    const struct row *const *left = a, *const *right = b;
    if ((*left)->ptr != (*right)->ptr) {
        return (*left)->ptr < (*right)->ptr ? -1 : 1;
    }
    return *left < *right ? -1 : *left > *right;
}

/* Of each address: allocations and frees take turns, with the same size. */
static inline void
check_turns(const struct rows *all)
{
    struct row **order = malloc(all->n * sizeof *order);
    size_t n_wrong = 0;
    for (size_t i = 0; i < all->n; i++) {
        order[i] = &all->rows[i];
    }
    qsort(order, all->n, sizeof *order, compare_addresses);
    for (size_t i = 0; i < all->n; i++) {
        bool follows = i > 0 && order[i - 1]->ptr == order[i]->ptr;
        bool is_free = strcmp(order[i]->action, "free") == 0;
        bool was_free = !follows || strcmp(order[i - 1]->action, "free") == 0;
        bool fits = !is_free || (follows && order[i]->nbytes == order[i - 1]->nbytes);
        n_wrong += is_free == was_free || !fits;
    }
    CHECK_EQ(n_wrong, 0);
    free(order);
}

/* Logs to `path` what goes to `upstream`, whose reference it takes. */
static inline nrm_resource *
log_over(nrm_resource *upstream, const char *path)
{
    nrm_logging_options options = NRM_OPTIONS(nrm_logging_options);
    nrm_resource *mr = NULL;
    options.path = path;
    CHECK_OK(nrm_logging_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

#endif
