/* Shadow memory: who wrote some bytes last, and who has read them since.
 *
 * Cells are pieces of memory of which the same is known, in order of address and never
 * overlapping. An access cuts the cells at its ends, is compared with what each cell inside
 * knows, and is written down there; a write leaves one cell behind. Host functions tell of
 * their accesses late, when something that comes after them may stand there already: that
 * stays. */
#include "checker.h"

#include <stdlib.h>
#include <string.h>

struct cell {
    uintptr_t start;
    uintptr_t end;
    struct sim_access *write; /* retained, like the next ones; NULL: none */
    struct sim_access **reads;
    size_t n_reads;
};

static struct {
    struct cell *cells;
    size_t n;
    size_t capacity;
} shadow;

/* ---- accesses -------------------------------------------------------------------- */

static struct sim_access *
retain(struct sim_access *access)
{
    if (access != NULL) {
        access->refs++;
    }
    return access;
}

void
sim_access_release(struct sim_access *access)
{
    if (access != NULL && --access->refs == 0) {
        sim_clock_release(access->clock);
        free(access);
    }
}

bool
sim_access_precedes(const struct sim_access *before, const struct sim_access *after)
{
    return sim_clock_get(after->clock, before->actor) >= before->count;
}

/* ---- cells ----------------------------------------------------------------------- */

