/* A resource against a naive model of it: a table of the blocks that live. A random
   walk from a seed allocates, resizes, gives back, looks addresses up, gives wrong ones
   back and trims; after every step the resource checks itself whole, and the two
   agree. */

#ifndef MODEL_H
#define MODEL_H

#include <string.h>

#include "base/bits.h"
#include "core/ops.h"
#include "fixtures.h"

#define MODEL_N_SLOTS 120

struct model_block {
    unsigned char *ptr; /* NULL: an empty slot */
    size_t nbytes;
    unsigned key; /* of its pattern */
};

struct model {
    nrm_resource *mr;
    size_t largest_nbytes; /* that is asked for */
    bool may_be_full;      /* NRM_OUT_OF_MEMORY is an answer */
    uint64_t state;        /* of the random numbers */
    unsigned n_full, n_refused, n_moved, n_resized;
    struct model_block blocks[MODEL_N_SLOTS];
};

static inline size_t
model__nbytes(struct model *model)
{
    uint64_t r = next_random(&model->state);
    size_t bound = model->largest_nbytes >> (r % 4 * 3);
    return 1 + (size_t)(r >> 8) % (bound != 0 ? bound : 1);
}

/* The block of the model around `address`, or NULL. */
static inline struct model_block *
model__find(struct model *model, const unsigned char *address)
{
    for (int i = 0; i < MODEL_N_SLOTS; i++) {
        struct model_block *block = &model->blocks[i];
        if (block->ptr != NULL && address >= block->ptr &&
            address < block->ptr + block->nbytes) {
            return block;
        }
    }
    return NULL;
}

static inline void
model__check_apart(struct model *model, const struct model_block *block)
{
    for (int i = 0; i < MODEL_N_SLOTS; i++) {
        const struct model_block *other = &model->blocks[i];
        CHECK(other == block || other->ptr == NULL ||
              other->ptr + other->nbytes <= block->ptr ||
              block->ptr + block->nbytes <= other->ptr);
    }
}

static inline void
model__allocate(struct model *model, struct model_block *block)
{
    static const size_t alignments[] = {0, 0, 0, 0, 64, 256, 4096};
    size_t alignment = alignments[next_random(&model->state) % 7];
    void *ptr = NULL;
    block->nbytes = model__nbytes(model);
    block->key = (unsigned)next_random(&model->state);
    nrm_status status =
        nrm_resource_allocate(model->mr, block->nbytes, alignment, NULL, &ptr);
    if (status == NRM_OUT_OF_MEMORY && model->may_be_full) {
        model->n_full++;
        return;
    }
    if (status == NRM_NOT_SUPPORTED && alignment > 64) {
        model->n_refused++;
        return;
    }
    CHECK_EQ(status, NRM_OK);
    CHECK_ALIGNED(ptr, alignment != 0 ? alignment : 64);
    block->ptr = ptr;
    model__check_apart(model, block);
    write_pattern(ptr, block->nbytes, block->key);
}

static inline void
model__resize(struct model *model, struct model_block *block)
{
    size_t nbytes = model__nbytes(model);
    void *ptr = block->ptr;
    nrm_status status =
        nrm_resource_reallocate(model->mr, block->ptr, nbytes, 0, NULL, &ptr);
    if (status == NRM_OUT_OF_MEMORY && model->may_be_full) {
        model->n_full++;
        CHECK(has_pattern(block->ptr, block->nbytes, block->key, block->nbytes));
        return;
    }
    CHECK_EQ(status, NRM_OK);
    CHECK(has_pattern(ptr, nrm__min(nbytes, block->nbytes), block->key, block->nbytes));
    model->n_moved += ptr != (void *)block->ptr;
    model->n_resized++;
    block->ptr = ptr;
    block->nbytes = nbytes;
    model__check_apart(model, block);
    write_pattern(ptr, nbytes, block->key);
}

static inline void
model__deallocate(struct model *model, struct model_block *block)
{
    CHECK(has_pattern(block->ptr, block->nbytes, block->key, block->nbytes));
    CHECK_OK(nrm_resource_deallocate(model->mr, block->ptr,
                                     (size_t)next_random(&model->state), NULL));
    CHECK_STATUS(nrm_resource_deallocate(model->mr, block->ptr, block->nbytes, NULL),
                 NRM_NOT_OWNED);
    block->ptr = NULL;
}

/* An address in the block, or a little beside it: the resource knows it as the
   model. */
static inline void
model__look_up(struct model *model, const struct model_block *block)
{
    size_t reach = block->nbytes + 512;
    unsigned char *at = block->ptr - 256 + next_random(&model->state) % reach;
    struct model_block *expected = model__find(model, at);
    nrm_block_info info = {0};
    nrm_status status = nrm_block_find(at, &info);
    if (expected != NULL) {
        REQUIRE(status == NRM_OK);
        CHECK(info.ptr == expected->ptr);
        CHECK_EQ(info.nbytes, expected->nbytes);
        CHECK_GE(info.capacity, expected->nbytes);
        if (at != expected->ptr) {
            CHECK_STATUS(nrm_resource_deallocate(model->mr, at, 0, NULL),
                         NRM_NOT_OWNED);
        }
    }
    nrm_resource_release(info.resource);
}

