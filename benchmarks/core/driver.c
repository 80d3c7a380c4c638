/*
 * The driver, opened when something asks for it: most workloads of the host run where
 * there is none.
 */
#include "driver.h"

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "bench.h"
#include "nrm/options.h"

#define RELEASE_THRESHOLD 4 /* CU_MEMPOOL_ATTR_RELEASE_THRESHOLD */

struct driver driver;

void
driver_expect(int result, const char *what)
{
    if (result != 0) {
        fail("%s answered %d", what, result);
    }
}

static void *
symbol_of(const char *name)
{
    void *symbol = dlsym(driver.library, name);
    if (symbol == NULL) {
        fail("this driver has no %s", name);
    }
    return symbol;
}

#define FIND(field, symbol, arguments) *(void **)&driver.field = symbol_of(symbol);

void
driver_open(void)
{
    char path[256];
    if (driver.library != NULL) {
        return;
    }
    nrm_option_get_text(NRM_OPT_CUDA_LIBRARY, path, sizeof path);
    driver.library = dlopen(path[0] ? path : "libcuda.so.1", RTLD_NOW);
    if (driver.library == NULL) {
        fail("no CUDA driver: %s", dlerror());
    }
    DRIVER_CALLS(FIND)
    driver_expect(driver.init(0), "cuInit");
    driver_expect(driver.retain(&driver.context, 0), "cuDevicePrimaryCtxRetain");
    driver_enter();
}

void
driver_enter(void)
{
    if (driver.library != NULL) {
        driver_expect(driver.set_current(driver.context), "cuCtxSetCurrent");
    }
}

void
driver_open_pool(void)
{
    unsigned long long all = ~0ULL; /* or it gives everything back at each wait */
    driver_open();
    POOL_CALLS(FIND)
    driver_expect(driver.default_pool(&driver.pool, 0), "cuDeviceGetDefaultMemPool");
    driver_expect(driver.pool_set(driver.pool, RELEASE_THRESHOLD, &all),
                  "cuMemPoolSetAttribute");
}

void
driver_open_reuse(void)
{
    driver_open();
    REUSE_CALLS(FIND)
}

size_t
driver_device_count(void)
{
    int n = 0;
    driver_expect(driver.n_devices(&n), "cuDeviceGetCount");
    return (size_t)n;
}

/* ---- a kernel that takes its time ---- */

static const char spin[] = ".version 6.3\n"
                           ".target sm_75\n"
                           ".address_size 64\n"
                           ".visible .entry spin(.param .u64 out, .param .u64 clocks)\n"
                           "{\n"
                           "    .reg .pred %p;\n"
                           "    .reg .b64 %out, %clocks, %start, %now, %passed;\n"
                           "    ld.param.u64 %out, [out];\n"
                           "    ld.param.u64 %clocks, [clocks];\n"
                           "    mov.u64 %start, %clock64;\n"
                           "again:\n"
                           "    mov.u64 %now, %clock64;\n"
                           "    sub.s64 %passed, %now, %start;\n"
                           "    setp.lt.s64 %p, %passed, %clocks;\n"
                           "    @%p bra again;\n"
                           "    cvta.to.global.u64 %out, %out;\n"
                           "    st.global.u64 [%out], %now;\n"
                           "    ret;\n"
                           "}\n";
#define CLOCKS 1000000 /* as RMM's benchmark has it */

static void *function; /* NULL: the driver runs no kernels */

void
driver_open_kernel(void)
{
    void *module = NULL;
    driver_open();
    if (dlsym(driver.library, "cuLaunchKernel") == NULL) {
        return;
    }
    KERNEL_CALLS(FIND)
    driver_expect(driver.load_module(&module, spin), "cuModuleLoadData");
    driver_expect(driver.find_function(&function, module, "spin"),
                  "cuModuleGetFunction");
}

void
driver_launch(void *ptr, void *stream)
{
    uint64_t out = (uintptr_t)ptr, clocks = CLOCKS;
    void *parameters[] = {&out, &clocks};
    if (function == NULL) {
        driver_expect(driver.fill_async(out, 1, 8, stream), "cuMemsetD8Async");
        return;
    }
    driver_expect(driver.launch(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters,
                                NULL),
                  "cuLaunchKernel");
}
