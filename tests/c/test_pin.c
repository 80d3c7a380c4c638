/* Page-locking in place: to the byte, counted, and refused where it must be. */
#include "pins.h"

#include <fcntl.h>

/* What the last error says of a range. */
static void
check_names(const char *ptr, size_t nbytes)
{
    char text[64];
    snprintf(text, sizeof text, "%zu B at %p", nbytes, (const void *)ptr);
    CHECK_STR_HAS(nrm_last_error()->message, text);
}

/* ---- locking ---- */

static const struct {
    const char *name;
    size_t offset, nbytes;
} shapes[] = {
    {"one_byte", 100, 1},
    {"a_part_of_a_page", 100, 1000},
    {"across_pages", 4000, 5000},
    {"whole_pages", 0, 64 * KIB},
    {"pages_that_were_never_touched", 8 * KIB, 40 * MIB + 5},
};

TEST_EACH(a_pin_locks_exactly_its_bytes, shapes)
{
    char *memory = start(NULL, 48 * MIB), *ptr = memory + row->offset;
    nrm_pin *one = pin(ptr, row->nbytes);
    CHECK(is_page_locked(ptr));
    CHECK(is_page_locked(ptr + row->nbytes - 1));
    CHECK(!is_page_locked(ptr + row->nbytes));
    CHECK(row->offset == 0 || !is_page_locked(ptr - 1));
    CHECK(nrm__pins_cover(ptr, ptr + row->nbytes - 1));
    CHECK(!nrm__pins_cover(ptr, ptr + row->nbytes));
    CHECK_EQ(nrm__pins_nbytes(), row->nbytes);
    CHECK_EQ(nrm__page_locked_nbytes(), row->nbytes);
    nrm_pin_destroy(one);
    CHECK(!is_page_locked(ptr));
    CHECK_EQ(atomic_load(&n_dropped), 1);
    stop(memory, 48 * MIB);
}

TEST(no_byte_is_written)
{
    char *memory = start(NULL, MIB);
    memset(memory, 0x5a, MIB / 2);
    nrm_pin *one = pin(memory, MIB);
    for (size_t i = 0; i < MIB; i += 509) {
        REQUIRE_EQ(memory[i], i < MIB / 2 ? 0x5a : 0);
    }
    nrm_pin_destroy(one);
    stop(memory, MIB);
}

TEST(zero_bytes_are_kept_alive_and_nothing_is_initialised)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, 0);
    CHECK_EQ(sim.call_count("cuInit"), 0u);
    CHECK_EQ(atomic_load(&n_dropped), 0);
    nrm_pin_destroy(one);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    stop(memory, MIB);
}

TEST(addresses_that_cannot_be)
{
    nrm_pin *one = NULL;
    char *memory = start(NULL, MIB);
    CHECK_STATUS(try_pin(NULL, 5, false, &one), NRM_INVALID_VALUE);
    CHECK_STATUS(try_pin(memory, SIZE_MAX, false, &one), NRM_INVALID_VALUE);
    CHECK_EQ(munmap(memory + 512 * KIB, 4096), 0);
    CHECK_STATUS(try_pin(memory, MIB, false, &one), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "cannot be read");
    CHECK(one == NULL);
    CHECK_EQ(atomic_load(&n_dropped), 0);
    nrm_pin_destroy(NULL);
    stop(memory, MIB);
}

/* ---- counting ---- */

TEST(pins_of_the_same_bytes_are_counted)
{
    char *memory = start(NULL, MIB);
    nrm_pin *pins[4];
    for (int i = 0; i < 4; i++) {
        pins[i] = pin(memory, MIB);
    }
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 1u);
    CHECK_EQ(nrm__pins_nbytes(), MIB);
    for (int i = 0; i < 3; i++) {
        nrm_pin_destroy(pins[i]);
        CHECK_EQ(atomic_load(&n_dropped), i + 1);
        CHECK(is_page_locked(memory));
    }
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    nrm_pin_destroy(pins[3]);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 1u);
    CHECK_EQ(atomic_load(&n_dropped), 4);
    stop(memory, MIB);
}

/* The bytes between were promised by the large pin only, which goes first. */
TEST(what_keeps_the_whole_range_stays_as_long_as_a_part_is_pinned)
{
    atomic_int n_whole = 0;
    char *memory = start(NULL, MIB);
    nrm_pin_options options = NRM_OPTIONS(nrm_pin_options);
    nrm_pin *whole;
    options.keepalive = &n_whole;
    options.drop = count_drop;
    REQUIRE_OK(nrm_pin_create(memory, MIB, &options, &whole));
    nrm_pin *part = pin(memory + 100, 1000);
    nrm_pin_destroy(whole);
    CHECK_EQ(atomic_load(&n_whole), 0);
    CHECK(is_page_locked(memory));
    nrm_pin_destroy(part);
    CHECK_EQ(atomic_load(&n_whole), 1);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    stop(memory, MIB);
}

