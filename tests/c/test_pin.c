/* Page-locking in place: to the byte, counted, refused where it must be, and let go of when
   the work that may use the memory is done. */
#include "simulator.h"

#include <fcntl.h>
#include <sys/mman.h>

#include "core/hooks.h"
#include "core/pin.h"
#include "cuda/context.h"
#include "cuda/page_lock.h"
#include "nrm/sources.h"
#include "nrm/stream.h"

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)

static atomic_int n_dropped;

static void
count_drop(void *keepalive)
{
    atomic_fetch_add((atomic_int *)keepalive, 1);
}

static nrm_status
try_pin(void *ptr, size_t nbytes, bool read_only, nrm_pin **out)
{
    nrm_pin_options options = NRM_OPTIONS(nrm_pin_options);
    options.read_only = read_only;
    options.keepalive = &n_dropped;
    options.drop = count_drop;
    return nrm_pin_create(ptr, nbytes, &options, out);
}

static nrm_pin *
pin(void *ptr, size_t nbytes)
{
    nrm_pin *out = NULL;
    CHECK_OK(try_pin(ptr, nbytes, false, &out));
    return out;
}

static char *
map(size_t nbytes)
{
    char *ptr =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(ptr != MAP_FAILED);
    return ptr;
}

static char *
start(const struct nrm_cudasim_config *config, size_t nbytes)
{
    simulator_start(config);
    atomic_store(&n_dropped, 0);
    return map(nbytes);
}

/* Nothing is left: not with the driver, not in the counts. */
static void
stop(char *memory, size_t nbytes)
{
    for (int i = 0; i < 200 && nrm__pins_nbytes() != 0; i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000); /* the background thread may hold the last one */
    }
    CHECK_EQ(nrm__pins_nbytes(), 0u);
    CHECK_EQ(nrm__page_locked_nbytes(), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 0u);
    CHECK(!nrm__pins_cover(memory, memory + nbytes - 1));
    CHECK_EQ(munmap(memory, nbytes), 0);
    simulator_check_faults();
}

static bool
is_locked(const void *ptr)
{
    nrm_CUmemorytype type = 0;
    nrm_CUresult code = cuda.cuPointerGetAttribute(
        &type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (nrm_CUdeviceptr)(uintptr_t)ptr);
    return code == NRM_CUDA_SUCCESS && type == NRM_CU_MEMORYTYPE_HOST;
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
    CHECK(is_locked(ptr));
    CHECK(is_locked(ptr + row->nbytes - 1));
    CHECK(!is_locked(ptr + row->nbytes));
    CHECK(row->offset == 0 || !is_locked(ptr - 1));
    CHECK(nrm__pins_cover(ptr, ptr + row->nbytes - 1));
    CHECK(!nrm__pins_cover(ptr, ptr + row->nbytes));
    CHECK_EQ(nrm__pins_nbytes(), row->nbytes);
    CHECK_EQ(nrm__page_locked_nbytes(), row->nbytes);
    nrm_pin_destroy(one);
    CHECK(!is_locked(ptr));
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
    CHECK(strstr(nrm_last_error()->message, "cannot be read") != NULL);
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
        CHECK(is_locked(memory));
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
    CHECK(is_locked(memory));
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
    char text[64];
    nrm_pin *other = NULL;
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory + 100 * KIB, 200 * KIB);
    CHECK_STATUS(try_pin(memory + row->offset, row->nbytes, false, &other),
                 NRM_INVALID_VALUE);
    snprintf(text, sizeof text, "%zu B at %p", row->nbytes,
             (void *)(memory + row->offset));
    CHECK(strstr(nrm_last_error()->message, text) != NULL);
    snprintf(text, sizeof text, "%zu B at %p", 200 * KIB, (void *)(memory + 100 * KIB));
    CHECK(strstr(nrm_last_error()->message, text) != NULL);
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
    char text[64];
    nrm_pin *one = NULL;
    char *memory = start(NULL, MIB), *other = memory + row->offset;
    struct nrm__cuda_scope scope;
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    CHECK_EQ(cuda.cuMemHostRegister(other, row->nbytes, 1), NRM_CUDA_SUCCESS);
    CHECK_STATUS(try_pin(memory, MIB, false, &one), NRM_INVALID_VALUE);
    CHECK_EQ(nrm_last_error()->native_code,
             NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    snprintf(text, sizeof text, "%zu B at %p", row->nbytes, (void *)other);
    CHECK(strstr(nrm_last_error()->message, text) != NULL);
    snprintf(text, sizeof text, "%zu B at %p", MIB, (void *)memory);
    CHECK(strstr(nrm_last_error()->message, text) != NULL);
    CHECK(strstr(nrm_last_error()->message, "somebody else") != NULL);
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
    CHECK(is_locked(block));
    CHECK_EQ(atomic_load(&n_dropped), 2);
    CHECK_OK(nrm_resource_deallocate(mr, block, MIB, NULL));
    nrm_resource_release(mr);
    for (int i = 0; i < 200 && nrm__page_locked_nbytes() != 0; i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000);
    }
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
    CHECK(strstr(nrm_last_error()->message, "managed memory") != NULL);
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
    CHECK(strstr(nrm_last_error()->message, "test_pin_") != NULL);
    CHECK(strstr(nrm_last_error()->message, "mode \"r\" or \"c\"") != NULL);
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
        CHECK(strstr(nrm_last_error()->message,
                     "READ_ONLY_HOST_REGISTER_SUPPORTED 0") != NULL);
        CHECK_EQ(sim.call_count("cuMemHostRegister"), 0u);
    }
    else {
        nrm_pin *other = NULL, *reader = NULL;
        CHECK_STATUS(try_pin(memory, MIB, false, &other), NRM_INVALID_VALUE);
        CHECK(strstr(nrm_last_error()->message, "for reading only") != NULL);
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
    CHECK(strstr(nrm_last_error()->message, "HOST_REGISTER_SUPPORTED 0") != NULL);
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
    CHECK(strstr(message, "cuMemHostRegister of 2 MiB (2 MiB page-locked by us, "
                          "RLIMIT_MEMLOCK ") != NULL);
    CHECK(strstr(message, "CUDA_ERROR_OUT_OF_MEMORY") != NULL);
    nrm_pin_destroy(first);
    stop(memory, 4 * MIB);
}

