/* The kernel's text files (/proc, /sys, cgroup) line by line, without malloc. */
#ifndef NRM_OS_LINES_H
#define NRM_OS_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct nrm__lines {
    int fd;
    size_t start, end; /* of what was read and not handed out yet */
    bool is_cut;       /* the rest of the last line is still to be dropped */
    char buffer[4096];
};

bool nrm__lines_open(struct nrm__lines *lines, const char *path);

/* The next line without its end, valid until the next call; NULL: there is none. Of a
   line longer than the buffer comes the first part. */
char *nrm__lines_next(struct nrm__lines *lines);

void nrm__lines_close(struct nrm__lines *lines);

/* The first line of a small file; false when it cannot be read. */
bool nrm__file_read_line(const char *path, char *out, size_t size);

/* The number that a small file starts with; false: unreadable, or no number ("max"). */
bool nrm__file_read_number(const char *path, uint64_t *out);

/* The number behind "<key>" and blanks or a colon, when the line starts with that
   key. */
bool nrm__line_read_number(const char *line, const char *key, uint64_t *out);

#endif
