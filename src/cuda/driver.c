/*
 * Loading the driver.
 *
 * A library that was looked for is one record, found or not: its table, why it cannot
 * be used, what it lacks, what cuInit said. Records are published whole, through one
 * pointer, and never freed, so nobody who read the pointer needs a lock. Opening a
 * library and calling cuInit happen outside the lock; both may be done by two threads
 * at once and answer the same, and the first to finish publishes.
 *
 * A child forked after cuInit must never call the driver. The fork hook marks it; a
 * child of a process in which somebody else called cuInit learns it from its own
 * cuInit.
 */
#include "cuda/driver.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "cuda/context.h"
#include "cuda/device.h"
#include "cuda/event.h"
#include "nrm/options.h"
#include "os/fork.h"
#include "os/memory.h"

#define DEFAULT_LIBRARY "libcuda.so.1"
#define SIMULATOR_LIBRARY "libnumpy_rmm_cudasim.so"
#define SIMULATOR_SYMBOL "nrm_cudasim_reset" /* that only the simulator has */

enum { INIT_NOT_CALLED = -1 };

struct library {
    struct nrm__driver driver;
    bool usable;
    char wanted[256];  /* as asked for: "", "simulator", a path */
    char path[512];    /* of the file, or the name that was looked for */
    char reason[224];  /* why it is not usable */
    char missing[224]; /* optional symbols, separated by ", " */
    atomic_int init;   /* what cuInit said, or INIT_NOT_CALLED */
    atomic_bool begun; /* cuInit was called in this process, and did not fail */
    atomic_bool forked;
    atomic_int pid; /* of the process that called it */
    atomic_llong attributes[NRM__MAX_DEVICES][NRM__N_ATTRIBUTES];
};

static _Atomic(struct library *) current; /* NULL: nothing was looked for yet */
_Atomic(const struct nrm__driver *) nrm__cuda_watcher;
static atomic_bool exiting;

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_CUDA);
static char
    chosen[256]; /* by nrm__cuda_set_library; under the lock, like the next two */
static bool is_chosen;
static unsigned n_choices;

static struct library *
loaded(void)
{
    return atomic_load_explicit(&current, memory_order_acquire);
}

/* ---- opening a library ---- */

/* Appends `word` to a list separated by ", "; what does not fit is left out. */
static void
append(char *list, size_t size, const char *word)
{
    size_t length = strlen(list);
    snprintf(list + length, size - length, "%s%s", length != 0 ? ", " : "", word);
}

/* Beside the file that this code is in, as installed, or where a build tree has it. */
static void
find_simulator(char *out, size_t size)
{
    static const char *const places[] = {"", "../cudasim/"};
    Dl_info self;
    const char *given = getenv("NUMPY_RMM_CUDASIM_PATH");
    if (given != NULL && given[0] != '\0') {
        snprintf(out, size, "%s", given);
        return;
    }
    snprintf(out, size, "%s", SIMULATOR_LIBRARY);
    if (dladdr(&current, &self) == 0 || strrchr(self.dli_fname, '/') == NULL) {
        return;
    }
    int n_folder = (int)(strrchr(self.dli_fname, '/') + 1 - self.dli_fname);
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        snprintf(out, size, "%.*s%s%s", n_folder, self.dli_fname, places[i],
                 SIMULATOR_LIBRARY);
        if (access(out, F_OK) == 0) {
            return;
        }
    }
}

/* What the driver has for a name and a version of its prototype, or NULL. */
static void *
resolve(nrm_cuGetProcAddress_fn *get, const char *name, int version)
{
    nrm_CUdriverProcAddressQueryResult found = NRM_CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    void *function = NULL;
    nrm_CUresult code =
        get(name, &function, version, NRM_CU_GET_PROC_ADDRESS_DEFAULT, &found);
    return code == NRM_CUDA_SUCCESS && found == NRM_CU_GET_PROC_ADDRESS_SUCCESS
               ? function
               : NULL;
}

