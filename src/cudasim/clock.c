/* Vector clocks: of each actor, up to which of its doings something comes after.
 *
 * Most of what happens learns nothing new, so clocks are shared, and a new one is made
 * only where two that differ come together. */
#include "checker.h"

#include <stdlib.h>
#include <string.h>

struct sim_clock {
    unsigned int refs;
    uint32_t n;
    uint64_t counts[];
};

uint64_t
sim_clock_get(const struct sim_clock *clock, uint32_t actor)
{
    return clock != NULL && actor < clock->n ? clock->counts[actor] : 0;
}

struct sim_clock *
sim_clock_retain(struct sim_clock *clock)
{
    if (clock != NULL) {
        clock->refs++;
    }
    return clock;
}

void
sim_clock_release(struct sim_clock *clock)
{
    if (clock != NULL && --clock->refs == 0) {
        free(clock);
    }
}

/* Nobody else has it, and it has room for so many actors: steals the clock. */
static struct sim_clock *
own(struct sim_clock *clock, uint32_t n)
{
    if (clock != NULL && clock->refs == 1 && clock->n >= n) {
        return clock;
    }
    uint32_t n_old = clock != NULL ? clock->n : 0;
    n = n > n_old ? n : n_old;
    struct sim_clock *copy = calloc(1, sizeof *copy + n * sizeof copy->counts[0]);
    if (copy == NULL) {
        sim_fault("the checker has no memory: what it reports may be wrong");
        return clock;
    }
    copy->refs = 1;
    copy->n = n;
    if (clock != NULL) {
        memcpy(copy->counts, clock->counts, n_old * sizeof copy->counts[0]);
        sim_clock_release(clock);
    }
    return copy;
}

static bool
covers(const struct sim_clock *clock, const struct sim_clock *other)
{
    for (uint32_t i = 0; i < other->n; i++) {
        if (other->counts[i] > sim_clock_get(clock, i)) {
            return false;
        }
    }
    return true;
}

void
sim_clock_join(struct sim_clock **clock, struct sim_clock *other)
{
    if (other == NULL || *clock == other || covers(*clock, other)) {
        return;
    }
    if (*clock == NULL || covers(other, *clock)) {
        sim_clock_release(*clock);
        *clock = sim_clock_retain(other);
        return;
    }
    *clock = own(*clock, other->n);
    for (uint32_t i = 0; i < (*clock)->n; i++) {
        uint64_t count = sim_clock_get(other, i);
        (*clock)->counts[i] = count > (*clock)->counts[i] ? count : (*clock)->counts[i];
    }
}

void
sim_clock_set(struct sim_clock **clock, uint32_t actor, uint64_t count)
{
    *clock = own(*clock, actor + 1);
    if (*clock != NULL && actor < (*clock)->n) {
        (*clock)->counts[actor] = count;
    }
}
