/*
 * HostMemoryResource: ordinary memory, straight from the kernel and never from malloc.
 *
 * Small requests get cells of slabs, whose chunks are cut from regions of 2 MiB. Every
 * other block is a mapping of its own, so that its address, its size and the advice
 * about its pages are its own too: big blocks start at a huge page and ask for huge
 * ones, they grow by moving pages instead of copying bytes, what they shrink by goes
 * back at once, and a fresh one is known to be zero without anybody writing to it.
 * Reuse of big blocks is the business of a pool on top.
 *
 * Memory is mapped with the kernel's accounting on, so a request that cannot be met
 * fails when it is made. Only huge_pages=ALWAYS touches what it returns; it looks first
 * how much can be touched, as a process that touches more than there is does not get an
 * error.
 */
#include <errno.h>
#include <stdint.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/given.h"
#include "base/units.h"
#include "core/ops.h"
#include "core/slab.h"
#include "nrm/options.h"
#include "nrm/sources.h"
#include "os/memory.h"
#include "os/numa.h"
#include "os/system.h"
#include "os/touch.h"
#include "sources/chunks.h"

/* The tag of a block that is a mapping. */
enum { TAG_PLAIN, TAG_HUGETLB };

static const char no_huge_pages[] = "the system makes no huge pages";
static const char not_present[] = "some of its pages could not be made present";

struct host {
    nrm_resource base;
    nrm_huge_pages huge_pages;
    size_t huge_threshold; /* blocks of so many bytes ask for huge pages */
    size_t alignment;      /* of every block, at least */
    int numa_node;         /* pages are bound to it; -1: not bound */
    int touch_threads;
    struct nrm__slabs slabs;
    struct nrm__chunks chunks;   /* for the slabs */
    atomic_size_t mapped_nbytes; /* of blocks that are mappings */
};

static struct host *
host_of(nrm_resource *mr)
{
    return (struct host *)mr;
}

/* ---- errors ---- */

/* What is free changes all the time: whole MiB say enough. */
static struct nrm__nbytes_text
available_text(void)
{
    return nrm__nbytes_text(nrm__align_down(nrm__touchable_nbytes(), NRM__MIB));
}

static nrm_status
map_error(size_t nbytes, int code)
{
    return nrm__error_errno(
        code == ENOMEM ? NRM_OUT_OF_MEMORY : NRM_OS_ERROR, code,
        "the system refused to map %s of host memory; %s are available",
        nrm__nbytes_text(nbytes).chars, available_text().chars);
}

static nrm_status
bind_error(size_t nbytes, int node, int code)
{
    return nrm__error_errno(
        NRM_OS_ERROR, code,
        "the system refused to bind %s of host memory to NUMA node %d",
        nrm__nbytes_text(nbytes).chars, node);
}

static nrm_status
touch_error(size_t nbytes, int code)
{
    return nrm__error_errno(code == ENOMEM ? NRM_OUT_OF_MEMORY : NRM_OS_ERROR, code,
                            "the pages of %s of host memory could not be made present; "
                            "%s are available",
                            nrm__nbytes_text(nbytes).chars, available_text().chars);
}

/* ---- mappings ---- */

static bool
wants_huge(const struct host *self, size_t nbytes)
{
    return nbytes >= self->huge_threshold;
}

static bool
is_touched(const struct host *self, size_t nbytes)
{
    return self->huge_pages == NRM_HUGE_PAGES_ALWAYS && wants_huge(self, nbytes);
}

/* The last huge page of a big block is worth an eighth of its size, no more. */
static size_t
mapping_nbytes(const struct host *self, size_t nbytes)
{
    size_t huge = nrm__align_up(nbytes, NRM__HUGE_PAGE);
    if (is_touched(self, nbytes) ||
        (wants_huge(self, nbytes) && huge - nbytes <= nbytes / 8)) {
        return huge;
    }
    return nrm__align_up(nbytes, nrm__page_size());
}