/* ---- letting go ---- */

static void *
destroy_in_thread(void *argument)
{
    nrm_pin_destroy(argument);
    return NULL;
}

/* A copy from the memory that is queued behind a stream that stands still. */
struct copy {
    nrm_CUstream stream;
    nrm_CUdeviceptr target;
};

static struct copy
queue_copy(const char *memory, size_t nbytes)
{
    struct copy copy = {0};
    CHECK_EQ(cuda.cuMemAlloc(&copy.target, nbytes), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamCreate(&copy.stream, NRM_CU_STREAM_NON_BLOCKING),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.hold_stream(copy.stream), 0);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(copy.target, memory, nbytes, copy.stream),
             NRM_CUDA_SUCCESS);
    return copy;
}

static void
end_copy(struct copy copy)
{
    CHECK_EQ(sim.release_stream(copy.stream), 0);
    CHECK_EQ(cuda.cuStreamSynchronize(copy.stream), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamDestroy(copy.stream), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(copy.target), NRM_CUDA_SUCCESS);
}

TEST(the_last_pin_waits_for_work_of_others_and_blocks_nobody)
{
    char *memory = start(NULL, MIB);
    struct nrm__cuda_scope scope;
    pthread_t thread;
    nrm_pin *one = pin(memory, MIB);
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    struct copy copy = queue_copy(memory, MIB);
    pthread_create(&thread, NULL, destroy_in_thread, one);
    usleep(30000);
    CHECK_EQ(atomic_load(&n_dropped), 0);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    /* The driver is free meanwhile. */
    char *more = map(MIB);
    nrm_pin_destroy(NULL);
    nrm_CUdeviceptr other;
    CHECK_EQ(cuda.cuMemAlloc(&other, 100), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.release_stream(copy.stream), 0);
    pthread_join(thread, NULL);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    CHECK(!is_locked(memory));
    CHECK_EQ(cuda.cuMemFree(other), NRM_CUDA_SUCCESS);
    end_copy(copy);
    nrm__cuda_leave(&scope);
    CHECK_EQ(munmap(more, MIB), 0);
    stop(memory, MIB);
}

TEST(memory_that_waits_to_be_unlocked_can_be_pinned_again)
{
    char *memory = start(NULL, MIB);
    struct nrm__cuda_scope scope;
    pthread_t thread;
    nrm_pin *one = pin(memory, MIB);
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    struct copy copy = queue_copy(memory, MIB);
    pthread_create(&thread, NULL, destroy_in_thread, one);
    usleep(20000);
    nrm_pin *two = pin(memory, MIB);
    CHECK_EQ(sim.release_stream(copy.stream), 0);
    pthread_join(thread, NULL);
    CHECK(is_locked(memory));
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 1u);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    end_copy(copy);
    nrm_pin_destroy(two);
    CHECK(!is_locked(memory));
    CHECK_EQ(atomic_load(&n_dropped), 2);
    nrm__cuda_leave(&scope);
    stop(memory, MIB);
}

