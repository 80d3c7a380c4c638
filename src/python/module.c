/*
 * numpy_rmm._core: the extension, put together from one file for each concept.
 */
#define NRM_IMPORTS_NUMPY
#include "python/numpy_api.h"

#include "builtin.h"
#include "python/adaptors.h"
#include "python/array_copy.h"
#include "python/array_info.h"
#include "python/byte_copy.h"
#include "python/c_api.h"
#include "python/callbacks.h"
#include "python/cuda_query.h"
#include "python/device_array.h"
#include "python/device_buffer.h"
#include "python/device_scalar.h"
#include "python/dlpack_array.h"
#include "python/dlpack_exchange.h"
#include "python/errors.h"
#include "python/event.h"
#include "python/fork.h"
#include "python/handler_functions.h"
#include "python/handler_type.h"
#include "python/interpreter.h"
#include "python/memory_resource.h"
#include "python/options.h"
#include "python/pending.h"
#include "python/pin.h"
#include "python/registry.h"
#include "python/resource_methods.h"
#include "python/scopes.h"
#include "python/state.h"
#include "python/statistics.h"
#include "python/stream.h"
#include "python/stream_pool.h"
#include "python/system_info.h"
#include "python/torch_allocator.h"
#include "python/uses.h"

/* Every object that the state holds, in the order of struct module_state. */
#define FOR_EACH_OBJECT(X, state)                                                      \
    X((state)->handler_type)                                                           \
    X((state)->stream_type)                                                            \
    X((state)->pin_type)                                                               \
    X((state)->resource_type)                                                          \
    X((state)->upstream_type)                                                          \
    X((state)->statistics_type)                                                        \
    X((state)->error_info_type)                                                        \
    X((state)->array_info_type)                                                        \
    X((state)->pending_type)                                                           \
    X((state)->device_buffer_type)                                                     \
    X((state)->device_array_type)                                                      \
    X((state)->event_type)                                                             \
    X((state)->pinned_view_type)                                                       \
    X((state)->callbacks_type)                                                         \
    X((state)->warden_type)                                                            \
    X((state)->after_collection)                                                       \
    X((state)->out_of_memory_error)                                                    \
    X((state)->cuda_error)                                                             \
    X((state)->cuda_unavailable_error)                                                 \
    X((state)->default_stream)                                                         \
    X((state)->legacy_default_stream)                                                  \
    X((state)->per_thread_default_stream)                                              \
    X((state)->byte_typestr)                                                           \
    X((state)->cuda_stream_name)                                                       \
    X((state)->ptr_name)                                                               \
    X((state)->handle_name)                                                            \
    X((state)->torch_stream_name)                                                      \
    X((state)->value_name)                                                             \
    X((state)->wrappers)                                                               \
    X((state)->registered)

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct module_state *state = module_state(module);
#define VISIT(object) Py_VISIT(object);
    FOR_EACH_OBJECT(VISIT, state)
#undef VISIT
    for (int i = 0; i < RESOURCE_N_CLASSES; i++) {
        Py_VISIT(state->resource_types[i]);
    }
    for (int i = 0; i < NRM__MAX_DEVICES; i++) {
        Py_VISIT(state->current[i]);
    }
    return 0;
}

static int
module_clear(PyObject *module)
{
    struct module_state *state = module_state(module);
#define CLEAR(object) Py_CLEAR(object);
    FOR_EACH_OBJECT(CLEAR, state)
#undef CLEAR
    for (int i = 0; i < RESOURCE_N_CLASSES; i++) {
        Py_CLEAR(state->resource_types[i]);
    }
    for (int i = 0; i < NRM__MAX_DEVICES; i++) {
        Py_CLEAR(state->current[i]);
    }
    device_buffer_forget_spares(state);
    stream_forget_spares(state);
    return 0;
}

static void
module_free(void *module)
{
    (void)module_clear(module);
}

static int
add_functions(PyObject *module)
{
    PyMethodDef *const tables[] = {
        errors_methods,         memory_resource_functions,
        resource_functions,     handler_functions,
        registry_methods,       options_methods,
        array_info_methods,     cuda_query_methods,
        system_info_methods,    stream_functions,
        uses_functions,         array_copy_functions,
        byte_copy_functions,    device_buffer_functions,
        device_array_functions, torch_allocator_methods,
        dlpack_array_functions, adaptor_functions,
        scopes_functions,
    };
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
builtin_init(PyObject *module)
{
    nrm_status status = nrm__builtin_init();
    return status == NRM_OK || errors_raise(module_state(module), status) ? 0 : -1;
}

/* Before 3.12 a module cannot say so, and from then on not every one asks. */
static int
check_interpreter(void)
{
    if (PyInterpreterState_Get() == PyInterpreterState_Main()) {
        return 0;
    }
    PyErr_SetString(PyExc_ImportError,
                    "numpy_rmm cannot be imported in a subinterpreter: as NumPy, it "
                    "works in the main one only");
    return -1;
}

static int
module_exec(PyObject *module)
{
    if (check_interpreter() < 0 || PyArray_ImportNumPyAPI() < 0) {
        return -1;
    }
    static int (*const steps[])(PyObject *) = {
        errors_init,        interpreter_init,
        builtin_init,       stream_init,
        statistics_init,    memory_resource_init,
        callbacks_init,     registry_init,
        handler_type_init,  array_info_init,
        pending_init,       pin_init,
        event_init,         stream_pool_init,
        device_buffer_init, device_array_init,
        device_scalar_init, c_api_init,
        fork_init,          torch_allocator_init,
        dlpack_array_init,  dlpack_exchange_init,
        add_functions,
    };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (steps[i](module) < 0) {
            return -1;
        }
    }
    return PyModule_AddStringConstant(module, "__version__", NRM_VERSION);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    /* As NumPy: one interpreter. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "numpy_rmm._core",
    .m_doc =
        PyDoc_STR("The resource core of numpy_rmm; use the package, not this module."),
    .m_size = sizeof(struct module_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
