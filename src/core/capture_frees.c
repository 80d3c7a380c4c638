/*
 * See capture_frees.h. A graph is known here by the tag of it (core/capture.h), found
 * when the capture begins, as giving a block back asks the driver nothing. Meanwhile no
 * thread keeps blocks of memory that GPUs see: each comes this way.
 */
#include "core/capture_frees.h"

#include "base/error.h"
#include "base/lock.h"
#include "core/capture.h"
#include "core/hooks.h"
#include "core/known_uses.h"
#include "core/nodes.h"
#include "core/stream.h"
#include "core/uses.h"
#include "cuda/capture.h"
#include "os/fork.h"

enum { MAX_OWNERS = 16 }; /* captures that go on at once */

struct owner {
    uint64_t name; /* 0: none */
    uintptr_t handle;
    struct nrm__order_tag tag;
};

atomic_uint nrm__capture_n_owners;

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_LEAF);
static struct owner owners[MAX_OWNERS];

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_LEAF, .lock = &lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

/* ---- who owns ---- */

/* A per-thread handle means another stream in each thread. */
static uint64_t
name_of(uintptr_t handle)
{
    nrm_stream *stream;
    if (handle != NRM_STREAM_HANDLE_PER_THREAD ||
        nrm_stream_per_thread(&stream) != NRM_OK) {
        return handle;
    }
    uint64_t name = handle ^ (uint64_t)stream->thread << 32;
    nrm_stream_release(stream);
    return name;
}

/* NULL: nobody of that name. */
static struct owner *
find_locked(uint64_t name)
{
    for (int i = 0; i < MAX_OWNERS; i++) {
        if (owners[i].name == name) {
            return &owners[i];
        }
    }
    return NULL;
}

nrm_status
nrm_capture_own_frees(uintptr_t handle)
{
    struct nrm__order_tag tag;
    uint64_t name = name_of(handle);
    void *token = nrm__detach();
    nrm_status status = nrm__cuda_init(NULL);
    nrm__attach(token);
    NRM_TRY(status);
    status = nrm__capture_find_held(handle, &tag);
    if (status == NRM_NOT_FOUND) {
        return nrm__error(NRM_NOT_FOUND,
                          "stream %p is in no capture that can be followed",
                          (void *)handle);
    }
    NRM_TRY(status);
    nrm__lock_acquire(&lock);
    struct owner *owner = find_locked(name);
    bool is_new = owner == NULL;
    owner = is_new ? find_locked(0)
                   : owner; /* of a stream that was destroyed meanwhile */
    if (owner != NULL) {
        *owner = (struct owner){name, handle, tag};
        atomic_fetch_add(&nrm__capture_n_owners, is_new ? 1u : 0u);
    }
    nrm__lock_release(&lock);
    if (owner == NULL) {
        return nrm__error(NRM_NOT_SUPPORTED, "more than %d captures at once",
                          MAX_OWNERS);
    }
    if (is_new) {
        nrm__epoch_forbid(true);
    }
    return NRM_OK;
}

void
nrm_capture_disown_frees(uintptr_t handle)
{
    uint64_t name = name_of(handle);
    nrm__lock_acquire(&lock);
    struct owner *owner = name != 0 ? find_locked(name) : NULL;
    if (owner != NULL) {
        owner->name = 0;
        atomic_fetch_sub(&nrm__capture_n_owners, 1);
    }
    nrm__lock_release(&lock);
    if (owner != NULL) {
        nrm__epoch_forbid(false);
    }
}

bool
nrm_stream_is_captured(uintptr_t handle)
{
    struct nrm__cuda_capture seen;
    void *token = nrm__detach();
    bool is_captured = nrm__cuda_init(NULL) == NRM_OK &&
                       nrm__cuda_capture_find(NRM_DEVICE_NONE, handle, &seen);
    nrm__attach(token);
    return is_captured;
}

/* ---- what it owns ---- */

bool
nrm__capture_owns(const struct nrm__block *block)
{
    return block->owner->kind != NRM_KIND_HOST &&
           block->owner->kind != NRM_KIND_DEVICE &&
           !(block->owner->flags & NRM__OPS_IMMEDIATE);
}

void
nrm__capture_add_uses(const struct nrm__block *block, struct nrm__use **list)
{
    struct owner copies[MAX_OWNERS];
    if (!nrm__capture_owns(block)) {
        return;
    }
    nrm__lock_acquire(&lock);
    for (int i = 0; i < MAX_OWNERS; i++) {
        copies[i] = owners[i];
    }
    nrm__lock_release(&lock);
    for (int i = 0; i < MAX_OWNERS; i++) {
        if (copies[i].name == 0) {
            continue;
        }
        struct nrm__use *use = nrm__node_allocate(sizeof *use);
        if (use == NULL) {
            nrm__lost_error_note(&(nrm_error){
                .status = NRM_OUT_OF_MEMORY,
                .message = "no memory to note that a graph may read a freed block"});
            return;
        }
        *use = (struct nrm__use){.next = *list,
                                 .start = (uintptr_t)block->ptr,
                                 .tag = copies[i].tag,
                                 .handle = copies[i].handle};
        *list = use;
    }
}
