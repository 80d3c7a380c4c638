/*
 * RMM's resources. They are C++ templates, so a library of their own holds them
 * (rmm_peer.cpp), which run.py compiles where their headers are and names in the
 * environment; this program never links it.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define VERSION 1
#define PINNED_NBYTES                                                                  \
    ((size_t)1 << 30) /* RMM's page-locked pool, unless initial= says */

static struct {
    int (*version)(void);
    const char *(*error)(void);
    void *(*open)(const char *name, size_t nbytes);
    void (*close)(void *mr);
    void *(*allocate)(void *mr, size_t nbytes, void *stream);
    void (*deallocate)(void *mr, void *ptr, size_t nbytes, void *stream);
} rmm;

static void *
symbol_of(void *library, const char *name)
{
    void *symbol = dlsym(library, name);
    if (symbol == NULL) {
        fail("the library of RMM's resources has no %s", name);
    }
    return symbol;
}

static void
load(void)
{
    const char *path = getenv("NUMPY_RMM_BENCH_RMM");
    if (path == NULL || path[0] == '\0') {
        fail("NUMPY_RMM_BENCH_RMM names no library of RMM's resources");
    }
    void *library = dlopen(path, RTLD_NOW);
    if (library == NULL) {
        fail("RMM's resources: %s", dlerror());
    }
    *(void **)&rmm.version = symbol_of(library, "rmm_peer_version");
    if (rmm.version() != VERSION) {
        fail("the library of RMM's resources is of another version");
    }
    *(void **)&rmm.error = symbol_of(library, "rmm_peer_error");
    *(void **)&rmm.open = symbol_of(library, "rmm_peer_open");
    *(void **)&rmm.close = symbol_of(library, "rmm_peer_close");
    *(void **)&rmm.allocate = symbol_of(library, "rmm_peer_allocate");
    *(void **)&rmm.deallocate = symbol_of(library, "rmm_peer_deallocate");
}

static void *
peer_allocate(struct allocator *self, size_t nbytes, size_t stream)
{
    return rmm.allocate(self->peer, nbytes, self->handles[stream]);
}

static void
peer_deallocate(struct allocator *self, void *ptr, size_t nbytes, size_t stream)
{
    rmm.deallocate(self->peer, ptr, nbytes, self->handles[stream]);
}

const char *
rmm_error(void)
{
    return rmm.error();
}

void
rmm_open(struct allocator *self, const char *name)
{
    if (rmm.version == NULL) {
        load();
    }
    self->peer = rmm.open(name, parameter("initial", PINNED_NBYTES));
    if (self->peer == NULL) {
        fail("RMM's %s: %s", name, rmm.error());
    }
    self->is_accessible = strcmp(name, "pinned") == 0;
    self->allocate = peer_allocate;
    self->deallocate = peer_deallocate;
}

void
rmm_close(struct allocator *self)
{
    rmm.close(self->peer);
    self->peer = NULL;
}
