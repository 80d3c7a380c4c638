/*
 * BinningMemoryResource: a request goes to the smallest bin that it fits in, else to
 * the upstream.
 *
 * It owns no blocks. On the way back the owner of a block decides, never its size: the
 * size that a caller names is a hint, and the bins may have changed meanwhile. The bins
 * stand in a sorted table that never changes: to add one, a longer copy is made and put
 * in its place at once, so that others allocate meanwhile without a lock. Old tables
 * are kept until the resource dies, as somebody may still read them; there are as many
 * as bins.
 */
#include <stdatomic.h>
#include <string.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/given.h"
#include "base/lock.h"
#include "core/enclosed.h"
#include "core/nodes.h"
#include "core/ops.h"
#include "nrm/pools.h"

#define MAX_BINS 200 /* a table is a node of at most 4 KiB */
#define MAX_EXPONENT 62u

struct table {
    struct table *older;
    size_t n_bins;
    struct nrm_bin bins[]; /* the smallest first; their resources are retained once */
};

/* That the resource of a bin is held: by its table, from the one on that it was added
   to. */
struct held {
    struct held *older;
    struct nrm__drawer drawer;
};

struct binning {
    nrm_resource base;
    _Atomic(struct table *) table; /* NULL: no bins */
    struct nrm__lock lock;         /* of those who add */
    _Atomic(struct held *) held;   /* one for each bin */
};

static const struct nrm__ops binning_ops;

static struct binning *
binning_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &binning_ops);
    return (struct binning *)mr;
}

static size_t
table_nbytes(size_t n_bins)
{
    return sizeof(struct table) + n_bins * sizeof(struct nrm_bin);
}

static const struct table *
table_of(nrm_resource *mr)
{
    static const struct table none;
    struct table *table =
        atomic_load_explicit(&binning_from(mr)->table, memory_order_acquire);
    return table != NULL ? table : &none;
}

/* The first bin for requests of `nbytes`; table->n_bins: none is large enough. */
static size_t
bin_for(const struct table *table, size_t nbytes)
{
    size_t low = 0, high = table->n_bins;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->bins[middle].nbytes < nbytes) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

/* ---- there and back ---- */

/* A bin may refuse an alignment that the upstream can give. */
static nrm_status
binning_allocate(nrm_resource *mr, const struct nrm__request *request,
                 struct nrm__block *out)
{
    const struct table *table = table_of(mr);
    size_t index = bin_for(table, request->nbytes);
    if (index < table->n_bins) {
        nrm_status status = nrm__allocate(table->bins[index].resource, request, out);
        if (status != NRM_NOT_SUPPORTED) {
            return status;
        }
    }
    return nrm__allocate(mr->upstream, request, out);
}

/* Bins come first: what they own lies in memory of the upstream, but is not its
   block. */
static nrm_resource *
binning_branch(nrm_resource *mr, const struct nrm__block *block)
{
    const struct table *table = table_of(mr);
    for (size_t i = 0; i < table->n_bins; i++) {
        if (nrm__leads_to(table->bins[i].resource, block)) {
            return table->bins[i].resource;
        }
    }
    return nrm__leads_to(mr->upstream, block) ? mr->upstream : NULL;
}

static void
binning_deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    nrm_resource *branch = binning_branch(mr, block);
    NRM_ASSERT(branch != NULL);
    nrm__deallocate(branch, block, stream);
}

/* A block stays where it is while at least half of it is used, or a new one would come
   from the same place; one that its branch cannot extend moves by a copy. */
static nrm_status
binning_reallocate(nrm_resource *mr, struct nrm__block *block,
                   const struct nrm__request *request)
{
    const struct table *table = table_of(mr);
    nrm_resource *branch = binning_branch(mr, block);
    size_t index = bin_for(table, request->nbytes);
    nrm_resource *next = index < table->n_bins ? table->bins[index].resource
                                               : mr->upstream;
    if (next != branch && request->nbytes < block->capacity / 2) {
        return NRM_NOT_SUPPORTED;
    }
    return nrm__reallocate_in_place(branch, block, request);
}

/* ---- trim, statistics, check ---- */

static nrm_status
binning_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    const struct table *table = table_of(mr);
    for (size_t i = 0; i < table->n_bins; i++) {
        size_t nbytes = 0;
        NRM_TRY(nrm_resource_trim(table->bins[i].resource, keep_nbytes, &nbytes));
        *out_nbytes += nbytes;
    }
    return NRM_OK;
}

static void
binning_statistics(nrm_resource *mr, nrm_statistics *out)
{
    const struct table *table = table_of(mr);
    for (size_t i = 0; i < table->n_bins; i++) {
        nrm_statistics bin;
        if (nrm_resource_statistics(table->bins[i].resource, &bin) == NRM_OK) {
            out->reserved_bytes += bin.reserved_bytes;
            out->parked_bytes += bin.parked_bytes;
            out->epochs += bin.epochs;
            out->waits += bin.waits;
        }
    }
}