/* The events of the first one do not cover what was submitted while it was pinned again. */
TEST(who_closed_first_does_not_unlock_for_who_closed_last)
{
    char *memory = start(NULL, MIB);
    struct nrm__cuda_scope scope;
    pthread_t first, last;
    nrm_pin *one = pin(memory, MIB);
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    struct copy copy = queue_copy(memory, MIB);
    pthread_create(&first, NULL, destroy_in_thread, one);
    usleep(20000);
    nrm_pin *two = pin(memory, MIB);
    struct copy other = queue_copy(memory, MIB);
    pthread_create(&last, NULL, destroy_in_thread, two);
    usleep(20000);
    CHECK_EQ(sim.release_stream(copy.stream), 0);
    pthread_join(first, NULL);
    usleep(20000);
    CHECK(is_locked(memory));
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    end_copy(other);
    pthread_join(last, NULL);
    CHECK(!is_locked(memory));
    CHECK_EQ(atomic_load(&n_dropped), 2);
    end_copy(copy);
    nrm__cuda_leave(&scope);
    stop(memory, MIB);
}

TEST(while_a_capture_is_announced_it_is_done_later)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    nrm_capture_begin();
    nrm_pin_destroy(one);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    CHECK(is_locked(memory));
    CHECK_EQ(atomic_load(&n_dropped), 0);
    nrm_pin *two = pin(memory, MIB); /* while it waits */
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 1u);
    nrm_pin_destroy(two);
    CHECK(is_locked(memory));
    nrm_capture_end();
    for (int i = 0; i < 200 && is_locked(memory); i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000);
    }
    CHECK(!is_locked(memory));
    CHECK_EQ(atomic_load(&n_dropped), 2);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 1u);
    stop(memory, MIB);
}

static void
destroy_in_host_function(void *argument)
{
    nrm_pin_destroy(argument);
}

TEST(in_a_host_function_it_is_done_later)
{
    char *memory = start(NULL, MIB);
    struct nrm__cuda_scope scope;
    nrm_pin *one = pin(memory, MIB);
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    CHECK_EQ(cuda.cuLaunchHostFunc(NULL, destroy_in_host_function, one),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    nrm__cuda_leave(&scope);
    for (int i = 0; i < 200 && is_locked(memory); i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000);
    }
    CHECK_EQ(atomic_load(&n_dropped), 1);
    stop(memory, MIB);
}

TEST(an_old_driver_synchronises_the_context)
{
    struct nrm_cudasim_config config = simulator_config();
    config.driver = 12040;
    char *memory = start(&config, MIB);
    nrm_pin_destroy(pin(memory, MIB));
    CHECK_EQ(sim.call_count("cuCtxSynchronize"), 1u);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    stop(memory, MIB);
}

/* ---- failures ---- */

static const char *const calls[] = {
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxGetState",
    "cuCtxGetId",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuEventCreate",
    "cuCtxRecordEvent",
    "cuEventQuery",
    "cuStreamIsCapturing",
    "cuPointerGetAttribute",
};

static const struct {
    const char *name;
    int error;
} errors[] = {
    {"out_of_memory", NRM_CUDA_ERROR_OUT_OF_MEMORY},
    {"invalid_value", NRM_CUDA_ERROR_INVALID_VALUE},
    {"not_permitted", NRM_CUDA_ERROR_NOT_PERMITTED},
    {"operating_system", NRM_CUDA_ERROR_OPERATING_SYSTEM},
    {"unknown", NRM_CUDA_ERROR_UNKNOWN},
};

TEST_EACH(each_call_that_fails_once_leaves_nothing_behind, errors)
{
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (uint64_t nth = 1; nth <= 3; nth++) {
            nrm_pin *one = NULL;
            char *memory = start(NULL, MIB);
            sim.fail(calls[i], nth, row->error, 1);
            nrm_status status = try_pin(memory, MIB, false, &one);
            if (status == NRM_CUDA_UNAVAILABLE) {
                /* It is not tried again: this driver is lost to the process. */
                CHECK_EQ(munmap(memory, MIB), 0);
                continue;
            }
            CHECK(status == NRM_OK || one == NULL);
            CHECK_EQ(nrm__pins_nbytes(), (status == NRM_OK ? MIB : 0));
            nrm_pin_destroy(one);
            (void)nrm__retired_drain(UINT64_MAX);
            sim.fail(calls[i], 1, 0, 1);
            nrm_pin_destroy(pin(memory, MIB));
            for (int j = 0; j < 200 && nrm__pins_nbytes() != 0; j++) {
                (void)nrm__retired_drain(UINT64_MAX);
                usleep(1000);
            }
            if (!CHECK_EQ(atomic_load(&n_dropped), (status == NRM_OK ? 2 : 1))) {
                NOTE("%s, call %d", calls[i], (int)nth);
            }
            stop(memory, MIB);
        }
    }
}

