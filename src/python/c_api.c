/* The function table of nrm/import.h. */
#include "python/c_api.h"

#include "nrm/import.h"
#include "python/memory_resource.h"

/* There is one interpreter. */
struct module_state *
c_api_state(void)
{
    PyObject *module = PyImport_ImportModule("numpy_rmm._core");
    if (module == NULL) {
        return NULL;
    }
    struct module_state *state = module_state(module);
    Py_DECREF(module); /* sys.modules keeps it */
    return state;
}

static nrm_resource *
resource_from_object(PyObject *object)
{
    struct module_state *state = c_api_state();
    return state == NULL ? NULL : memory_resource_get(state, object, "the argument");
}

static PyObject *
resource_to_object(nrm_resource *mr)
{
    struct module_state *state = c_api_state();
    return state == NULL ? NULL : memory_resource_wrap(state, mr);
}

static const struct nrm_functions functions = {.size = sizeof functions,
                                               .resource_from_object =
                                                   resource_from_object,
                                               .resource_to_object = resource_to_object,
#define ENTRY(name, result, arguments) .name = nrm_##name,
                                               NRM_C_API_FUNCTIONS(ENTRY)
#undef ENTRY
};

int
c_api_init(PyObject *module)
{
    PyObject *capsule = PyCapsule_New((void *)&functions, NRM_C_API_CAPSULE, NULL);
    if (capsule == NULL) {
        return -1;
    }
    int result = PyModule_AddObjectRef(module, "_C_API", capsule);
    Py_DECREF(capsule);
    return result;
}
