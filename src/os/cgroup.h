/* The control groups of this process, version 2 or 1: where their files are. */
#ifndef NRM_OS_CGROUP_H
#define NRM_OS_CGROUP_H

#include <stdbool.h>
#include <stddef.h>

#define NRM__CGROUP_PATH_SIZE 4096

/*
 * Calls `visit` with the folder of this process's group for `controller` ("memory",
 * "cpu"), then with the folders of the groups around it, as far as they can be seen.
 * `is_v2` says whose file names hold.
 */
void nrm__cgroup_visit(const char *controller,
                       void (*visit)(const char *folder, bool is_v2, void *context),
                       void *context);

/* "<folder>/<name>", or "" when that is too long. */
void nrm__cgroup_file(const char *folder, const char *name, char *out, size_t size);

#endif
