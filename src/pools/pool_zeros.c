/*
 * Zeros in large blocks of ordinary pages: how a used block becomes zero again.
 *
 * Writing zeros costs least where the program fills the block: the pages are there.
 * Where it does not, dropping the pages costs least, as the next ones are zero and come
 * one by one when they are touched. Nobody knows beforehand, so each power of two of
 * sizes remembers which it was the last two times, and in what that differed from the
 * time before: a program that always fills, never does, or does so in turn is foreseen
 * after one round.
 *
 * What happened shows when the block is freed: by which of its pages are present if
 * they were dropped, else by what stands in them. A block that nobody touched loses the
 * few pages that somebody may have touched all the same, and is known to be zero from
 * then on.
 */
#include <string.h>

#include "os/memory.h"
#include "pools/pool_internal.h"

#define LAZY_NBYTES (4 * NRM__MIB) /* from here on zeros are not written at once */
#define N_SAMPLES 8                /* places of a block that are looked at */
#define N_TOUCHED 2                /* so many of them were written to: it was filled */
#define SAMPLE_WORDS 8

/* ---- what is foreseen ---- */

/* A habit: whether the last blocks were filled, the last one in the lowest bit; and for
   each such past whether what follows differs from the last one. */
#define PAST_MASK 3u
#define DIFFERS_SHIFT 4

static atomic_uchar *
habit_of(struct nrm__pool *pool, size_t nbytes)
{
    return &pool->zero_habits[63u - (unsigned)__builtin_clzll(nbytes)];
}

static bool
will_be_filled(struct nrm__pool *pool, size_t nbytes)
{
    unsigned habit = atomic_load_explicit(habit_of(pool, nbytes), memory_order_relaxed);
    unsigned past = habit & PAST_MASK;
    return ((habit >> (DIFFERS_SHIFT + past) ^ past) & 1) != 0;
}

/* Two threads that do so at once lose one of the two: it is a guess all the same. */
static void
note_filled(struct nrm__pool *pool, size_t nbytes, bool is_filled)
{
    atomic_uchar *slot = habit_of(pool, nbytes);
    unsigned habit = atomic_load_explicit(slot, memory_order_relaxed);
    unsigned past = habit & PAST_MASK, bit = 1u << (DIFFERS_SHIFT + past);
    bool differs = is_filled != ((past & 1) != 0);
    habit = differs ? habit | bit : habit & ~bit;
    past = (past << 1 | is_filled) & PAST_MASK;
    habit = (habit & ~PAST_MASK) | past;
    atomic_store_explicit(slot, (unsigned char)habit, memory_order_relaxed);
}

/* ---- pages ---- */

/* Drops the whole pages of a claimed block and zeroes the rest: what lies in pages that
   it shares with its neighbours. Whether it reads as zero now. */
static bool
drop_pages(const struct nrm__pool_block *block)
{
    uintptr_t end = block->start + block->size;
    uintptr_t first = nrm__align_up(block->start, nrm__page_size());
    uintptr_t last = nrm__align_down(end, nrm__page_size());
    if ((block->live.segment->upstream.flags & NRM__BLOCK_IS_PRESENT) != 0 ||
        first >= last || nrm__discard((void *)first, last - first) != 0) {
        return false; /* they are to stay, or are locked by somebody else */
    }
    memset((void *)block->start, 0, first - block->start);
    memset((void *)last, 0, end - last);
    return true;
}

static bool
is_present(uintptr_t address)
{
    return nrm__is_resident((void *)nrm__align_down(address, nrm__page_size()));
}

static bool
is_written(uintptr_t address)
{
    const uint64_t *words = (const uint64_t *)address;
    uint64_t any = 0;
    for (size_t i = 0; i < SAMPLE_WORDS; i++) {
        any |= words[i];
    }
    return any != 0;
}

static bool
was_filled(const struct nrm__pool_block *block)
{
    bool (*is_touched)(uintptr_t) = block->is_written ? is_written : is_present;
    size_t step = nrm__align_down(block->size / N_SAMPLES, NRM__SLAB_ALIGNMENT);
    size_t n_touched = 0;
    for (size_t i = 0; i < N_SAMPLES && n_touched < N_TOUCHED; i++) {
        n_touched += is_touched(block->start + i * step);
    }
    return n_touched >= N_TOUCHED;
}

/* ---- the life of such a block ---- */

bool
nrm__pool_is_lazy_zero(const struct nrm__pool *pool, const struct nrm__request *request)
{
    return pool->is_plain && (request->flags & NRM__REQUEST_ZEROED) &&
           request->nbytes >= LAZY_NBYTES;
}

bool
nrm__pool_make_zero(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    bool is_zero = block->is_zero ||
                   (!will_be_filled(pool, block->size) && drop_pages(block));
    block->is_written = !is_zero;
    return is_zero;
}

bool
nrm__pool_learn_zero(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    bool is_filled = was_filled(block);
    note_filled(pool, block->size, is_filled);
    return !is_filled && !block->is_written && drop_pages(block);
}