static size_t
mapping_alignment(const struct host *self, size_t nbytes, size_t alignment)
{
    size_t pages = wants_huge(self, nbytes) ? NRM__HUGE_PAGE : nrm__page_size();
    return nrm__max(pages, nrm__max(alignment, self->alignment));
}

/* Room to grow costs no memory until it is touched, and saves a system call for each of
   many small steps. */
static size_t
with_slack(const struct host *self, const struct nrm__request *request)
{
    bool may_grow = (request->flags & NRM__REQUEST_GROWING) != 0;
    if (!may_grow || is_touched(self, request->nbytes)) {
        return request->nbytes;
    }
    return request->nbytes + request->nbytes / 8;
}

static nrm_status
check_touchable(size_t nbytes)
{
    size_t available = nrm__touchable_nbytes();
    if (nbytes <= available) {
        return NRM_OK;
    }
    return nrm__error(
        NRM_OUT_OF_MEMORY,
        "%s of host memory were asked for with their pages present, but only "
        "%s can be touched before the process is killed",
        nrm__nbytes_text(nbytes).chars,
        nrm__nbytes_text(nrm__align_down(available, NRM__MIB)).chars);
}

/* Advice and binding: before the first page exists. */
static nrm_status
prepare_pages(const struct host *self, void *ptr, size_t nbytes, bool huge)
{
    if (huge || self->huge_pages == NRM_HUGE_PAGES_NEVER) {
        nrm__advise_huge_pages(ptr, nbytes, huge);
    }
    if (self->numa_node < 0) {
        return NRM_OK;
    }
    int code = nrm__numa_bind(ptr, nbytes, self->numa_node);
    return code == 0 ? NRM_OK : bind_error(nbytes, self->numa_node, code);
}

static nrm_status
map_plain(const struct host *self, size_t nbytes, size_t alignment, bool huge,
          bool touch, void **out)
{
    void *ptr;
    int code = nrm__map(nbytes, alignment, &ptr);
    if (code != 0) {
        return map_error(nbytes, code);
    }
    nrm_status status = prepare_pages(self, ptr, nbytes, huge);
    if (status == NRM_OK && touch) {
        code = nrm__touch(ptr, nbytes, self->touch_threads);
        status = code == 0 ? NRM_OK : touch_error(nbytes, code);
    }
    if (status != NRM_OK) {
        nrm__unmap(ptr, nbytes);
        return status;
    }
    *out = ptr;
    return NRM_OK;
}

/* Pages set aside for hugetlbfs; whatever goes wrong, ordinary ones are as good. */
static bool
map_hugetlb(const struct host *self, size_t nbytes, size_t alignment, void **out)
{
    void *ptr;
    if (alignment > NRM__HUGE_PAGE || nrm__map_hugetlb(nbytes, &ptr) != 0) {
        return false;
    }
    bool usable =
        (self->numa_node < 0 || nrm__numa_bind(ptr, nbytes, self->numa_node) == 0) &&
        nrm__populate(ptr, nbytes, self->touch_threads) == 0;
    if (!usable) {
        nrm__unmap(ptr, nbytes);
        return false;
    }
    *out = ptr;
    return true;
}

static nrm_status
map_block(struct host *self, const struct nrm__request *request, struct nrm__block *out)
{
    size_t nbytes = mapping_nbytes(self, with_slack(self, request));
    size_t alignment = mapping_alignment(self, request->nbytes, request->alignment);
    bool touch = is_touched(self, request->nbytes);
    bool huge = wants_huge(self, request->nbytes);
    if (touch && map_hugetlb(self, nbytes, alignment, &out->ptr)) {
        out->tag = TAG_HUGETLB;
    }
    else {
        if (touch) {
            NRM_TRY(check_touchable(nbytes));
        }
        NRM_TRY(map_plain(self, nbytes, alignment, huge, touch, &out->ptr));
        out->tag = TAG_PLAIN;
        if (touch && !nrm__has_transparent_huge_pages()) {
            out->reason = no_huge_pages;
        }
    }
    out->capacity = nbytes;
    out->flags = NRM__BLOCK_IS_ZERO | (touch ? NRM__BLOCK_IS_PRESENT : 0);
    atomic_fetch_add_explicit(&self->mapped_nbytes, nbytes, memory_order_relaxed);
    return NRM_OK;
}

