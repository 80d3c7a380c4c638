/*
 * What the driver's errors mean. Names and texts are the driver's own, which may be
 * newer than the list of abi.h; that list serves where no driver is loaded.
 */
#include "cuda/error.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/error.h"
#include "cuda/driver.h"

/* ---- names ---- */

static const char *
declared_name(nrm_CUresult code)
{
    switch ((int)code) {
#define X(name, value)                                                                 \
    case value:                                                                        \
        return "CUDA_" #name;
        NRM_CUDA_RESULTS(X)
#undef X
    default:
        return "CUDA_ERROR_WITHOUT_NAME";
    }
}

const char *
nrm__cuda_error_name(nrm_CUresult code)
{
    const struct nrm__driver *driver = nrm__cuda_loaded();
    const char *name = NULL;
    if (driver == NULL || driver->cuGetErrorName(code, &name) != NRM_CUDA_SUCCESS ||
        name == NULL) {
        return declared_name(code);
    }
    return name;
}

const char *
nrm__cuda_error_text(nrm_CUresult code)
{
    const struct nrm__driver *driver = nrm__cuda_loaded();
    const char *text = NULL;
    if (driver == NULL || driver->cuGetErrorString(code, &text) != NRM_CUDA_SUCCESS ||
        text == NULL) {
        return "";
    }
    return text;
}

/* ---- classes ---- */

bool
nrm__cuda_is_sticky(nrm_CUresult code)
{
    switch ((int)code) {
    case NRM_CUDA_ERROR_ECC_UNCORRECTABLE:
    case NRM_CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case NRM_CUDA_ERROR_CONTAINED:
    case NRM_CUDA_ERROR_ILLEGAL_ADDRESS:
    case NRM_CUDA_ERROR_LAUNCH_TIMEOUT:
    case NRM_CUDA_ERROR_ASSERT:
    case NRM_CUDA_ERROR_HARDWARE_STACK_ERROR:
    case NRM_CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case NRM_CUDA_ERROR_MISALIGNED_ADDRESS:
    case NRM_CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case NRM_CUDA_ERROR_INVALID_PC:
    case NRM_CUDA_ERROR_LAUNCH_FAILED:
    case NRM_CUDA_ERROR_EXTERNAL_DEVICE:
        return true;
    default:
        return false;
    }
}

bool
nrm__cuda_is_destroyed(nrm_CUresult code)
{
    return code == NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED ||
           code == NRM_CUDA_ERROR_DEINITIALIZED;
}

static nrm_status
status_of(nrm_CUresult code)
{
    if (code == NRM_CUDA_ERROR_OUT_OF_MEMORY) {
        return NRM_OUT_OF_MEMORY;
    }
    if (nrm__cuda_is_sticky(code) || nrm__cuda_is_destroyed(code)) {
        return NRM_DEVICE_LOST;
    }
    return NRM_CUDA_ERROR;
}

/* ---- the record ---- */

nrm_status
nrm__cuda_error(nrm_CUresult code, const char *what, ...)
{
    char call[200];
    va_list arguments;
    if (code == NRM_CUDA_ERROR_DEINITIALIZED || nrm__cuda_is_exiting()) {
        return status_of(code);
    }
    va_start(arguments, what);
    vsnprintf(call, sizeof call, what, arguments);
    va_end(arguments);
    const char *name = nrm__cuda_error_name(code), *text = nrm__cuda_error_text(code);
    return nrm__error_native(status_of(code), code, name, "%s%s%.60s (%s)", call,
                             text[0] != '\0' ? ": " : "", text, name);
}
