/*
 * Finding control groups.
 *
 * /proc/self/cgroup names the group by a path inside its hierarchy,
 * /proc/self/mountinfo says where (part of) the hierarchy is mounted. In a container
 * the mounted part may begin below the root, and the path may lead outside of it: then
 * the mount point itself is the nearest group that can be seen. A controller belongs to
 * version 1 when a line of /proc/self/cgroup names it; the line with an empty list is
 * version 2.
 */
#include "os/cgroup.h"

#include <stdio.h>
#include <string.h>

#include "os/lines.h"

struct hierarchy {
    bool is_v2;
    char path[NRM__CGROUP_PATH_SIZE];  /* of the group, in the hierarchy */
    char mount[NRM__CGROUP_PATH_SIZE]; /* point; then the group's folder */
    size_t mount_length;               /* of the mount point alone */
};

/* Whether `word` is in the list "a,b,c" of `length` characters. */
static bool
has_word(const char *list, size_t length, const char *word)
{
    size_t word_length = strlen(word);
    const char *end = list + length;
    while (list < end) {
        const char *comma = memchr(list, ',', (size_t)(end - list));
        size_t n = (size_t)((comma != NULL ? comma : end) - list);
        if (n == word_length && memcmp(list, word, n) == 0) {
            return true;
        }
        list += n + 1;
    }
    return false;
}

/* "4:memory:/some/group" or "0::/some/group" */
static bool
find_path(const char *controller, struct hierarchy *out)
{
    struct nrm__lines lines;
    const char *line;
    bool found = false;
    out->is_v2 = true;
    if (!nrm__lines_open(&lines, "/proc/self/cgroup")) {
        return false;
    }
    while (out->is_v2 && (line = nrm__lines_next(&lines)) != NULL) {
        const char *list = strchr(line, ':');
        const char *path = list != NULL ? strchr(list + 1, ':') : NULL;
        if (path == NULL) {
            continue;
        }
        size_t length = (size_t)(path - ++list);
        bool is_v1 = has_word(list, length, controller);
        if (!is_v1 && length != 0) {
            continue;
        }
        out->is_v2 = !is_v1;
        snprintf(out->path, sizeof out->path, "%s", path + 1);
        found = true;
    }
    nrm__lines_close(&lines);
    return found;
}

/* The n-th word of a line (from 0), ended in place; NULL: there are fewer. */
static char *
nth_word(char *line, int n)
{
    for (; n > 0 && line != NULL; n--) {
        line = strchr(line, ' ');
        line = line != NULL ? line + 1 : NULL;
    }
    if (line != NULL) {
        line[strcspn(line, " ")] = '\0';
    }
    return line;
}

/* "31 23 0:28 <root> <mount point> rw,... [tags] - cgroup2 <source> <options>" */
static bool
is_mount_of(const char *controller, bool is_v2, const char *line)
{
    const char *type = strstr(line, " - ");
    if (type == NULL) {
        return false;
    }
    type += 3;
    if (is_v2) {
        return strncmp(type, "cgroup2 ", 8) == 0;
    }
    const char *options = strrchr(type, ' ');
    return strncmp(type, "cgroup ", 7) == 0 && options != NULL &&
           has_word(options + 1, strlen(options + 1), controller);
}

/* Sets the mount point and appends to it what of the path lies below the mounted
   root. */
static void
set_folder(struct hierarchy *hierarchy, const char *root, const char *mount)
{
    size_t root_length = strcmp(root, "/") == 0 ? 0 : strlen(root);
    const char *below = hierarchy->path;
    bool is_visible = strncmp(below, root, root_length) == 0 &&
                      (below[root_length] == '/' || below[root_length] == '\0') &&
                      strstr(below, "/..") == NULL;
    below = is_visible ? below + root_length : "";
    hierarchy->mount_length = strlen(mount);
    int n = snprintf(hierarchy->mount, sizeof hierarchy->mount, "%s%s", mount,
                     strcmp(below, "/") == 0 ? "" : below);
    if (n >= (int)sizeof hierarchy->mount) {
        hierarchy->mount[hierarchy->mount_length] = '\0';
    }
}

static bool
find_mount(const char *controller, struct hierarchy *hierarchy)
{
    struct nrm__lines lines;
    char *line;
    bool found = false;
    if (!nrm__lines_open(&lines, "/proc/self/mountinfo")) {
        return false;
    }
    while (!found && (line = nrm__lines_next(&lines)) != NULL) {
        if (!is_mount_of(controller, hierarchy->is_v2, line)) {
            continue;
        }
        const char *mount = nth_word(line, 4);
        const char *root = nth_word(line, 3);
        if (mount == NULL || root == NULL) {
            continue;
        }
        set_folder(hierarchy, root, mount);
        found = true;
    }
    nrm__lines_close(&lines);
    return found;
}

void
nrm__cgroup_visit(const char *controller,
                  void (*visit)(const char *folder, bool is_v2, void *context),
                  void *context)
{
    struct hierarchy hierarchy;
    if (!find_path(controller, &hierarchy) || !find_mount(controller, &hierarchy)) {
        return;
    }
    char *folder = hierarchy.mount;
    for (;;) {
        visit(folder, hierarchy.is_v2, context);
        char *slash = strrchr(folder, '/');
        if (slash == NULL || (size_t)(slash - folder) < hierarchy.mount_length) {
            return;
        }
        *slash = '\0';
    }
}

void
nrm__cgroup_file(const char *folder, const char *name, char *out, size_t size)
{
    int n = snprintf(out, size, "%s/%s", folder, name);
    if (n < 0 || (size_t)n >= size) {
        out[0] = '\0';
    }
}