static void
set_capacity(struct host *self, struct nrm__block *block, size_t nbytes)
{
    /* Unsigned arithmetic: a difference below zero subtracts. */
    atomic_fetch_add_explicit(&self->mapped_nbytes, nbytes - block->capacity,
                              memory_order_relaxed);
    block->capacity = nbytes;
}

/* ---- resizing a mapping ---- */

static nrm_status
shrink_mapping(struct host *self, struct nrm__block *block, size_t nbytes)
{
    nrm__unmap((char *)block->ptr + nbytes, block->capacity - nbytes);
    set_capacity(self, block, nbytes);
    return NRM_OK;
}

/* The block is in place whatever happens to the pages that it grew by. */
static void
prepare_growth(struct host *self, struct nrm__block *block, size_t old_nbytes,
               size_t asked_nbytes)
{
    char *grown = (char *)block->ptr + old_nbytes;
    if (wants_huge(self, asked_nbytes)) {
        nrm__advise_huge_pages(block->ptr, block->capacity, true);
    }
    if (is_touched(self, asked_nbytes) &&
        nrm__touch(grown, block->capacity - old_nbytes, self->touch_threads) != 0) {
        block->reason = not_present;
    }
}

static nrm_status
grow_mapping(struct host *self, struct nrm__block *block,
             const struct nrm__request *request)
{
    size_t old_nbytes = block->capacity;
    size_t nbytes = mapping_nbytes(self, with_slack(self, request));
    size_t alignment = mapping_alignment(self, request->nbytes, request->alignment);
    if (is_touched(self, request->nbytes)) {
        NRM_TRY(check_touchable(nbytes - old_nbytes));
    }
    int code = nrm__remap(block->ptr, old_nbytes, nbytes, alignment, &block->ptr);
    if (code == ENOMEM) {
        nbytes = mapping_nbytes(self, request->nbytes);
        code = nrm__remap(block->ptr, old_nbytes, nbytes, alignment, &block->ptr);
    }
    if (code == ENOMEM) {
        return map_error(nbytes, code);
    }
    if (code != 0) {
        return NRM_NOT_SUPPORTED; /* its pages are locked or split by somebody else */
    }
    set_capacity(self, block, nbytes);
    prepare_growth(self, block, old_nbytes, request->nbytes);
    return NRM_OK;
}

static nrm_status
resize_mapping(struct host *self, struct nrm__block *block,
               const struct nrm__request *request)
{
    bool is_hugetlb = block->tag == TAG_HUGETLB;
    size_t exact = is_hugetlb ? nrm__align_up(request->nbytes, NRM__HUGE_PAGE)
                              : mapping_nbytes(self, request->nbytes);
    if (exact > block->capacity) {
        return is_hugetlb ? NRM_NOT_SUPPORTED : grow_mapping(self, block, request);
    }
    if (exact == block->capacity || (request->flags & NRM__REQUEST_GROWING) != 0) {
        return NRM_OK;
    }
    return shrink_mapping(self, block, exact);
}

/* ---- small blocks ---- */

static nrm_status
map_region(nrm_resource *mr, void **out)
{
    struct host *self = host_of(mr);
    bool huge = self->huge_pages == NRM_HUGE_PAGES_ALWAYS;
    return map_plain(self, NRM__REGION_NBYTES, NRM__REGION_NBYTES, huge, false, out);
}

static nrm_status
get_chunk(nrm_resource *mr, struct nrm__block *out)
{
    return nrm__chunks_get(&host_of(mr)->chunks, out);
}

