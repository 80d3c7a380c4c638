/* What the kernel's own table says of memory that somebody else has mapped. */
#ifndef NRM_OS_MAPPING_H
#define NRM_OS_MAPPING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct nrm__mapping {
    uintptr_t hole;      /* the first byte that cannot be read, 0: there is none */
    bool is_writable;    /* all of it */
    bool is_shared;      /* all of it: a child made by fork has the same pages */
    bool is_shared_file; /* a part is a writable shared mapping of a file, of `path` */
    char path[1024];     /* may be cut */
};

/* Reads the table, which takes longer the more the process has mapped. False: it cannot
   be read, and `out` holds nothing. `nbytes` is not 0. */
bool nrm__mapping_of(const void *ptr, size_t nbytes, struct nrm__mapping *out);

#endif
