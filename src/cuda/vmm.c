/*
 * Mapping device memory. vmm.h says what for.
 *
 * A piece holds no handle: once it is mapped the creation's reference is released, and
 * the mapping alone keeps the memory, so unmapping gives it back.
 *
 * The list of pieces is there for peers that are added later. Whoever maps enters the
 * piece only if no peer has come since access was given, and gives it again otherwise;
 * whoever adds a peer makes it visible first and then walks the list. So either of them
 * sees the other. A piece leaves the list before it is unmapped, and an access that
 * fails because of that is no error.
 */
#include "cuda/vmm.h"

#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "cuda/context.h"
#include "os/fork.h"

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_CUDA);

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_CUDA, .lock = &lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

/* ---- whether it can be done ---- */

static bool
has_all_symbols(const struct nrm__driver *driver)
{
    return driver->cuMemAddressReserve != NULL && driver->cuMemAddressFree != NULL &&
           driver->cuMemCreate != NULL && driver->cuMemRelease != NULL &&
           driver->cuMemMap != NULL && driver->cuMemUnmap != NULL &&
           driver->cuMemSetAccess != NULL &&
           driver->cuMemGetAllocationGranularity != NULL;
}

const char *
nrm__vmm_reason(int device)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL) {
        return "CUDA is not initialised";
    }
    if (device < 0 || device >= driver->n_devices) {
        return "there is no such device";
    }
    if (!has_all_symbols(driver)) {
        return "the driver lacks calls of its virtual memory management";
    }
    if (nrm__cuda_attribute(
            device, NRM_CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) <= 0) {
        return "the device does not support virtual memory management";
    }
    return NULL;
}

static nrm_CUmemAllocationProp
prop_of(const struct nrm__driver *driver, int device)
{
    return (nrm_CUmemAllocationProp){
        .type = NRM_CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = NRM_CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE,
                     .id = driver->devices[device]},
    };
}

nrm_status
nrm__vmm_granularity(int device, size_t *out)
{
    const struct nrm__driver *driver;
    size_t granularity;
    NRM_TRY(nrm__cuda_init(&driver));
    const char *reason = nrm__vmm_reason(device);
    if (reason != NULL) {
        return nrm__error(NRM_NOT_SUPPORTED, "no memory can be mapped on device %d: %s",
                          device, reason);
    }
    nrm_CUmemAllocationProp prop = prop_of(driver, device);
    nrm_CUresult code = driver->cuMemGetAllocationGranularity(
        &granularity, &prop, NRM_CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "cuMemGetAllocationGranularity on device %d",
                               device);
    }
    *out = granularity;
    return NRM_OK;
}

/* ---- the range ---- */

nrm_status
nrm__vmm_init(struct nrm__vmm_range *range, int device, size_t nbytes)
{
    size_t granularity = 0;
    struct nrm__cuda_scope scope;
    nrm_CUdeviceptr base = 0;
    NRM_TRY(nrm__vmm_granularity(device, &granularity));
    if (nbytes == 0 || nbytes > SIZE_MAX / 2) {
        return nrm__error(NRM_INVALID_VALUE, "%zu bytes of addresses on device %d",
                          nbytes, device);
    }
    nbytes = nrm__align_up(nbytes, granularity);
    NRM_TRY(nrm__cuda_enter(device, &scope));
    nrm_CUresult code =
        scope.driver->cuMemAddressReserve(&base, nbytes, granularity, 0, 0);
    nrm__cuda_leave(&scope);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "cuMemAddressReserve of %zu bytes on device %d",
                               nbytes, device);
    }
    *range = (struct nrm__vmm_range){
        .base = base,
        .nbytes = nbytes,
        .granularity = granularity,
        .device = device,
        .open_to = UINT64_C(1) << device,
    };
    nrm__list_init(&range->pieces);
    return NRM_OK;
}

/* The table, with the range's context entered if it lives: these calls need none, and a
   context is not made to give something back. */
static nrm_status
enter(int device, struct nrm__cuda_scope *scope, bool *entered)
{
    nrm_status status = nrm__cuda_enter_existing(device, scope);
    *entered = status == NRM_OK;
    if (!*entered) {
        scope->driver = nrm__cuda_driver();
        if (scope->driver == NULL || nrm__cuda_is_exiting()) {
            return nrm__error(NRM_CUDA_UNAVAILABLE,
                              "device memory cannot be given back: the driver is gone");
        }
    }
    return NRM_OK;
}

static void
leave(struct nrm__cuda_scope *scope, bool entered)
{
    if (entered) {
        nrm__cuda_leave(scope);
    }
}

