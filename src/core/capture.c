/*
 * See capture.h. A capture is in the list from the first memory that is used in it
 * until its graph is gone. The destructor of the driver's object pushes it to `gone`,
 * from where it is taken out as a whole. The reset of a context ends its graphs without
 * a word: then the tags of its memory are closed, and what describes the capture stays,
 * as the driver may yet come back to it.
 */
#include "core/capture.h"

#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "cuda/capture.h"
#include "cuda/context.h"
#include "cuda/event.h"
#include "cuda/foreign.h"
#include "os/fork.h"

enum { ORIGIN_OF_NONE = 0 }; /* of no stream that can be captured */

/* A stream of a capture, or all of it (ORIGIN_OF_NONE). */
struct member {
    struct member *next;
    uintptr_t origin; /* the handle, and of a per-thread stream the thread */
    struct nrm__order_tag tag;
};

/* A pool whose memory the graph uses, and keeps alive if it holds an object. */
struct keeper {
    struct keeper *next;
    nrm_resource *pool;
};

struct capture {
    struct nrm__link link;
    uint64_t id;
    int device;          /* of the context that ends its graph, or -1 */
    uint64_t generation; /* of that */
    bool is_retained;    /* the graph holds it */
    bool is_open;        /* counts among those that are known to go on */
    bool is_listed;
    struct member *members;
    struct keeper *keepers;
    struct capture *next_gone;
};

atomic_uint nrm__captures_known;

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_CAPTURES);
static struct nrm__link captures = {&captures, &captures};
static atomic_size_t n_captures;
static uint64_t generations_seen; /* under the lock */
static _Atomic(struct capture *) gone;
static atomic_uint_least64_t n_ended;

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_CAPTURES,
                                                .lock = &lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

/* ---- the end of a graph ---- */

/* In a thread of the driver: no lock, no call. */
static void
push_gone(void *data)
{
    struct capture *capture = data;
    capture->next_gone = atomic_load(&gone);
    while (!atomic_compare_exchange_weak(&gone, &capture->next_gone, capture))
        ;
}

static void
close_members(struct capture *capture)
{
    while (capture->members != NULL) {
        struct member *member = capture->members;
        capture->members = member->next;
        nrm__order_close(member->tag);
        nrm__node_deallocate(member, sizeof *member);
    }
}

static void
set_open_locked(struct capture *capture, bool is_open)
{
    if (capture->is_open != is_open) {
        capture->is_open = is_open;
        atomic_fetch_add(&nrm__captures_known, is_open ? 1u : -1u);
    }
}

static void
unlist_locked(struct capture *capture)
{
    if (capture->is_listed) {
        nrm__list_remove(&capture->link);
        n_captures--;
        set_open_locked(capture, false);
    }
}

/* May end pools. */
static void
drop_keepers(struct keeper *keeper)
{
    while (keeper != NULL) {
        struct keeper *next = keeper->next;
        nrm__resource_unhold(keeper->pool, 1);
        nrm__node_deallocate(keeper, sizeof *keeper);
        keeper = next;
    }
}

static void
destroy(struct capture *capture)
{
    close_members(capture);
    atomic_fetch_add(&n_ended, 1);
    drop_keepers(capture->keepers); /* which only a graph with an object has here */
    nrm__node_deallocate(capture, sizeof *capture);
}

static void
destroy_all(struct capture *capture)
{
    while (capture != NULL) {
        struct capture *next = capture->next_gone;
        destroy(capture);
        capture = next;
    }
}

static bool
was_reset(const struct capture *capture)
{
    return capture->device >= 0 &&
           nrm__cuda_generation_noticed(capture->device) != capture->generation;
}

/* Of contexts that were reset. Returns the pools that were kept for their graphs. */
static struct keeper *
close_reset_locked(void)
{
    struct keeper *dropped = NULL;
    for (struct nrm__link *link = captures.next; link != &captures; link = link->next) {
        struct capture *capture = NRM__CONTAINER(link, struct capture, link);
        if (!was_reset(capture)) {
            continue;
        }
        close_members(capture);
        set_open_locked(capture, false);
        while (capture->is_retained && capture->keepers != NULL) {
            struct keeper *keeper = capture->keepers;
            capture->keepers = keeper->next;
            keeper->next = dropped;
            dropped = keeper;
        }
    }
    return dropped;
}

static void
reap_reset(void)
{
    struct keeper *dropped = NULL;
    nrm__lock_acquire(&lock);
    uint64_t now = nrm__cuda_generations();
    bool is_new = now != generations_seen;
    if (is_new) {
        generations_seen = now;
        dropped = close_reset_locked();
    }
    nrm__lock_release(&lock);
    if (is_new) {
        atomic_fetch_add(&n_ended, 1);
    }
    drop_keepers(dropped);
}