/* The first cell that ends behind the address. */
static size_t
index_of(uintptr_t address)
{
    size_t low = 0;
    size_t high = shadow.n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (shadow.cells[middle].end <= address) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

static void
clear(struct cell *cell)
{
    sim_access_release(cell->write);
    for (size_t i = 0; i < cell->n_reads; i++) {
        sim_access_release(cell->reads[i]);
    }
    free(cell->reads);
    cell->write = NULL;
    cell->reads = NULL;
    cell->n_reads = 0;
}

static bool
insert(size_t index, struct cell cell)
{
    if (shadow.n == shadow.capacity) {
        size_t capacity = shadow.capacity == 0 ? 256 : 2 * shadow.capacity;
        void *cells = realloc(shadow.cells, capacity * sizeof *shadow.cells);
        if (cells == NULL) {
            sim_fault("the checker has no memory: it does not see everything");
            return false;
        }
        shadow.cells = cells;
        shadow.capacity = capacity;
    }
    memmove(shadow.cells + index + 1, shadow.cells + index,
            (shadow.n - index) * sizeof *shadow.cells);
    shadow.cells[index] = cell;
    shadow.n++;
    return true;
}

static void
remove_cells(size_t first, size_t end)
{
    if (first == end) {
        return;
    }
    for (size_t i = first; i < end; i++) {
        clear(&shadow.cells[i]);
    }
    memmove(shadow.cells + first, shadow.cells + end,
            (shadow.n - end) * sizeof *shadow.cells);
    shadow.n -= end - first;
}

/* No cell lies across the address from here on. */
static bool
cut(uintptr_t address)
{
    size_t index = index_of(address);
    if (index == shadow.n || shadow.cells[index].start >= address) {
        return true;
    }
    struct cell *cell = &shadow.cells[index];
    struct cell left = {.start = cell->start, .end = address};
    if (cell->n_reads != 0) {
        left.reads = malloc(cell->n_reads * sizeof *left.reads);
        if (left.reads == NULL) {
            return false;
        }
    }
    for (size_t i = 0; i < cell->n_reads; i++) {
        left.reads[i] = retain(cell->reads[i]);
    }
    left.n_reads = cell->n_reads;
    left.write = retain(cell->write);
    cell->start = address;
    if (!insert(index, left)) {
        clear(&left);
        return false;
    }
    return true;
}

/* Cells without a gap from `start` to `end`; nothing is known of what is new. */
static bool
cover(uintptr_t start, uintptr_t end)
{
    uintptr_t at = start;
    for (size_t i = index_of(start); at < end; i++) {
        uintptr_t next = i < shadow.n ? shadow.cells[i].start : end;
        if (next > at) {
            uintptr_t limit = next < end ? next : end;
            if (!insert(i, (struct cell){.start = at, .end = limit})) {
                return false;
            }
        }
        at = shadow.cells[i].end;
    }
    return true;
}

/* ---- comparing and writing down -------------------------------------------------- */

static bool
are_ordered(const struct sim_access *a, const struct sim_access *b)
{
    return sim_access_precedes(a, b) || sim_access_precedes(b, a);
}

static void
compare(const struct cell *cell, const struct sim_access *access)
{
    size_t nbytes = cell->end - cell->start;
    if (cell->write != NULL && !are_ordered(cell->write, access)) {
        sim_race_report(cell->write, access, nbytes);
    }
    for (size_t i = 0; i < cell->n_reads && access->writes; i++) {
        if (!are_ordered(cell->reads[i], access)) {
            sim_race_report(cell->reads[i], access, nbytes);
        }
    }
}

/* Of the reads only those stay that a later write may still meet. */
static void
drop_reads(struct cell *cell, const struct sim_access *access)
{
    size_t n = 0;
    for (size_t i = 0; i < cell->n_reads; i++) {
        struct sim_access *read = cell->reads[i];
        bool stays = access->writes ? sim_access_precedes(access, read)
                                    : !sim_access_precedes(read, access);
        if (stays) {
            cell->reads[n++] = read;
        }
        else {
            sim_access_release(read);
        }
    }
    cell->n_reads = n;
}

static void
write_down(struct cell *cell, struct sim_access *access)
{
    drop_reads(cell, access);
    if (!access->writes) {
        void *reads = realloc(cell->reads, (cell->n_reads + 1) * sizeof *cell->reads);
        if (reads != NULL) {
            cell->reads = reads;
            cell->reads[cell->n_reads++] = retain(access);
        }
    }
    else if (cell->write == NULL || !sim_access_precedes(access, cell->write)) {
        sim_access_release(cell->write);
        cell->write = retain(access);
    }
}

/* Neighbours of which the access is all that is known become one cell. */
static void
merge(size_t first, size_t end, const struct sim_access *access)
{
    size_t n = first;
    while (n < end && shadow.cells[n].write == access && shadow.cells[n].n_reads == 0) {
        n++;
    }
    if (n == end && end - first > 1) {
        shadow.cells[first].end = shadow.cells[end - 1].end;
        remove_cells(first + 1, end);
    }
}

void
sim_shadow_touch(struct sim_access *access, uintptr_t start, size_t nbytes, bool stays)
{
    uintptr_t end = start + nbytes;
    if (nbytes == 0 || !cut(start) || !cut(end) || (stays && !cover(start, end))) {
        return;
    }
    size_t first = index_of(start);
    size_t i = first;
    for (; i < shadow.n && shadow.cells[i].start < end; i++) {
        compare(&shadow.cells[i], access);
        if (stays) {
            write_down(&shadow.cells[i], access);
        }
    }
    if (stays) {
        merge(first, i, access);
    }
}

void
sim_shadow_await(struct sim_clock **clock, uintptr_t start, size_t nbytes)
{
    for (size_t i = index_of(start);
         i < shadow.n && shadow.cells[i].start < start + nbytes; i++) {
        const struct cell *cell = &shadow.cells[i];
        if (cell->write != NULL) {
            sim_clock_join(clock, cell->write->clock);
        }
        for (size_t k = 0; k < cell->n_reads; k++) {
            sim_clock_join(clock, cell->reads[k]->clock);
        }
    }
}

void
sim_shadow_forget(uintptr_t start, size_t nbytes)
{
    uintptr_t end = start + nbytes;
    if (cut(start) && cut(end)) {
        size_t first = index_of(start);
        size_t i = first;
        while (i < shadow.n && shadow.cells[i].start < end) {
            i++;
        }
        remove_cells(first, i);
    }
}

void
sim_shadow_reset(void)
{
    remove_cells(0, shadow.n);
}