static inline void
model__check(struct model *model)
{
    nrm_statistics statistics;
    int64_t nbytes = 0, count = 0;
    for (int i = 0; i < MODEL_N_SLOTS; i++) {
        if (model->blocks[i].ptr != NULL) {
            nbytes += (int64_t)model->blocks[i].nbytes;
            count++;
        }
    }
    model->mr->ops->check(model->mr);
    CHECK_OK(nrm_resource_statistics(model->mr, &statistics));
    CHECK_EQ(statistics.current_bytes, nbytes);
    CHECK_EQ(statistics.current_count, count);
}

static inline void
model_walk(struct model *model, int n_steps)
{
    for (int step = 0; step < n_steps; step++) {
        struct model_block *block =
            &model->blocks[next_random(&model->state) % MODEL_N_SLOTS];
        unsigned choice = next_random(&model->state) % 100;
        if (choice == 0) {
            CHECK_OK(nrm_resource_trim(model->mr, 0, NULL));
        }
        else if (block->ptr == NULL) {
            model__allocate(model, block);
        }
        else if (choice < 20) {
            model__resize(model, block);
        }
        else if (choice < 40) {
            model__look_up(model, block);
        }
        else {
            model__deallocate(model, block);
        }
        model__check(model);
    }
    for (int i = 0; i < MODEL_N_SLOTS; i++) {
        if (model->blocks[i].ptr != NULL) {
            model__deallocate(model, &model->blocks[i]);
            model__check(model);
        }
    }
}

/* ---- threads that free each other's blocks ---- */

#define MODEL_N_SHARED 64

struct model_exchange {
    nrm_resource *mr;
    size_t largest_nbytes;
    int n_rounds;
    _Atomic(void *) blocks[MODEL_N_SHARED];
};

static inline void
model__exchange(unsigned index, void *arg)
{
    struct model_exchange *exchange = arg;
    uint64_t state = index + 1;
    for (int round = 0; round < exchange->n_rounds; round++) {
        size_t nbytes = 1 + next_random(&state) % exchange->largest_nbytes;
        unsigned char *mine = allocate(exchange->mr, nbytes);
        mine[0] = mine[nbytes - 1] = (unsigned char)index;
        nrm_block_info info = {0};
        if (nrm_block_find(mine + nbytes / 2, &info) == NRM_OK) {
            nrm_resource_release(info.resource);
        }
        CHECK_EQ(mine[0], index);
        void *theirs = atomic_exchange(
            &exchange->blocks[next_random(&state) % MODEL_N_SHARED], mine);
        CHECK_OK(nrm_resource_deallocate(exchange->mr, theirs, 0, NULL));
        if (round % 512 == 0) {
            CHECK_OK(nrm_resource_trim(exchange->mr, 0, NULL));
        }
    }
}

static inline void
model_exchange_blocks(nrm_resource *mr, size_t largest_nbytes, int n_rounds)
{
    static struct model_exchange exchange;
    exchange.mr = mr;
    exchange.largest_nbytes = largest_nbytes;
    exchange.n_rounds = n_rounds;
    check_threads(4, model__exchange, &exchange);
    for (int i = 0; i < MODEL_N_SHARED; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, atomic_exchange(&exchange.blocks[i], NULL),
                                         0, NULL));
    }
    mr->ops->check(mr);
    CHECK_EQ(live_nbytes(mr), 0);
}

/* ---- a source that fails at its N-th call ---- */

struct model_failing {
    struct counting counting;
    atomic_uint n_calls;
    unsigned fail_at; /* 0: never; counted from 1 */
    bool for_good;    /* from then on, else once */
};

static inline nrm_status
model__failing_allocate(void *context, size_t nbytes, size_t alignment,
                        nrm_stream *stream, void **out)
{
    struct model_failing *failing = context;
    unsigned n = atomic_fetch_add(&failing->n_calls, 1) + 1;
    if (failing->fail_at != 0 &&
        (n == failing->fail_at || (failing->for_good && n > failing->fail_at))) {
        return NRM_OUT_OF_MEMORY;
    }
    return counting_allocate(&failing->counting, nbytes, alignment, stream, out);
}

static inline nrm_status
model__failing_deallocate(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    struct model_failing *failing = context;
    return counting_deallocate(&failing->counting, ptr, nbytes, stream);
}

static inline nrm_resource *
model_failing_source(struct model_failing *failing)
{
    return callback_source(model__failing_allocate, model__failing_deallocate, failing);
}

#endif