static void
binning_check(nrm_resource *mr)
{
    const struct table *table = table_of(mr);
    for (size_t i = 0; i < table->n_bins; i++) {
        nrm_resource *bin = table->bins[i].resource;
        NRM_ASSERT(bin->kind == mr->kind);
        NRM_ASSERT(i == 0 || table->bins[i - 1].nbytes < table->bins[i].nbytes);
        NRM_ASSERT(table->older == NULL || table->older->n_bins + 1 == table->n_bins);
        if (bin->ops->check != NULL) {
            bin->ops->check(bin);
        }
    }
}

/* ---- life ---- */

static void
let_go(struct held *held)
{
    while (held != NULL) {
        struct held *older = held->older;
        nrm__drawer_remove(&held->drawer);
        nrm__node_deallocate(held, sizeof *held);
        held = older;
    }
}

static void
binning_finish(nrm_resource *mr)
{
    struct binning *binning = binning_from(mr);
    struct table *table = atomic_load(&binning->table);
    let_go(atomic_load(&binning->held));
    for (size_t i = 0; table != NULL && i < table->n_bins; i++) {
        nrm_resource_release(table->bins[i].resource);
    }
    while (table != NULL) {
        struct table *older = table->older;
        nrm__node_deallocate(table, table_nbytes(table->n_bins));
        table = older;
    }
    nrm__lock_finish(&binning->lock);
}

static const struct nrm__ops binning_ops = {
    .class_name = "BinningMemoryResource",
    .flags = NRM__OPS_ADAPTOR | NRM__OPS_OWN_SIZES,
    .allocate = binning_allocate,
    .deallocate = binning_deallocate,
    .reallocate = binning_reallocate,
    .branch = binning_branch,
    .trim = binning_trim,
    .statistics = binning_statistics,
    .check = binning_check,
    .lock_offset = offsetof(struct binning, lock),
    .finish = binning_finish,
};

/* ---- bins ---- */

/* Whether a request to `mr` can come to `target`. */
static bool
reaches(nrm_resource *mr, const nrm_resource *target)
{
    for (; mr != NULL; mr = mr->upstream) {
        if (mr == target) {
            return true;
        }
        if (mr->ops != &binning_ops) {
            continue;
        }
        const struct table *table = table_of(mr);
        for (size_t i = 0; i < table->n_bins; i++) {
            if (reaches(table->bins[i].resource, target)) {
                return true;
            }
        }
    }
    return false;
}

/* Managed memory beside that of a device: nobody may take it for memory of the host. */
static bool
is_mixed(const nrm_resource *mr, const nrm_resource *bin)
{
    return (mr->kind == NRM_KIND_MANAGED && bin->kind == NRM_KIND_DEVICE) ||
           (mr->kind == NRM_KIND_DEVICE && bin->kind == NRM_KIND_MANAGED);
}

/* Somebody besides the caller has a reference: a handler may stand on the resource. */
static bool
is_shared(nrm_resource *mr)
{
    return atomic_load_explicit(&mr->refcount, memory_order_acquire) != 1;
}

static nrm_status
check_bin(nrm_resource *mr, nrm_resource *bin)
{
    bool is_mix = is_mixed(mr, bin);
    if (bin->kind != mr->kind && !is_mix) {
        return nrm__error(NRM_INVALID_VALUE,
                          "a bin must have the memory of its resource: %s has %s "
                          "memory, not %s",
                          bin->ops->class_name, nrm_kind_name(bin->kind),
                          nrm_kind_name(mr->kind));
    }
    if (is_mix && mr->kind == NRM_KIND_MANAGED && is_shared(mr)) {
        return nrm__error(NRM_INVALID_VALUE,
                          "a bin of device memory makes the resource one of device "
                          "memory, and others use it as managed already: add it "
                          "first");
    }
    if (nrm_resource_calls_user_code(bin) && !nrm_resource_calls_user_code(mr)) {
        return nrm__error(NRM_INVALID_VALUE,
                          "a bin must not call user code where the upstream does not: "
                          "a handler may stand on the resource already");
    }
    if (reaches(bin, mr)) {
        return nrm__error(NRM_INVALID_VALUE,
                          "a bin must not lead back to the resource it is added to");
    }
    return NRM_OK;
}

/* Puts a copy of the table with one bin more in its place; retains the bin. Where
   there is a bin of this size nothing changes. */
