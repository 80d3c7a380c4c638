/* A sorted array that doubles: what is known of memory changes near one place at a
 * time, and is looked up much more often than it is cut. */
#include "intervals.h"

#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define FIRST_CAPACITY 64

static const struct sim_interval *
interval_at(const struct sim_intervals *intervals, size_t index)
{
    return sim_intervals_at(intervals, index);
}

size_t
sim_intervals_find(const struct sim_intervals *intervals, uintptr_t address)
{
    size_t low = 0;
    size_t high = intervals->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (interval_at(intervals, middle)->end <= address) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

size_t
sim_intervals_limit(const struct sim_intervals *intervals, size_t index,
                    uintptr_t address)
{
    while (index < intervals->n && interval_at(intervals, index)->start < address) {
        index++;
    }
    return index;
}

bool
sim_intervals_insert(struct sim_intervals *intervals, size_t index, const void *item)
{
    if (intervals->n == intervals->capacity) {
        size_t capacity = intervals->capacity == 0 ? FIRST_CAPACITY
                                                   : 2 * intervals->capacity;
        void *items = realloc(intervals->items, capacity * intervals->item_nbytes);
        if (items == NULL) {
            sim_fault("the checker has no memory: it does not see everything");
            return false;
        }
        intervals->items = items;
        intervals->capacity = capacity;
    }
    char *place = sim_intervals_at(intervals, index);
    memmove(place + intervals->item_nbytes, place,
            (intervals->n - index) * intervals->item_nbytes);
    memcpy(place, item, intervals->item_nbytes);
    intervals->n++;
    return true;
}

void
sim_intervals_remove(struct sim_intervals *intervals, size_t first, size_t end)
{
    if (first == end) {
        return;
    }
    memmove(sim_intervals_at(intervals, first), sim_intervals_at(intervals, end),
            (intervals->n - end) * intervals->item_nbytes);
    intervals->n -= end - first;
}
