/*
 * Tags of counted blocks: a tree of two levels over all addresses, as the page table of
 * the block map is one. Leaves come straight from the system as one untouched mapping,
 * so that a page of tags is memory only once a block near it is counted; nothing of the
 * tree ever goes away, and it is read and written without a lock.
 */
#include "core/scope_tags.h"

#include "os/memory.h"

_Atomic(struct nrm__tag_table *) nrm__tag_tables[NRM__TAG_TABLES];

/* Who comes second has made it for nothing. False: no memory. */
static bool
make_table(_Atomic(struct nrm__tag_table *) *at)
{
    void *memory;
    struct nrm__tag_table *none = NULL;
    if (atomic_load_explicit(at, memory_order_acquire) != NULL) {
        return true;
    }
    if (nrm__map(sizeof **at, nrm__page_size(), &memory) != 0) {
        return false;
    }
    if (!atomic_compare_exchange_strong(at, &none, (struct nrm__tag_table *)memory)) {
        nrm__unmap(memory, sizeof **at);
    }
    return true;
}

static bool
make_leaf(_Atomic(struct nrm__tag_leaf *) *at)
{
    void *memory;
    struct nrm__tag_leaf *none = NULL;
    if (atomic_load_explicit(at, memory_order_acquire) != NULL) {
        return true;
    }
    if (nrm__map(sizeof **at, nrm__page_size(), &memory) != 0) {
        return false;
    }
    if (!atomic_compare_exchange_strong(at, &none, (struct nrm__tag_leaf *)memory)) {
        nrm__unmap(memory, sizeof **at);
    }
    return true;
}

static bool
make_place(uintptr_t address)
{
    if (address >> NRM__TAG_ADDRESS_BITS != 0) {
        return false;
    }
    _Atomic(struct nrm__tag_table *) *table =
        &nrm__tag_tables[address >> NRM__TAG_TABLE_SHIFT];
    return make_table(table) &&
           make_leaf(&atomic_load(table)->leaves[address >> NRM__TAG_LEAF_SHIFT &
                                                 (NRM__TAG_TABLE_LEAVES - 1)]);
}

bool
nrm__scope_tag_set(const void *ptr, uint64_t tag)
{
    uintptr_t address = (uintptr_t)ptr;
    atomic_uint_least64_t *at = nrm__scope_tag_at(address);
    if (__builtin_expect(at == NULL, 0)) {
        if (!make_place(address)) {
            return false;
        }
        at = nrm__scope_tag_at(address);
    }
    atomic_store_explicit(at, tag, memory_order_relaxed);
    return true;
}
