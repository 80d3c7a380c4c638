/* The files of core/log.c, and how a record becomes a row. */
#ifndef NRM_CORE_LOG_FILE_H
#define NRM_CORE_LOG_FILE_H

#include <stddef.h>
#include <sys/types.h>

#include "base/list.h"
#include "core/log.h"

#define NRM__LOG_TEXT_NBYTES ((size_t)64 * 1024)
#define NRM__LOG_ROW_NBYTES 160u /* no row is longer */

struct nrm__log_file {
    struct nrm__link link; /* in the list of all */
    size_t n_users;        /* of whoever drains, as all but n_lost that changes */
    dev_t device;          /* with `inode`: which file it is */
    ino_t inode;
    int descriptor;
    int zone_s; /* seconds that local time is ahead, when it was opened */
    char path[NRM__LOG_PATH_NBYTES];
    atomic_uint_least64_t n_lost; /* rows */
    uint64_t n_told;              /* of these */
    int error;                    /* why: errno, of the last ones */
    bool is_cut;                  /* the last row is not whole */
    size_t n_text, n_rows;        /* of `text` that is not written yet */
    char *text;
};

/* Adds a row; there is room for it. `real_ns`: of the real-time clock. */
void nrm__log_file_add(struct nrm__log_file *file, const struct nrm__log_record *record,
                       int thread, int64_t real_ns);

static inline bool
nrm__log_file_is_full(const struct nrm__log_file *file)
{
    return file->n_text > NRM__LOG_TEXT_NBYTES - NRM__LOG_ROW_NBYTES;
}

/* Writes what was added. What cannot be written is lost, and counted. */
void nrm__log_file_write(struct nrm__log_file *file);

/* The file behind a path, not in the list yet, and not emptied; one user. */
nrm_status nrm__log_file_create(const char *path, struct nrm__log_file **out);

/* Empties it, and writes the first line. */
nrm_status nrm__log_file_begin(struct nrm__log_file *file);

void nrm__log_file_destroy(struct nrm__log_file *file);

#endif
