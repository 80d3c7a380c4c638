/* Where a thread is: the return addresses of its stack, and their names. */
#ifndef NRM_OS_STACK_H
#define NRM_OS_STACK_H

#include <stddef.h>

/* At most `n` of them, the innermost first; 0 where the C library cannot tell. */
size_t nrm__stack_get(void **out, size_t n);

/* To be called once before, as the first call loads a library. */
void nrm__stack_prepare(void);

/* "function+0x12 in /path/of/library.so"; returns the length, as snprintf. Takes the
   lock of the dynamic linker: no lock of ours is held. */
int nrm__stack_describe(const void *address, char *out, size_t size);

#endif
