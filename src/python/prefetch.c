/* prefetch(): arguments in, one call of the core. */
#include "python/prefetch.h"

#include "base/error.h"
#include "core/hooks.h"
#include "core/prefetch.h"
#include "core/transfer.h"
#include "cuda/device.h"
#include "python/args.h"
#include "python/cuda_query.h"
#include "python/errors.h"
#include "python/signature.h"
#include "python/stream.h"

/* Behind what the memory's own stream has been given, and that one behind it. */
static nrm_status
prefetch_in_order(const struct device_memory *memory, const char *ptr, size_t nbytes,
                  int target, nrm_stream *stream)
{
    NRM_TRY(nrm__transfer_join(memory->device, stream, memory->device, memory->stream));
    NRM_TRY(nrm__prefetch(ptr, nbytes, target, memory->device, stream));
    return nrm__transfer_join(memory->device, memory->stream, memory->device, stream);
}

PyObject *
prefetch_method(struct module_state *state, struct device_memory *memory,
                const char *ptr, size_t nbytes, PyObject *const *args,
                Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("prefetch", PREFETCH_TEXT);
    PyObject *values[2];
    long target = memory->device != NRM_DEVICE_NONE ? memory->device
                                                    : cuda_current_device();
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        (!arg_is_none(values[0]) &&
         arg_integer(values[0], "device", NRM__PREFETCH_TO_HOST, NRM__MAX_DEVICES - 1,
                     &target) < 0)) {
        return NULL;
    }
    nrm_stream *stream = memory->stream;
    nrm_stream_retain(stream);
    if (!arg_is_none(values[1])) {
        nrm_stream_release(stream);
        stream = stream_get(state, values[1]);
    }
    if (stream == NULL) {
        return NULL;
    }
    nrm_status status = NRM_OK;
    if (nbytes != 0 && memory->mr != NULL &&
        nrm_resource_kind(memory->mr) == NRM_KIND_MANAGED) {
        void *token = nrm__detach();
        status = prefetch_in_order(memory, ptr, nbytes, (int)target, stream);
        nrm__attach(token);
    }
    nrm_stream_release(stream);
    return status == NRM_OK ? Py_NewRef(Py_None) : errors_raise(state, status);
}
