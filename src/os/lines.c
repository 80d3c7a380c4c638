/*
 * A window of 4 KiB that slides over the file. These files are made at the moment they
 * are read and have no size, so reading goes on until nothing comes.
 */
#include "os/lines.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool
nrm__lines_open(struct nrm__lines *lines, const char *path)
{
    lines->start = lines->end = 0;
    lines->is_cut = false;
    do {
        lines->fd = open(path, O_RDONLY | O_CLOEXEC);
    } while (lines->fd < 0 && errno == EINTR);
    return lines->fd >= 0;
}

void
nrm__lines_close(struct nrm__lines *lines)
{
    (void)close(lines->fd);
    lines->fd = -1;
}

/* Reads more behind what is there, one byte short of the end; false: nothing came. */
static bool
fill(struct nrm__lines *lines)
{
    ssize_t n;
    memmove(lines->buffer, lines->buffer + lines->start, lines->end - lines->start);
    lines->end -= lines->start;
    lines->start = 0;
    if (lines->end == sizeof lines->buffer - 1) {
        return false;
    }
    do {
        n = read(lines->fd, lines->buffer + lines->end,
                 sizeof lines->buffer - 1 - lines->end);
    } while (n < 0 && errno == EINTR);
    if (n > 0) {
        lines->end += (size_t)n;
    }
    return n > 0;
}

/* The end of the line that starts the window, or NULL: it is not in the window. */
static char *
find_newline(struct nrm__lines *lines)
{
    return memchr(lines->buffer + lines->start, '\n', lines->end - lines->start);
}

static void
skip_rest(struct nrm__lines *lines)
{
    char *newline;
    lines->is_cut = false;
    while ((newline = find_newline(lines)) == NULL) {
        lines->start = lines->end;
        if (!fill(lines)) {
            return;
        }
    }
    lines->start = (size_t)(newline - lines->buffer) + 1;
}

/* A last line without an end, or the first part of a long one. */
static char *
take_window(struct nrm__lines *lines)
{
    lines->is_cut = lines->end == sizeof lines->buffer - 1;
    lines->buffer[lines->end] = '\0';
    lines->start = lines->end;
    return lines->end != 0 ? lines->buffer : NULL;
}

char *
nrm__lines_next(struct nrm__lines *lines)
{
    char *newline;
    if (lines->is_cut) {
        skip_rest(lines);
    }
    while ((newline = find_newline(lines)) == NULL) {
        if (!fill(lines)) {
            return take_window(lines);
        }
    }
    char *line = lines->buffer + lines->start;
    *newline = '\0';
    lines->start = (size_t)(newline - lines->buffer) + 1;
    return line;
}

bool
nrm__file_read_line(const char *path, char *out, size_t size)
{
    struct nrm__lines lines;
    if (!nrm__lines_open(&lines, path)) {
        return false;
    }
    const char *line = nrm__lines_next(&lines);
    if (line != NULL) {
        snprintf(out, size, "%s", line);
    }
    nrm__lines_close(&lines);
    return line != NULL;
}

bool
nrm__file_read_number(const char *path, uint64_t *out)
{
    char text[64];
    char *end;
    if (!nrm__file_read_line(path, text, sizeof text)) {
        return false;
    }
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (end == text || errno != 0 || text[0] == '-') {
        return false;
    }
    *out = value;
    return true;
}

bool
nrm__line_read_number(const char *line, const char *key, uint64_t *out)
{
    size_t length = strlen(key);
    char *end;
    if (strncmp(line, key, length) != 0 || strchr(": \t", line[length]) == NULL ||
        line[length] == '\0') {
        return false;
    }
    const char *digits = line + length + strspn(line + length, ": \t");
    unsigned long long value = strtoull(digits, &end, 10);
    if (end == digits) {
        return false;
    }
    *out = value;
    return true;
}
