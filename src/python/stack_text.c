/*
 * The lines of a Python program that wait for a block, the innermost first, as the
 * traceback module writes them but without the source: that would be read from files at
 * each allocation.
 */
#include "python/stack_text.h"

#include <stdio.h>

#include "adaptors/tracking.h"
#include "python/compat.h"

/* Of the text; 0: it has no more room, or could not be read. */
static int
write_frame(PyFrameObject *frame, char *out, size_t size)
{
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    PyObject *file = PyObject_GetAttrString(code, "co_filename");
    PyObject *name = PyObject_GetAttrString(code, "co_name");
    const char *file_text = file != NULL ? PyUnicode_AsUTF8(file) : NULL;
    const char *name_text = name != NULL ? PyUnicode_AsUTF8(name) : NULL;
    int n = 0;
    if (file_text != NULL && name_text != NULL) {
        n = snprintf(out, size, "  File \"%s\", line %d, in %s\n", file_text,
                     PyFrame_GetLineNumber(frame), name_text);
    }
    if (n < 0 || (size_t)n >= size) {
        out[0] = '\0'; /* whole lines only */
        n = 0;
    }
    Py_XDECREF(file);
    Py_XDECREF(name);
    Py_DECREF(code);
    return n;
}

static void
write_stack(char *out, size_t size)
{
    PyFrameObject *frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    out[0] = '\0';
    for (int n = 1; frame != NULL && n > 0;) {
        n = write_frame(frame, out, size);
        out += n;
        size -= (size_t)n;
        PyFrameObject *outer = n > 0 ? PyFrame_GetBack(frame) : NULL;
        Py_DECREF(frame);
        frame = outer;
    }
}

void
stack_text_annotate(nrm_resource *mr, const void *ptr)
{
    char text[NRM__TRACKING_TEXT_NBYTES];
    PyObject *pending = compat_take_error();
    write_stack(text, sizeof text);
    PyErr_Clear();
    nrm__tracking_annotate(mr, ptr, text);
    compat_restore_error(pending);
}
