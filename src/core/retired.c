/*
 * The retired list: blocks that were given back for good and wait for their epoch. Whoever
 * allocates, trims or has nothing else to do (the background thread) gives back what is
 * done; never an array's deallocation, which only appends.
 */
#include "base/bits.h"
#include "base/lock.h"
#include "core/background.h"
#include "core/block_map.h"
#include "core/capture.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/uses.h"
#include "cuda/driver.h"
#include "os/fork.h"

static struct nrm__lock retired_lock = NRM__LOCK_INIT(NRM__RANK_RETIRED);
static struct nrm__link retired = {&retired, &retired};
static atomic_size_t n_retired;

/* The entry of the block in the ordered table, or a new one for a block of a segment. */
static struct nrm__entry *
entry_for(const struct nrm__block *block)
{
    if (block->segment == NULL) {
        return block->record;
    }
    return nrm__node_allocate(sizeof(struct nrm__entry));
}

void
nrm__retire(const struct nrm__block *block, uint64_t stamp)
{
    struct nrm__entry *entry = entry_for(block);
    if (entry == NULL) {
        /* No memory for a list node: better lost than handed out too early. */
        nrm__lost_error_note(&(nrm_error){
            .status = NRM_OUT_OF_MEMORY,
            .message =
                "a freed block was lost: no memory to note that the GPU may use it",
            .requested_nbytes = block->nbytes,
        });
        return;
    }
    nrm_resource_retain(block->owner);
    entry->block = *block;
    entry->stamp = stamp;
    nrm__lock_acquire(&retired_lock);
    nrm__list_append(&retired, &entry->link);
    nrm__lock_release(&retired_lock);
    atomic_fetch_add(&n_retired, 1);
    nrm__background_wake();
}

size_t
nrm__retired_nbytes(const nrm_resource *owner)
{
    size_t nbytes = 0;
    nrm__lock_acquire(&retired_lock);
    for (struct nrm__link *link = retired.next; link != &retired; link = link->next) {
        struct nrm__entry *entry = NRM__CONTAINER(link, struct nrm__entry, link);
        if (owner == NULL || entry->block.owner == owner) {
            nbytes += entry->block.capacity;
        }
    }
    nrm__lock_release(&retired_lock);
    return nbytes;
}

/* Moves what is done to `ready`; the newest stamp of what is left, 0: nothing is. The
   GPU knows nothing of the pages of a forked child: there, everything is done. */
static uint64_t
take_ready(struct nrm__link *ready)
{
    bool forked = nrm__cuda_is_forked();
    uint64_t newest = 0;
    struct nrm__link *next;
    nrm__list_init(ready);
    nrm__lock_acquire(&retired_lock);
    for (struct nrm__link *link = retired.next; link != &retired; link = next) {
        struct nrm__entry *entry = NRM__CONTAINER(link, struct nrm__entry, link);
        next = link->next;
        if (forked || nrm__epoch_is_done(entry->stamp)) {
            nrm__list_remove(link);
            nrm__list_append(ready, link);
        }
        else if (entry->stamp > newest) {
            newest = entry->stamp;
        }
    }
    nrm__lock_release(&retired_lock);
    return newest;
}

static size_t
release_one(struct nrm__entry *entry)
{
    struct nrm__block block = entry->block;
    size_t nbytes = block.capacity;
    nrm_resource *owner = block.owner;
    if (owner->ops->release_block != NULL) {
        owner->ops->release_block(owner, &block);
    }
    else {
        owner->ops->deallocate(owner, &block, NULL);
    }
    nrm__entry_destroy(entry);
    nrm_resource_release(owner);
    atomic_fetch_sub_explicit(&n_retired, 1, memory_order_release);
    return nbytes;
}

static size_t
release_all(struct nrm__link *ready)
{
    size_t nbytes = 0;
    if (nrm__list_is_empty(ready)) {
        return 0;
    }
    void *token = nrm__detach();
    while (!nrm__list_is_empty(ready)) {
        struct nrm__link *link = ready->next;
        nrm__list_remove(link);
        nbytes += release_one(NRM__CONTAINER(link, struct nrm__entry, link));
    }
    nrm__attach(token);
    return nbytes;
}

size_t
nrm__retired_release_done(void)
{
    struct nrm__link ready;
    if (nrm__is_exiting() || nrm__retired_is_empty()) {
        return 0;
    }
    (void)nrm__epoch_poll();
    (void)take_ready(&ready);
    return release_all(&ready);
}

size_t
nrm__retired_drain(uint64_t limit_ns)
{
    struct nrm__link ready;
    nrm__background_drop_orphan();
    nrm__captures_reap();
    if (nrm__is_exiting() || nrm__retired_is_empty()) {
        return 0;
    }
    (void)nrm__epoch_poll();
    uint64_t newest = take_ready(&ready);
    size_t nbytes = release_all(&ready);
    if (newest > nrm__epoch_newest_recorded()) {
        (void)nrm__epoch_close();
    }
    while (newest != 0) {
        newest = take_ready(&ready);
        nbytes += release_all(&ready);
        if (newest == 0 || !nrm__epoch_wait(limit_ns, false)) {
            break;
        }
    }
    return nbytes;
}

bool
nrm__retired_is_empty(void)
{
    return atomic_load(&n_retired) == 0;
}

static const struct nrm__fork_hook retired_hook = {
    .rank = NRM__RANK_RETIRED,
    .lock = &retired_lock,
};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&retired_hook);
}
