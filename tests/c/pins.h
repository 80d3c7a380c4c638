/* Page-locking in place, for the programs that test how it begins and how it ends. */
#ifndef NRM_TESTS_PINS_H
#define NRM_TESTS_PINS_H

#include "simulator.h"

#include <sys/mman.h>

#include "core/pin.h"
#include "cuda/context.h"
#include "cuda/page_lock.h"
#include "nrm/sources.h"

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)

static atomic_int n_dropped;

static inline void
count_drop(void *keepalive)
{
    atomic_fetch_add((atomic_int *)keepalive, 1);
}

static inline nrm_status
try_pin(void *ptr, size_t nbytes, bool read_only, nrm_pin **out)
{
    nrm_pin_options options = NRM_OPTIONS(nrm_pin_options);
    options.read_only = read_only;
    options.keepalive = &n_dropped;
    options.drop = count_drop;
    return nrm_pin_create(ptr, nbytes, &options, out);
}

static inline nrm_pin *
pin(void *ptr, size_t nbytes)
{
    nrm_pin *out = NULL;
    CHECK_OK(try_pin(ptr, nbytes, false, &out));
    return out;
}

static inline char *
map(size_t nbytes)
{
    char *ptr =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(ptr != MAP_FAILED);
    return ptr;
}

static inline char *
start(const struct nrm_cudasim_config *config, size_t nbytes)
{
    simulator_start(config);
    atomic_store(&n_dropped, 0);
    return map(nbytes);
}

/* Until the list is empty, of which the background thread may hold the last one. */
static inline void
await_nothing(size_t (*nbytes)(void))
{
    for (int i = 0; i < 200 && nbytes() != 0; i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000);
    }
    CHECK_EQ(nbytes(), 0u);
}

/* Nothing is left: not with the driver, not in the counts. */
static inline void
stop(char *memory, size_t nbytes)
{
    await_nothing(nrm__pins_nbytes);
    await_nothing(nrm__page_locked_nbytes);
    CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 0u);
    CHECK(!nrm__pins_cover(memory, memory + nbytes - 1));
    CHECK_EQ(munmap(memory, nbytes), 0);
    simulator_check_faults();
}

#endif