static void
resolve_all(struct library *library, nrm_cuGetProcAddress_fn *get)
{
    char required[sizeof library->reason] = "";
    struct nrm__driver *driver = &library->driver;
#define X(name, symbol, number, needed, result, arguments)                             \
    *(void **)&driver->name = resolve(get, #name, number);                             \
    if (driver->name == NULL)                                                          \
        append((needed) ? required : library->missing,                                 \
               (needed) ? sizeof required : sizeof library->missing, #name);
    NRM_CUDA_CORE_CALLS(X)
#undef X
    library->usable = required[0] == '\0';
    if (!library->usable) {
        snprintf(library->reason, sizeof library->reason,
                 "%.60s (CUDA %d.%d) has no %.120s", library->path,
                 driver->version / 1000, driver->version % 1000 / 10, required);
    }
}

/* Real drivers are not asked for what they do not have. */
static void
resolve_watch(struct nrm__driver *driver, nrm_cuGetProcAddress_fn *get)
{
    if (driver->simulated) {
        *(void **)&driver->block_taken =
            resolve(get, "nrm_cudasim_block_taken", NRM_CUDA_WATCH_VERSION);
        *(void **)&driver->block_given =
            resolve(get, "nrm_cudasim_block_given", NRM_CUDA_WATCH_VERSION);
    }
}

static bool
watches(const struct nrm__driver *driver)
{
    return driver->block_taken != NULL && driver->block_given != NULL;
}

/* Fills the record of an opened library. */
static void
examine(struct library *library, void *handle)
{
    nrm_cuDriverGetVersion_fn *get_version;
    nrm_cuGetProcAddress_fn *get;
    Dl_info file;
    *(void **)&get_version = dlsym(handle, "cuDriverGetVersion");
    *(void **)&get = dlsym(handle, "cuGetProcAddress_v2");
    int version = 0;
    if (get_version == NULL || get_version(&version) != NRM_CUDA_SUCCESS) {
        snprintf(library->reason, sizeof library->reason,
                 "%.120s is not a usable CUDA driver: cuDriverGetVersion %s",
                 library->path, get_version == NULL ? "is missing" : "fails");
        return;
    }
    if (dladdr(*(void **)&get_version, &file) != 0 && file.dli_fname != NULL) {
        snprintf(library->path, sizeof library->path, "%s", file.dli_fname);
    }
    library->driver.version = version;
    library->driver.simulated = dlsym(handle, SIMULATOR_SYMBOL) != NULL;
    if (version < NRM__CUDA_MINIMUM || get == NULL) {
        snprintf(
            library->reason, sizeof library->reason,
            "the CUDA driver is too old: %.120s is of CUDA %d.%d, and %d.%d or newer "
            "is needed",
            library->path, version / 1000, version % 1000 / 10,
            NRM__CUDA_MINIMUM / 1000, NRM__CUDA_MINIMUM % 1000 / 10);
        return;
    }
    resolve_all(library, get);
    resolve_watch(&library->driver, get);
}

static size_t
record_nbytes(void)
{
    return nrm__align_up(sizeof(struct library), nrm__page_size());
}

/* A new record for what `wanted` names; NULL: no memory for it. */
static struct library *
library_open(const char *wanted)
{
    void *memory;
    if (nrm__map(record_nbytes(), nrm__page_size(), &memory) != 0) {
        return NULL;
    }
    struct library *library = memory;
    atomic_init(&library->init, INIT_NOT_CALLED);
    library->driver.attributes = library->attributes;
    snprintf(library->wanted, sizeof library->wanted, "%s", wanted);
    if (strcmp(wanted, "simulator") == 0) {
        find_simulator(library->path, sizeof library->path);
    }
    else {
        snprintf(library->path, sizeof library->path, "%s",
                 wanted[0] != '\0' ? wanted : DEFAULT_LIBRARY);
    }
    void *handle = dlopen(library->path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle != NULL) {
        examine(library, handle);
    }
    else {
        snprintf(library->reason, sizeof library->reason,
                 "the CUDA driver cannot be opened: %.160s", dlerror());
    }
    return library;
}

/* The choice, and its number. */
static unsigned
read_choice(char *out, size_t size)
{
    char option[256];
    nrm_option_get_text(NRM_OPT_CUDA_LIBRARY, option, sizeof option);
    nrm__lock_acquire(&lock);
    unsigned number = n_choices;
    snprintf(out, size, "%s", is_chosen ? chosen : option);
    nrm__lock_release(&lock);
    return number;
}

/* Publishes `made` unless the choice has changed or another thread was first. */
static struct library *
publish(struct library *made, struct library *instead_of, unsigned number)
{
    nrm__lock_acquire(&lock);
    struct library *library = loaded();
    if (library == instead_of && number == n_choices) {
        atomic_store_explicit(&current, made, memory_order_release);
        atomic_store(&nrm__cuda_watcher, watches(&made->driver) ? &made->driver : NULL);
        library = made;
    }
    nrm__lock_release(&lock);
    if (library != made) {
        nrm__unmap(made, record_nbytes());
    }
    return library;
}

/* Never NULL but for want of memory. One that was not usable is looked for again when
   another one is wanted meanwhile. */
static struct library *
library_get(void)
{
    for (;;) {
        char wanted[256];
        struct library *library = loaded();
        if (library != NULL && library->usable) {
            return library;
        }
        unsigned number = read_choice(wanted, sizeof wanted);
        if (library != NULL && strcmp(wanted, library->wanted) == 0) {
            return library;
        }
        struct library *made = library_open(wanted);
        if (made == NULL) {
            return NULL;
        }
        library = publish(made, library, number);
        if (library != NULL) {
            return library;
        }
    }
}

nrm_status
nrm__cuda_set_library(const char *path)
{
    if (path != NULL && strlen(path) >= sizeof chosen) {
        return nrm__error(NRM_INVALID_VALUE, "a path of %zu characters is too long",
                          strlen(path));
    }
    nrm__lock_acquire(&lock);
    is_chosen = path != NULL;
    snprintf(chosen, sizeof chosen, "%s", is_chosen ? path : "");
    n_choices++;
    atomic_store_explicit(&current, NULL, memory_order_release);
    atomic_store(&nrm__cuda_watcher, NULL);
    nrm__lock_release(&lock);
    nrm__cuda_contexts_forget();
    nrm__cuda_capture_lift(-1);
    return NRM_OK;
}

/* ---- whether there can be a device ---- */

static bool
starts_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* "nvidiactl" and "nvidia0", "dxg" of WSL, "nvgpu" and "nvhost-..." of Tegra. */
static bool
is_device_node(const char *name)
{
    if (starts_with(name, "nvidia")) {
        return strcmp(name + 6, "ctl") == 0 || (name[6] >= '0' && name[6] <= '9');
    }
    return strcmp(name, "dxg") == 0 || strcmp(name, "nvgpu") == 0 ||
           starts_with(name, "nvhost-");
}

static bool
has_device_node(void)
{
    DIR *folder = opendir("/dev");
    if (folder == NULL) {
        return true; /* cannot be known: cuInit will say */
    }
    bool found = false;
    for (struct dirent *entry; !found && (entry = readdir(folder)) != NULL;) {
        found = is_device_node(entry->d_name);
    }
    closedir(folder);
    return found;
}

static nrm_status
check_visible(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible != NULL && (visible[0] == '\0' || strcmp(visible, "-1") == 0)) {
        return nrm__error(NRM_CUDA_UNAVAILABLE,
                          "no CUDA device is visible: CUDA_VISIBLE_DEVICES is \"%s\"",
                          visible);
    }
    return NRM_OK;
}

static nrm_status
forked_error(struct library *library)
{
    return nrm__error(
        NRM_CUDA_UNAVAILABLE,
        "CUDA does not work in a child that was forked after CUDA had been "
        "initialised (by process %d); start workers with the \"spawn\" "
        "method, or before the first use of CUDA",
        atomic_load(&library->pid));
}

static nrm_status
init_error(struct library *library, nrm_CUresult code)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    const char *name = nrm__cuda_error_name(code);
    return nrm__error_native(NRM_CUDA_UNAVAILABLE, code, name,
                             "cuInit of %.100s fails: %.80s (%s)%s%.20s", library->path,
                             nrm__cuda_error_text(code), name,
                             visible != NULL ? "; CUDA_VISIBLE_DEVICES=" : "",
                             visible != NULL ? visible : "");
}

