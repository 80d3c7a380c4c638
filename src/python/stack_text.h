/* Where a Python program is, as text. */
#ifndef NRM_PYTHON_STACK_TEXT_H
#define NRM_PYTHON_STACK_TEXT_H

#include <Python.h>

#include "nrm/resource.h"

/* Tells the adaptors on the way of a new block that want to know where the program
   asked for it. An exception that is pending stays so; what goes wrong here is left
   out. */
void stack_text_annotate(nrm_resource *mr, const void *ptr);

#endif
