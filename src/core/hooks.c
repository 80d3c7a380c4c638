/*
 * The language above the core, the end of the process, warnings and lost errors: small
 * state that any thread may touch at any time.
 */
#include "core/hooks.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/lock.h"
#include "os/fork.h"

/* ---- the interpreter's lock ---- */

static struct nrm__hooks hooks;
static atomic_bool has_hooks;

void
nrm__hooks_set(const struct nrm__hooks *new_hooks)
{
    hooks = *new_hooks;
    atomic_store_explicit(&has_hooks, true, memory_order_release);
}

void *
nrm__detach(void)
{
    nrm__assert_no_locks();
    return atomic_load_explicit(&has_hooks, memory_order_acquire) ? hooks.detach()
                                                                  : NULL;
}

void
nrm__attach(void *token)
{
    nrm__assert_no_locks();
    if (token != NULL) {
        hooks.attach(token);
    }
}

bool
nrm__collect(void)
{
    nrm__assert_no_locks();
    return atomic_load_explicit(&has_hooks, memory_order_acquire) &&
           hooks.collect != NULL && !nrm__is_exiting() && hooks.collect();
}

/* ---- the end ---- */

static atomic_bool exiting;

void
nrm__exit_begin(void)
{
    atomic_store(&exiting, true);
}

bool
nrm__is_exiting(void)
{
    return atomic_load_explicit(&exiting, memory_order_acquire);
}

/* ---- warnings and lost errors ---- */

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_LEAF);

static struct {
    bool posted;
    bool shown;
    char text[320];
} warnings[NRM__WARN_COUNT];
atomic_int nrm__n_warnings;

static nrm_error first_lost;
static uint64_t n_lost;

void
nrm__warning_post(enum nrm__warning id, const char *format, ...)
{
    va_list arguments;
    if (nrm__is_exiting()) {
        return;
    }
    nrm__lock_acquire(&lock);
    if (!warnings[id].posted) {
        warnings[id].posted = true;
        va_start(arguments, format);
        vsnprintf(warnings[id].text, sizeof warnings[id].text, format, arguments);
        va_end(arguments);
        atomic_fetch_add_explicit(&nrm__n_warnings, 1, memory_order_release);
    }
    nrm__lock_release(&lock);
}

bool
nrm__warning_take(char *out, size_t size)
{
    bool found = false;
    if (atomic_load_explicit(&nrm__n_warnings, memory_order_acquire) == 0) {
        return false;
    }
    nrm__lock_acquire(&lock);
    for (int id = 0; id < NRM__WARN_COUNT && !found; id++) {
        found = warnings[id].posted && !warnings[id].shown;
        if (found) {
            warnings[id].shown = true;
            snprintf(out, size, "%s", warnings[id].text);
            atomic_fetch_sub_explicit(&nrm__n_warnings, 1, memory_order_relaxed);
        }
    }
    nrm__lock_release(&lock);
    return found;
}

void
nrm__warnings_rearm(void)
{
    nrm__lock_acquire(&lock);
    for (int id = 0; id < NRM__WARN_COUNT; id++) {
        warnings[id].posted = warnings[id].shown = false;
    }
    atomic_store(&nrm__n_warnings, 0);
    nrm__lock_release(&lock);
}

void
nrm__lost_error_note(const nrm_error *error)
{
    if (nrm__is_exiting()) {
        return;
    }
    nrm__lock_acquire(&lock);
    if (n_lost++ == 0) {
        first_lost = *error;
    }
    nrm__lock_release(&lock);
}

void
nrm__lost_error_get(nrm_error *out, uint64_t *out_count)
{
    nrm__lock_acquire(&lock);
    *out = n_lost != 0 ? first_lost : (nrm_error){.status = NRM_OK};
    *out_count = n_lost;
    nrm__lock_release(&lock);
}

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_LEAF, .lock = &lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}
