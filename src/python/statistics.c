/* ResourceStatistics: what a resource has counted, as a struct sequence. */
#include "python/statistics.h"

#include "python/errors.h"

static PyStructSequence_Field statistics_fields[] = {
    {"current_bytes", "requested bytes of live blocks"},
    {"current_count", "live blocks"},
    {"peak_bytes", "largest current_bytes so far"},
    {"peak_count", "largest current_count so far"},
    {"total_bytes", "requested bytes of all blocks so far"},
    {"total_count", "all blocks so far"},
    {"reserved_bytes", "bytes taken from the system, the driver or the upstream"},
    {"parked_bytes", "bytes given back that the GPU may still touch"},
    {"epochs", "epochs closed to learn when parked memory is free"},
    {"waits", "waits for an epoch"},
    {"fallbacks", "requests served by a fallback"},
    {"errors", "frees of addresses that were not this resource's"},
    {"segments_ahead", "segments taken ahead of demand, in the background"},
    {"failures_ahead", "times that this failed"},
    {NULL, NULL},
};

static PyStructSequence_Desc statistics_desc = {
    .name = "numpy_rmm.ResourceStatistics",
    .doc = "Counters of a resource or a handler. Sizes are in requested bytes.",
    .fields = statistics_fields,
    .n_in_sequence = 14,
};

PyObject *
statistics_of(struct module_state *state, nrm_resource *mr)
{
    nrm_statistics s;
    nrm_status status = nrm_resource_statistics(mr, &s);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    const int64_t values[] = {
        s.current_bytes,  s.current_count,  s.peak_bytes,     s.peak_count,
        s.total_bytes,    s.total_count,    s.reserved_bytes, s.parked_bytes,
        s.epochs,         s.waits,          s.fallbacks,      s.errors,
        s.segments_ahead, s.failures_ahead,
    };
    PyObject *result = PyStructSequence_New(state->statistics_type);
    for (int i = 0; result != NULL && i < 14; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) {
            Py_CLEAR(result);
            break;
        }
        PyStructSequence_SetItem(result, i, value);
    }
    return result;
}

int
statistics_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->statistics_type = PyStructSequence_NewType(&statistics_desc);
    return state->statistics_type == NULL
               ? -1
               : PyModule_AddType(module, state->statistics_type);
}
