/*
 * Copies of contiguous bytes, of which one side is memory of a device: what the methods
 * of DeviceBuffer are made of.
 *
 * A copy is made on a stream, and comes after what the streams of the buffers at its
 * ends have been given. One with a side of the host is waited for, so that the caller
 * need not know what becomes of that; one between devices only on the default stream.
 * Otherwise the streams of both buffers wait for it, so that memory which is freed then
 * is still safe.
 */
#ifndef NRM_PYTHON_BYTE_COPY_H
#define NRM_PYTHON_BYTE_COPY_H

#include <Python.h>

#include "core/transfer.h"
#include "python/array_interface.h"
#include "python/device_buffer.h"

enum { N_ENDS = 2 };

struct byte_copy {
    char *dst;
    const char *src;
    size_t nbytes;
    enum nrm__direction direction;
    nrm_stream *stream;               /* borrowed */
    int device;                       /* whose special streams are meant */
    struct device_buffer *dst_buffer; /* borrowed, or NULL: it is in none of ours */
    struct device_buffer *src_buffer; /* the same */
    PyObject *src_object;       /* borrowed: to be kept while the copy runs; or NULL */
    uintptr_t producer;         /* handle of a stream that comes before; 0: none */
    bool never_waits;           /* not on the default stream either */
    nrm_stream *owners[N_ENDS]; /* for byte_copy.c: the streams of both buffers */
    int owner_devices[N_ENDS];
};

/* -1 with an error set fails. */
int byte_copy_run(struct module_state *state, struct byte_copy *copy);

/* Fills a new buffer with as many bytes from an address of whatever memory. */
int byte_copy_from_address(struct module_state *state, struct device_buffer *buffer,
                           uintptr_t ptr);

/* The bytes of a host buffer of one dimension, dense, of one-byte items; `flags` are
   further ones of PyObject_GetBuffer. -1 with a TypeError, BufferError or
   ValueError. */
int byte_copy_host(PyObject *object, const char *name, int flags, Py_buffer *out);

/* Raises ValueError, and returns -1, unless `nbytes` is at most `room`. */
int byte_copy_check_room(const char *name, size_t nbytes, const char *into,
                         size_t room);

/* copy_ptr_to_host(), copy_host_to_ptr() and copy_device_to_ptr(). */
extern PyMethodDef byte_copy_functions[];

#endif
