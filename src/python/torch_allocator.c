/*
 * PyTorch's memory from the resources of the registry.
 *
 * PyTorch gives a block back by its address and a stream, and by then the current
 * resource may be another one. So what each block came from is kept beside it until its
 * end. A tensor that another stream uses (Tensor.record_stream) goes back as if the
 * host had freed it: the pool waits for the whole context before it hands the block out
 * again, and no stream is made to wait.
 *
 * PyTorch takes what is returned without a look: a NULL would be a tensor at address 0.
 * Its caching allocator does look, when it asks for the memory of a MemPool, and tries
 * again after it has let go of what it caches. It is the one who asks while PyTorch's
 * current allocator is still its own. So NULL is the answer then; otherwise c10::Error
 * is thrown, by a function of PyTorch that does no more: it passes through this file,
 * which is compiled for that, while no lock is held.
 */
#include "python/torch_allocator.h"

#include <stdatomic.h>
#include <stdint.h>

#include "base/error.h"
#include "base/tree.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/ops.h"
#include "nrm/registry.h"
#include "os/fork.h"
#include "python/args.h"

/* c10::detail::torchCheckFail(function, file, line, message), which does not return. */
typedef void (*throw_function)(const char *function, const char *file, uint32_t line,
                               const char *message);

static struct {
    _Atomic(throw_function) throw_error; /* NULL: none was found */
    _Atomic(_Atomic(void *) *) current;  /* PyTorch's current allocator */
    atomic_uintptr_t caching;            /* its caching allocator */
} torch;

struct allocation {
    struct nrm__tree_node node; /* what was asked for */
    nrm_resource *mr;           /* owned */
    bool is_shared;             /* other streams use it, too */
};

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_LEAF);
static struct nrm__tree allocations;

/* ---- allocation ---- */

static nrm_status
find_stream(uintptr_t handle, nrm_stream **out)
{
    if (handle > NRM_STREAM_HANDLE_LEGACY) {
        return nrm_stream_wrap(handle, NULL, NULL, out);
    }
    *out = handle == NRM_STREAM_HANDLE_LEGACY ? nrm_stream_legacy()
                                              : nrm_stream_default();
    return NRM_OK;
}

static nrm_status
find_resource(int device, nrm_resource **out)
{
    NRM_TRY(nrm_get_per_device_resource(device, out));
    if (!nrm_resource_calls_user_code(*out)) {
        return NRM_OK;
    }
    nrm_status status =
        nrm__error(NRM_NOT_SUPPORTED,
                   "%s calls Python code, which cannot run where PyTorch allocates",
                   nrm_resource_class_name(*out));
    nrm_resource_release(*out);
    return status;
}

static nrm_status
allocate_of(nrm_resource *mr, size_t nbytes, uintptr_t handle, void **out)
{
    nrm_stream *stream;
    struct allocation *self = nrm__node_allocate(sizeof *self);
    if (self == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe an allocation");
    }
    nrm_status status = find_stream(handle, &stream);
    if (status == NRM_OK) {
        status = nrm_resource_allocate(mr, nbytes, 0, stream, out);
        nrm_stream_release(stream);
    }
    if (status != NRM_OK) {
        nrm__node_deallocate(self, sizeof *self);
        return status;
    }
    nrm_resource_retain(mr);
    self->mr = mr;
    self->node.start = (uintptr_t)*out;
    self->node.nbytes = nbytes;
    nrm__lock_acquire(&lock);
    nrm__tree_insert(&allocations, &self->node);
    nrm__lock_release(&lock);
    return NRM_OK;
}

static nrm_status
allocate(size_t nbytes, int device, uintptr_t handle, void **out)
{
    nrm_resource *mr;
    NRM_TRY(find_resource(device, &mr));
    nrm_status status = allocate_of(mr, nbytes, handle, out);
    nrm_resource_release(mr);
    return status;
}

/* Whether who asks takes NULL for an answer. */
static bool
is_asked_by_pool(void)
{
    _Atomic(void *) *current = atomic_load(&torch.current);
    return current != NULL &&
           (uintptr_t)atomic_load(current) == atomic_load(&torch.caching);
}

