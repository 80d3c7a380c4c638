/*
 * Names. The table is a list in order of registration; a row is made once and never
 * freed, so a name keeps its place when it is deleted and bound again. A factory runs
 * without the lock: when two threads meet in one, the second resource is dropped.
 */
#include "core/registry.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/current.h"
#include "core/nodes.h"
#include "core/ops.h"
#include "nrm/registry.h"
#include "os/fork.h"

#define NAME_MAX_LENGTH 64

struct row {
    struct row *next;
    const struct nrm__builtin *builtin; /* borrowed; NULL: a user's name */
    nrm_resource *mr;                   /* retained, or NULL */
    bool from_factory;                  /* `mr` was made by the factory */
    char name[NAME_MAX_LENGTH + 1];
};

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_REGISTRY);
static struct row *rows;

/* ---- rows ---- */

static struct row *
find_locked(const char *name)
{
    struct row *row = rows;
    while (row != NULL && strcmp(row->name, name) != 0) {
        row = row->next;
    }
    return row;
}

static bool
is_known(const struct row *row)
{
    return row->builtin != NULL || row->mr != NULL;
}

static struct row *
append_locked(const char *name)
{
    struct row *row = nrm__node_allocate(sizeof *row);
    struct row **end = &rows;
    if (row == NULL) {
        return NULL;
    }
    snprintf(row->name, sizeof row->name, "%s", name);
    while (*end != NULL) {
        end = &(*end)->next;
    }
    *end = row;
    return row;
}

static nrm_status
check_name(const char *name)
{
    size_t length = strlen(name);
    if (length == 0 || length > NAME_MAX_LENGTH) {
        return nrm__error(NRM_INVALID_VALUE,
                          "a name has 1 to %d characters, this one %zu: '%.80s'",
                          NAME_MAX_LENGTH, length, name);
    }
    for (const char *c = name; *c != '\0'; c++) {
        if (*c < 0x20 || *c > 0x7e || *c == ':' || *c == '#') {
            return nrm__error(NRM_INVALID_VALUE,
                              "a name is printable ASCII without ':' and '#': '%s'",
                              name);
        }
    }
    return NRM_OK;
}

/* The record has room for some of the names only; what is cut ends in "...". */
static nrm_status
unknown(const char *name)
{
    char known[200] = "";
    size_t length = 0;
    nrm__lock_acquire(&lock);
    for (struct row *row = rows; row != NULL && length < sizeof known;
         row = row->next) {
        if (is_known(row)) {
            length += (size_t)snprintf(known + length, sizeof known - length, "%s'%s'",
                                       length != 0 ? ", " : "", row->name);
        }
    }
    nrm__lock_release(&lock);
    if (length >= sizeof known) {
        memcpy(known + sizeof known - 4, "...", 4);
    }
    return nrm__error(NRM_NOT_FOUND, "no resource is named '%.64s'; known: %s", name,
                      known);
}

/* ---- names ---- */

nrm_status
nrm__registry_add_builtins(const struct nrm__builtin *builtins, size_t n_builtins,
                           nrm_status (*device_default)(int device, nrm_resource **out))
{
    nrm_status status = NRM_OK;
    nrm__current_set_maker(device_default);
    nrm__lock_acquire(&lock);
    for (size_t i = 0; i < n_builtins && status == NRM_OK; i++) {
        struct row *row = find_locked(builtins[i].name);
        if (row == NULL) {
            row = append_locked(builtins[i].name);
        }
        if (row != NULL) {
            row->builtin = &builtins[i];
        }
        else {
            status = nrm__error(NRM_OUT_OF_MEMORY, "no memory for the registry");
        }
    }
    nrm__lock_release(&lock);
    return status;
}

/* A new reference, or NULL. `out_builtin` (may be NULL): the factory of the name. */
static nrm_resource *
look_up(const char *name, const struct nrm__builtin **out_builtin, bool *out_known)
{
    nrm_resource *mr = NULL;
    nrm__lock_acquire(&lock);
    struct row *row = find_locked(name);
    *out_known = row != NULL && is_known(row);
    *out_builtin = row != NULL ? row->builtin : NULL;
    if (row != NULL && row->mr != NULL) {
        mr = row->mr;
        nrm_resource_retain(mr);
    }
    nrm__lock_release(&lock);
    return mr;
}

