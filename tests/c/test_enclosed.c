/* Whether all that keeps a resource alive is known, and which resources are over
   which. */
#include "fixtures.h"

#include "core/enclosed.h"

/* A source that calls user code, held by one object, as Python's are. */
static struct counting counting;

static nrm_resource *
make_of_kind(nrm_kind kind)
{
    nrm_resource *mr = NULL;
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    options.allocate = counting_allocate;
    options.deallocate = counting_deallocate;
    options.context = &counting;
    options.kind = kind;
    options.calls_user_code = true;
    CHECK_OK(nrm_callback_create(&options, &mr));
    nrm__resource_add_object(mr);
    return mr;
}

static nrm_resource *
make_source(void)
{
    counting = (struct counting){0};
    return make_of_kind(NRM_KIND_HOST);
}

static nrm_resource *
held(nrm_status status, nrm_resource *mr)
{
    CHECK_EQ(status, NRM_OK);
    nrm__resource_add_object(mr);
    return mr;
}

static void
let_go(nrm_resource *mr)
{
    nrm__resource_remove_object(mr);
    nrm_resource_release(mr);
}

static nrm_resource *
over_pool(nrm_resource *source)
{
    nrm_resource *mr = NULL;
    nrm_status status = nrm_pool_create(source, NULL, &mr);
    return held(status, mr);
}

static nrm_resource *
over_fixed_size(nrm_resource *source)
{
    nrm_resource *mr = NULL;
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    options.block_nbytes = 1 << 16;
    nrm_status status = nrm_fixed_size_create(source, &options, &mr);
    return held(status, mr);
}

static nrm_resource *
over_arena(nrm_resource *source)
{
    nrm_resource *mr = NULL;
    nrm_arena_options options = NRM_OPTIONS(nrm_arena_options);
    options.nbytes = 1 << 20;
    nrm_status status = nrm_arena_create(source, &options, &mr);
    return held(status, mr);
}

static nrm_resource *
over_bins(nrm_resource *source)
{
    nrm_resource *mr = NULL;
    nrm_binning_options options = NRM_OPTIONS(nrm_binning_options);
    options.make_bins = true;
    options.min_exponent = 12;
    options.max_exponent = 16;
    nrm_status status = nrm_binning_create(source, &options, &mr);
    return held(status, mr);
}

static nrm_resource *
over_statistics(nrm_resource *source)
{
    nrm_resource *mr = NULL;
    nrm_status status = nrm_statistics_create(source, &mr);
    return held(status, mr);
}

static nrm_resource *
over_pool_of_pool(nrm_resource *source)
{
    nrm_resource *inner = over_pool(source);
    nrm_resource *mr = over_pool(inner);
    let_go(inner); /* as one whose object was never asked for */
    return mr;
}

static const struct {
    const char *name;
    nrm_resource *(*make)(nrm_resource *source);
} stacks[] = {
    {"a pool", over_pool},           {"a fixed size", over_fixed_size},
    {"an arena", over_arena},        {"bins", over_bins},
    {"statistics", over_statistics}, {"a pool of a pool", over_pool_of_pool},
};

static void *
take(nrm_resource *mr, size_t nbytes)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr));
    return ptr;
}

TEST_EACH(what_is_over_it_is_known, stacks)
{
    nrm_resource *source = make_source();
    nrm_resource *over = row->make(source);
    CHECK(nrm__resource_is_enclosed(&source));
    CHECK(!nrm__resource_is_alone(&source));
    CHECK(nrm__resource_is_under(source, over));
    CHECK(!nrm__resource_is_under(over, source));
    let_go(over);
    CHECK(nrm__resource_is_alone(&source));
    CHECK_EQ(atomic_load(&source->n_held), 0);
    let_go(source);
    CHECK_EQ(atomic_load(&counting.n_live), 0);
}

TEST_EACH(a_reference_of_somebody_else_is_not, stacks)
{
    nrm_resource *source = make_source();
    nrm_resource *over = row->make(source);
    nrm_resource *const both[] = {source, over};
    for (int i = 0; i < 2; i++) {
        nrm_resource_retain(both[i]);
        CHECK(!nrm__resource_is_enclosed(&source));
        nrm_resource_release(both[i]);
        CHECK(nrm__resource_is_enclosed(&source));
    }
    let_go(over);
    let_go(source);
}

TEST_EACH(a_block_is_known_while_an_object_has_it, stacks)
{
    static const size_t sizes[] = {100, 5000, 60000};
    nrm_resource *source = make_source();
    nrm_resource *over = row->make(source);
    nrm_resource *owners[3];
    void *ptrs[3];
    for (int i = 0; i < 3; i++) {
        ptrs[i] = take(over, sizes[i]);
        CHECK(!nrm__resource_is_enclosed(&source));
        owners[i] = nrm__block_add_object(ptrs[i]);
        CHECK(owners[i] != NULL);
        CHECK(nrm__resource_is_enclosed(&source));
    }
    for (int i = 0; i < 3; i++) {
        nrm__block_remove_object(owners[i]);
        CHECK(!nrm__resource_is_enclosed(&source));
        CHECK_OK(nrm_resource_deallocate(over, ptrs[i], 0, NULL));
        CHECK(nrm__resource_is_enclosed(&source));
    }
    let_go(over);
    CHECK(nrm__resource_is_alone(&source));
    let_go(source);
    CHECK_EQ(atomic_load(&counting.n_live), 0);
}

