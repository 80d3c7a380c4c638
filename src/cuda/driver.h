/*
 * The CUDA driver, found at run time.
 *
 * libcuda.so.1 is opened at the first use that needs it, never at import. Each symbol
 * is asked for with the version of the prototype in cuda/abi.h; a missing optional
 * symbol disables one feature, with a reason that `info` shows. The table can be
 * exchanged for the simulated driver's.
 *
 * Nothing here takes an interpreter's lock or holds one of ours while the driver works,
 * but cuInit takes long: call nrm__cuda_init detached.
 */
#ifndef NRM_CUDA_DRIVER_H
#define NRM_CUDA_DRIVER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/abi.h"
#include "cuda/error.h"
#include "nrm/status.h"

#define NRM__CUDA_MINIMUM 12000 /* CUDA 12.0: cuCtxGetId, cuGetProcAddress_v2 */

#define NRM__MAX_DEVICES 64

enum {
#define X(name, value) NRM__ATTRIBUTE_INDEX_##name,
    NRM_CU_DEVICE_ATTRIBUTES(X)
#undef X
        NRM__N_ATTRIBUTES
};

/* The entry points and what cuInit found. Valid for ever, also after an exchange. */
struct nrm__driver {
    /* NULL where the driver has none: only the optional ones of abi.h. */
#define X(name, symbol, version, required, result, arguments) nrm_##name##_fn *name;
    NRM_CUDA_CORE_CALLS(X)
#undef X
    nrm_cudasim_block_taken_fn
        *block_taken; /* NULL: nobody wants to know, nor of ... */
    nrm_cudasim_block_given_fn *block_given; /* ... what comes back */
    int version;                             /* 13000 for CUDA 13.0 */
    bool simulated;
    int n_devices; /* visible, at most NRM__MAX_DEVICES; set by cuInit, like the next */
    nrm_CUdevice devices[NRM__MAX_DEVICES];        /* by ordinal */
    atomic_llong (*attributes)[NRM__N_ATTRIBUTES]; /* by ordinal; see device.c */
};

/*
 * Whether a device can be expected, without cuInit: the library opens, its version
 * reaches our minimum, CUDA_VISIBLE_DEVICES is not empty and a device node exists (or
 * it is the simulator). Otherwise NRM_CUDA_UNAVAILABLE says what was looked for and
 * where.
 */
nrm_status nrm__cuda_expect(void);

/*
 * Loads the driver and calls cuInit, once. NRM_CUDA_UNAVAILABLE, also in a child forked
 * after this process called cuInit. `out` may be NULL.
 */
nrm_status nrm__cuda_init(const struct nrm__driver **out);

/* The table when cuInit has succeeded in this process, else NULL: never loads it. */
const struct nrm__driver *nrm__cuda_driver(void);

/* The table once it is loaded, before cuInit too, else NULL: never loads it. */
const struct nrm__driver *nrm__cuda_loaded(void);

/* The table of a simulated driver that checks how memory is used, while that is loaded;
   mostly NULL. */
extern _Atomic(const struct nrm__driver *) nrm__cuda_watcher;

/* In a child that was forked after cuInit, whoever called it. */
bool nrm__cuda_is_forked(void);

/* True for the simulated driver. */
bool nrm__cuda_is_simulated(void);

/* 13000 for CUDA 13.0; 0: not loaded. */
int nrm__cuda_version(void);

/* Path of the library that is or would be loaded (it is opened if it was not yet). */
const char *nrm__cuda_library_path(void);
/* Optional symbols that the loaded driver lacks: "cuCtxRecordEvent, ..." or "". */
const char *nrm__cuda_missing_symbols(void);

/*
 * Loads another library at the next use (NULL: the search order again; "simulator" as
 * in the option), as if every context had been reset. For tests. NRM_INVALID_VALUE: the
 * path is too long.
 */
nrm_status nrm__cuda_set_library(const char *path);

/* From now on errors are not recorded and no context is entered: the process ends. */
void nrm__cuda_exit_begin(void);
bool nrm__cuda_is_exiting(void);

#endif