static void
put_chunk(nrm_resource *mr, const struct nrm__block *chunk)
{
    nrm__chunks_put(&host_of(mr)->chunks, chunk);
}

/* A cell serves while at least half of it is used; the smallest always does. */
static nrm_status
resize_cell(const struct nrm__block *block, size_t nbytes)
{
    bool fits = nbytes <= block->capacity;
    bool is_used = nbytes >= block->capacity / 2 ||
                   block->capacity == NRM__SLAB_ALIGNMENT;
    return fits && is_used ? NRM_OK : NRM_NOT_SUPPORTED;
}

/* ---- the ops ---- */

static nrm_status
host_allocate(nrm_resource *mr, const struct nrm__request *request,
              struct nrm__block *out)
{
    struct host *self = host_of(mr);
    size_t alignment = nrm__max(request->alignment, self->alignment);
    if (nrm__slabs_takes(request->nbytes, alignment)) {
        return nrm__slabs_allocate(&self->slabs, request->nbytes, out);
    }
    return map_block(self, request, out);
}

static void
host_deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    struct host *self = host_of(mr);
    if (block->segment != NULL) {
        nrm__slabs_deallocate(&self->slabs, block);
        return;
    }
    nrm__unmap(block->ptr, block->capacity);
    atomic_fetch_sub_explicit(&self->mapped_nbytes, block->capacity,
                              memory_order_relaxed);
}

static nrm_status
host_reallocate(nrm_resource *mr, struct nrm__block *block,
                const struct nrm__request *request)
{
    struct host *self = host_of(mr);
    size_t alignment = nrm__max(request->alignment, self->alignment);
    if (!nrm__is_aligned(block->ptr, alignment)) {
        return NRM_NOT_SUPPORTED;
    }
    if (block->segment != NULL) {
        return resize_cell(block, request->nbytes);
    }
    if (nrm__slabs_takes(request->nbytes, alignment)) {
        return NRM_NOT_SUPPORTED; /* the bytes are few: a cell does */
    }
    return resize_mapping(self, block, request);
}

static bool
host_find_block(nrm_resource *mr, struct nrm__segment *segment, const void *ptr,
                struct nrm__block *out)
{
    return nrm__slabs_find(segment, ptr, out);
}

static bool
host_claim_block(nrm_resource *mr, struct nrm__block *block)
{
    return nrm__slabs_claim(block);
}

static void
host_unclaim_block(nrm_resource *mr, const struct nrm__block *block)
{
    nrm__slabs_unclaim(block);
}

static void
host_statistics(nrm_resource *mr, nrm_statistics *out)
{
    struct host *self = host_of(mr);
    out->reserved_bytes += (int64_t)(atomic_load(&self->mapped_nbytes) +
                                     atomic_load(&self->chunks.reserved_nbytes));
}

static nrm_status
host_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    struct host *self = host_of(mr);
    size_t into_chunks = 0; /* stays with us: not counted */
    nrm__slabs_trim(&self->slabs, keep_nbytes, &into_chunks);
    nrm__chunks_trim(&self->chunks, keep_nbytes, out_nbytes);
    return NRM_OK;
}

static void
host_check(nrm_resource *mr)
{
    struct host *self = host_of(mr);
    nrm__slabs_check(&self->slabs);
    nrm__chunks_check(&self->chunks);
}

static void
host_fork_prepare(nrm_resource *mr)
{
    nrm__slabs_fork_prepare(&host_of(mr)->slabs);
    nrm__lock_fork_prepare(&host_of(mr)->chunks.lock);
}

static void
host_fork_parent(nrm_resource *mr)
{
    nrm__lock_fork_parent(&host_of(mr)->chunks.lock);
    nrm__slabs_fork_parent(&host_of(mr)->slabs);
}

static void
host_fork_child(nrm_resource *mr)
{
    nrm__lock_fork_child(&host_of(mr)->chunks.lock);
    nrm__slabs_fork_child(&host_of(mr)->slabs);
}

