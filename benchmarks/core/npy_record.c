/*
 * A NumPy handler that notes what arrays ask for and hands it on to NumPy's default.
 * Compiled by benchmarks/record.py.
 *
 *     start() -> the handler's capsule
 *     stop()  -> bytes: of each call (what, old address, new address, bytes), 64 bits
 *                each
 *
 * NumPy may call a handler from any thread, with and without the interpreter's lock, so
 * the notes have a lock of their own. Calls after stop() are handed on and not noted.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>

struct note {
    uint64_t what; /* '+', '-', '=', as in the trace */
    uint64_t old_address, new_address, nbytes;
};

static struct {
    pthread_mutex_t lock;
    PyDataMem_Handler *base;
    struct note *notes;
    size_t n_notes, capacity;
    int is_noting, is_full;
} recorder = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Called with the lock held, so that notes stand in the order in which memory changed
   hands. */
static void
note_locked(char what, void *old, void *new, size_t nbytes)
{
    if (!recorder.is_noting) {
        return;
    }
    if (recorder.n_notes == recorder.capacity) {
        size_t capacity = recorder.capacity ? 2 * recorder.capacity : 65536;
        struct note *notes = realloc(recorder.notes, capacity * sizeof *notes);
        if (notes == NULL) { /* stop() says so */
            recorder.is_noting = 0;
            recorder.is_full = 1;
            return;
        }
        recorder.notes = notes;
        recorder.capacity = capacity;
    }
    recorder.notes[recorder.n_notes++] = (struct note){
        (uint64_t)what, (uint64_t)(uintptr_t)old, (uint64_t)(uintptr_t)new, nbytes};
}

static void *
record_malloc(void *ctx, size_t nbytes)
{
    (void)ctx;
    pthread_mutex_lock(&recorder.lock);
    void *ptr = recorder.base->allocator.malloc(recorder.base->allocator.ctx, nbytes);
    if (ptr != NULL) {
        note_locked('+', NULL, ptr, nbytes);
    }
    pthread_mutex_unlock(&recorder.lock);
    return ptr;
}

static void *
record_calloc(void *ctx, size_t n_items, size_t nbytes)
{
    (void)ctx;
    pthread_mutex_lock(&recorder.lock);
    void *ptr =
        recorder.base->allocator.calloc(recorder.base->allocator.ctx, n_items, nbytes);
    if (ptr != NULL) {
        note_locked('+', NULL, ptr, n_items * nbytes);
    }
    pthread_mutex_unlock(&recorder.lock);
    return ptr;
}

static void *
record_realloc(void *ctx, void *old, size_t nbytes)
{
    (void)ctx;
    uintptr_t address = (uintptr_t)old;
    pthread_mutex_lock(&recorder.lock);
    void *ptr =
        recorder.base->allocator.realloc(recorder.base->allocator.ctx, old, nbytes);
    if (ptr != NULL) {
        note_locked(address == 0 ? '+' : '=', (void *)address, ptr, nbytes);
    }
    pthread_mutex_unlock(&recorder.lock);
    return ptr;
}

static void
record_free(void *ctx, void *ptr, size_t nbytes)
{
    (void)ctx;
    pthread_mutex_lock(&recorder.lock);
    if (ptr != NULL) {
        note_locked('-', ptr, NULL, nbytes);
    }
    recorder.base->allocator.free(recorder.base->allocator.ctx, ptr, nbytes);
    pthread_mutex_unlock(&recorder.lock);
}

static PyDataMem_Handler handler = {
    "nrm_record",
    1,
    {NULL, record_malloc, record_calloc, record_realloc, record_free},
};

static PyObject *
record_start(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (recorder.base == NULL) {
        recorder.base = PyCapsule_GetPointer(PyDataMem_DefaultHandler, "mem_handler");
        if (recorder.base == NULL) {
            return NULL;
        }
    }
    pthread_mutex_lock(&recorder.lock);
    recorder.is_noting = 1;
    recorder.n_notes = 0;
    pthread_mutex_unlock(&recorder.lock);
    return PyCapsule_New(&handler, "mem_handler", NULL);
}

static PyObject *
record_stop(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    pthread_mutex_lock(&recorder.lock);
    recorder.is_noting = 0;
    pthread_mutex_unlock(&recorder.lock); /* nobody changes the notes from here on */
    if (recorder.is_full) {
        return PyErr_NoMemory();
    }
    return PyBytes_FromStringAndSize(
        (const char *)recorder.notes,
        (Py_ssize_t)(recorder.n_notes * sizeof *recorder.notes));
}

static PyMethodDef methods[] = {
    {"start", record_start, METH_NOARGS, NULL},
    {"stop", record_stop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "npy_record",
                                        .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC
PyInit_npy_record(void)
{
    import_array();
    return PyModule_Create(&definition);
}