static const struct {
    const char *name;
    size_t offset, nbytes;
} overlaps[] = {
    {"before", 0, 200 * 1024},
    {"behind", 200 * 1024, 200 * 1024},
    {"around", 0, 1024 * 1024},
};

TEST_EACH(a_pin_across_the_end_of_another_names_both, overlaps)
{
    nrm_pin *other = NULL;
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory + 100 * KIB, 200 * KIB);
    CHECK_STATUS(try_pin(memory + row->offset, row->nbytes, false, &other),
                 NRM_INVALID_VALUE);
    check_names(memory + row->offset, row->nbytes);
    check_names(memory + 100 * KIB, 200 * KIB);
    CHECK(other == NULL);
    nrm_pin_destroy(one);
    stop(memory, MIB);
}

static const struct {
    const char *name;
    size_t offset, nbytes;
} theirs[] = {
    {"the_same_bytes", 0, 1024 * 1024},
    {"the_first", 0, 100},
    {"the_last", 1024 * 1024 - 100, 100},
    {"some_in_between", 500 * 1024, 8 * 1024},
};

TEST_EACH(what_others_have_registered_is_named, theirs)
{
    nrm_pin *one = NULL;
    char *memory = start(NULL, MIB), *other = memory + row->offset;
    struct nrm__cuda_scope scope;
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    CHECK_EQ(cuda.cuMemHostRegister(other, row->nbytes, 1), NRM_CUDA_SUCCESS);
    CHECK_STATUS(try_pin(memory, MIB, false, &one), NRM_INVALID_VALUE);
    CHECK_EQ(nrm_last_error()->native_code,
             NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    check_names(other, row->nbytes);
    check_names(memory, MIB);
    CHECK_STR_HAS(nrm_last_error()->message, "somebody else");
    CHECK_EQ(cuda.cuMemHostUnregister(other), NRM_CUDA_SUCCESS);
    nrm__cuda_leave(&scope);
    nrm_pin_destroy(pin(memory, MIB));
    stop(memory, MIB);
}

/* ---- memory of ours ---- */

TEST(a_block_that_is_page_locked_already_needs_nothing)
{
    char *memory = start(NULL, MIB), *block;
    nrm_resource *mr = NULL;
    REQUIRE_OK(nrm_pinned_create(NULL, &mr));
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, (void **)&block));
    nrm_pin *one = pin(block, MIB), *two = pin(block + 5, 1000);
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 1u);
    CHECK_EQ(nrm__pins_nbytes(), 0u);
    nrm_pin_destroy(one);
    nrm_pin_destroy(two);
    CHECK(is_page_locked(block));
    CHECK_EQ(atomic_load(&n_dropped), 2);
    CHECK_OK(nrm_resource_deallocate(mr, block, MIB, NULL));
    nrm_resource_release(mr);
    stop(memory, MIB);
}

TEST(managed_memory_is_refused)
{
    char *memory = start(NULL, MIB), *block;
    nrm_resource *mr = NULL;
    nrm_pin *one = NULL;
    REQUIRE_OK(nrm_managed_create(NULL, &mr));
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, (void **)&block));
    CHECK_STATUS(try_pin(block, MIB, false, &one), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "managed memory");
    CHECK_OK(nrm_resource_deallocate(mr, block, MIB, NULL));
    (void)nrm__retired_drain(UINT64_MAX);
    nrm_resource_release(mr);
    stop(memory, MIB);
}

/* ---- what the pages are ---- */

/* A file of 64 KiB. */
static int
make_file(void)
{
    char path[] = "test_pin_XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(ftruncate(fd, 64 * 1024), 0);
    return fd;
}

static int
make_memory_file(void)
{
    int fd = memfd_create("pin", 0);
    CHECK_EQ(ftruncate(fd, 64 * 1024), 0);
    return fd;
}

static const struct {
    const char *name;
    int (*make)(void);
    int rights, flags;
    nrm_status expected;
    const char *flags_text; /* that the driver is given */
} mappings[] = {
    {"anonymous", NULL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, NRM_OK,
     ", 0x1,"},
    {"anonymous_shared", NULL, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
     NRM_OK, ", 0x1,"},
    {"anonymous_read_only", NULL, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, NRM_OK,
     ", 0x9,"},
    {"no_rights", NULL, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, NRM_INVALID_VALUE, ""},
    {"shared_memory", make_memory_file, PROT_READ | PROT_WRITE, MAP_SHARED, NRM_OK,
     ", 0x1,"},
    {"shared_memory_read_only", make_memory_file, PROT_READ, MAP_SHARED, NRM_OK,
     ", 0x9,"},
    {"a_file", make_file, PROT_READ | PROT_WRITE, MAP_SHARED, NRM_INVALID_VALUE, ""},
    {"a_file_read_only", make_file, PROT_READ, MAP_SHARED, NRM_OK, ", 0x9,"},
    {"a_file_copied_on_write", make_file, PROT_READ | PROT_WRITE, MAP_PRIVATE, NRM_OK,
     ", 0x1,"},
};

