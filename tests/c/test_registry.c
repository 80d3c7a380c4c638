/* Names, their factories, and the current resource of each device. */
#include "core/ops.h"
#include "fixtures.h"

static void
start(void)
{
    REQUIRE_OK(nrm__builtin_init());
}

TEST(built_in_names_are_known_before_anything_is_made)
{
    start();
    static const char *const names[] = {
        "host",   "host_direct",   "huge_pages",     "pinned",       "managed",
        "device", "pinned_direct", "managed_direct", "device_direct"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        CHECK(nrm_registry_contains(names[i]));
        CHECK(nrm_registry_peek(names[i]) == NULL);
    }
    CHECK(nrm_registry_needs_cuda("pinned"));
    CHECK(!nrm_registry_needs_cuda("host"));
    CHECK(!nrm_registry_contains("hots"));
}

TEST(a_factory_runs_once_and_names_its_resource)
{
    nrm_resource *first = NULL, *second = NULL;
    char name[65];
    start();
    REQUIRE_OK(nrm_registry_get("host", &first));
    REQUIRE_OK(nrm_registry_get("host", &second));
    CHECK(first == second);
    nrm_resource_name(first, name, sizeof name);
    CHECK_STR_EQ(name, "host");
    CHECK_STR_EQ(nrm_resource_class_name(first), "PoolMemoryResource");
    nrm_resource_release(first);
    nrm_resource_release(second);
}

TEST(an_unknown_name_lists_the_known_ones)
{
    nrm_resource *mr = NULL;
    start();
    CHECK_STATUS(nrm_registry_get("hots", &mr), NRM_NOT_FOUND);
    CHECK_STR_HAS(nrm_last_error()->message, "'hots'");
    CHECK_STR_HAS(nrm_last_error()->message, "'host'");
    CHECK_STR_HAS(nrm_last_error()->message, "'pinned_direct'");
}

static const struct bad_name {
    const char *name;
    const char *value;
} bad_names[] = {
    {"empty", ""},
    {"a colon", "a:b"},
    {"a hash", "a#1"},
    {"a line feed", "a\nb"},
    {"not ASCII", "\xc3\xa4"},
    {"65 characters",
     "01234567890123456789012345678901234567890123456789012345678901234"},
};

TEST_EACH(a_bad_name_is_refused, bad_names)
{
    nrm_resource *mr = host_source();
    CHECK_STATUS(nrm_registry_set(row->value, mr), NRM_INVALID_VALUE);
    nrm_resource_release(mr);
}

TEST(binding_replaces_and_deleting_restores)
{
    nrm_resource *original = NULL, *mine = host_source(), *found = NULL;
    start();
    REQUIRE_OK(nrm_registry_get("host", &original));
    REQUIRE_OK(nrm_registry_set("host", mine));
    REQUIRE_OK(nrm_registry_get("host", &found));
    CHECK(found == mine);
    nrm_resource_release(found);
    REQUIRE_OK(nrm_registry_delete("host"));
    REQUIRE_OK(nrm_registry_get("host", &found));
    CHECK(found != mine);
    nrm_resource_release(found);
    nrm_resource_release(original);
    nrm_resource_release(mine);
}

TEST(a_users_name_can_be_bound_and_deleted)
{
    nrm_resource *mine = host_source(), *found = NULL;
    char name[65];
    start();
    REQUIRE_OK(nrm_registry_set("staging", mine));
    nrm_resource_name(mine, name, sizeof name);
    CHECK_STR_EQ(name, "staging");
    REQUIRE_OK(nrm_registry_get("staging", &found));
    CHECK(found == mine);
    nrm_resource_release(found);
    REQUIRE_OK(nrm_registry_delete("staging"));
    CHECK(!nrm_registry_contains("staging"));
    CHECK_STATUS(nrm_registry_delete("staging"), NRM_NOT_FOUND);
    nrm_resource_release(mine);
}

TEST(iteration_gives_every_known_name_once)
{
    char name[65];
    size_t n = 0;
    start();
    while (nrm_registry_name(n, name, sizeof name) == NRM_OK) {
        CHECK(nrm_registry_contains(name));
        n++;
    }
    CHECK_EQ(n, 10);
}

TEST(host_memory_is_refused_as_a_devices_resource)
{
    nrm_resource *mr = host_source();
    CHECK_STATUS(nrm_set_per_device_resource(0, mr), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_set_per_device_resource(-1, NULL), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_set_per_device_resource(64, NULL), NRM_INVALID_VALUE);
    CHECK_OK(nrm_set_per_device_resource(0, NULL));
    nrm_resource_release(mr);
}

static void *
bind_and_get(void *unused)
{
    (void)unused;
    for (int i = 0; i < 300; i++) {
        nrm_resource *mine = host_source(), *found = NULL;
        CHECK_OK(nrm_registry_set("contended", mine));
        if (nrm_registry_get("contended", &found) == NRM_OK) {
            CHECK_OK(nrm_resource_deallocate(found, allocate(found, 100), 0, NULL));
            nrm_resource_release(found);
        }
        nrm_resource_release(mine);
    }
    return NULL;
}

TEST(threads_may_bind_and_look_up_one_name)
{
    pthread_t threads[4];
    start();
    for (int i = 0; i < 4; i++) {
        pthread_create(&threads[i], NULL, bind_and_get, NULL);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_OK(nrm_registry_delete("contended"));
}

CHECK_MAIN
