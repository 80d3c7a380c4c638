/* What `info` shows of page-locked memory. */
#ifndef NRM_SOURCES_PINNED_H
#define NRM_SOURCES_PINNED_H

#include <stddef.h>

/* "cuMemHostRegister", or "cuMemHostAlloc: " and why; "" before anything was pinned. */
void nrm__pinned_method(char *out, size_t size);

/* Bytes that this process has page-locked through us now. */
size_t nrm__pinned_nbytes(void);

#endif