nrm_status
nrm_registry_get(const char *name, nrm_resource **out)
{
    const struct nrm__builtin *builtin;
    bool known;
    nrm_resource *mr = look_up(name, &builtin, &known);
    if (mr == NULL && !known) {
        return unknown(name);
    }
    if (mr == NULL) {
        NRM_TRY(builtin->create(&mr));
        nrm__resource_set_name(mr, name);
        nrm_resource *mine = mr;
        nrm__lock_acquire(&lock);
        struct row *row = find_locked(name);
        if (row->mr == NULL) {
            row->mr = mr;
            row->from_factory = true;
        }
        mr = row->mr;
        nrm_resource_retain(mr);
        nrm__lock_release(&lock);
        if (mine != mr) {
            nrm_resource_release(mine);
        }
    }
    *out = mr;
    return NRM_OK;
}

nrm_resource *
nrm_registry_peek(const char *name)
{
    const struct nrm__builtin *builtin;
    bool known;
    return look_up(name, &builtin, &known);
}

nrm_status
nrm_registry_set(const char *name, nrm_resource *mr)
{
    nrm_resource *old = NULL;
    NRM_TRY(check_name(name));
    nrm__resource_set_name(mr, name);
    nrm__lock_acquire(&lock);
    struct row *row = find_locked(name);
    if (row == NULL) {
        row = append_locked(name);
    }
    if (row != NULL) {
        nrm_resource_retain(mr);
        old = row->mr;
        row->mr = mr;
        row->from_factory = false;
    }
    nrm__lock_release(&lock);
    nrm_resource_release(old);
    return row != NULL ? NRM_OK
                       : nrm__error(NRM_OUT_OF_MEMORY, "no memory for the registry");
}

nrm_status
nrm_registry_delete(const char *name)
{
    nrm_resource *old = NULL;
    nrm__lock_acquire(&lock);
    struct row *row = find_locked(name);
    bool known = row != NULL && is_known(row);
    if (known) {
        old = row->mr;
        row->mr = NULL;
    }
    nrm__lock_release(&lock);
    nrm_resource_release(old);
    return known ? NRM_OK : unknown(name);
}

bool
nrm_registry_contains(const char *name)
{
    nrm__lock_acquire(&lock);
    struct row *row = find_locked(name);
    bool known = row != NULL && is_known(row);
    nrm__lock_release(&lock);
    return known;
}

nrm_status
nrm_registry_name(size_t index, char *out, size_t size)
{
    nrm__lock_acquire(&lock);
    struct row *row = rows;
    for (; row != NULL; row = row->next) {
        if (is_known(row) && index-- == 0) {
            break;
        }
    }
    if (row != NULL) {
        snprintf(out, size, "%s", row->name);
    }
    nrm__lock_release(&lock);
    return row != NULL ? NRM_OK : NRM_NOT_FOUND;
}

bool
nrm_registry_needs_cuda(const char *name)
{
    nrm__lock_acquire(&lock);
    struct row *row = find_locked(name);
    bool needs = false;
    if (row != NULL && row->mr != NULL) {
        needs = row->mr->kind != NRM_KIND_HOST;
    }
    else if (row != NULL && row->builtin != NULL) {
        needs = row->builtin->needs_cuda;
    }
    nrm__lock_release(&lock);
    return needs;
}

/* ---- another driver ---- */

/* One resource that a factory made on the old driver, taken out of the table; NULL. */
static nrm_resource *
take_made_on_driver_locked(void)
{
    nrm_resource *mr = NULL;
    for (struct row *row = rows; row != NULL && mr == NULL; row = row->next) {
        if (row->mr != NULL && row->from_factory && row->builtin->needs_cuda) {
            mr = row->mr;
            row->mr = NULL;
        }
    }
    return mr;
}

void
nrm__registry_forget_driver(void)
{
    nrm_resource *mr;
    do {
        nrm__lock_acquire(&lock);
        mr = take_made_on_driver_locked();
        nrm__lock_release(&lock);
        nrm_resource_release(mr);
    } while (mr != NULL);
    nrm__current_forget_driver();
}

static const struct nrm__fork_hook fork_hook = {
    .rank = NRM__RANK_REGISTRY,
    .lock = &lock,
};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}
