/* See exchange.h. To the rest of the core it looks as if every context had been
   reset. */
#include "core/exchange.h"

#include "base/error.h"
#include "core/hooks.h"
#include "core/order.h"
#include "core/registry.h"
#include "core/uses.h"
#include "cuda/device.h"
#include "nrm/options.h"

nrm_status
nrm__driver_exchange(const char *path)
{
    uint64_t limit_ns = (uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT);
    nrm__registry_forget_driver();
    (void)nrm__retired_drain(limit_ns);
    void *token = nrm__detach();
    nrm_status status = nrm__cuda_set_library(path);
    nrm__attach(token);
    if (status != NRM_OK) {
        return status;
    }
    nrm__cuda_note_devices();
    nrm__epoch_forget_contexts();
    nrm__order_forget_contexts();
    (void)nrm__retired_release_done();
    nrm__warnings_rearm();
    return NRM_OK;
}