/* Finds a library that can be used here; what cuInit would say is not known yet. */
static nrm_status
find_usable(struct library **out)
{
    struct library *library = library_get();
    if (library == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to load the CUDA driver");
    }
    if (!library->usable) {
        return nrm__error(NRM_CUDA_UNAVAILABLE, "%s", library->reason);
    }
    if (atomic_load_explicit(&library->forked, memory_order_relaxed)) {
        return forked_error(library);
    }
    *out = library;
    return NRM_OK;
}

nrm_status
nrm__cuda_expect(void)
{
    struct library *library;
    if (nrm__cuda_driver() != NULL) {
        return NRM_OK;
    }
    NRM_TRY(check_visible());
    NRM_TRY(find_usable(&library));
    int code = atomic_load_explicit(&library->init, memory_order_acquire);
    if (code == NRM_CUDA_SUCCESS) {
        return NRM_OK;
    }
    if (code != INIT_NOT_CALLED) {
        return init_error(library, (nrm_CUresult)code);
    }
    if (!library->driver.simulated && !has_device_node()) {
        return nrm__error(NRM_CUDA_UNAVAILABLE,
                          "no CUDA device: %.100s is there (CUDA %d.%d), but none of "
                          "/dev/nvidiactl, /dev/nvidia[0-9], /dev/dxg, /dev/nvgpu, "
                          "/dev/nvhost-*",
                          library->path, library->driver.version / 1000,
                          library->driver.version % 1000 / 10);
    }
    return NRM_OK;
}

