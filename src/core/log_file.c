/*
 * Rows as RMM writes them: `Thread,Time,Action,Pointer,Size,Stream`.
 *
 * They are put together by hand, as that takes a fifth of what printf does, and a drain
 * may have to keep up with a thread that does nothing but allocate. A file is opened
 * for appending, so that a forked child, which goes on with it, overwrites nothing. The
 * zone of local time is asked for when the file is opened: asking takes a lock of the C
 * library, which a forked child may find taken for ever.
 */
#include "core/log_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "os/memory.h"

#define SECOND_NS INT64_C(1000000000)
#define DAY_S INT64_C(86400)

static const char header[] = "Thread,Time,Action,Pointer,Size,Stream\n";

static const char *const action_names[] = {
    [NRM__LOG_ALLOCATE] = "allocate",
    [NRM__LOG_FAILURE] = "allocate failure",
    [NRM__LOG_FREE] = "free",
};

/* ---- rows ---- */

static char *
put_text(char *at, const char *text)
{
    size_t n = strlen(text);
    memcpy(at, text, n);
    return at + n;
}

static char *
put_number(char *at, uint64_t value, unsigned base)
{
    char digits[24];
    size_t n = 0;
    do {
        digits[n++] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value != 0);
    while (n > 0) {
        *at++ = digits[--n];
    }
    return at;
}

static char *
put_padded(char *at, unsigned value, unsigned n_digits)
{
    for (unsigned i = n_digits; i-- > 0; value /= 10) {
        at[i] = (char)('0' + value % 10);
    }
    return at + n_digits;
}

static char *
put_address(char *at, uintptr_t address, const char *zero)
{
    return address != 0 ? put_number(put_text(at, "0x"), address, 16)
                        : put_text(at, zero);
}

/* HH:MM:SS.us */
static char *
put_time(char *at, int64_t real_ns, int zone_s)
{
    int64_t second = real_ns / SECOND_NS + zone_s;
    unsigned of_day = (unsigned)((second % DAY_S + DAY_S) % DAY_S);
    at = put_padded(at, of_day / 3600, 2);
    *at++ = ':';
    at = put_padded(at, of_day / 60 % 60, 2);
    *at++ = ':';
    at = put_padded(at, of_day % 60, 2);
    *at++ = '.';
    return put_padded(at, (unsigned)(real_ns % SECOND_NS / 1000), 6);
}

void
nrm__log_file_add(struct nrm__log_file *file, const struct nrm__log_record *record,
                  int thread, int64_t real_ns)
{
    char *at = file->text + file->n_text;
    at = put_number(at, (uint64_t)thread, 10);
    *at++ = ',';
    at = put_time(at, real_ns, file->zone_s);
    *at++ = ',';
    at = put_text(at, action_names[record->action]);
    *at++ = ',';
    at = put_address(at, (uintptr_t)record->ptr, "(nil)");
    *at++ = ',';
    at = put_number(at, record->nbytes, 10);
    *at++ = ',';
    at = put_address(at, record->stream, "0");
    *at++ = '\n';
    file->n_text = (size_t)(at - file->text);
    file->n_rows++;
}

/* ---- writing ---- */

/* What of a text was written; all of it, or errno says why not. */
static size_t
write_some(int descriptor, const char *text, size_t nbytes)
{
    size_t n_written = 0;
    while (n_written < nbytes) {
        ssize_t n = write(descriptor, text + n_written, nbytes - n_written);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n == 0 ? EIO : errno;
            break;
        }
        n_written += (size_t)n;
    }
    return n_written;
}

static size_t
count_rows(const char *text, size_t nbytes)
{
    size_t n = 0;
    const char *end = text + nbytes;
    while ((text = memchr(text, '\n', (size_t)(end - text))) != NULL) {
        text++;
        n++;
    }
    return n;
}

static void
note_lost(struct nrm__log_file *file, size_t n, int code)
{
    file->error = code;
    atomic_fetch_add_explicit(&file->n_lost, n, memory_order_relaxed);
    nrm__warning_post(NRM__WARN_LOG, "rows of the log %s are lost: %s", file->path,
                      nrm__errno_name(code));
}

void
nrm__log_file_write(struct nrm__log_file *file)
{
    if (file->n_text == 0) {
        return;
    }
    if (file->is_cut && write_some(file->descriptor, "\n", 1) == 1) {
        file->is_cut = false;
    }
    size_t n = file->is_cut ? 0
                            : write_some(file->descriptor, file->text, file->n_text);
    if (n < file->n_text) {
        int code = errno;
        size_t n_whole = count_rows(file->text, n);
        file->is_cut |= n > 0 && file->text[n - 1] != '\n';
        note_lost(file, file->n_rows - n_whole, code);
    }
    file->n_text = file->n_rows = 0;
}

/* ---- life ---- */

static int
zone_now(void)
{
    struct tm local;
    time_t now = time(NULL);
    return localtime_r(&now, &local) != NULL ? (int)local.tm_gmtoff : 0;
}

static nrm_status
open_file(struct nrm__log_file *file)
{
    struct stat status;
    file->descriptor =
        open(file->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file->descriptor < 0 || fstat(file->descriptor, &status) != 0) {
        return nrm__error_errno(NRM_OS_ERROR, errno, "the log %s cannot be opened",
                                file->path);
    }
    file->device = status.st_dev;
    file->inode = status.st_ino;
    return NRM_OK;
}

nrm_status
nrm__log_file_create(const char *path, struct nrm__log_file **out)
{
    void *text;
    size_t nbytes = strlen(path) + 1;
    if (nbytes == 1 || nbytes > NRM__LOG_PATH_NBYTES) {
        return nrm__error(NRM_INVALID_VALUE,
                          "the name of a log has 1 to %u bytes, not %zu",
                          NRM__LOG_PATH_NBYTES - 1, nbytes - 1);
    }
    struct nrm__log_file *file = nrm__node_allocate(sizeof *file);
    if (file == NULL || nrm__map(NRM__LOG_TEXT_NBYTES, nrm__page_size(), &text) != 0) {
        nrm__node_deallocate(file, sizeof *file);
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory for a log");
    }
    file->text = text;
    file->descriptor = -1;
    file->n_users = 1;
    file->zone_s = zone_now();
    nrm__list_init(&file->link);
    memcpy(file->path, path, nbytes);
    nrm_status status = open_file(file);
    if (status != NRM_OK) {
        nrm__log_file_destroy(file);
        return status;
    }
    *out = file;
    return NRM_OK;
}

nrm_status
nrm__log_file_begin(struct nrm__log_file *file)
{
    /* What cannot be cut off, as a pipe, is empty. */
    if (ftruncate(file->descriptor, 0) != 0 && errno != EINVAL) {
        return nrm__error_errno(NRM_OS_ERROR, errno, "the log %s cannot be emptied",
                                file->path);
    }
    size_t n = write_some(file->descriptor, header, sizeof header - 1);
    if (n < sizeof header - 1) {
        return nrm__error_errno(NRM_OS_ERROR, errno, "the log %s cannot be written",
                                file->path);
    }
    return NRM_OK;
}

void
nrm__log_file_destroy(struct nrm__log_file *file)
{
    if (file->descriptor >= 0) {
        (void)close(file->descriptor);
    }
    nrm__unmap(file->text, NRM__LOG_TEXT_NBYTES);
    nrm__node_deallocate(file, sizeof *file);
}
