/* Moving bytes when an operation executes.
 *
 * Host memory is read and written at that moment and not before, so a buffer reused
 * too early really gives wrong bytes. It is touched only by the kernel, with pwrite
 * and pread on a memory file: where a load would be a segmentation fault, they answer
 * EFAULT. That happens when registered memory was unmapped. A real driver then goes on
 * with the old pages; here the bytes as they were at the registration stand in for
 * them, as far as they were kept, and a fault is recorded. */
#include "sim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BOUNCE_NBYTES = 256 * 1024 };

static const size_t PAGE_NBYTES = 4096;

/* Between two host buffers the bytes take the way over this file. */
static struct {
    pthread_mutex_t lock; /* under the state lock or none, for one piece at a time */
    int fd;
    unsigned char bounce[BOUNCE_NBYTES];
} scratch = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void
scratch_open(void)
{
    scratch.fd = memfd_create("cudasim-scratch", MFD_CLOEXEC);
    if (scratch.fd < 0) {
        abort(); /* no copy could be made at all */
    }
}

void
sim_transfer_fork_child(void)
{
    pthread_mutex_init(&scratch.lock, NULL);
}

/* One piece of a copy: how far the kernel came before it met an unmapped page. */
static size_t
file_move(int fd, uint64_t offset, uintptr_t address, size_t nbytes, bool writes)
{
    size_t done = 0;
    while (done < nbytes) {
        void *rest = (void *)(address + done);
        off_t at = (off_t)(offset + done);
        ssize_t n = writes ? pwrite(fd, rest, nbytes - done, at)
                           : pread(fd, rest, nbytes - done, at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            break;
        }
        done += (size_t)n;
    }
    return done;
}

static size_t
file_write(int fd, uint64_t offset, const void *from, size_t nbytes)
{
    return file_move(fd, offset, (uintptr_t)from, nbytes, true);
}

static size_t
file_read(int fd, uint64_t offset, void *to, size_t nbytes)
{
    return file_move(fd, offset, (uintptr_t)to, nbytes, false);
}

static bool
read_piece(void *to, uintptr_t from, size_t nbytes)
{
    pthread_mutex_lock(&scratch.lock);
    bool complete = file_write(scratch.fd, 0, (const void *)from, nbytes) == nbytes &&
                    file_read(scratch.fd, 0, to, nbytes) == nbytes;
    pthread_mutex_unlock(&scratch.lock);
    return complete;
}

bool
sim_bytes_read(void *to, uintptr_t from, size_t nbytes)
{
    pthread_once(&scratch_once, scratch_open);
    for (size_t done = 0; done < nbytes;) {
        size_t piece = nbytes - done < BOUNCE_NBYTES ? nbytes - done : BOUNCE_NBYTES;
        if (!read_piece((char *)to + done, from + done, piece)) {
            return false;
        }
        done += piece;
    }
    return true;
}

/* ---- the shape of a copy --------------------------------------------------------- */

struct sim_copy
sim_copy_flat(uintptr_t dst, uintptr_t src, size_t nbytes)
{
    return (struct sim_copy){
        .dst = {.address = dst, .pitch = nbytes, .slice = nbytes},
        .src = {.address = src, .pitch = nbytes, .slice = nbytes},
        .width = nbytes,
        .height = 1,
        .depth = 1,
    };
}

size_t
sim_copy_extent(const struct sim_copy *copy, const struct sim_span *span)
{
    return (copy->depth - 1) * span->slice + (copy->height - 1) * span->pitch +
           copy->width;
}

size_t
sim_copy_n_rows(const struct sim_copy *copy)
{
    return copy->height * copy->depth;
}

uintptr_t
sim_copy_row(const struct sim_copy *copy, const struct sim_span *span, size_t row)
{
    return span->address + row / copy->height * span->slice +
           row % copy->height * span->pitch;
}

/* ---- one side of a copy ---------------------------------------------------------- */

static bool
is_on_device(const struct sim_span *span)
{
    return !span->is_reserved && span->range != NULL &&
           (span->range->kind == SIM_DEVICE || span->range->kind == SIM_PHYSICAL);
}