nrm_status
nrm__vmm_finish(struct nrm__vmm_range *range)
{
    struct nrm__cuda_scope scope;
    bool entered;
    nrm__lock_acquire(&lock);
    bool is_empty = nrm__list_is_empty(&range->pieces);
    nrm__lock_release(&lock);
    if (!is_empty) {
        return nrm__error(NRM_INVALID_VALUE,
                          "memory is mapped in the %zu bytes of addresses at 0x%llx",
                          range->nbytes, range->base);
    }
    NRM_TRY(enter(range->device, &scope, &entered));
    nrm_CUresult code = scope.driver->cuMemAddressFree(range->base, range->nbytes);
    leave(&scope, entered);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuMemAddressFree of %zu bytes on device %d",
                                 range->nbytes, range->device);
}

/* ---- access ---- */

static nrm_CUresult
set_access(const struct nrm__driver *driver, const struct nrm__vmm_range *range,
           size_t offset, size_t nbytes, uint64_t open_to)
{
    nrm_CUmemAccessDesc access[NRM__MAX_DEVICES];
    size_t n = 0;
    for (int i = 0; i < driver->n_devices; i++) {
        if ((open_to >> i & 1) != 0) {
            access[n++] = (nrm_CUmemAccessDesc){
                .location = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE,
                             .id = driver->devices[i]},
                .flags = NRM_CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
        }
    }
    return driver->cuMemSetAccess(range->base + offset, nbytes, access, n);
}

static void
enter_piece(struct nrm__vmm_range *range, struct nrm__vmm_piece *piece)
{
    nrm__lock_acquire(&lock);
    nrm__list_append(&range->pieces, &piece->link);
    nrm__lock_release(&lock);
}

/* Enters a piece when it is open to everybody who may touch the range. */
static nrm_CUresult
publish(const struct nrm__driver *driver, struct nrm__vmm_range *range,
        struct nrm__vmm_piece *piece)
{
    for (;;) {
        nrm__lock_acquire(&lock);
        uint64_t open_to = range->open_to;
        bool is_open = piece->open_to == open_to;
        if (is_open) {
            nrm__list_append(&range->pieces, &piece->link);
        }
        nrm__lock_release(&lock);
        if (is_open) {
            return NRM_CUDA_SUCCESS;
        }
        nrm_CUresult code =
            set_access(driver, range, piece->offset, piece->nbytes, open_to);
        if (code != NRM_CUDA_SUCCESS) {
            return code;
        }
        piece->open_to = open_to;
    }
}

/* The piece that follows the offset, closed to the device; copied, for it may go. */
static bool
find_closed(struct nrm__vmm_range *range, size_t from, uint64_t bit,
            struct nrm__vmm_piece *out)
{
    bool found = false;
    nrm__lock_acquire(&lock);
    struct nrm__link *link = range->pieces.next;
    for (; link != &range->pieces; link = link->next) {
        const struct nrm__vmm_piece *piece =
            NRM__CONTAINER(link, struct nrm__vmm_piece, link);
        if (piece->offset >= from && (piece->open_to & bit) == 0 &&
            (!found || piece->offset < out->offset)) {
            *out = *piece;
            found = true;
        }
    }
    nrm__lock_release(&lock);
    return found;
}

/* Notes that a piece was opened; false: it is no longer there. */
static bool
note_open(struct nrm__vmm_range *range, const struct nrm__vmm_piece *copy,
          uint64_t bits)
{
    bool found = false;
    nrm__lock_acquire(&lock);
    struct nrm__link *link = range->pieces.next;
    for (; link != &range->pieces && !found; link = link->next) {
        struct nrm__vmm_piece *piece =
            NRM__CONTAINER(link, struct nrm__vmm_piece, link);
        found = piece->offset == copy->offset && piece->nbytes == copy->nbytes;
        if (found) {
            piece->open_to |= bits;
        }
    }
    nrm__lock_release(&lock);
    return found;
}

static void
set_open(struct nrm__vmm_range *range, uint64_t bit, bool open)
{
    nrm__lock_acquire(&lock);
    range->open_to = open ? range->open_to | bit : range->open_to & ~bit;
    nrm__lock_release(&lock);
}

