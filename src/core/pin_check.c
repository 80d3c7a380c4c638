/*
 * Before memory of others is page-locked: whose it is, what stands behind it, and its
 * pages.
 */
#include "core/pin_check.h"

#include <stdint.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "core/block_map.h"
#include "nrm/options.h"
#include "os/mapping.h"
#include "os/memory.h"
#include "os/system.h"
#include "os/touch.h"

#define PREFAULT_MIN_NBYTES (4 * NRM__MIB)
#define CHECK_MIN_NBYTES (64 * NRM__MIB) /* of pages to be made: may kill the process */
#define SHOWN_PATH 100 /* bytes of a path, from its end, in an error */

nrm_status
nrm__pin_check_block(const void *ptr, size_t nbytes)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return NRM_NOT_FOUND;
    }
    nrm_kind kind = block.owner->kind;
    size_t left =
        block.capacity - (size_t)((const char *)ptr - (const char *)block.ptr);
    nrm_resource_release(block.owner);
    if (kind == NRM_KIND_PINNED && nbytes <= left) {
        return NRM_OK;
    }
    if (kind == NRM_KIND_MANAGED || kind == NRM_KIND_DEVICE) {
        return nrm__error(NRM_INVALID_VALUE,
                          "%zu B at 0x%zx are %s memory, which cannot be page-locked",
                          nbytes, (size_t)(uintptr_t)ptr, nrm_kind_name(kind));
    }
    return NRM_NOT_FOUND;
}

/* The driver refuses a writable mapping of a file only where the kernel does. Older
   kernels lock its pages, and what a device writes there then may not reach the
   file. */
nrm_status
nrm__pin_check_mapping(const void *ptr, size_t nbytes, bool *read_only, bool *is_shared)
{
    struct nrm__mapping mapping;
    if (!nrm__mapping_of(ptr, nbytes, &mapping)) {
        return NRM_OK; /* then the driver has to say it */
    }
    if (mapping.hole != 0) {
        return nrm__error(
            NRM_INVALID_VALUE,
            "%zu B at 0x%zx cannot be page-locked: what is at 0x%zx cannot be read",
            nbytes, (size_t)(uintptr_t)ptr, (size_t)mapping.hole);
    }
    if (mapping.is_shared_file) {
        size_t length = strlen(mapping.path);
        size_t cut = length > SHOWN_PATH ? length - SHOWN_PATH : 0;
        return nrm__error(
            NRM_INVALID_VALUE,
            "%zu B at 0x%zx cannot be page-locked: they are a writable "
            "mapping of the file %s%s; map it with mode \"r\" or \"c\", or "
            "use a copy",
            nbytes, (size_t)(uintptr_t)ptr, cut != 0 ? "..." : "", &mapping.path[cut]);
    }
    *read_only = *read_only || !mapping.is_writable;
    *is_shared = mapping.is_shared;
    return NRM_OK;
}

/* The driver would make the pages that are not there one by one in one thread; the
   kernel makes them in several, and writes nothing but zeros to new ones. */
nrm_status
nrm__pin_make_pages(void *ptr, size_t nbytes, bool read_only)
{
    char absent_text[32], touchable_text[32];
    size_t absent = nrm__absent_nbytes(ptr, nbytes);
    if (absent >= CHECK_MIN_NBYTES) {
        size_t touchable = nrm__touchable_nbytes();
        if (absent > touchable) {
            nrm_format_nbytes(absent, absent_text, sizeof absent_text);
            nrm_format_nbytes(touchable, touchable_text, sizeof touchable_text);
            return nrm__error(
                NRM_OUT_OF_MEMORY,
                "%s of the memory to be page-locked were never touched, and "
                "%s can be without the process being killed",
                absent_text, touchable_text);
        }
    }
    if (absent >= PREFAULT_MIN_NBYTES) {
        nrm__prefault(ptr, nbytes, (int)nrm_option_get(NRM_OPT_TOUCH_THREADS),
                      !read_only);
    }
    return NRM_OK;
}