/* Of the only registration. */
static bool
log_has(const char *call, const char *argument)
{
    char text[200];
    uint64_t cursor = 0;
    while (sim.log_read(&cursor, text, sizeof text) == 1) {
        if (strncmp(text, call, strlen(call)) == 0) {
            return strstr(text, argument) != NULL;
        }
    }
    return false;
}

TEST_EACH(a_mapping_is_locked_as_it_is_or_refused, mappings)
{
    nrm_pin *one = NULL;
    char *memory = start(NULL, MIB);
    int fd = row->make != NULL ? row->make() : -1;
    char *ptr = mmap(NULL, 64 * KIB, row->rights, row->flags, fd, 0);
    REQUIRE(ptr != MAP_FAILED);
    CHECK_STATUS(try_pin(ptr, 64 * KIB, false, &one), row->expected);
    if (one != NULL) {
        CHECK(log_has("cuMemHostRegister(", row->flags_text));
        nrm_pin *again = pin(ptr, 64 * KIB);
        nrm_pin_destroy(again);
    }
    else {
        CHECK_EQ(sim.call_count("cuMemHostRegister"), 0u);
    }
    nrm_pin_destroy(one);
    munmap(ptr, 64 * KIB);
    if (fd >= 0) {
        close(fd);
    }
    stop(memory, MIB);
}

TEST(a_writable_file_is_refused_with_the_way_out)
{
    nrm_pin *one = NULL;
    char *memory = start(NULL, MIB);
    int fd = make_file();
    char *ptr = mmap(NULL, 64 * KIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK_STATUS(try_pin(ptr, 64 * KIB, false, &one), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "test_pin_");
    CHECK_STR_HAS(nrm_last_error()->message, "mode \"r\" or \"c\"");
    munmap(ptr, 64 * KIB);
    close(fd);
    stop(memory, MIB);
}

static const struct {
    const char *name;
    int by_flag, as_it_is;
    nrm_status expected;
} readers[] = {
    {"by_the_flag", 1, 0, NRM_OK},
    {"not_at_all", 0, 0, NRM_NOT_SUPPORTED},
};

TEST_EACH(reading_only_depends_on_the_device, readers)
{
    nrm_pin *one = NULL;
    char *memory = start(NULL, MIB);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
                      row->by_flag);
    CHECK_STATUS(try_pin(memory, MIB, true, &one), row->expected);
    if (one == NULL) {
        CHECK_STR_HAS(nrm_last_error()->message, "READ_ONLY_HOST_REGISTER_SUPPORTED 0");
        CHECK_EQ(sim.call_count("cuMemHostRegister"), 0u);
    }
    else {
        nrm_pin *other = NULL, *reader = NULL;
        CHECK_STATUS(try_pin(memory, MIB, false, &other), NRM_INVALID_VALUE);
        CHECK_STR_HAS(nrm_last_error()->message, "for reading only");
        CHECK_OK(try_pin(memory, 100, true, &reader));
        nrm_pin_destroy(reader);
    }
    nrm_pin_destroy(one);
    stop(memory, MIB);
}

TEST(a_device_that_registers_nothing_says_so)
{
    nrm_pin *one = NULL;
    char *memory = start(NULL, MIB);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 0);
    CHECK_STATUS(try_pin(memory, MIB, false, &one), NRM_NOT_SUPPORTED);
    CHECK_STR_HAS(nrm_last_error()->message, "HOST_REGISTER_SUPPORTED 0");
    stop(memory, MIB);
}

TEST(what_the_system_allows_is_named_when_the_driver_refuses)
{
    nrm_pin *one = NULL;
    struct nrm_cudasim_config config = simulator_config();
    config.page_locked_nbytes = 3 * MIB;
    char *memory = start(&config, 4 * MIB);
    nrm_pin *first = pin(memory, 2 * MIB);
    CHECK_STATUS(try_pin(memory + 2 * MIB, 2 * MIB, false, &one), NRM_OUT_OF_MEMORY);
    const char *message = nrm_last_error()->message;
    CHECK_STR_HAS(message, "cuMemHostRegister of 2 MiB (2 MiB page-locked by us, "
                           "RLIMIT_MEMLOCK ");
    CHECK_STR_HAS(message, "CUDA_ERROR_OUT_OF_MEMORY");
    nrm_pin_destroy(first);
    stop(memory, 4 * MIB);
}

CHECK_MAIN
