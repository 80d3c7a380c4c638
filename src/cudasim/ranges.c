/* All memory that the driver knows, in order of address: ranges that never overlap. A
 * sorted array is enough, since a program has thousands of them and not millions. */
#include "checker.h"

#include <stdlib.h>
#include <string.h>

static struct {
    struct sim_range **items;
    size_t n_items;
    size_t capacity;
} table;

size_t
sim_range_index(uintptr_t address)
{
    size_t low = 0;
    size_t high = table.n_items;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const struct sim_range *range = table.items[middle];
        if (range->start + range->nbytes <= address) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

struct sim_range *
sim_range_at(size_t index)
{
    return index < table.n_items ? table.items[index] : NULL;
}

struct sim_range *
sim_range_find(uintptr_t address)
{
    struct sim_range *range = sim_range_at(sim_range_index(address));
    return range != NULL && range->start <= address ? range : NULL;
}

struct sim_range *
sim_range_find_overlap(uintptr_t start, size_t nbytes)
{
    struct sim_range *range = sim_range_at(sim_range_index(start));
    /* it ends behind the start */
    return range != NULL && range->start < start + nbytes ? range : NULL;
}

bool
sim_range_add(struct sim_range *range)
{
    if (table.n_items == table.capacity) {
        size_t capacity = table.capacity == 0 ? 64 : 2 * table.capacity;
        void *items = realloc(table.items, capacity * sizeof *table.items);
        if (items == NULL) {
            return false;
        }
        table.items = items;
        table.capacity = capacity;
    }
    size_t index = sim_range_index(range->start);
    memmove(table.items + index + 1, table.items + index,
            (table.n_items - index) * sizeof *table.items);
    table.items[index] = range;
    table.n_items++;
    return true;
}

void
sim_range_remove(struct sim_range *range)
{
    size_t index = sim_range_index(range->start);
    sim_checker_forget(range->start, range->nbytes);
    sim_advice_forget(range->start, range->nbytes);
    sim_pool_drop_chunk(range);
    table.n_items--;
    memmove(table.items + index, table.items + index + 1,
            (table.n_items - index) * sizeof *table.items);
    free(range->shadow);
    free(range);
}
