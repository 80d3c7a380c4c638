/*
 * Stacks by the C library's unwinder, names by the dynamic linker: it knows only what a
 * library exports. Both are there with glibc; elsewhere stacks are empty.
 */
#include "os/stack.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

#if defined(__has_include)
#if __has_include(<execinfo.h>)
#include <execinfo.h>
#define HAS_BACKTRACE 1
#endif
#endif

size_t
nrm__stack_get(void **out, size_t n)
{
#ifdef HAS_BACKTRACE
    int found = backtrace(out, (int)n);
    return found > 0 ? (size_t)found : 0;
#else
    (void)out;
    (void)n;
    return 0;
#endif
}

void
nrm__stack_prepare(void)
{
    void *address;
    (void)nrm__stack_get(&address, 1);
}

int
nrm__stack_describe(const void *address, char *out, size_t size)
{
    Dl_info info;
    if (dladdr(address, &info) == 0 || info.dli_fname == NULL) {
        return snprintf(out, size, "%p", address);
    }
    if (info.dli_sname == NULL) {
        return snprintf(out, size, "%p (+0x%zx) in %s", address,
                        (size_t)((uintptr_t)address - (uintptr_t)info.dli_fbase),
                        info.dli_fname);
    }
    return snprintf(out, size, "%p %s+0x%zx in %s", address, info.dli_sname,
                    (size_t)((uintptr_t)address - (uintptr_t)info.dli_saddr),
                    info.dli_fname);
}
