/*
 * Uses in contexts that are not primary, which the context epochs do not see: an event
 * of such a context, and a tag that is closed when the event is done, as a graph's is
 * when the graph is gone (core/capture.c).
 */
#include "base/error.h"
#include "base/lock.h"
#include "core/hooks.h"
#include "core/known_uses.h"
#include "core/nodes.h"
#include "os/fork.h"

struct foreign {
    struct foreign *next;
    struct nrm__cuda_lone_event event;
    struct nrm__order_tag tag;
};

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_LEAF);
static struct foreign *foreigners;
static atomic_uint n_foreigners;

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_LEAF, .lock = &lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

nrm_status
nrm__foreign_use_note(const struct nrm__cuda_place *at, uintptr_t handle,
                      struct nrm__order_tag *out)
{
    struct foreign *foreign = nrm__node_allocate(sizeof *foreign);
    nrm_status status = NRM_OUT_OF_MEMORY;
    if (foreign != NULL && nrm__order_open(&foreign->tag)) {
        void *token = nrm__detach();
        status = nrm__cuda_lone_record(at, handle, &foreign->event);
        nrm__attach(token);
        if (status != NRM_OK) {
            nrm__order_close(foreign->tag);
        }
    }
    if (status != NRM_OK) {
        nrm__node_deallocate(foreign, sizeof *foreign);
        return status != NRM_OUT_OF_MEMORY
                   ? status
                   : nrm__error(status, "no memory to note a use");
    }
    *out = foreign->tag;
    nrm__lock_acquire(&lock);
    foreign->next = foreigners;
    foreigners = foreign;
    nrm__lock_release(&lock);
    atomic_fetch_add(&n_foreigners, 1);
    return NRM_OK;
}

/* All of them, for this thread alone. */
static struct foreign *
take_foreigners(void)
{
    nrm__lock_acquire(&lock);
    struct foreign *all = foreigners;
    foreigners = NULL;
    nrm__lock_release(&lock);
    return all;
}

static void
put_foreigners(struct foreign *first, struct foreign *last)
{
    nrm__lock_acquire(&lock);
    last->next = foreigners;
    foreigners = first;
    nrm__lock_release(&lock);
}

void
nrm__foreign_uses_reap(void)
{
    struct foreign *left = NULL, *last = NULL;
    if (atomic_load(&n_foreigners) == 0 || nrm__cuda_is_forked()) {
        return;
    }
    for (struct foreign *each = take_foreigners(), *next; each != NULL; each = next) {
        next = each->next;
        /* When all contexts were forgotten, with the driver, the tag is done
           already. */
        bool was_forgotten = nrm__order_is_done(each->tag);
        if (was_forgotten || nrm__cuda_lone_end(&each->event)) {
            nrm__order_close(each->tag);
            nrm__node_deallocate(each, sizeof *each);
            atomic_fetch_sub(&n_foreigners, 1);
        }
        else {
            each->next = left;
            left = each;
            last = last != NULL ? last : each;
        }
    }
    if (left != NULL) {
        put_foreigners(left, last);
    }
}
