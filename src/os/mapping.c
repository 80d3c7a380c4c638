/*
 * /proc/self/maps, read as far as the range goes. A mapping of shared memory has a file
 * as well (of memfd_create, shm_open, System V, or of no name at all), but no disk
 * behind it: these are known by their paths.
 */
#include "os/mapping.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "os/lines.h"

struct line {
    uintptr_t start, end;
    char rights[8]; /* "rw-s" */
    unsigned long long inode;
    const char *path;
};

/* "7f00a0000000-7f00a0021000 rw-s 00000000 08:01 1234   /a/path". */
static bool
read_line(const char *text, struct line *out)
{
    int path = 0;
    int n = sscanf(text, "%" SCNxPTR "-%" SCNxPTR " %7s %*s %*s %llu %n", &out->start,
                   &out->end, out->rights, &out->inode, &path);
    out->path = text + path;
    return n == 4;
}

static bool
is_shared_file(const struct line *line)
{
    static const char *const memory[] = {"/dev/shm/", "/memfd:", "/SYSV", "/dev/zero",
                                         "/anon_hugepage"};
    if (line->rights[1] != 'w' || line->rights[3] != 's' || line->inode == 0) {
        return false;
    }
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
        if (strncmp(line->path, memory[i], strlen(memory[i])) == 0) {
            return false;
        }
    }
    return true;
}

static void
note(struct nrm__mapping *mapping, const struct line *line)
{
    if (line->rights[1] != 'w') {
        mapping->is_writable = false;
    }
    if (line->rights[3] != 's') {
        mapping->is_shared = false;
    }
    if (!mapping->is_shared_file && is_shared_file(line)) {
        mapping->is_shared_file = true;
        snprintf(mapping->path, sizeof mapping->path, "%s", line->path);
    }
}

bool
nrm__mapping_of(const void *ptr, size_t nbytes, struct nrm__mapping *out)
{
    struct nrm__lines maps;
    struct line line;
    const char *text;
    uintptr_t at = (uintptr_t)ptr, end = at + nbytes;
    if (!nrm__lines_open(&maps, "/proc/self/maps")) {
        return false;
    }
    *out = (struct nrm__mapping){.is_writable = true, .is_shared = true};
    while (at < end && (text = nrm__lines_next(&maps)) != NULL) {
        if (!read_line(text, &line) || line.end <= at) {
            continue;
        }
        if (line.start > at || line.rights[0] != 'r') {
            break;
        }
        note(out, &line);
        at = line.end;
    }
    nrm__lines_close(&maps);
    out->hole = at < end ? at : 0;
    return true;
}
