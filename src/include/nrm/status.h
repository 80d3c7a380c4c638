/*
 * Status codes and the last-error record.
 *
 * A function that can fail returns an nrm_status. What went wrong, with numbers and
 * units, stands in a record of the calling thread that nrm_last_error reads: callers
 * that can only return NULL (NEP 49 handlers) have no other way to say why. Writing the
 * record never allocates.
 */
#ifndef NRM_STATUS_H
#define NRM_STATUS_H

#include <stddef.h>

#if defined(__GNUC__)
#define NRM_API __attribute__((visibility("default")))
#define NRM_NODISCARD __attribute__((warn_unused_result))
#define NRM_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define NRM_API
#define NRM_NODISCARD
#define NRM_PRINTF(text, first)
#endif

/* X(name, text, Python exception) */
#define NRM_STATUSES(X)                                                                \
    X(OK, "success", None)                                                             \
    X(INVALID_VALUE, "invalid value", ValueError)                                      \
    X(OUT_OF_MEMORY, "out of memory", OutOfMemoryError)                                \
    X(NOT_OWNED, "address not of this resource", ValueError)                           \
    X(NOT_SUPPORTED, "not supported", NotImplementedError)                             \
    X(NOT_FOUND, "no such name", KeyError)                                             \
    X(CUDA_UNAVAILABLE, "CUDA is not available", CudaUnavailableError)                 \
    X(CUDA_ERROR, "CUDA driver error", CudaError)                                      \
    X(DEVICE_LOST, "the device or its context is lost", CudaError)                     \
    X(OS_ERROR, "operating system error", OSError)                                     \
    X(CALLBACK_FAILED, "a callback failed", RuntimeError)

typedef enum nrm_status {
#define NRM_STATUS_ENUM(name, text, exception) NRM_##name,
    NRM_STATUSES(NRM_STATUS_ENUM)
#undef NRM_STATUS_ENUM
} nrm_status;

typedef struct nrm_error {
    nrm_status status;
    int native_code;         /* of the driver or errno; 0: none */
    char native_name[48];    /* "CUDA_ERROR_OUT_OF_MEMORY", "ENOMEM"; may be "" */
    char message[288];       /* one sentence with numbers and units */
    size_t requested_nbytes; /* of the allocation that failed; 0: not one */
    char resource[64];       /* name of the resource asked; may be "" */
} nrm_error;

/* The name of a status without its prefix, e.g. "OUT_OF_MEMORY". */
NRM_API const char *nrm_status_name(nrm_status status);

/* A few words about a status. */
NRM_API const char *nrm_status_text(nrm_status status);

/*
 * The last error of the calling thread: owned by the thread and valid until its next
 * error. `status` is NRM_OK when there was none, or when it was cleared.
 */
NRM_API const nrm_error *nrm_last_error(void);

NRM_API void nrm_clear_last_error(void);

#endif