static nrm_status
insert_locked(struct binning *binning, size_t nbytes, nrm_resource *bin,
              bool *out_inserted)
{
    struct table *old = atomic_load_explicit(&binning->table, memory_order_relaxed);
    const struct table *from = table_of(&binning->base);
    size_t index = bin_for(from, nbytes);
    if (index < from->n_bins && from->bins[index].nbytes == nbytes) {
        return NRM_OK;
    }
    if (from->n_bins == MAX_BINS) {
        return nrm__error(NRM_INVALID_VALUE, "a resource has %d bins at most",
                          MAX_BINS);
    }
    struct table *table = nrm__node_allocate(table_nbytes(from->n_bins + 1));
    if (table == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a bin");
    }
    size_t n_larger = from->n_bins - index;
    memcpy(table->bins, from->bins, index * sizeof *table->bins);
    memcpy(table->bins + index + 1, from->bins + index, n_larger * sizeof *table->bins);
    table->bins[index] = (struct nrm_bin){.nbytes = nbytes, .resource = bin};
    table->n_bins = from->n_bins + 1;
    table->older = old;
    nrm_resource_retain(bin);
    atomic_store_explicit(&binning->table, table, memory_order_release);
    *out_inserted = true;
    return NRM_OK;
}

static nrm_status
insert(struct binning *binning, size_t nbytes, nrm_resource *bin)
{
    bool inserted = false;
    struct held *held = nrm__node_allocate(sizeof *held);
    if (held == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a bin");
    }
    nrm__lock_acquire(&binning->lock);
    nrm_status status = insert_locked(binning, nbytes, bin, &inserted);
    if (status == NRM_OK && is_mixed(&binning->base, bin)) {
        binning->base.kind = NRM_KIND_DEVICE;
    }
    nrm__lock_release(&binning->lock);
    if (!inserted) {
        nrm__node_deallocate(held, sizeof *held);
        return status;
    }
    nrm__drawer_add(&held->drawer, &binning->base, bin);
    held->older = atomic_load(&binning->held);
    while (!atomic_compare_exchange_weak(&binning->held, &held->older, held)) {
    }
    return NRM_OK;
}

static bool
has_bin(nrm_resource *mr, size_t nbytes)
{
    const struct table *table = table_of(mr);
    size_t index = bin_for(table, nbytes);
    return index < table->n_bins && table->bins[index].nbytes == nbytes;
}

nrm_status
nrm_binning_add_bin(nrm_resource *mr, size_t nbytes, nrm_resource *resource)
{
    if (mr->ops != &binning_ops) {
        return nrm__error(NRM_INVALID_VALUE, "a %s has no bins", mr->ops->class_name);
    }
    if (nbytes == 0 || nbytes > SIZE_MAX / 2) {
        return nrm__error(NRM_INVALID_VALUE, "a bin cannot be for %zu B", nbytes);
    }
    struct binning *binning = binning_from(mr);
    nrm_resource *made = NULL;
    nbytes = nrm__align_up(nbytes, nrm__kind_alignment(mr->kind));
    if (resource != NULL) {
        NRM_TRY(check_bin(mr, resource));
    }
    else if (has_bin(mr, nbytes)) {
        return NRM_OK; /* before a chunk is taken for nothing */
    }
    else {
        nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
        options.block_nbytes = nbytes;
        NRM_TRY(nrm_fixed_size_create(mr->upstream, &options, &made));
        resource = made;
    }
    nrm_status status = insert(binning, nbytes, resource);
    nrm_resource_release(made);
    return status;
}

size_t
nrm_binning_get_bins(nrm_resource *mr, nrm_bin *out, size_t n)
{
    if (mr->ops != &binning_ops) {
        return 0;
    }
    const struct table *table = table_of(mr);
    if (n != 0) {
        memcpy(out, table->bins, nrm__min(n, table->n_bins) * sizeof *out);
    }
    return table->n_bins;
}

/* ---- construction ---- */

static nrm_status
make_bins(nrm_resource *mr, const nrm_binning_options *options)
{
    if (options->min_exponent > options->max_exponent ||
        options->max_exponent > MAX_EXPONENT) {
        return nrm__error(NRM_INVALID_VALUE,
                          "bins of 2^%u to 2^%u bytes: the first exponent must not be "
                          "larger than the second, nor that than %u",
                          options->min_exponent, options->max_exponent, MAX_EXPONENT);
    }
    for (unsigned i = options->min_exponent; i <= options->max_exponent; i++) {
        NRM_TRY(nrm_binning_add_bin(mr, (size_t)1 << i, NULL));
    }
    return NRM_OK;
}

nrm_status
nrm_binning_create(nrm_resource *upstream, const nrm_binning_options *options,
                   nrm_resource **out)
{
    nrm_binning_options given = {0};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    NRM_TRY(nrm__resource_create(&binning_ops, upstream->kind, upstream,
                                 sizeof(struct binning), &mr));
    mr->flags |= upstream->flags & NRM__OPS_PASSED_ON;
    nrm__lock_init(&binning_from(mr)->lock, NRM__RANK_POOL);
    nrm__resource_publish(mr);
    nrm_status status = given.make_bins ? make_bins(mr, &given) : NRM_OK;
    if (status != NRM_OK) {
        nrm_resource_release(mr);
        return status;
    }
    *out = mr;
    return NRM_OK;
}