static const struct sim_device *
device_of(const struct sim_span *span)
{
    return &sim.devices[span->range->context->ordinal];
}

static uint64_t
device_offset(const struct sim_span *span)
{
    return span->address - device_of(span)->base;
}

static size_t
bytes_to_page_end(uintptr_t address, size_t nbytes)
{
    size_t rest = PAGE_NBYTES - address % PAGE_NBYTES;
    return rest < nbytes ? rest : nbytes;
}

static void
report(const struct sim_span *span, enum sim_call_id call, const char *did)
{
    if (span->range != NULL) {
        sim_fault("%s %s 0x%zx, which was unmapped while it was registered "
                  "(0x%zx, %zu bytes)",
                  sim_call_name(call), did, span->address, span->range->start,
                  span->range->nbytes);
    }
    else {
        sim_fault("%s %s 0x%zx, which is not mapped", sim_call_name(call), did,
                  span->address);
    }
}

/* What the copy engine of a real card finds where the page tables of the process
 * end. */
static void
shadow_read(const struct sim_span *span, void *to, size_t nbytes)
{
    if (span->range != NULL && span->range->shadow != NULL) {
        memcpy(to, span->range->shadow + (span->address - span->range->start), nbytes);
    }
    else {
        memset(to, 0, nbytes);
    }
}

static void
shadow_write(const struct sim_span *span, const void *from, size_t nbytes)
{
    if (span->range != NULL && span->range->shadow != NULL) {
        memcpy(span->range->shadow + (span->address - span->range->start), from,
               nbytes);
    }
}

/* Reads up to BOUNCE_NBYTES into the bounce buffer, whatever is the matter with
 * them. */
static void
span_read_locked(struct sim_span span, size_t nbytes, enum sim_call_id call)
{
    if (is_on_device(&span)) {
        file_read(device_of(&span)->fd, device_offset(&span), scratch.bounce, nbytes);
        return;
    }
    size_t done = 0;
    bool reported = false;
    while (done < nbytes) {
        size_t n =
            file_write(scratch.fd, done, (const void *)span.address, nbytes - done);
        if (n == 0) {
            if (!reported) {
                report(&span, call, "read");
                reported = true;
            }
            unsigned char page[4096];
            n = bytes_to_page_end(span.address, nbytes - done);
            shadow_read(&span, page, n);
            file_write(scratch.fd, done, page, n);
        }
        done += n;
        span.address += n;
    }
    file_read(scratch.fd, 0, scratch.bounce, nbytes);
}

static void
span_write_locked(struct sim_span span, size_t nbytes, enum sim_call_id call)
{
    if (is_on_device(&span)) {
        if (file_write(device_of(&span)->fd, device_offset(&span), scratch.bounce,
                       nbytes) != nbytes) {
            sim_fault("%s: the machine has no memory left for the simulated device",
                      sim_call_name(call));
        }
        return;
    }
    file_write(scratch.fd, 0, scratch.bounce, nbytes);
    size_t done = 0;
    bool reported = false;
    while (done < nbytes) {
        size_t n = file_read(scratch.fd, done, (void *)span.address, nbytes - done);
        if (n == 0) {
            if (!reported) {
                report(&span, call, "wrote");
                reported = true;
            }
            n = bytes_to_page_end(span.address, nbytes - done);
            shadow_write(&span, scratch.bounce + done, n);
        }
        done += n;
        span.address += n;
    }
}

/* ---- reserved addresses ---------------------------------------------------------- */

/* What stands in for a side of a copy while its bytes move. */
struct place {
    struct sim_span span;
    struct sim_physical *physical; /* used */
    bool is_missing;
};

/* Cuts *nbytes to what lies in one piece of memory. */
static struct place
place_find(struct sim_span span, size_t *nbytes, enum sim_call_id call, const char *did)
{
    struct place place = {.span = span};
    if (!span.is_reserved) {
        return place;
    }
    sim_lock();
    place.physical = sim_virtual_use(&place.span, nbytes);
    sim_unlock();
    place.is_missing = place.physical == NULL;
    if (place.is_missing) {
        sim_fault("%s %s 0x%zx, which has been unmapped", sim_call_name(call), did,
                  span.address);
    }
    return place;
}

