/* Addresses that are handed out again while an older owner of them is still in the map:
   as after a reset of a context, where the driver gives to others what a pool holds on
   to. */
#include "core/block_map.h"
#include "fixtures.h"
#include "nrm/pools.h"
#include "nrm/sources.h"

/* Nothing of it is touched. */
#define START ((uintptr_t)1 << 46)
#define NBYTES (4 * NRM__MAP_PAGE)

static nrm_resource *
new_source(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_host_create(NULL, &mr));
    return mr;
}

static nrm_resource *
new_pool(nrm_resource *source)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_pool_create(source, NULL, &mr));
    return mr;
}

static struct nrm__segment *
add(nrm_resource *owner, uintptr_t start, size_t nbytes)
{
    struct nrm__segment *segment = NULL;
    CHECK_OK(nrm__segment_create(owner, (void *)start, nbytes, &segment));
    CHECK_OK(nrm__block_map_add_segment(segment));
    return segment;
}

static void
drop(struct nrm__segment *segment)
{
    nrm__block_map_remove_segment(segment);
    nrm__segment_destroy(segment);
}

static const struct range {
    const char *name;
    uintptr_t start;
    size_t nbytes;
} ranges[] = {
    {"all of it", START, NBYTES},
    {"a part of a page", START + NRM__MAP_PAGE + 256, 512},
    {"and what is before and behind", START - NRM__MAP_PAGE, 2 * NBYTES},
};

TEST_EACH(a_block_of_a_source_is_found_where_an_older_segment_is, ranges)
{
    nrm_resource *source = new_source(), *pool = new_pool(source);
    struct nrm__segment *old = add(pool, START, NBYTES);
    struct nrm__entry *entry = NULL;
    CHECK_OK(nrm__entry_create(&entry));
    struct nrm__block block = {.ptr = (void *)row->start,
                               .nbytes = row->nbytes,
                               .capacity = row->nbytes,
                               .owner = source};
    nrm__block_map_insert(entry, &block);
    struct nrm__block found;
    const char *last = (const char *)row->start + row->nbytes - 1;
    CHECK(nrm__block_map_find((void *)row->start, &found) && found.owner == source);
    nrm_resource_release(source);
    CHECK(nrm__block_map_find(last, &found) && found.owner == source);
    nrm_resource_release(source);
    drop(old);
    CHECK(nrm__block_map_find(last, &found) && found.ptr == block.ptr);
    nrm_resource_release(source);
    CHECK(nrm__block_map_claim(&found));
    CHECK(!nrm__block_map_find(last, &found));
    nrm__block_map_forget(&block);
    nrm_resource_release(pool);
    nrm_resource_release(source);
}

TEST(a_newer_segment_stays_when_an_older_one_goes)
{
    nrm_resource *source = new_source();
    nrm_resource *first = new_pool(source), *second = new_pool(source);
    struct nrm__segment *old = add(first, START, NBYTES);
    struct nrm__segment *recent = add(second, START + NRM__MAP_PAGE, 2 * NRM__MAP_PAGE);
    drop(old);
    CHECK(nrm__block_map_peek(START) == NULL);
    CHECK(nrm__block_map_peek(START + NRM__MAP_PAGE) == recent);
    CHECK(nrm__block_map_peek(START + 2 * NRM__MAP_PAGE) == recent);
    CHECK(nrm__block_map_peek(START + 3 * NRM__MAP_PAGE) == NULL);
    drop(recent);
    CHECK(nrm__block_map_peek(START + NRM__MAP_PAGE) == NULL);
    nrm_resource_release(second);
    nrm_resource_release(first);
    nrm_resource_release(source);
}

CHECK_MAIN
