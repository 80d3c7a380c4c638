/*
 * Statuses and the last-error record of a thread.
 *
 * A message is put together on the stack before the record changes, so it may quote the
 * record that it replaces. Floating-point conversions can allocate in printf and have
 * no place in these formats.
 */
#include "nrm/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/thread_state.h"

static const struct {
    const char *name;
    const char *text;
} statuses[] = {
#define STATUS_ROW(name, text, exception) {#name, text},
    NRM_STATUSES(STATUS_ROW)
#undef STATUS_ROW
};

#define N_STATUSES (sizeof statuses / sizeof *statuses)

const char *
nrm_status_name(nrm_status status)
{
    return (size_t)status < N_STATUSES ? statuses[status].name : "UNKNOWN";
}

const char *
nrm_status_text(nrm_status status)
{
    return (size_t)status < N_STATUSES ? statuses[status].text : "unknown status";
}

const nrm_error *
nrm_last_error(void)
{
    return &nrm__thread_state()->error;
}

/* The record of this thread, emptied; NULL: it has none that can be written. */
static nrm_error *
fresh_record(void)
{
    struct nrm__thread_state *state = nrm__thread_state();
    if (nrm__thread_state_is_shared(state)) {
        return NULL;
    }
    memset(&state->error, 0, sizeof state->error);
    return &state->error;
}

void
nrm_clear_last_error(void)
{
    (void)fresh_record();
}

NRM_PRINTF(4, 0)
static nrm_status
record(nrm_status status, int code, const char *name, const char *format, va_list args)
{
    char message[sizeof((nrm_error *)0)->message];
    char native_name[sizeof((nrm_error *)0)->native_name];
    vsnprintf(message, sizeof message, format, args);
    snprintf(native_name, sizeof native_name, "%s", name != NULL ? name : "");
    nrm_error *error = fresh_record();
    if (error != NULL) {
        error->status = status;
        error->native_code = code;
        memcpy(error->native_name, native_name, sizeof native_name);
        memcpy(error->message, message, sizeof message);
    }
    return status;
}

nrm_status
nrm__error(nrm_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    record(status, 0, NULL, format, args);
    va_end(args);
    return status;
}

nrm_status
nrm__error_native(nrm_status status, int code, const char *name, const char *format,
                  ...)
{
    va_list args;
    va_start(args, format);
    record(status, code, name, format, args);
    va_end(args);
    return status;
}

nrm_status
nrm__error_errno(nrm_status status, int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    record(status, code, nrm__errno_name(code), format, args);
    va_end(args);
    return status;
}

void
nrm__error_request(size_t nbytes, const char *resource)
{
    struct nrm__thread_state *state = nrm__thread_state();
    if (nrm__thread_state_is_shared(state)) {
        return;
    }
    state->error.requested_nbytes = nbytes;
    snprintf(state->error.resource, sizeof state->error.resource, "%s",
             resource != NULL ? resource : "");
}

/* strerrorname_np is younger than the oldest C library that this is built for. */
const char *
nrm__errno_name(int code)
{
    switch (code) {
#define ERRNO_CASE(name)                                                               \
    case name:                                                                         \
        return #name;
        ERRNO_CASE(EPERM)
        ERRNO_CASE(ENOENT)
        ERRNO_CASE(EINTR)
        ERRNO_CASE(EIO)
        ERRNO_CASE(ENXIO)
        ERRNO_CASE(EBADF)
        ERRNO_CASE(EAGAIN)
        ERRNO_CASE(ENOMEM)
        ERRNO_CASE(EACCES)
        ERRNO_CASE(EFAULT)
        ERRNO_CASE(EBUSY)
        ERRNO_CASE(EEXIST)
        ERRNO_CASE(ENODEV)
        ERRNO_CASE(ENOTDIR)
        ERRNO_CASE(EISDIR)
        ERRNO_CASE(EINVAL)
        ERRNO_CASE(ENFILE)
        ERRNO_CASE(EMFILE)
        ERRNO_CASE(EFBIG)
        ERRNO_CASE(ENOSPC)
        ERRNO_CASE(EROFS)
        ERRNO_CASE(EPIPE)
        ERRNO_CASE(ENOSYS)
        ERRNO_CASE(EOVERFLOW)
        ERRNO_CASE(EOPNOTSUPP)
        ERRNO_CASE(ETIMEDOUT)
        ERRNO_CASE(EDQUOT)
        ERRNO_CASE(EHWPOISON)
#undef ERRNO_CASE
    default:
        return "";
    }
}
