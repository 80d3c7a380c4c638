/*
 * The scopes of all threads.
 *
 * Time is counted in pushes. A block bears the time that it was allocated at, and so a
 * scope that is open counts it if it began no later: no scope need be kept for its
 * blocks, and what has ended is found nowhere. A scope that is popped while others
 * stand over it leaves them as they are, since every open one counts for itself: tasks
 * of an event loop interleave theirs.
 *
 * Its thread counts without a lock, and other threads add what they free to counts of
 * their own, which its thread takes into account when it looks. Only links change under
 * the lock.
 */
#include "core/scopes.h"

#include "base/error.h"
#include "core/nodes.h"
#include "core/request.h"
#include "os/fork.h"

#define N_THREADS ((size_t)1 << 16) /* with scopes at a time; number 0 is nobody's */
#define TIME_MASK (((uint64_t)1 << NRM__SCOPE_TIME_BITS) - 1)

atomic_uint_least64_t nrm__scope_time = 1;

static struct nrm__lock all_lock = NRM__LOCK_INIT(NRM__RANK_LEAF);
static struct nrm__scopes *free_scopes; /* of threads that ended */
static size_t n_scopes = 1;             /* entries of the table that are used */
static _Atomic(struct nrm__scopes *) all[N_THREADS];

/* ---- of a thread ---- */

static struct nrm__scopes *
take_free(void)
{
    nrm__lock_acquire(&all_lock);
    struct nrm__scopes *scopes = free_scopes;
    if (scopes != NULL) {
        free_scopes = scopes->next_free;
    }
    nrm__lock_release(&all_lock);
    return scopes;
}

/* NULL: no memory, or too many threads have some. */
static struct nrm__scopes *
create(void)
{
    struct nrm__scopes *scopes = nrm__node_allocate(sizeof *scopes);
    if (scopes == NULL) {
        return NULL;
    }
    nrm__lock_init(&scopes->lock, NRM__RANK_LEAF);
    nrm__lock_acquire(&all_lock);
    if (n_scopes < N_THREADS) {
        scopes->number = n_scopes;
        atomic_store_explicit(&all[n_scopes++], scopes, memory_order_release);
    }
    nrm__lock_release(&all_lock);
    if (scopes->number == 0) {
        nrm__lock_finish(&scopes->lock);
        nrm__node_deallocate(scopes, sizeof *scopes);
        return NULL;
    }
    return scopes;
}

/* Those of this thread; NULL: it cannot have any. */
static struct nrm__scopes *
own_scopes(void)
{
    struct nrm__thread_state *state = nrm__thread_state();
    if (state->scopes != NULL || nrm__thread_state_is_shared(state)) {
        return state->scopes;
    }
    struct nrm__scopes *scopes = take_free();
    if (scopes == NULL) {
        scopes = create();
    }
    if (scopes != NULL) {
        scopes->since = atomic_load_explicit(&nrm__scope_time, memory_order_relaxed);
        scopes->is_inside = false;
        state->scopes = scopes;
    }
    return scopes;
}

static struct nrm__scopes *
known_scopes(void)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    return state != NULL ? state->scopes : NULL;
}

static struct nrm__scope *
find(uint64_t start)
{
    struct nrm__scopes *scopes = known_scopes();
    struct nrm__scope *scope = scopes != NULL ? scopes->innermost : NULL;
    while (scope != NULL && scope->start != start) {
        scope = scope->outer;
    }
    return scope;
}

/* Its counts with those of other threads. */
static nrm_counts
counts_of(struct nrm__scope *scope)
{
    nrm_counts counts = scope->counts;
    counts.current_bytes -=
        atomic_load_explicit(&scope->other_bytes, memory_order_relaxed);
    counts.current_count -=
        atomic_load_explicit(&scope->other_count, memory_order_relaxed);
    return counts;
}

static void
unlink_scope(struct nrm__scopes *scopes, const struct nrm__scope *scope)
{
    struct nrm__scope **link = &scopes->innermost;
    nrm__lock_acquire(&scopes->lock);
    while (*link != scope) {
        link = &(*link)->outer;
    }
    *link = scope->outer;
    nrm__lock_release(&scopes->lock);
}

