/* What the simulated machine looks like when nobody has said: the environment. */
#include "sim.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

static const struct {
    const char *name;
    uint64_t factor;
} units[] = {
    {"", 1},          {"B", 1},         {"KiB", 1024},
    {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", (uint64_t)1 << 40},
};

/* "8 GiB", "1.5GiB", "4096". */
static bool
parse_nbytes(const char *text, uint64_t *out)
{
    char *end;
    errno = 0;
    double number = strtod(text, &end);
    if (end == text || errno != 0 || !(number >= 1)) {
        return false;
    }
    while (isspace((unsigned char)*end)) {
        end++;
    }
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        double nbytes = number * (double)units[i].factor;
        if (strcasecmp(end, units[i].name) == 0 && nbytes <= (double)(1ull << 45)) {
            *out = (uint64_t)nbytes;
            return true;
        }
    }
    return false;
}

static bool
parse_int(const char *text, long low, long high, int *out)
{
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || value < low || value > high) {
        return false;
    }
    *out = (int)value;
    return true;
}

static int
unreadable(const char *name, const char *text)
{
    sim_fault("the environment variable %s=%s cannot be read", name, text);
    return NRM_CUDA_ERROR_INVALID_VALUE;
}

int
nrm_cudasim_default_config(struct nrm_cudasim_config *out)
{
    static const char devices[] = "NUMPY_RMM_SIMULATED_DEVICES";
    static const char memory[] = "NUMPY_RMM_SIMULATED_MEMORY";
    static const char driver[] = "NUMPY_RMM_SIMULATED_DRIVER";
    static const char check[] = "NUMPY_RMM_SIMULATED_CHECK";
    const char *text;
    int checks = 0;
    int result = NRM_CUDA_SUCCESS;
    *out = (struct nrm_cudasim_config){.size = sizeof *out,
                                       .devices = 1,
                                       .driver = 13000,
                                       .memory_nbytes = (uint64_t)8 << 30};
    text = getenv(devices);
    if (text != NULL && !parse_int(text, 0, SIM_MAX_DEVICES, &out->devices)) {
        result = unreadable(devices, text);
    }
    text = getenv(memory);
    if (text != NULL && !parse_nbytes(text, &out->memory_nbytes)) {
        result = unreadable(memory, text);
    }
    text = getenv(driver);
    if (text != NULL && !parse_int(text, 1000, 99990, &out->driver)) {
        result = unreadable(driver, text);
    }
    text = getenv(check);
    if (text != NULL && !parse_int(text, 0, 1, &checks)) {
        result = unreadable(check, text);
    }
    out->check = checks != 0 ? NRM_CUDASIM_CHECK_ALOUD : NRM_CUDASIM_CHECK_OFF;
    return result;
}
