/* Shadow memory: who wrote some bytes last, and who has read them since.
 *
 * Cells are pieces of memory of which the same is known, in order of address and never
 * overlapping. An access cuts the cells at its ends, is compared with what each cell
 * inside knows, and is written down there; a write leaves one cell behind. Host
 * functions tell of their accesses late, when something that comes after them may stand
 * there already: that stays. */
#include "checker.h"

#include <stdlib.h>

struct cell {
    struct sim_interval where;
    struct sim_access *write; /* retained, like the next ones; NULL: none */
    struct sim_access **reads;
    size_t n_reads;
};

static struct sim_intervals shadow = {.item_nbytes = sizeof(struct cell)};

static struct cell *
cell_at(size_t index)
{
    return sim_intervals_at(&shadow, index);
}

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

static void
remove_cells(size_t first, size_t end)
{
    for (size_t i = first; i < end; i++) {
        clear(cell_at(i));
    }
    sim_intervals_remove(&shadow, first, end);
}

/* No cell lies across the address from here on. */
static bool
cut(uintptr_t address)
{
    size_t index = sim_intervals_find(&shadow, address);
    if (index == shadow.n || cell_at(index)->where.start >= address) {
        return true;
    }
    struct cell *cell = cell_at(index);
    struct cell left = {.where = {cell->where.start, address}};
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
    cell->where.start = address;
    if (!sim_intervals_insert(&shadow, index, &left)) {
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
    for (size_t i = sim_intervals_find(&shadow, start); at < end; i++) {
        uintptr_t next = i < shadow.n ? cell_at(i)->where.start : end;
        if (next > at) {
            uintptr_t limit = next < end ? next : end;
            struct cell cell = {.where = {at, limit}};
            if (!sim_intervals_insert(&shadow, i, &cell)) {
                return false;
            }
        }
        at = cell_at(i)->where.end;
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
    size_t nbytes = cell->where.end - cell->where.start;
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
    while (n < end && cell_at(n)->write == access && cell_at(n)->n_reads == 0) {
        n++;
    }
    if (n == end && end - first > 1) {
        cell_at(first)->where.end = cell_at(end - 1)->where.end;
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
    size_t first = sim_intervals_find(&shadow, start);
    size_t limit = sim_intervals_limit(&shadow, first, end);
    for (size_t i = first; i < limit; i++) {
        compare(cell_at(i), access);
        if (stays) {
            write_down(cell_at(i), access);
        }
    }
    if (stays) {
        merge(first, limit, access);
    }
}

void
sim_shadow_await(struct sim_clock **clock, uintptr_t start, size_t nbytes)
{
    size_t first = sim_intervals_find(&shadow, start);
    size_t limit = sim_intervals_limit(&shadow, first, start + nbytes);
    for (size_t i = first; i < limit; i++) {
        const struct cell *cell = cell_at(i);
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
        size_t first = sim_intervals_find(&shadow, start);
        remove_cells(first, sim_intervals_limit(&shadow, first, end));
    }
}

void
sim_shadow_reset(void)
{
    remove_cells(0, shadow.n);
}