/* ---- for programs ---- */

static nrm_status
not_found(void)
{
    return nrm__error(NRM_NOT_FOUND, "this thread has no such scope: it ended, or was "
                                     "begun in another thread");
}

nrm_status
nrm__scope_push(nrm_resource *through, uint64_t *out_scope)
{
    struct nrm__scopes *scopes = own_scopes();
    struct nrm__scope *scope = scopes != NULL ? nrm__node_allocate(sizeof *scope)
                                              : NULL;
    if (scope == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory for a scope of %zu B",
                          sizeof *scope);
    }
    if (through != NULL) {
        nrm_resource_retain(through);
    }
    scope->through = through;
    scope->start = atomic_fetch_add(&nrm__scope_time, 1) + 1;
    scope->outer = scopes->innermost;
    nrm__lock_acquire(&scopes->lock);
    scopes->innermost = scope;
    nrm__lock_release(&scopes->lock);
    if (!scopes->is_inside && nrm__thread_state_now()->counting == NULL) {
        nrm__scopes_leave(scopes);
    }
    *out_scope = scope->start;
    return NRM_OK;
}

nrm_status
nrm__scope_pop(uint64_t start, nrm_counts *out)
{
    struct nrm__scopes *scopes = known_scopes();
    struct nrm__scope *scope = find(start);
    if (scope == NULL) {
        return not_found();
    }
    unlink_scope(scopes, scope);
    *out = counts_of(scope);
    nrm_resource *through = scope->through;
    nrm__node_deallocate(scope, sizeof *scope);
    if (scopes->innermost == NULL && nrm__scopes_enter() != NULL) {
        nrm__scopes_leave(scopes);
    }
    nrm_resource_release(through);
    return NRM_OK;
}

nrm_status
nrm__scope_counts(uint64_t start, nrm_counts *out)
{
    struct nrm__scope *scope = find(start);
    if (scope == NULL) {
        return not_found();
    }
    *out = counts_of(scope);
    return NRM_OK;
}

uint64_t
nrm__scope_innermost(const nrm_resource *through)
{
    struct nrm__scopes *scopes = known_scopes();
    struct nrm__scope *scope = scopes != NULL ? scopes->innermost : NULL;
    while (scope != NULL && scope->through != through) {
        scope = scope->outer;
    }
    return scope != NULL ? scope->start : 0;
}

/* ---- counting ---- */

static bool
counts_through(const struct nrm__scope *scope, const nrm_resource *mr)
{
    const nrm_resource *through = scope->through;
    while (through != NULL && mr != through) {
        if (!nrm__is_adaptor(mr)) {
            return false;
        }
        mr = mr->upstream;
    }
    return true;
}

/* What there is now may be the most so far; other threads have taken from it. */
static void
raise_peaks(struct nrm__scope *scope)
{
    nrm_counts now = counts_of(scope);
    if (now.current_bytes > now.peak_bytes) {
        scope->counts.peak_bytes = now.current_bytes;
    }
    if (now.current_count > now.peak_count) {
        scope->counts.peak_count = now.current_count;
    }
}

void
nrm__scopes_count_in(struct nrm__scopes *scopes, const nrm_resource *mr, size_t nbytes)
{
    struct nrm__scope *scope = scopes->innermost;
    for (; scope != NULL; scope = scope->outer) {
        if (counts_through(scope, mr)) {
            scope->counts.current_bytes += (int64_t)nbytes;
            scope->counts.current_count++;
            scope->counts.total_bytes += (int64_t)nbytes;
            scope->counts.total_count++;
            raise_peaks(scope);
        }
    }
}

/* Whether a thread with these scopes allocated the block, or nobody knows who did. */
static bool
is_own(const struct nrm__scopes *scopes, uint64_t tag)
{
    return scopes != NULL &&
           (tag == 0 || (tag >> NRM__SCOPE_TIME_BITS == scopes->number &&
                         (tag & TIME_MASK) > scopes->since));
}