nrm_status
nrm__vmm_add_peer(struct nrm__vmm_range *range, int device)
{
    struct nrm__cuda_scope scope;
    struct nrm__vmm_piece piece = {0};
    NRM_TRY(nrm__cuda_enter(range->device, &scope));
    if (device < 0 || device >= scope.driver->n_devices) {
        nrm__cuda_leave(&scope);
        return nrm__error(NRM_INVALID_VALUE, "there is no device %d", device);
    }
    uint64_t bit = UINT64_C(1) << device;
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    set_open(range, bit, true);
    for (size_t from = 0; find_closed(range, from, bit, &piece);
         from = piece.offset + piece.nbytes) {
        code = set_access(scope.driver, range, piece.offset, piece.nbytes, bit);
        if (!note_open(range, &piece, code == NRM_CUDA_SUCCESS ? bit : 0)) {
            code = NRM_CUDA_SUCCESS;
        }
        if (code != NRM_CUDA_SUCCESS) {
            set_open(range, bit, false);
            break;
        }
    }
    nrm__cuda_leave(&scope);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuMemSetAccess of device %d to memory of %d",
                                 device, range->device);
}

/* ---- pieces ---- */

static nrm_status
check_place(const struct nrm__vmm_range *range, size_t offset, size_t nbytes)
{
    if (nbytes == 0 || nbytes % range->granularity != 0 ||
        offset % range->granularity != 0 || offset > range->nbytes ||
        nbytes > range->nbytes - offset) {
        return nrm__error(NRM_INVALID_VALUE,
                          "%zu bytes at offset %zu of %zu cannot be mapped: multiples "
                          "of %zu can",
                          nbytes, offset, range->nbytes, range->granularity);
    }
    return NRM_OK;
}

/* Undone with a second try where the first one fails: nothing else would give it
   back. */
static nrm_CUresult
release(const struct nrm__driver *driver, nrm_CUmemGenericAllocationHandle handle)
{
    nrm_CUresult code = driver->cuMemRelease(handle);
    if (code != NRM_CUDA_SUCCESS) {
        (void)driver->cuMemRelease(handle);
    }
    return code;
}

static nrm_status
map(const struct nrm__driver *driver, struct nrm__vmm_range *range,
    struct nrm__vmm_piece *piece)
{
    nrm_CUmemAllocationProp prop = prop_of(driver, range->device);
    nrm_CUmemGenericAllocationHandle handle;
    nrm_CUdeviceptr ptr = range->base + piece->offset;
    const char *what = "cuMemCreate";
    nrm_CUresult code = driver->cuMemCreate(&handle, piece->nbytes, &prop, 0);
    if (code != NRM_CUDA_SUCCESS) {
        goto fail;
    }
    what = "cuMemMap";
    code = driver->cuMemMap(ptr, piece->nbytes, 0, handle, 0);
    if (code != NRM_CUDA_SUCCESS) {
        (void)release(driver, handle);
        goto fail;
    }
    what = "cuMemRelease";
    code = release(driver, handle); /* from here on the mapping keeps the memory */
    if (code == NRM_CUDA_SUCCESS) {
        what = "cuMemSetAccess";
        code = publish(driver, range, piece);
    }
    if (code == NRM_CUDA_SUCCESS) {
        return NRM_OK;
    }
    if (driver->cuMemUnmap(ptr, piece->nbytes) != NRM_CUDA_SUCCESS) {
        (void)driver->cuMemUnmap(ptr, piece->nbytes);
    }
fail:
    return nrm__cuda_error(code, "%s of %zu bytes on device %d", what, piece->nbytes,
                           range->device);
}

nrm_status
nrm__vmm_map(struct nrm__vmm_range *range, size_t offset, size_t nbytes,
             struct nrm__vmm_piece *piece)
{
    struct nrm__cuda_scope scope;
    NRM_TRY(check_place(range, offset, nbytes));
    NRM_TRY(nrm__cuda_enter(range->device, &scope));
    *piece = (struct nrm__vmm_piece){.offset = offset, .nbytes = nbytes};
    nrm_status status = map(scope.driver, range, piece);
    nrm__cuda_leave(&scope);
    return status;
}

nrm_status
nrm__vmm_unmap(struct nrm__vmm_range *range, struct nrm__vmm_piece *piece)
{
    struct nrm__cuda_scope scope;
    bool entered;
    NRM_TRY(enter(range->device, &scope, &entered));
    nrm__lock_acquire(&lock);
    nrm__list_remove(&piece->link);
    nrm__lock_release(&lock);
    nrm_CUresult code =
        scope.driver->cuMemUnmap(range->base + piece->offset, piece->nbytes);
    nrm_status status = NRM_OK;
    if (code != NRM_CUDA_SUCCESS) {
        status = nrm__cuda_error(code, "cuMemUnmap of %zu bytes on device %d",
                                 piece->nbytes, range->device);
        if (publish(scope.driver, range, piece) != NRM_CUDA_SUCCESS) {
            enter_piece(range, piece); /* closed to a peer, but not lost */
        }
    }
    leave(&scope, entered);
    return status;
}