void *
nrm_torch_allocate(ssize_t nbytes, int device, void *stream)
{
    void *ptr = NULL;
    if (nbytes <= 0 ||
        allocate((size_t)nbytes, device, (uintptr_t)stream, &ptr) == NRM_OK) {
        return ptr;
    }
    throw_function throw_error = atomic_load(&torch.throw_error);
    if (throw_error != NULL && !is_asked_by_pool()) {
        throw_error(__func__, __FILE__, __LINE__, nrm_last_error()->message);
    }
    return NULL;
}

/* ---- deallocation ---- */

static struct allocation *
take_out(uintptr_t address)
{
    nrm__lock_acquire(&lock);
    struct nrm__tree_node *node = nrm__tree_floor(&allocations, address);
    if (node != NULL && node->start != address) {
        node = NULL;
    }
    if (node != NULL) {
        nrm__tree_remove(&allocations, node);
    }
    nrm__lock_release(&lock);
    return (struct allocation *)node;
}

static nrm_status
give_back(const struct allocation *self, uintptr_t handle)
{
    nrm_stream *stream = NULL;
    if (!self->is_shared) {
        NRM_TRY(find_stream(handle, &stream));
    }
    nrm_status status = nrm_resource_deallocate(self->mr, (void *)self->node.start,
                                                self->node.nbytes, stream);
    nrm_stream_release(stream);
    return status;
}

void
nrm_torch_deallocate(void *ptr, ssize_t nbytes, int device, void *stream)
{
    (void)nbytes;
    (void)device;
    if (ptr == NULL) {
        return;
    }
    nrm_status status;
    struct allocation *self = take_out((uintptr_t)ptr);
    if (self != NULL) {
        status = give_back(self, (uintptr_t)stream);
        nrm_resource_release(self->mr);
        nrm__node_deallocate(self, sizeof *self);
    }
    else {
        status = nrm__error(NRM_NOT_OWNED,
                            "PyTorch gave %p back, which it has not from here", ptr);
    }
    if (status != NRM_OK && !nrm__is_exiting()) {
        nrm__lost_error_note(nrm_last_error());
    }
}

/* ---- what else PyTorch may ask for ---- */

void
nrm_torch_record_stream(void *ptr, void *stream)
{
    (void)stream;
    nrm__lock_acquire(&lock);
    struct nrm__tree_node *node = nrm__tree_find(&allocations, (uintptr_t)ptr);
    if (node != NULL) {
        ((struct allocation *)node)->is_shared = true;
    }
    nrm__lock_release(&lock);
}

static void
trim_device_memory(nrm_resource *mr, void *context)
{
    (void)context;
    if (nrm_resource_kind(mr) == NRM_KIND_DEVICE &&
        nrm_resource_trim(mr, 0, NULL) != NRM_OK) {
        nrm__lost_error_note(nrm_last_error());
    }
}

void
nrm_torch_empty_cache(void)
{
    nrm__resource_for_each(trim_device_memory, NULL);
}

/* ---- set-up ---- */

static PyObject *
torch_errors(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args)
{
    uintptr_t throw_error, current;
    if (n_args != 2) {
        PyErr_Format(PyExc_TypeError, "_torch_errors takes 2 addresses, not %zd",
                     n_args);
        return NULL;
    }
    if (arg_address(args[0], "throw_error", &throw_error) < 0 ||
        arg_address(args[1], "current", &current) < 0) {
        return NULL;
    }
    _Atomic(void *) *allocator = (_Atomic(void *) *)current;
    atomic_store(&torch.caching,
                 allocator != NULL ? (uintptr_t)atomic_load(allocator) : 0);
    atomic_store(&torch.current, allocator);
    atomic_store(&torch.throw_error, (throw_function)throw_error);
    Py_RETURN_NONE;
}

PyMethodDef torch_allocator_methods[] = {
    {"_torch_errors", (PyCFunction)(void (*)(void))torch_errors, METH_FASTCALL,
     PyDoc_STR(
         "_torch_errors($module, throw_error, current, /)\n--\n\n"
         "How PyTorch is told of errors: the address of the function that throws,\n"
         "and that of the pointer to its current allocator, which is the caching\n"
         "one now. 0: there is none.")},
    {NULL, NULL, 0, NULL},
};

int
torch_allocator_init(PyObject *Py_UNUSED(module))
{
    static const struct nrm__fork_hook hook = {.rank = NRM__RANK_LEAF, .lock = &lock};
    static atomic_flag is_added = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&is_added)) {
        nrm__fork_hook_add(&hook);
    }
    return 0;
}