TEST(a_driver_that_never_unlocks_is_asked_a_few_times)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    sim.fail("cuMemHostUnregister", 1, NRM_CUDA_ERROR_UNKNOWN, 0);
    nrm_pin_destroy(one);
    for (int i = 0; i < 50; i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000);
    }
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 8u);
    CHECK_EQ(atomic_load(&n_dropped), 0); /* kept alive: the driver may go there */
    CHECK(is_locked(memory));
    /* It can be pinned again, and then it works. */
    sim.fail("cuMemHostUnregister", 1, 0, 1);
    nrm_pin_destroy(pin(memory, MIB));
    CHECK_EQ(atomic_load(&n_dropped), 2);
    stop(memory, MIB);
}

/* ---- contexts that end ---- */

static void
reset_context(void)
{
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(nrm__cuda_driver()->devices[0]),
             NRM_CUDA_SUCCESS);
    nrm__cuda_check_generations();
}

TEST(a_reset_takes_the_lock_and_pinning_brings_it_back)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    CHECK_EQ(nrm__pins_nbytes(), MIB);
    reset_context();
    CHECK(!nrm__pins_cover(memory, memory));
    nrm_pin *two = pin(memory, MIB);
    CHECK(is_locked(memory));
    CHECK(nrm__pins_cover(memory, memory + MIB - 1));
    CHECK_EQ(nrm__pins_nbytes(), MIB);
    CHECK_EQ(nrm__page_locked_nbytes(), MIB);
    nrm_pin_destroy(one);
    CHECK(is_locked(memory));
    nrm_pin_destroy(two);
    stop(memory, MIB);
}

TEST(after_a_reset_there_is_nothing_to_unlock)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    reset_context();
    nrm_pin_destroy(one);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    stop(memory, MIB);
}

TEST(a_pin_outlives_its_driver)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    simulator_start(NULL);
    nrm_pin_destroy(one);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    nrm_pin_destroy(pin(memory, MIB));
    stop(memory, MIB);
}

/* ---- processes ---- */

static nrm_pin *parents;
static char *parents_memory;

static void
use_in_child(void)
{
    nrm_pin *one = NULL;
    uint64_t before = sim.call_count(NULL);
    CHECK(!nrm__pins_cover(parents_memory, parents_memory));
    CHECK_EQ(nrm__pins_nbytes(), 0u);
    CHECK_STATUS(try_pin(parents_memory, MIB, false, &one), NRM_CUDA_UNAVAILABLE);
    nrm_pin_destroy(parents);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    (void)nrm__retired_drain(UINT64_MAX);
    CHECK_EQ(sim.call_count(NULL), before);
}

TEST(the_pins_of_a_child_are_its_parents)
{
    parents_memory = start(NULL, MIB);
    parents = pin(parents_memory, MIB);
    CHECK_EQ(in_child(use_in_child), 0);
    CHECK(is_locked(parents_memory));
    CHECK_EQ(atomic_load(&n_dropped), 0);
    nrm_pin_destroy(parents);
    stop(parents_memory, MIB);
}

static void
drain_in_child(void)
{
    uint64_t before = sim.call_count(NULL);
    (void)nrm__retired_drain(UINT64_MAX);
    CHECK(nrm__retired_is_empty());
    CHECK_EQ(sim.call_count(NULL), before);
}

TEST(what_waits_to_be_unlocked_is_the_parents_too)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    nrm_capture_begin();
    nrm_pin_destroy(one);
    CHECK_EQ(in_child(drain_in_child), 0);
    CHECK(is_locked(memory));
    nrm_capture_end();
    stop(memory, MIB);
}

/* ---- threads ---- */

static char *shared;

static void *
pin_often(void *argument)
{
    uint64_t seed = (uint64_t)(uintptr_t)argument;
    for (int i = 0; i < 300; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        size_t part = (seed >> 33) % 4;
        nrm_pin *one = NULL;
        CHECK_OK(try_pin(shared + part * MIB, MIB, false, &one));
        CHECK(nrm__pins_cover(shared + part * MIB, shared + part * MIB + MIB - 1));
        nrm_pin_destroy(one);
    }
    return NULL;
}

TEST(threads_pin_the_same_buffers)
{
    enum { N_THREADS = 4 };
    pthread_t threads[N_THREADS];
    shared = start(NULL, 4 * MIB);
    for (uintptr_t i = 0; i < N_THREADS; i++) {
        pthread_create(&threads[i], NULL, pin_often, (void *)(i + 1));
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_EQ(atomic_load(&n_dropped), N_THREADS * 300);
    stop(shared, 4 * MIB);
}

CHECK_MAIN
