/*
 * From Python's arguments to the option structs of the core, one function for each row
 * of resources.def.
 */
#include "python/constructors.h"

#include <limits.h>

#include "cuda/context.h"
#include "core/ops.h"
#include "nrm/adaptors.h"
#include "nrm/pools.h"
#include "nrm/sources.h"
#include "os/system.h"
#include "python/args.h"
#include "python/callback.h"
#include "python/cuda_query.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/signature.h"

/* `values` are in the order of the signature; NULL where the default holds. */
typedef nrm_resource *(*construct_function)(struct module_state *state,
                                            PyObject **values, void **out_callbacks);

static nrm_resource *
made(struct module_state *state, nrm_status status, nrm_resource *mr)
{
    if (status != NRM_OK) {
        return (nrm_resource *)errors_raise(state, status);
    }
    return mr;
}

/* ---- sources ---- */

static int
huge_pages_argument(PyObject *value, nrm_huge_pages *out)
{
    if (value == NULL) {
        *out = NRM_HUGE_PAGES_AUTO;
        return 0;
    }
    if (PyBool_Check(value)) {
        *out = value == Py_True ? NRM_HUGE_PAGES_ALWAYS : NRM_HUGE_PAGES_NEVER;
        return 0;
    }
    if (PyUnicode_Check(value) &&
        PyUnicode_CompareWithASCIIString(value, "auto") == 0) {
        *out = NRM_HUGE_PAGES_AUTO;
        return 0;
    }
    PyErr_Format(PyUnicode_Check(value) ? PyExc_ValueError : PyExc_TypeError,
                 "huge_pages must be 'auto', True or False, not %R", value);
    return -1;
}

static nrm_resource *
construct_host(struct module_state *state, PyObject **values,
               void **Py_UNUSED(callbacks))
{
    nrm_host_options options = NRM_OPTIONS(nrm_host_options);
    long node = 0;
    if (huge_pages_argument(values[0], &options.huge_pages) < 0) {
        return NULL;
    }
    if (!arg_is_none(values[1])) {
        if (arg_integer(values[1], "numa_node", 0, INT_MAX, &node) < 0) {
            return NULL;
        }
        options.bind_numa = true;
        options.numa_node = (int)node;
    }
    if (values[2] != NULL &&
        arg_alignment(values[2], "alignment", &options.alignment) < 0) {
        return NULL;
    }
    nrm_resource *mr;
    nrm_status status = nrm_host_create(&options, &mr);
    return made(state, status, mr);
}

/* The ordinal that `device` names; -1 with an error set. */
static int
device_argument(PyObject *device, bool *out_set, int *out)
{
    long ordinal = 0;
    if (arg_is_none(device)) {
        return 0;
    }
    if (arg_integer(device, "device", 0, NRM__MAX_DEVICES - 1, &ordinal) < 0) {
        return -1;
    }
    *out_set = true;
    *out = (int)ordinal;
    return 0;
}

static int
flag_argument(PyObject *value, bool *out)
{
    int flag = value != NULL ? PyObject_IsTrue(value) : 0;
    *out = flag > 0;
    return flag < 0 ? -1 : 0;
}

/* A size, or a percentage of what memory of a kind there is; of a device, what is
   free. */
static int
size_argument(struct module_state *state, nrm_kind kind, int device, PyObject *value,
              const char *name, size_t *out)
{
    double percent;
    size_t whole, total;
    if (arg_is_none(value)) {
        return 0;
    }
    if (arg_nbytes_or_percent(value, name, out, &percent) < 0) {
        return -1;
    }
    if (percent < 0) {
        return 0;
    }
    if (kind == NRM_KIND_HOST || kind == NRM_KIND_PINNED) {
        whole = nrm__host_memory_nbytes();
    }
    else if (cuda_memory_info(state, device, &whole, &total) < 0) {
        return -1;
    }
    *out = (size_t)((double)whole * percent / 100);
    return 0;
}