void
nrm__captures_reap(void)
{
    if (nrm__is_exiting() || nrm__cuda_is_forked()) {
        return;
    }
    if (atomic_load(&n_captures) != 0) {
        reap_reset();
    }
    if (atomic_load(&gone) == NULL) {
        return;
    }
    struct capture *all = atomic_exchange(&gone, NULL);
    nrm__lock_acquire(&lock);
    for (struct capture *capture = all; capture != NULL; capture = capture->next_gone) {
        unlist_locked(capture);
    }
    nrm__lock_release(&lock);
    destroy_all(all);
}

/* True: it was the last pool of a graph that holds no object. */
static bool
drop_pool_locked(struct capture *capture, const nrm_resource *pool)
{
    struct keeper **link = &capture->keepers;
    while (*link != NULL && (*link)->pool != pool) {
        link = &(*link)->next;
    }
    if (*link == NULL || capture->is_retained) {
        return false;
    }
    struct keeper *keeper = *link;
    *link = keeper->next;
    nrm__node_deallocate(keeper, sizeof *keeper);
    return capture->keepers == NULL;
}

void
nrm__captures_forget(const nrm_resource *pool)
{
    struct capture *forgotten = NULL;
    struct nrm__link *next;
    nrm__lock_acquire(&lock);
    for (struct nrm__link *link = captures.next; link != &captures; link = next) {
        struct capture *capture = NRM__CONTAINER(link, struct capture, link);
        next = link->next;
        if (drop_pool_locked(capture, pool)) {
            unlist_locked(capture);
            capture->next_gone = forgotten;
            forgotten = capture;
        }
    }
    nrm__lock_release(&lock);
    destroy_all(forgotten);
}

uint64_t
nrm__captures_n_ended(void)
{
    return atomic_load_explicit(&n_ended, memory_order_acquire);
}

size_t
nrm__captures_n_alive(void)
{
    return atomic_load(&n_captures);
}

/* ---- a capture that goes on ---- */

static uintptr_t
origin_of(const nrm_stream *stream)
{
    return stream->handle ^ (uintptr_t)stream->thread << 32;
}

static struct member *
find_member_locked(const struct capture *capture, uintptr_t origin)
{
    struct member *member = capture->members;
    while (member != NULL && member->origin != origin) {
        member = member->next;
    }
    return member;
}

/* NULL: no memory for it. */
static struct member *
get_member_locked(struct capture *capture, uintptr_t origin)
{
    struct member *member = find_member_locked(capture, origin);
    if (member != NULL) {
        return member;
    }
    member = nrm__node_allocate(sizeof *member);
    if (member == NULL || !nrm__order_open(&member->tag)) {
        nrm__node_deallocate(member, sizeof *member);
        return NULL;
    }
    member->origin = origin;
    member->next = capture->members;
    capture->members = member;
    return member;
}

static bool
keep_locked(struct capture *capture, nrm_resource *pool)
{
    struct keeper *keeper = capture->keepers;
    while (keeper != NULL && keeper->pool != pool) {
        keeper = keeper->next;
    }
    if (keeper != NULL) {
        return true;
    }
    keeper = nrm__node_allocate(sizeof *keeper);
    if (keeper == NULL) {
        return false;
    }
    if (capture->is_retained) {
        nrm__resource_hold(pool, 1); /* who asks uses it, so it lives */
    }
    *keeper = (struct keeper){.next = capture->keepers, .pool = pool};
    capture->keepers = keeper;
    return true;
}

static struct capture *
find_locked(uint64_t id)
{
    for (struct nrm__link *link = captures.next; link != &captures; link = link->next) {
        struct capture *capture = NRM__CONTAINER(link, struct capture, link);
        if (capture->id == id && !was_reset(capture)) {
            return capture;
        }
    }
    return NULL;
}

static nrm_status
no_memory(void)
{
    return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a stream capture");
}

/* NRM_NOT_FOUND (not recorded): the capture is not in the list yet. `stream` may be
   NULL: the tags are of no stream then; and `pool`: none is kept. */
static nrm_status
join(uint64_t id, const nrm_stream *stream, nrm_resource *pool,
     struct nrm__capture_tags *out)
{
    nrm_status status = NRM_NOT_FOUND;
    uintptr_t origin = stream != NULL ? origin_of(stream) : ORIGIN_OF_NONE;
    nrm__lock_acquire(&lock);
    struct capture *capture = find_locked(id);
    if (capture != NULL) {
        const struct member *held = get_member_locked(capture, ORIGIN_OF_NONE);
        const struct member *own = get_member_locked(capture, origin);
        status = NRM_OUT_OF_MEMORY;
        if (held != NULL && own != NULL &&
            (pool == NULL || keep_locked(capture, pool))) {
            *out = (struct nrm__capture_tags){.own = own->tag, .held = held->tag};
            status = NRM_OK;
        }
        if (stream != NULL && nrm__stream_stays(stream)) {
            set_open_locked(capture, true);
        }
    }
    nrm__lock_release(&lock);
    return status == NRM_OUT_OF_MEMORY ? no_memory() : status;
}

