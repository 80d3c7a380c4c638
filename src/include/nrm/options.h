/*
 * Policy with numbers, in one table: each row is an option, an environment variable
 * NUMPY_RMM_<NAME>, a line of `numpy-rmm info` and a line of the documentation. A
 * change holds for resources made later; `fork` is read at each fork.
 */
#ifndef NRM_OPTIONS_H
#define NRM_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nrm/status.h"

typedef enum nrm_option_type {
    NRM_OPTION_SIZE, /* bytes */
    NRM_OPTION_TIME, /* nanoseconds; in text: "20 ms" */
    NRM_OPTION_INT,
    NRM_OPTION_BOOL,
    NRM_OPTION_CHOICE, /* index into the choices */
    NRM_OPTION_TEXT,   /* a path or a name */
} nrm_option_type;

typedef enum nrm_option_source {
    NRM_OPTION_DEFAULT,
    NRM_OPTION_ENVIRONMENT,
    NRM_OPTION_PROGRAM,
    NRM_OPTION_INVALID, /* of an environment variable that says nothing: the default */
} nrm_option_source;

/*
 * X(id, name, type, default number, choices "a|b" or default text, what it means)
 * A choice's number is its index.
 */
#define NRM_OPTION_ROWS(X)                                                             \
    X(PINNED_THRESHOLD, "pinned_threshold", SIZE, 65536, "",                           \
      "arrays of fewer bytes get ordinary memory from a pinned handler")               \
    X(REUSE, "reuse", CHOICE, 0, "context|immediate|recorded",                         \
      "when freed memory that the GPU can use may be handed out again")                \
    X(EPOCH_NBYTES, "epoch_nbytes", SIZE, 1048576, "",                                 \
      "freed bytes after which an allocation records an event; for blocks of a "       \
      "quarter of it and more, what the thread has live counts too, up to half")       \
    X(PARKED_LIMIT, "parked_limit", SIZE, 16777216, "",                                \
      "freed bytes in use by the GPU beyond which an allocation waits; at least four " \
      "blocks of the size asked for")                                                  \
    X(WAIT_LIMIT, "wait_limit", TIME, 20000000, "",                                    \
      "longest such wait, unless the GPU has lately needed longer (at most 1 s)")      \
    X(ON_EXHAUSTED, "on_exhausted", CHOICE, 0, "auto|host|error|wait",                 \
      "what a full pool does; auto: host for \"pinned\", error for the others")        \
    X(SEGMENT_NBYTES, "segment_nbytes", SIZE, 67108864, "",                            \
      "largest segment that a pool takes for small blocks; of page-locked memory "     \
      "at most 64 MiB")                                                                \
    X(SEGMENTS, "segments", CHOICE, 0, "vmm|alloc",                                    \
      "whether a device pool maps its segments side by side where it can, or takes "   \
      "them of its upstream")                                                          \
    X(IDLE_LIMIT, "idle_limit", SIZE, 0, "",                                           \
      "free bytes that a pool keeps when a large array dies; 0: a sixteenth of the "   \
      "memory")                                                                        \
    X(DECAY, "decay", TIME, 10000000000, "",                                           \
      "how long ordinary memory lies free in a pool before it goes back to the "       \
      "system; 0: until it is trimmed")                                                \
    X(DEVICE, "device", INT, 0, "",                                                    \
      "device whose context is used where the program has none")                       \
    X(TOUCH_THREADS, "touch_threads", INT, 0, "",                                      \
      "threads that touch new page-locked memory; 0: one for each core, at most 16")   \
    X(HUGE_PAGE_THRESHOLD, "huge_page_threshold", SIZE, 4194304, "",                   \
      "host blocks of this many bytes and more ask for huge pages")                    \
    X(FORK, "fork", CHOICE, 0, "copy|dontfork",                                        \
      "page-locked arrays in a forked child: copied at the fork, or left out; read "   \
      "at each fork")                                                                  \
    X(LOG_FILE, "log_file", TEXT, 0, "",                                               \
      "file of a LoggingResourceAdaptor that is not given one")                        \
    X(CUDA_LIBRARY, "cuda_library", TEXT, 0, "",                                       \
      "path of the CUDA driver library, or \"simulator\"")                             \
    X(DEBUG, "debug", BOOL, 0, "", "abort when an address is freed that is not ours")

typedef enum nrm_option {
#define NRM_OPTION_ENUM(id, name, type, number, text, doc) NRM_OPT_##id,
    NRM_OPTION_ROWS(NRM_OPTION_ENUM)
#undef NRM_OPTION_ENUM
        NRM_OPT_COUNT
} nrm_option;

typedef struct nrm_option_info {
    const char *name;
    const char *environment; /* NUMPY_RMM_... */
    nrm_option_type type;
    const char *choices; /* "a|b|c" or "" */
    const char *doc;
    char text[256]; /* the value as text: "64 KiB", "20 ms", "context" */
    char default_text[64];
    nrm_option_source source;
} nrm_option_info;

/* SIZE, TIME, INT, BOOL and CHOICE options. */
NRM_API int64_t nrm_option_get(nrm_option option);
/* TEXT options: copied into `out`. */
NRM_API void nrm_option_get_text(nrm_option option, char *out, size_t size);

/* NRM_NOT_FOUND unless `name` is an option. */
NRM_API NRM_NODISCARD nrm_status nrm_option_find(const char *name, nrm_option *out);
NRM_API void nrm_option_info_get(nrm_option option, nrm_option_info *out);

/* Sets an option from text; sizes may have units ("1.5 GiB"). Checked and bounded. */
NRM_API NRM_NODISCARD nrm_status nrm_option_set(nrm_option option, const char *text);

/*
 * "1.5 GiB", "64 KiB", "10 MB", "123" → bytes; parts of a byte are dropped, but "1.5"
 * and "1.5 B" are not sizes. NRM_INVALID_VALUE for negative, overflowing or unreadable
 * text. `out_percent` (may be NULL: then a percentage is invalid) is -1; "50%" sets it
 * to 50, and the bytes to 0.
 */
NRM_API NRM_NODISCARD nrm_status nrm_parse_nbytes(const char *text, size_t *out,
                                                  double *out_percent);

/* For people: "64 KiB", "1.5 GiB", "123 B"; rounded down to a tenth when it is no short
   number of some unit: "762.9 MiB". */
NRM_API void nrm_format_nbytes(size_t nbytes, char *out, size_t size);

#endif
