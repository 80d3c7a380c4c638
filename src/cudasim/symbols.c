/* Names: of entry points, of errors, and what cuGetProcAddress answers for them. */
#include "sim.h"

#include <string.h>

typedef void (*function)(void);

static const struct {
    const char *name;
    int version;
    function entry;
} symbols[SIM_N_CALLS] = {
#define X(name, symbol, version, required, result, arguments)                          \
    [SIM_CALL_##name] = {#name, version, (function)symbol},
    NRM_CUDA_ALL_CALLS(X)
#undef X
};

/* Where a later CUDA version gives another prototype under the same name. Whoever asks
 * for it gets a function that takes other arguments than he thinks; the simulator does
 * not have it and says so. */
static const struct {
    const char *name;
    int version;
} superseded[] = {
    {"cuCtxCreate", 11040},      {"cuCtxGetDevice", 13000},
    {"cuCtxSynchronize", 13000}, {"cuMemcpyBatchAsync", 13000},
    {"cuStreamGetCtx", 12050},
};

static const struct {
    nrm_CUresult result;
    const char *name;
} results[] = {
#define X(name, value) {NRM_CUDA_##name, "CUDA_" #name},
    NRM_CUDA_RESULTS(X)
#undef X
};

/* The texts that matter when an error is shown; the others repeat their name. */
static const struct {
    nrm_CUresult result;
    const char *text;
} texts[] = {
    {NRM_CUDA_SUCCESS, "no error"},
    {NRM_CUDA_ERROR_INVALID_VALUE, "invalid argument"},
    {NRM_CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
    {NRM_CUDA_ERROR_NOT_INITIALIZED, "initialization error"},
    {NRM_CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"},
    {NRM_CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"},
    {NRM_CUDA_ERROR_INVALID_CONTEXT, "invalid device context"},
    {NRM_CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"},
    {NRM_CUDA_ERROR_NOT_READY, "device not ready"},
    {NRM_CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
    {NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"},
    {NRM_CUDA_ERROR_NOT_PERMITTED, "operation not permitted"},
    {NRM_CUDA_ERROR_NOT_SUPPORTED, "operation not supported"},
};

const char *
sim_call_name(enum sim_call_id id)
{
    return id == SIM_N_CALLS ? "a kernel" : symbols[id].name;
}

int
sim_call_version(enum sim_call_id id)
{
    return symbols[id].version;
}

enum sim_call_id
sim_call_find(const char *name)
{
    int i = 0;
    while (i < SIM_N_CALLS && strcmp(symbols[i].name, name) != 0) {
        i++;
    }
    return (enum sim_call_id)i;
}

const char *
sim_result_name(nrm_CUresult result)
{
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        if (results[i].result == result) {
            return results[i].name;
        }
    }
    return NULL;
}

static const char *
without_prefix(const char *name, const char *prefix)
{
    size_t length = strlen(prefix);
    return strncmp(name, prefix, length) == 0 ? name + length : name;
}

static const char *
short_name(const char *name)
{
    return without_prefix(without_prefix(name, "CUDA_"), "ERROR_");
}

int
nrm_cudasim_error_code(const char *name)
{
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        if (strcmp(short_name(results[i].name), short_name(name)) == 0) {
            return (int)results[i].result;
        }
    }
    return -1;
}

static bool
is_superseded(const char *name, int version)
{
    for (size_t i = 0; i < sizeof superseded / sizeof superseded[0]; i++) {
        if (strcmp(superseded[i].name, name) == 0) {
            return version >= superseded[i].version;
        }
    }
    return false;
}

/* What only a checker wants to know. NULL: it is off, or has no such entry. */
static function
find_watch(const char *name)
{
    if (!sim.config.check) {
        return NULL;
    }
    if (strcmp(name, "nrm_cudasim_block_taken") == 0) {
        return (function)nrm_cudasim_block_taken;
    }
    return strcmp(name, "nrm_cudasim_block_given") == 0
               ? (function)nrm_cudasim_block_given
               : NULL;
}

/* The function, or NULL; `found` says why. */
static function
find_symbol(const char *name, int version, nrm_CUdriverProcAddressQueryResult *found)
{
    enum sim_call_id id = sim_call_find(name);
    function watch = find_watch(name);
    *found = NRM_CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (watch != NULL) {
        *found = NRM_CU_GET_PROC_ADDRESS_SUCCESS;
        return watch;
    }
    if (id == SIM_N_CALLS || symbols[id].version > sim.config.driver) {
        return NULL;
    }
    if (is_superseded(name, version)) {
        sim_fault("cuGetProcAddress(%s, %d) gives a later prototype than the declared "
                  "one of %d",
                  name, version, symbols[id].version);
        return NULL;
    }
    if (version < symbols[id].version) {
        *found = NRM_CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        return NULL;
    }
    *found = NRM_CU_GET_PROC_ADDRESS_SUCCESS;
    return symbols[id].entry;
}

nrm_CUresult
cuGetProcAddress_v2(const char *symbol, void **entry, int version, uint64_t flags,
                    nrm_CUdriverProcAddressQueryResult *found)
{
    SIM_BEGIN(call, cuGetProcAddress, SIM_PTR(symbol), SIM_PTR(entry),
              (uint64_t)version, flags);
    if (symbol == NULL || entry == NULL || version > sim.config.driver) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    nrm_CUdriverProcAddressQueryResult status;
    function address = find_symbol(symbol, version, &status);
    memcpy(entry, &address, sizeof address); /* ISO C has no cast between the two */
    if (found != NULL) {
        *found = status;
    }
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuDriverGetVersion(int *version)
{
    SIM_BEGIN(call, cuDriverGetVersion, SIM_PTR(version));
    if (version == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    *version = sim.config.driver;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuGetErrorName(nrm_CUresult error, const char **name)
{
    SIM_BEGIN(call, cuGetErrorName, (uint64_t)error, SIM_PTR(name));
    *name = sim_result_name(error);
    return sim_call_end(&call, *name == NULL ? NRM_CUDA_ERROR_INVALID_VALUE
                                             : NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuGetErrorString(nrm_CUresult error, const char **text)
{
    SIM_BEGIN(call, cuGetErrorString, (uint64_t)error, SIM_PTR(text));
    *text = sim_result_name(error);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (texts[i].result == error) {
            *text = texts[i].text;
        }
    }
    return sim_call_end(&call, *text == NULL ? NRM_CUDA_ERROR_INVALID_VALUE
                                             : NRM_CUDA_SUCCESS);
}