/* Two threads may list one capture each of the same number: the first is used, and the
   other goes when the graph does. */
static nrm_status
list(const struct nrm__cuda_capture *seen)
{
    struct capture *capture = nrm__node_allocate(sizeof *capture);
    if (capture == NULL) {
        return no_memory();
    }
    void *token = nrm__detach();
    enum nrm__cuda_retained retained =
        nrm__cuda_capture_retain(seen->graph, capture, push_gone);
    nrm__attach(token);
    if (retained ==
        NRM__CAPTURE_REFUSED) { /* it is the driver's, which lets go of it */
        capture = nrm__node_allocate(sizeof *capture);
        if (capture == NULL) {
            return no_memory();
        }
    }
    capture->id = seen->id;
    capture->device = seen->device;
    capture->generation = seen->device >= 0 ? nrm__cuda_generation_noticed(seen->device)
                                            : 0;
    capture->is_retained = retained == NRM__CAPTURE_RETAINED;
    nrm__lock_acquire(&lock);
    if (n_captures == 0) {
        generations_seen = nrm__cuda_generations();
    }
    capture->is_listed = true;
    nrm__list_append(&captures, &capture->link);
    n_captures++;
    nrm__lock_release(&lock);
    return NRM_OK;
}

static nrm_status
join_or_list(const struct nrm__cuda_capture *seen, const nrm_stream *stream,
             nrm_resource *pool, struct nrm__capture_tags *out)
{
    nrm_status status = join(seen->id, stream, pool, out);
    if (status == NRM_NOT_FOUND) {
        NRM_TRY(list(seen));
        status = join(seen->id, stream, pool, out);
    }
    return status;
}

/* A capture of the stream that was known to go on is over, unless it is this one. */
static void
note_ends(const nrm_stream *stream, uint64_t id)
{
    nrm__lock_acquire(&lock);
    for (struct nrm__link *link = captures.next; link != &captures; link = link->next) {
        struct capture *capture = NRM__CONTAINER(link, struct capture, link);
        if (capture->id != id &&
            find_member_locked(capture, origin_of(stream)) != NULL) {
            set_open_locked(capture, false);
        }
    }
    nrm__lock_release(&lock);
}

nrm_status
nrm__capture_find(nrm_stream *stream, int device, nrm_resource *pool,
                  struct nrm__capture_tags *out)
{
    struct nrm__cuda_capture seen = {0};
    /* The query does not block; entering a context, for a per-thread stream, may. */
    void *token = nrm__stream_is_special(stream) ? nrm__detach() : NULL;
    bool is_captured = nrm__cuda_capture_find(device, stream->handle, &seen);
    nrm__attach(token);
    if (nrm__stream_stays(stream) && atomic_load(&nrm__captures_known) != 0) {
        note_ends(stream, is_captured ? seen.id : 0);
    }
    *out =
        (struct nrm__capture_tags){NRM__ORDER_NEVER, NRM__ORDER_NEVER, seen.is_broken};
    if (!is_captured) {
        return NRM_NOT_FOUND;
    }
    if (seen.id == 0) {
        return NRM_OK;
    }
    return join_or_list(&seen, stream, pool, out);
}

nrm_status
nrm__capture_find_held(uintptr_t handle, struct nrm__order_tag *out)
{
    struct nrm__cuda_capture seen = {0};
    struct nrm__capture_tags tags;
    void *token = nrm__detach();
    bool is_captured = nrm__cuda_capture_find(NRM_DEVICE_NONE, handle, &seen);
    nrm__attach(token);
    if (!is_captured || seen.id == 0 || !nrm__cuda_can_retain()) {
        return NRM_NOT_FOUND;
    }
    NRM_TRY(join_or_list(&seen, NULL, NULL, &tags));
    *out = tags.held;
    return NRM_OK;
}

/* ---- announcing ---- */

static atomic_uint n_begun; /* by nrm_capture_begin, and not ended */

void
nrm_capture_begin(void)
{
    atomic_fetch_add(&n_begun, 1);
    atomic_fetch_add(&nrm__captures_known, 1);
    void *token = nrm__detach();
    nrm__cuda_capture_announce();
    nrm__attach(token);
}

/* Whether there is one to end. Nobody knows whose it is: an end too many, while another
   thread has begun, is taken for that thread's. */
static bool
take_begun(void)
{
    unsigned n = atomic_load(&n_begun);
    while (n != 0 && !atomic_compare_exchange_weak(&n_begun, &n, n - 1))
        ;
    return n != 0;
}

void
nrm_capture_end(void)
{
    if (take_begun()) {
        nrm__cuda_capture_withdraw();
        nrm__cuda_capture_lift(-1);
        nrm__cuda_foreign_lift();
        atomic_fetch_sub(&nrm__captures_known, 1);
    }
}