TEST(its_own_block)
{
    nrm_resource *source = make_source();
    void *ptr = take(source, 100);
    CHECK(!nrm__resource_is_enclosed(&source));
    nrm_resource *owner = nrm__block_add_object(ptr);
    CHECK(owner == source);
    CHECK(nrm__resource_is_enclosed(&source) && !nrm__resource_is_alone(&source));
    nrm__block_remove_object(owner);
    CHECK_OK(nrm_resource_deallocate(source, ptr, 0, NULL));
    let_go(source);
}

TEST(blocks_of_others_are_not_noted)
{
    nrm_resource *host = host_source();
    void *ptr = take(host, 100);
    CHECK(nrm__block_add_object(ptr) == NULL);
    CHECK(nrm__block_add_object(&host) == NULL);
    CHECK_OK(nrm_resource_deallocate(host, ptr, 0, NULL));
    nrm_resource_release(host);
}

TEST(what_a_thread_keeps_of_a_pool_is_nobodys)
{
    nrm_resource *source = make_source();
    nrm_resource *pool = over_pool(source);
    void *ptrs[20];
    for (size_t i = 0; i < 20; i++) {
        ptrs[i] = take(pool, 1000 * (i + 1));
    }
    for (size_t i = 0; i < 20; i++) {
        CHECK_OK(nrm_resource_deallocate(pool, ptrs[i], 0, NULL));
    }
    CHECK(nrm__resource_is_enclosed(&source));
    let_go(pool);
    CHECK(nrm__resource_is_alone(&source));
    let_go(source);
}

TEST(the_current_resource_is_held_by_somebody)
{
    nrm_resource *source = make_of_kind(NRM_KIND_DEVICE);
    CHECK(nrm__resource_is_enclosed(&source));
    CHECK_OK(nrm_set_per_device_resource(0, source));
    CHECK(!nrm__resource_is_enclosed(&source));
    CHECK_OK(nrm_set_per_device_resource(0, NULL));
    CHECK(nrm__resource_is_enclosed(&source));
    let_go(source);
}

TEST(so_is_what_has_a_name)
{
    nrm_resource *source = make_source();
    nrm_resource *pool = over_pool(source);
    CHECK_OK(nrm_registry_set("enclosed", pool));
    CHECK(!nrm__resource_is_enclosed(&source));
    CHECK_OK(nrm_registry_delete("enclosed"));
    CHECK(nrm__resource_is_enclosed(&source));
    let_go(pool);
    let_go(source);
}

TEST(a_resource_without_an_object_or_with_two)
{
    nrm_resource *source = make_source();
    nrm__resource_remove_object(source);
    CHECK(!nrm__resource_is_enclosed(&source));
    nrm__resource_add_object(source);
    nrm_resource *pool = over_pool(source);
    nrm_resource_retain(pool);
    nrm__resource_add_object(pool); /* whose upstream may be another object */
    CHECK(!nrm__resource_is_enclosed(&source));
    let_go(pool);
    CHECK(nrm__resource_is_enclosed(&source));
    let_go(pool);
    let_go(source);
}

TEST(a_bin_that_was_given)
{
    nrm_resource *source = make_source();
    nrm_resource *other = make_of_kind(NRM_KIND_HOST);
    nrm_resource *pool = over_pool(source);
    nrm_resource *bins = over_bins(other);
    CHECK(!nrm__resource_is_under(source, bins));
    CHECK_OK(nrm_binning_add_bin(bins, 1 << 20, pool));
    CHECK_OK(nrm_binning_add_bin(bins, 1 << 20, pool)); /* is there already */
    CHECK(nrm__resource_is_under(source, bins) && nrm__resource_is_under(other, bins));
    CHECK(nrm__resource_is_enclosed(&source) && nrm__resource_is_enclosed(&other));
    nrm_resource_retain(bins);
    CHECK(!nrm__resource_is_enclosed(&source) && !nrm__resource_is_enclosed(&other));
    nrm_resource_release(bins);
    let_go(bins);
    let_go(pool);
    CHECK(nrm__resource_is_alone(&source) && nrm__resource_is_alone(&other));
    let_go(other);
    let_go(source);
}

TEST(a_place_is_emptied_at_the_end)
{
    nrm_resource *place = make_source();
    nrm_resource *mr = nrm__resource_in(&place);
    CHECK(mr == place);
    nrm_resource_release(mr);
    let_go(mr);
    nrm__resource_forget(&place);
    CHECK(nrm__resource_in(&place) == NULL);
    CHECK(!nrm__resource_is_enclosed(&place) && !nrm__resource_is_alone(&place));
}

TEST(more_adaptors_than_are_looked_through)
{
    enum { N = 1001 };
    static nrm_resource *stack[N + 1];
    stack[0] = make_source();
    for (int i = 0; i < N; i++) {
        CHECK(i % 100 != 0 || nrm__resource_is_enclosed(&stack[0]));
        stack[i + 1] = over_statistics(stack[i]);
    }
    CHECK(!nrm__resource_is_enclosed(&stack[0]));
    let_go(stack[N]);
    CHECK(nrm__resource_is_enclosed(&stack[0]));
    for (int i = N - 1; i >= 0; i--) {
        let_go(stack[i]);
    }
}

CHECK_MAIN
