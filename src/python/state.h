/*
 * What the module owns. Only Python-level calls read it: a NEP 49 function runs after
 * it is cleared.
 */
#ifndef NRM_PYTHON_STATE_H
#define NRM_PYTHON_STATE_H

#include <Python.h>

#include "cuda/driver.h"
#include "python/compat.h"

/* One number for each row of resources.def. */
enum resource_class {
#define RESOURCE(c_name, python_name, kind, signature, doc) RESOURCE_##c_name,
#include "resources.def"
#undef RESOURCE
    RESOURCE_N_CLASSES
};

enum { N_SPARE_BUFFERS = 16, N_SPARE_STREAMS = 8, N_FOREIGN_TYPES = 4 };

/* A type of another library whose streams have no protocol
   (python/foreign_stream.c). */
struct foreign_type {
    PyTypeObject *type;   /* borrowed, and perhaps dead: only to be compared */
    unsigned int version; /* its tp_version_tag, which no other state of a type has */
    int library;
};

struct module_state {
    PyTypeObject *handler_type;
    PyTypeObject *stream_type;
    PyTypeObject *pin_type;
    PyTypeObject *resource_type; /* MemoryResource */
    PyTypeObject *upstream_type; /* UpstreamResourceAdaptor */
    PyTypeObject *resource_types[RESOURCE_N_CLASSES];
    PyTypeObject *statistics_type;
    PyTypeObject *error_info_type;
    PyTypeObject *array_info_type;
    PyTypeObject *pending_type;
    PyTypeObject *device_buffer_type;
    PyTypeObject *device_array_type;
    PyTypeObject *event_type;
    PyTypeObject *pinned_view_type;
    PyTypeObject *callbacks_type;
    PyTypeObject *warden_type;

    PyObject *out_of_memory_error;
    PyObject *cuda_error;
    PyObject *cuda_unavailable_error;

    PyObject *default_stream; /* the Stream constants */
    PyObject *legacy_default_stream;
    PyObject *per_thread_default_stream;

    PyObject *byte_typestr;     /* "|u1" */
    PyObject *cuda_stream_name; /* "__cuda_stream__" */
    PyObject *ptr_name, *handle_name, *torch_stream_name, *value_name;

    PyObject *after_collection; /* a function for gc.callbacks */

    PyObject *wrappers;   /* address of a C resource -> weak reference of its object */
    PyObject *registered; /* name -> the object in the registry, kept alive */

    /* What a device's look-up gave last, kept alive, and buffers that died. Guarded by
       the critical section of `registered`. */
    PyObject *current[NRM__MAX_DEVICES];
    struct {
        PyObject *objects[N_SPARE_BUFFERS];
        int n;
    } spare_buffers;

    /* The memory of Streams that died, and types that were met last. Unused without the
       interpreter's lock. */
    struct {
        PyObject *objects[N_SPARE_STREAMS];
        int n;
    } spare_streams;
    struct foreign_type foreign_types[N_FOREIGN_TYPES];
    int next_foreign_type;
};

extern struct PyModuleDef core_module;

static inline struct module_state *
module_state(PyObject *module)
{
    return PyModule_GetState(module);
}

/* Of the module that defines `type`, or a base of it. NULL with an error set. */
static inline struct module_state *
type_state(PyTypeObject *type)
{
    PyObject *module = PyType_GetModuleByDef(type, &core_module);
    return module != NULL ? PyModule_GetState(module) : NULL;
}

#endif
