/* Ranges in one another, as callbacks over pools over callbacks make them: which one is
   the innermost around an address, whatever lies beside and in whichever order they
   go. */
#include "core/block_map.h"
#include "fixtures.h"
#include "nrm/sources.h"

/* Nothing of it is touched. */
#define START (((uintptr_t)1 << 46) + 64)
#define N_BESIDE 40
#define N_RANGES 60

static nrm_status
no_memory(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
          void **out)
{
    (void)context, (void)nbytes, (void)alignment, (void)stream, (void)out;
    return NRM_OUT_OF_MEMORY;
}

static nrm_status
no_end(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    (void)context, (void)ptr, (void)nbytes, (void)stream;
    return NRM_OK;
}

static nrm_resource *
new_callback(void)
{
    nrm_resource *mr = NULL;
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    options.kind = NRM_KIND_HOST;
    options.allocate = no_memory;
    options.deallocate = no_end;
    CHECK_OK(nrm_callback_create(&options, &mr));
    return mr;
}

static struct nrm__block
enter(nrm_resource *owner, uintptr_t start, size_t nbytes)
{
    struct nrm__entry *entry = NULL;
    struct nrm__block block = {
        .ptr = (void *)start, .nbytes = nbytes, .capacity = nbytes, .owner = owner};
    CHECK_OK(nrm__entry_create(&entry));
    nrm__block_map_insert(entry, &block);
    return block;
}

static void
leave(struct nrm__block *block)
{
    CHECK(nrm__block_map_claim(block));
    nrm__block_map_forget(block);
}

/* The record of the block around `address`, or NULL. */
static const void *
around(uintptr_t address)
{
    struct nrm__block found;
    if (!nrm__block_map_find((void *)address, &found)) {
        return NULL;
    }
    nrm_resource_release(found.owner);
    return found.record;
}

TEST(what_lies_beside_an_address_does_not_hide_what_is_around_it)
{
    nrm_resource *mr = new_callback();
    struct nrm__block outer = enter(mr, START, 100000), inner[N_BESIDE];
    for (size_t i = 0; i < N_BESIDE; i++) {
        inner[i] = enter(mr, START + 1000 * i, 500);
    }
    for (size_t i = 0; i < N_BESIDE; i++) {
        CHECK(around(START + 1000 * i + 499) == inner[i].record);
        CHECK(around(START + 1000 * i + 500) == outer.record);
    }
    CHECK(around(START + 99999) == outer.record);
    CHECK(around(START + 100000) == NULL);
    for (size_t i = 0; i < N_BESIDE; i++) {
        leave(&inner[i]);
    }
    leave(&outer);
    nrm_resource_release(mr);
}

TEST(of_those_that_start_together_the_longer_ones_are_found_behind_the_shorter)
{
    nrm_resource *mr = new_callback();
    struct nrm__block blocks[4];
    for (size_t i = 0; i < 4; i++) {
        blocks[i] = enter(mr, START, 4000 - 1000 * i);
    }
    for (size_t i = 0; i < 4; i++) {
        CHECK(around(START + 3999 - 1000 * i) == blocks[i].record);
    }
    leave(&blocks[2]);
    CHECK(around(START + 1999) == blocks[1].record);
    CHECK(around(START) == blocks[3].record);
    leave(&blocks[3]);
    leave(&blocks[0]);
    CHECK(around(START + 2999) == blocks[1].record);
    CHECK(around(START + 3000) == NULL);
    leave(&blocks[1]);
    nrm_resource_release(mr);
}

/* ---- against a naive model: all ranges, in the order in which they came ---- */

struct ranges {
    struct nrm__block blocks[N_RANGES];
    size_t n;
};

static const struct nrm__block *
naive(const struct ranges *ranges, uintptr_t address)
{
    const struct nrm__block *found = NULL;
    for (size_t i = 0; i < ranges->n; i++) {
        const struct nrm__block *block = &ranges->blocks[i];
        bool is_around = address - (uintptr_t)block->ptr < block->nbytes;
        if (is_around && (found == NULL || block->nbytes <= found->nbytes)) {
            found = block;
        }
    }
    return found;
}

static bool
cuts(const struct ranges *ranges, uintptr_t start, size_t nbytes)
{
    for (size_t i = 0; i < ranges->n; i++) {
        uintptr_t other = (uintptr_t)ranges->blocks[i].ptr;
        size_t length = ranges->blocks[i].nbytes;
        bool is_apart = start + nbytes <= other || other + length <= start;
        bool is_inside = other <= start && start + nbytes <= other + length;
        if (!is_apart && !is_inside) {
            return true;
        }
    }
    return false;
}

static void
change(nrm_resource *mr, struct ranges *ranges, uint64_t *state)
{
    size_t nbytes = (size_t)64 << next_random(state) % 7;
    uintptr_t start = START + nbytes * (next_random(state) % (8192 / nbytes));
    if (ranges->n == N_RANGES || (ranges->n > 0 && next_random(state) % 3 == 0)) {
        size_t i = next_random(state) % ranges->n; /* an outer one, as may be */
        leave(&ranges->blocks[i]);
        ranges->n--;
        memmove(&ranges->blocks[i], &ranges->blocks[i + 1],
                (ranges->n - i) * sizeof ranges->blocks[0]);
    }
    else if (!cuts(ranges, start, nbytes)) {
        ranges->blocks[ranges->n++] = enter(mr, start, nbytes);
    }
}

TEST(random_ranges_that_go_in_any_order)
{
    nrm_resource *mr = new_callback();
    struct ranges ranges = {.n = 0};
    uint64_t state = 7;
    size_t most = 0;
    for (int step = 0; step < 5000; step++) {
        change(mr, &ranges, &state);
        most = ranges.n > most ? ranges.n : most;
        for (int i = 0; i < 8; i++) {
            uintptr_t address = START - 64 + next_random(&state) % 9000;
            const struct nrm__block *expected = naive(&ranges, address);
            const void *record = expected != NULL ? expected->record : NULL;
            REQUIRE(around(address) == record);
        }
    }
    CHECK(most > 20);
    while (ranges.n != 0) {
        leave(&ranges.blocks[--ranges.n]);
    }
    nrm_resource_release(mr);
}

CHECK_MAIN