static void
place_leave(const struct place *place)
{
    if (place->physical != NULL) {
        sim_lock();
        sim_virtual_unuse(place->physical);
        sim_unlock();
    }
}

/* ---- operations ------------------------------------------------------------------ */

/* Between a host and a device one system call moves a whole row; what it leaves over,
 * and every other pair, goes through the bounce buffer. */
static void
piece_copy(struct sim_span dst, struct sim_span src, size_t nbytes,
           enum sim_call_id call)
{
    size_t done = 0;
    if (is_on_device(&dst) && !is_on_device(&src)) {
        done = file_write(device_of(&dst)->fd, device_offset(&dst),
                          (const void *)src.address, nbytes);
    }
    else if (is_on_device(&src) && !is_on_device(&dst)) {
        done = file_read(device_of(&src)->fd, device_offset(&src), (void *)dst.address,
                         nbytes);
    }
    dst.address += done;
    src.address += done;
    while (done < nbytes) {
        size_t n = nbytes - done < BOUNCE_NBYTES ? nbytes - done : BOUNCE_NBYTES;
        pthread_mutex_lock(&scratch.lock);
        span_read_locked(src, n, call);
        span_write_locked(dst, n, call);
        pthread_mutex_unlock(&scratch.lock);
        dst.address += n;
        src.address += n;
        done += n;
    }
}

static void
row_copy(struct sim_span dst, struct sim_span src, size_t nbytes, enum sim_call_id call)
{
    while (nbytes > 0) {
        size_t n = nbytes;
        struct place to = place_find(dst, &n, call, "wrote");
        struct place from = place_find(src, &n, call, "read");
        if (!to.is_missing && !from.is_missing) {
            piece_copy(to.span, from.span, n, call);
        }
        place_leave(&to);
        place_leave(&from);
        dst.address += n;
        src.address += n;
        nbytes -= n;
    }
}

void
sim_copy_execute(const struct sim_copy *copy, enum sim_call_id call)
{
    pthread_once(&scratch_once, scratch_open);
    struct sim_span dst = copy->dst;
    struct sim_span src = copy->src;
    for (size_t row = 0; row < sim_copy_n_rows(copy); row++) {
        dst.address = sim_copy_row(copy, &copy->dst, row);
        src.address = sim_copy_row(copy, &copy->src, row);
        row_copy(dst, src, copy->width, call);
    }
}

void
sim_fill_execute(const struct sim_copy *copy, unsigned char value,
                 enum sim_call_id call)
{
    pthread_once(&scratch_once, scratch_open);
    struct sim_span dst = copy->dst;
    for (size_t done = 0; done < copy->width;) {
        size_t rest = copy->width - done;
        size_t n = rest < BOUNCE_NBYTES ? rest : BOUNCE_NBYTES;
        struct place place = place_find(dst, &n, call, "wrote");
        if (!place.is_missing) {
            pthread_mutex_lock(&scratch.lock);
            memset(scratch.bounce, value, n);
            span_write_locked(place.span, n, call);
            pthread_mutex_unlock(&scratch.lock);
        }
        place_leave(&place);
        dst.address += n;
        done += n;
    }
}

static uint32_t
virtual_word_read(struct sim_span span)
{
    uint32_t word = 0;
    size_t nbytes = sizeof word;
    struct sim_physical *physical = sim_virtual_use(&span, &nbytes);
    if (physical != NULL) {
        word = sim_word_read(&span);
        sim_virtual_unuse(physical);
    }
    return word;
}

/* A word that the host may be writing: the driver's own memory is read atomically,
 * other memory by the kernel, because it may have been unmapped. */
uint32_t
sim_word_read(const struct sim_span *span)
{
    uint32_t word = 0;
    if (span->is_reserved) {
        return virtual_word_read(*span);
    }
    if (is_on_device(span)) {
        file_read(device_of(span)->fd, device_offset(span), &word, sizeof word);
    }
    else if (span->range != NULL && span->range->kind != SIM_REGISTERED) {
        word = __atomic_load_n((const uint32_t *)span->address, __ATOMIC_ACQUIRE);
    }
    else {
        sim_bytes_read(&word, span->address, sizeof word);
    }
    return word;
}