static nrm_resource *
construct_on_device(struct module_state *state, PyObject *device,
                    bool allow_nonconcurrent,
                    nrm_status (*create)(const nrm_device_options *, nrm_resource **))
{
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    options.allow_nonconcurrent = allow_nonconcurrent;
    if (device_argument(device, &options.set_device, &options.device) < 0) {
        return NULL;
    }
    nrm_resource *mr;
    nrm_status status = create(&options, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_pinned(struct module_state *state, PyObject **values,
                 void **Py_UNUSED(callbacks))
{
    return construct_on_device(state, values[0], false, nrm_pinned_create);
}

static nrm_resource *
construct_managed(struct module_state *state, PyObject **values,
                  void **Py_UNUSED(callbacks))
{
    int allow_nonconcurrent = values[1] != NULL ? PyObject_IsTrue(values[1]) : 0;
    if (allow_nonconcurrent < 0) {
        return NULL;
    }
    return construct_on_device(state, values[0], allow_nonconcurrent != 0,
                               nrm_managed_create);
}

static nrm_resource *
construct_device(struct module_state *state, PyObject **values,
                 void **Py_UNUSED(callbacks))
{
    return construct_on_device(state, values[0], false, nrm_device_create);
}

static nrm_resource *
construct_cuda_async(struct module_state *state, PyObject **values,
                     void **Py_UNUSED(callbacks))
{
    nrm_cuda_async_options options = NRM_OPTIONS(nrm_cuda_async_options);
    size_t threshold = 0;
    options.set_release_threshold = !arg_is_none(values[1]);
    if (device_argument(values[4], &options.set_device, &options.device) < 0 ||
        size_argument(state, NRM_KIND_DEVICE,
                      options.set_device ? options.device : NRM_DEVICE_NONE, values[0],
                      "initial_pool_size", &options.initial_nbytes) < 0 ||
        (options.set_release_threshold &&
         arg_nbytes(values[1], "release_threshold", &threshold) < 0) ||
        flag_argument(values[2], &options.enable_ipc) < 0 ||
        flag_argument(values[3], &options.enable_fabric) < 0) {
        return NULL;
    }
    options.release_threshold = threshold;
    nrm_resource *mr;
    nrm_status status = nrm_cuda_async_create(&options, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_cuda_async_view(struct module_state *state, PyObject **values,
                          void **Py_UNUSED(callbacks))
{
    nrm_cuda_async_view_options options = NRM_OPTIONS(nrm_cuda_async_view_options);
    if (arg_driver_handle(values[0], "pool_handle", &options.pool_handle) < 0 ||
        device_argument(values[1], &options.set_device, &options.device) < 0) {
        return NULL;
    }
    nrm_resource *mr;
    nrm_status status = nrm_cuda_async_view_create(&options, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_cuda_async_managed(struct module_state *state, PyObject **values,
                             void **Py_UNUSED(callbacks))
{
    return construct_on_device(state, values[0], false, nrm_cuda_async_managed_create);
}

static nrm_resource *
construct_system(struct module_state *state, PyObject **values,
                 void **Py_UNUSED(callbacks))
{
    return construct_on_device(state, values[0], false, nrm_system_create);
}

static nrm_resource *
construct_sam_headroom(struct module_state *state, PyObject **values,
                       void **Py_UNUSED(callbacks))
{
    nrm_sam_headroom_options options = NRM_OPTIONS(nrm_sam_headroom_options);
    if (arg_nbytes(values[0], "headroom", &options.headroom) < 0 ||
        device_argument(values[1], &options.set_device, &options.device) < 0) {
        return NULL;
    }
    nrm_resource *mr;
    nrm_status status = nrm_sam_headroom_create(&options, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_callback(struct module_state *state, PyObject **values, void **out_callbacks)
{
    static const char *const kinds[] = {"host", "pinned", "managed", "device", NULL};
    int kind = NRM_KIND_DEVICE;
    if (values[2] != NULL && arg_choice(values[2], "kind", kinds, &kind) < 0) {
        return NULL;
    }
    return callback_create(state, values[0], values[1], (nrm_kind)kind, out_callbacks);
}

/* ---- pools ---- */

static int
pool_size_argument(struct module_state *state, nrm_resource *upstream, PyObject *value,
                   const char *name, size_t *out)
{
    return size_argument(state, nrm_resource_kind(upstream),
                         nrm_resource_device(upstream), value, name, out);
}

/* What a full pool does. To serve host memory is for handlers to do, which have
   arrays. */
static int
exhausted_argument(const nrm_resource *upstream, PyObject *value,
                   nrm_pool_options *options, unsigned *out_flags)
{
    static const char *const words[] = {"host", "error", "wait", NULL};
    int choice;
    *out_flags = 0;
    if (arg_is_none(value)) {
        return 0;
    }
    if (arg_choice(value, "on_exhausted", words, &choice) < 0) {
        return -1;
    }
    nrm_kind kind = nrm_resource_kind(upstream);
    if (choice == 0 && kind != NRM_KIND_PINNED && kind != NRM_KIND_MANAGED) {
        PyErr_SetString(PyExc_ValueError,
                        "on_exhausted='host' is for pools of page-locked and managed "
                        "memory, in whose place a handler can give host memory");
        return -1;
    }
    options->on_exhausted = choice == 2 ? NRM_ON_EXHAUSTED_WAIT
                                        : NRM_ON_EXHAUSTED_ERROR;
    *out_flags = choice == 0 ? NRM__OPS_HOST_WHEN_FULL : NRM__OPS_NO_FALLBACK;
    return 0;
}

static nrm_resource *
construct_pool(struct module_state *state, PyObject **values,
               void **Py_UNUSED(callbacks))
{
    static const char *const reuse_words[] = {"context", "immediate", "recorded", NULL};
    static const char *const segments_words[] = {"vmm", "alloc", NULL};
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    int choice;
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    if (upstream == NULL ||
        pool_size_argument(state, upstream, values[1], "initial_pool_size",
                           &options.initial_nbytes) < 0 ||
        pool_size_argument(state, upstream, values[2], "maximum_pool_size",
                           &options.maximum_nbytes) < 0) {
        return NULL;
    }
    if (!arg_is_none(values[2]) && options.maximum_nbytes == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "maximum_pool_size must be more than 0 bytes");
        return NULL;
    }
    if (!arg_is_none(values[3])) {
        if (arg_choice(values[3], "reuse", reuse_words, &choice) < 0) {
            return NULL;
        }
        options.reuse = (nrm_reuse)(NRM_REUSE_CONTEXT + choice); /* in that order */
    }
    if (!arg_is_none(values[4]) &&
        arg_nbytes(values[4], "parked_limit", &options.parked_limit) < 0) {
        return NULL;
    }
    if (!arg_is_none(values[5]) &&
        arg_duration(values[5], "wait_limit", &options.wait_limit_ns) < 0) {
        return NULL;
    }
    unsigned flags;
    if (exhausted_argument(upstream, values[6], &options, &flags) < 0) {
        return NULL;
    }
    if (!arg_is_none(values[7])) {
        if (arg_choice(values[7], "segments", segments_words, &choice) < 0) {
            return NULL;
        }
        options.segments = choice == 0 ? NRM_SEGMENTS_VMM : NRM_SEGMENTS_ALLOC;
    }
    int grow_ahead = values[8] != NULL ? PyObject_IsTrue(values[8]) : 0;
    if (grow_ahead < 0) {
        return NULL;
    }
    options.grow_ahead = grow_ahead != 0;
    nrm_resource *mr;
    nrm_status status = nrm_pool_create(upstream, &options, &mr);
    if (status == NRM_OK) {
        mr->flags |= flags; /* nobody else has it yet */
    }
    return made(state, status, mr);
}

static nrm_resource *
construct_fixed_size(struct module_state *state, PyObject **values,
                     void **Py_UNUSED(callbacks))
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    long n_blocks = 0;
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    if (upstream == NULL) {
        return NULL;
    }
    if (values[1] != NULL &&
        arg_nbytes(values[1], "block_size", &options.block_nbytes) < 0) {
        return NULL;
    }
    if (values[1] != NULL && options.block_nbytes == 0) {
        PyErr_SetString(PyExc_ValueError, "block_size must be more than 0 bytes");
        return NULL;
    }
    if (values[2] != NULL &&
        arg_integer(values[2], "blocks_to_preallocate", 1, LONG_MAX, &n_blocks) < 0) {
        return NULL;
    }
    options.n_blocks = (size_t)n_blocks;
    nrm_resource *mr;
    nrm_status status = nrm_fixed_size_create(upstream, &options, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_binning(struct module_state *state, PyObject **values,
                  void **Py_UNUSED(callbacks))
{
    nrm_binning_options options = NRM_OPTIONS(nrm_binning_options);
    long low = -1, high = -1;
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    if (upstream == NULL ||
        (values[1] != NULL &&
         arg_integer(values[1], "min_size_exponent", -1, 62, &low) < 0) ||
        (values[2] != NULL &&
         arg_integer(values[2], "max_size_exponent", -1, 62, &high) < 0)) {
        return NULL;
    }
    if ((low < 0) != (high < 0) || low > high) {
        PyErr_Format(PyExc_ValueError,
                     "min_size_exponent (%ld) must not be larger than "
                     "max_size_exponent (%ld), and both are given or none",
                     low, high);
        return NULL;
    }
    options.make_bins = low >= 0;
    options.min_exponent = options.make_bins ? (unsigned)low : 0;
    options.max_exponent = options.make_bins ? (unsigned)high : 0;
    nrm_resource *mr;
    nrm_status status = nrm_binning_create(upstream, &options, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_arena(struct module_state *state, PyObject **values,
                void **Py_UNUSED(callbacks))
{
    nrm_arena_options options = NRM_OPTIONS(nrm_arena_options);
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    if (upstream == NULL || pool_size_argument(state, upstream, values[1], "arena_size",
                                               &options.nbytes) < 0) {
        return NULL;
    }
    if (!arg_is_none(values[1]) && options.nbytes == 0) {
        PyErr_SetString(PyExc_ValueError, "arena_size must be more than 0 bytes");
        return NULL;
    }
    int dumps = values[2] != NULL ? PyObject_IsTrue(values[2]) : 0;
    if (dumps < 0) {
        return NULL;
    }
    options.dump_log_on_failure = dumps != 0;
    nrm_resource *mr;
    nrm_status status = nrm_arena_create(upstream, &options, &mr);
    return made(state, status, mr);
}

/* ---- adaptors ---- */

static nrm_resource *
construct_statistics(struct module_state *state, PyObject **values,
                     void **Py_UNUSED(callbacks))
{
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    if (upstream == NULL) {
        return NULL;
    }
    nrm_resource *mr;
    nrm_status status = nrm_statistics_create(upstream, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_limiting(struct module_state *state, PyObject **values,
                   void **Py_UNUSED(callbacks))
{
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    if (upstream == NULL ||
        arg_nbytes(values[1], "allocation_limit", &options.allocation_limit) < 0 ||
        (values[2] != NULL &&
         arg_alignment(values[2], "alignment", &options.alignment) < 0)) {
        return NULL;
    }
    nrm_resource *mr;
    nrm_status status = nrm_limiting_create(upstream, &options, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_aligned(struct module_state *state, PyObject **values,
                  void **Py_UNUSED(callbacks))
{
    nrm_aligned_options options = NRM_OPTIONS(nrm_aligned_options);
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    if (upstream == NULL ||
        (values[1] != NULL &&
         arg_alignment(values[1], "alignment", &options.alignment) < 0) ||
        (values[2] != NULL && arg_nbytes(values[2], "alignment_threshold",
                                         &options.alignment_threshold) < 0)) {
        return NULL;
    }
    nrm_resource *mr;
    nrm_status status = nrm_aligned_create(upstream, &options, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_prefetch(struct module_state *state, PyObject **values,
                   void **Py_UNUSED(callbacks))
{
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    if (upstream == NULL) {
        return NULL;
    }
    nrm_resource *mr;
    nrm_status status = nrm_prefetch_create(upstream, &mr);
    return made(state, status, mr);
}

static nrm_resource *
construct_failure_callback(struct module_state *state, PyObject **values,
                           void **out_callbacks)
{
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    return upstream == NULL
               ? NULL
               : callback_create_failure(state, upstream, values[1], out_callbacks);
}

static nrm_resource *
construct_tracking(struct module_state *state, PyObject **values,
                   void **Py_UNUSED(callbacks))
{
    nrm_tracking_options options = NRM_OPTIONS(nrm_tracking_options);
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    int captures = values[1] != NULL ? PyObject_IsTrue(values[1]) : 0;
    if (upstream == NULL || captures < 0) {
        return NULL;
    }
    options.capture_stacks = captures != 0;
    nrm_resource *mr;
    nrm_status status = nrm_tracking_create(upstream, &options, &mr);
    return made(state, status, mr);
}

/* Logs of what devices have are told apart by their names. */
static nrm_resource *
construct_logging(struct module_state *state, PyObject **values,
                  void **Py_UNUSED(callbacks))
{
    nrm_logging_options options = NRM_OPTIONS(nrm_logging_options);
    PyObject *path = NULL;
    nrm_resource *upstream = memory_resource_get(state, values[0], "upstream_mr");
    if (upstream == NULL ||
        (!arg_is_none(values[1]) && !PyUnicode_FSConverter(values[1], (void *)&path))) {
        return NULL;
    }
    nrm_kind kind = nrm_resource_kind(upstream);
    options.path = path != NULL ? PyBytes_AS_STRING(path) : NULL;
    options.name_device = kind == NRM_KIND_DEVICE || kind == NRM_KIND_MANAGED;
    options.device = nrm_resource_device(upstream);
    if (options.device == NRM_DEVICE_NONE) {
        options.device = cuda_current_device();
    }
    nrm_resource *mr;
    nrm_status status = nrm_logging_create(upstream, &options, &mr);
    Py_XDECREF(path);
    return made(state, status, mr);
}

/* ---- the table ---- */

#define RESOURCE(c_name, python_name, kind, text, doc) SIGNATURE(#python_name, text),
static struct signature signatures[RESOURCE_N_CLASSES] = {
#include "resources.def"
};
#undef RESOURCE

#define RESOURCE(c_name, python_name, kind, text, doc) construct_##c_name,
static const construct_function functions[RESOURCE_N_CLASSES] = {
#include "resources.def"
};
#undef RESOURCE

nrm_resource *
constructor_call(struct module_state *state, enum resource_class row, PyObject *args,
                 PyObject *keywords, void **out_callbacks)
{
    PyObject *values[SIGNATURE_MAX];
    if (signature_bind_tuple(&signatures[row], args, keywords, values) < 0) {
        return NULL;
    }
    nrm_resource *mr = functions[row](state, values, out_callbacks);
    if (mr != NULL) {
        PyErr_Clear(); /* of a callback that a pool asked again, for less */
    }
    return mr;
}