/* In scopes of another thread: fewer bytes, and blocks, of one that it allocated. */
static void
count_other(const nrm_resource *mr, uint64_t tag, int64_t nbytes, int64_t n)
{
    struct nrm__scopes *scopes =
        atomic_load_explicit(&all[tag >> NRM__SCOPE_TIME_BITS], memory_order_acquire);
    if (scopes == NULL) {
        return; /* number 0: nobody counted it */
    }
    nrm__lock_acquire(&scopes->lock);
    struct nrm__scope *scope = scopes->innermost;
    for (; scope != NULL; scope = scope->outer) {
        if (scope->start <= (tag & TIME_MASK) && counts_through(scope, mr)) {
            atomic_fetch_add_explicit(&scope->other_bytes, nbytes,
                                      memory_order_relaxed);
            atomic_fetch_add_explicit(&scope->other_count, n, memory_order_relaxed);
        }
    }
    nrm__lock_release(&scopes->lock);
}

void
nrm__scopes_count_out(struct nrm__scopes *scopes, const nrm_resource *mr, uint64_t tag,
                      size_t nbytes)
{
    if (!is_own(scopes, tag)) {
        count_other(mr, tag, (int64_t)nbytes, 1);
        return;
    }
    struct nrm__scope *scope = scopes->innermost;
    for (; scope != NULL; scope = scope->outer) {
        if (counts_through(scope, mr)) {
            scope->counts.current_bytes -= (int64_t)nbytes;
            scope->counts.current_count--;
        }
    }
}

void
nrm__scopes_count_resize(struct nrm__scopes *scopes, const nrm_resource *mr,
                         uint64_t tag, size_t old_nbytes, size_t nbytes)
{
    int64_t grown = (int64_t)nbytes - (int64_t)old_nbytes;
    if (!is_own(scopes, tag)) {
        count_other(mr, tag, -grown, 0);
        return;
    }
    struct nrm__scope *scope = scopes->innermost;
    for (; scope != NULL; scope = scope->outer) {
        if (counts_through(scope, mr)) {
            scope->counts.current_bytes += grown;
            scope->counts.total_bytes += grown > 0 ? grown : 0;
            raise_peaks(scope);
        }
    }
}

/* ---- the end of a thread, and forks ---- */

void
nrm__scopes_end_thread(struct nrm__thread_state *state)
{
    nrm_counts counts;
    struct nrm__scopes *scopes = state->scopes;
    if (scopes == NULL) {
        return;
    }
    while (scopes->innermost != NULL &&
           nrm__scope_pop(scopes->innermost->start, &counts) == NRM_OK)
        ;
    state->scopes = NULL;
    nrm__lock_acquire(&all_lock);
    scopes->next_free = free_scopes;
    free_scopes = scopes;
    nrm__lock_release(&all_lock);
}

static void
fork_prepare(void)
{
    for (size_t i = 1; i < n_scopes; i++) {
        nrm__lock_fork_prepare(&atomic_load(&all[i])->lock);
    }
}

static void
fork_parent(void)
{
    for (size_t i = 1; i < n_scopes; i++) {
        nrm__lock_fork_parent(&atomic_load(&all[i])->lock);
    }
}

/* The scopes of threads that are not in the child have ended; what they held stays. */
static void
fork_child(void)
{
    struct nrm__scopes *own = known_scopes();
    free_scopes = NULL;
    for (size_t i = 1; i < n_scopes; i++) {
        struct nrm__scopes *scopes = atomic_load(&all[i]);
        if (scopes != own) {
            scopes->innermost = NULL;
            scopes->next_free = free_scopes;
            free_scopes = scopes;
        }
        nrm__lock_fork_child(&scopes->lock);
    }
}

static const struct nrm__fork_hook fork_hook = {
    .rank = NRM__RANK_LEAF,
    .lock = &all_lock,
    .prepare = fork_prepare,
    .parent = fork_parent,
    .child = fork_child,
};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}
