/* Intervals of addresses that never overlap, in order, each with what is known of it:
 * an item of any type whose first member is its struct sim_interval. The simulator's
 * lock guards them. */
#ifndef NRM_CUDASIM_INTERVALS_H
#define NRM_CUDASIM_INTERVALS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sim_interval {
    uintptr_t start;
    uintptr_t end;
};

struct sim_intervals {
    size_t item_nbytes;
    char *items;
    size_t n;
    size_t capacity;
};

static inline void *
sim_intervals_at(const struct sim_intervals *intervals, size_t index)
{
    return intervals->items + index * intervals->item_nbytes;
}

/* The first that ends behind the address; n: none does. */
size_t sim_intervals_find(const struct sim_intervals *intervals, uintptr_t address);

/* The first from there on that does not start before the address; n: all do. */
size_t sim_intervals_limit(const struct sim_intervals *intervals, size_t index,
                           uintptr_t address);

/* False: there is no memory, and a fault says so. */
bool sim_intervals_insert(struct sim_intervals *intervals, size_t index,
                          const void *item);

/* The items from `first` to `end` go; what they own is the caller's to release. */
void sim_intervals_remove(struct sim_intervals *intervals, size_t first, size_t end);

#endif