static void
host_finish(nrm_resource *mr)
{
    struct host *self = host_of(mr);
    nrm__slabs_finish(&self->slabs);
    nrm__chunks_finish(&self->chunks);
    NRM_ASSERT(atomic_load(&self->mapped_nbytes) == 0);
}

static const struct nrm__ops host_ops = {
    .class_name = "HostMemoryResource",
    .flags = NRM__OPS_MAPPED | NRM__OPS_PLAIN,
    .allocate = host_allocate,
    .deallocate = host_deallocate,
    .reallocate = host_reallocate,
    .find_block = host_find_block,
    .claim_block = host_claim_block,
    .unclaim_block = host_unclaim_block,
    .trim = host_trim,
    .statistics = host_statistics,
    .check = host_check,
    .fork_prepare = host_fork_prepare,
    .fork_parent = host_fork_parent,
    .fork_child = host_fork_child,
    .finish = host_finish,
};

/* ---- the constructor ---- */

static nrm_status
check_node(int node)
{
    size_t nbytes = nrm__page_size();
    void *page;
    if (!nrm__numa_has_node(node)) {
        return nrm__error(
            NRM_INVALID_VALUE,
            "there is no NUMA node %d with memory: this machine has %d node%s "
            "from 0 up",
            node, nrm__numa_n_nodes(), nrm__numa_n_nodes() == 1 ? "" : "s");
    }
    int code = nrm__map(nbytes, nbytes, &page);
    if (code != 0) {
        return map_error(nbytes, code);
    }
    code = nrm__numa_bind(page, nbytes, node);
    nrm__unmap(page, nbytes);
    return code == 0 ? NRM_OK : bind_error(nbytes, node, code);
}

static nrm_status
check_options(const nrm_host_options *options)
{
    if ((unsigned)options->huge_pages > NRM_HUGE_PAGES_ALWAYS) {
        return nrm__error(NRM_INVALID_VALUE, "%u is no choice for huge pages",
                          (unsigned)options->huge_pages);
    }
    if (options->alignment != 0) {
        NRM_TRY(nrm__alignment_check(options->alignment));
    }
    return options->bind_numa ? check_node(options->numa_node) : NRM_OK;
}

static size_t
huge_threshold(nrm_huge_pages huge_pages)
{
    size_t threshold = (size_t)nrm_option_get(NRM_OPT_HUGE_PAGE_THRESHOLD);
    if (huge_pages == NRM_HUGE_PAGES_ALWAYS) {
        return NRM__HUGE_PAGE;
    }
    if (huge_pages == NRM_HUGE_PAGES_NEVER || !nrm__has_transparent_huge_pages()) {
        return SIZE_MAX;
    }
    return nrm__max(threshold, NRM__HUGE_PAGE);
}

nrm_status
nrm_host_create(const nrm_host_options *options, nrm_resource **out)
{
    nrm_host_options given = {.size = sizeof given};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    NRM_TRY(check_options(&given));
    NRM_TRY(
        nrm__resource_create(&host_ops, NRM_KIND_HOST, NULL, sizeof(struct host), &mr));
    struct host *self = host_of(mr);
    self->huge_pages = given.huge_pages;
    self->huge_threshold = huge_threshold(given.huge_pages);
    self->alignment = nrm__max(given.alignment, nrm__kind_alignment(NRM_KIND_HOST));
    self->numa_node = given.bind_numa ? given.numa_node : -1;
    mr->flags |= given.bind_numa ? 0 : NRM__OPS_LOCAL;
    self->touch_threads = (int)nrm_option_get(NRM_OPT_TOUCH_THREADS);
    nrm__chunks_init(&self->chunks, mr, map_region);
    nrm_status status = nrm__slabs_init(&self->slabs, mr, get_chunk, put_chunk);
    if (status != NRM_OK) {
        nrm__chunks_finish(&self->chunks);
        nrm__resource_abandon(mr);
        return status;
    }
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