/* ---- cuInit ---- */

static nrm_CUresult
find_devices(const struct nrm__driver *driver, nrm_CUdevice *devices, int *out_n)
{
    int n = 0;
    nrm_CUresult code = driver->cuDeviceGetCount(&n);
    n = n > NRM__MAX_DEVICES ? NRM__MAX_DEVICES : n;
    for (int i = 0; i < n && code == NRM_CUDA_SUCCESS; i++) {
        code = driver->cuDeviceGet(&devices[i], i);
    }
    *out_n = n;
    return code;
}

static nrm_CUresult
call_init(struct library *library)
{
    nrm_CUdevice devices[NRM__MAX_DEVICES];
    int n = 0;
    atomic_store(&library->pid, (int)getpid());
    atomic_store(&library->begun, true); /* a child forked meanwhile cannot use it */
    nrm_CUresult code = library->driver.cuInit(0);
    if (code == NRM_CUDA_SUCCESS) {
        code = find_devices(&library->driver, devices, &n);
    }
    if (code == NRM_CUDA_ERROR_NOT_INITIALIZED) {
        atomic_store(&library->pid, (int)getppid());
        atomic_store(&library->forked, true);
    }
    nrm__lock_acquire(&lock);
    if (atomic_load(&library->init) == INIT_NOT_CALLED) {
        library->driver.n_devices = n;
        memcpy(library->driver.devices, devices, (size_t)n * sizeof devices[0]);
        atomic_store_explicit(&library->init, (int)code, memory_order_release);
        atomic_store(&library->begun, code == NRM_CUDA_SUCCESS);
    }
    nrm__lock_release(&lock);
    return code;
}

nrm_status
nrm__cuda_init(const struct nrm__driver **out)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    struct library *library;
    if (driver == NULL) {
        NRM_TRY(find_usable(&library));
        int code = atomic_load_explicit(&library->init, memory_order_acquire);
        if (code == INIT_NOT_CALLED) {
            NRM_TRY(check_visible());
            code = (int)call_init(library);
        }
        if (atomic_load(&library->forked)) {
            return forked_error(library);
        }
        if (code != NRM_CUDA_SUCCESS) {
            return init_error(library, (nrm_CUresult)code);
        }
        driver = &library->driver;
        nrm__cuda_note_devices();
    }
    if (out != NULL) {
        *out = driver;
    }
    return NRM_OK;
}

const struct nrm__driver *
nrm__cuda_loaded(void)
{
    struct library *library = loaded();
    return library != NULL && library->usable ? &library->driver : NULL;
}

const struct nrm__driver *
nrm__cuda_driver(void)
{
    struct library *library = loaded();
    if (library == NULL ||
        atomic_load_explicit(&library->init, memory_order_acquire) !=
            NRM_CUDA_SUCCESS ||
        atomic_load_explicit(&library->forked, memory_order_relaxed)) {
        return NULL;
    }
    return &library->driver;
}

/* ---- forks and the end ---- */

bool
nrm__cuda_is_forked(void)
{
    struct library *library = loaded();
    return library != NULL &&
           atomic_load_explicit(&library->forked, memory_order_relaxed);
}

static void
mark_child(void)
{
    struct library *library = loaded();
    if (library != NULL && atomic_load(&library->begun)) {
        atomic_store(&library->forked, true);
    }
}

static const struct nrm__fork_hook fork_hook = {
    .rank = NRM__RANK_CUDA,
    .lock = &lock,
    .child = mark_child,
};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

void
nrm__cuda_exit_begin(void)
{
    atomic_store_explicit(&exiting, true, memory_order_release);
}

bool
nrm__cuda_is_exiting(void)
{
    return atomic_load_explicit(&exiting, memory_order_acquire);
}

/* ---- what is known of it ---- */

bool
nrm__cuda_is_simulated(void)
{
    struct library *library = loaded();
    return library != NULL && library->driver.simulated;
}

int
nrm__cuda_version(void)
{
    struct library *library = loaded();
    return library != NULL ? library->driver.version : 0;
}

const char *
nrm__cuda_library_path(void)
{
    struct library *library = library_get();
    return library != NULL ? library->path : DEFAULT_LIBRARY;
}

const char *
nrm__cuda_missing_symbols(void)
{
    struct library *library = loaded();
    return library != NULL ? library->missing : "";
}
