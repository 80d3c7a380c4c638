/*
 * Where a failed assert ends. The heap, the locks and stdio may be what broke, so the
 * line is put together on the stack and written at once.
 */
#include "base/assert.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void
nrm__assert_failed(const char *text, const char *file, int line)
{
    char message[512];
    int n = snprintf(message, sizeof message, "numpy_rmm: %s:%d: %s does not hold\n",
                     file, line, text);
    if (n >= (int)sizeof message) {
        n = (int)sizeof message - 1;
    }
    if (n > 0) {
        (void)!write(STDERR_FILENO, message, (size_t)n);
    }
    abort();
}
