/* A resource that has slabs and nothing else; each chunk is a mapping of its own,
   counted, and may be refused. */
#ifndef NRM_TESTS_SLAB_OWNER_H
#define NRM_TESTS_SLAB_OWNER_H

#include <string.h>

#include "check.h"

#include "base/error.h"
#include "core/cache.h"
#include "core/slab.h"
#include "os/memory.h"

struct owner {
    nrm_resource base;
    struct nrm__slabs slabs;
    atomic_size_t n_chunks;
    atomic_size_t n_refused;
    atomic_bool refuses;
};

static inline struct owner *
owner_of(nrm_resource *mr)
{
    return (struct owner *)mr;
}

static inline nrm_status
get_chunk(nrm_resource *mr, struct nrm__block *out)
{
    struct owner *owner = owner_of(mr);
    if (atomic_load(&owner->refuses)) {
        atomic_fetch_add(&owner->n_refused, 1);
        return nrm__error(NRM_OUT_OF_MEMORY, "no chunk today");
    }
    nrm__assert_no_locks();
    CHECK_EQ(nrm__map(NRM__SLAB_CHUNK, NRM__SLAB_CHUNK, &out->ptr), 0);
    out->capacity = out->nbytes = NRM__SLAB_CHUNK;
    out->flags = NRM__BLOCK_IS_ZERO;
    atomic_fetch_add(&owner->n_chunks, 1);
    return NRM_OK;
}

static inline void
put_chunk(nrm_resource *mr, const struct nrm__block *chunk)
{
    nrm__assert_no_locks();
    nrm__unmap(chunk->ptr, NRM__SLAB_CHUNK);
    atomic_fetch_sub(&owner_of(mr)->n_chunks, 1);
}

static inline nrm_status
owner_allocate(nrm_resource *mr, const struct nrm__request *request,
               struct nrm__block *out)
{
    return nrm__slabs_allocate(&owner_of(mr)->slabs, request->nbytes, out);
}

static inline void
owner_deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    (void)stream;
    nrm__slabs_deallocate(&owner_of(mr)->slabs, block);
}

static inline bool
owner_find(nrm_resource *mr, struct nrm__segment *segment, const void *ptr,
           struct nrm__block *out)
{
    (void)mr;
    CHECK(nrm__segment_is_slab(segment));
    return nrm__slabs_find(segment, ptr, out);
}

static inline bool
owner_claim(nrm_resource *mr, struct nrm__block *block)
{
    (void)mr;
    return nrm__slabs_claim(block);
}

static inline void
owner_unclaim(nrm_resource *mr, const struct nrm__block *block)
{
    (void)mr;
    nrm__slabs_unclaim(block);
}

static inline void
owner_fork_prepare(nrm_resource *mr)
{
    nrm__slabs_fork_prepare(&owner_of(mr)->slabs);
}

static inline void
owner_fork_parent(nrm_resource *mr)
{
    nrm__slabs_fork_parent(&owner_of(mr)->slabs);
}

static inline void
owner_fork_child(nrm_resource *mr)
{
    nrm__slabs_fork_child(&owner_of(mr)->slabs);
}

static inline void
owner_finish(nrm_resource *mr)
{
    nrm__slabs_finish(&owner_of(mr)->slabs);
    CHECK_EQ(atomic_load(&owner_of(mr)->n_chunks), 0u);
}

static const struct nrm__ops owner_ops = {
    .class_name = "SlabsOnly",
    .flags = NRM__OPS_MAPPED,
    .allocate = owner_allocate,
    .deallocate = owner_deallocate,
    .find_block = owner_find,
    .claim_block = owner_claim,
    .unclaim_block = owner_unclaim,
    .fork_prepare = owner_fork_prepare,
    .fork_parent = owner_fork_parent,
    .fork_child = owner_fork_child,
    .finish = owner_finish,
};

static inline struct owner *
create_owner(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm__resource_create(&owner_ops, NRM_KIND_HOST, NULL, sizeof(struct owner),
                                  &mr));
    CHECK_OK(nrm__slabs_init(&owner_of(mr)->slabs, mr, get_chunk, put_chunk));
    nrm__resource_publish(mr);
    return owner_of(mr);
}

static inline void *
allocate(struct owner *owner, size_t nbytes, struct nrm__block *out)
{
    *out = (struct nrm__block){0};
    CHECK_OK(
        nrm__allocate(&owner->base, &(struct nrm__request){nbytes, 64, NULL, 0}, out));
    return out->ptr;
}

/* Finds, claims and gives back, as the dispatcher does. */
static inline bool
release(struct owner *owner, void *ptr)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return false;
    }
    nrm_resource *found_owner = block.owner;
    bool claimed = block.ptr == ptr && nrm__block_map_claim(&block);
    if (claimed) {
        nrm__deallocate(&owner->base, &block, NULL);
    }
    nrm_resource_release(found_owner);
    return claimed;
}

/* The size that a look-up gives for an address; 0: it is in no live block. */
static inline size_t
found_nbytes(const void *ptr, const void *start)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return 0;
    }
    CHECK_EQ(block.ptr, start);
    nrm_resource_release(block.owner);
    return block.nbytes;
}

/* ---- random walks: a block full of one byte, and what it was asked for ---- */

struct slot {
    unsigned char *ptr;
    size_t nbytes;
};

static inline size_t
random_nbytes(uint64_t *seed)
{
    return 1 + check_random(seed) % ((size_t)1 << (6 + check_random(seed) % 8));
}

static inline void
fill_slot(struct owner *owner, struct slot *slot, size_t nbytes, unsigned char key)
{
    struct nrm__block block;
    slot->ptr = allocate(owner, nbytes, &block);
    slot->nbytes = nbytes;
    if (block.flags & NRM__BLOCK_IS_ZERO) {
        CHECK_EQ(slot->ptr[0], 0);
        CHECK_EQ(slot->ptr[nbytes - 1], 0);
    }
    memset(slot->ptr, key, nbytes);
}

static inline void
empty_slot(struct owner *owner, struct slot *slot, unsigned char key)
{
    CHECK_EQ(slot->ptr[0], key);
    CHECK_EQ(slot->ptr[slot->nbytes / 2], key);
    CHECK_EQ(slot->ptr[slot->nbytes - 1], key);
    CHECK_EQ(found_nbytes(slot->ptr + slot->nbytes - 1, slot->ptr), slot->nbytes);
    CHECK(release(owner, slot->ptr));
    slot->ptr = NULL;
}

#endif
