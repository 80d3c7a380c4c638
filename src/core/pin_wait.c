/*
 * Waiting for the GPU, for who closes a pin (core/pin.c).
 *
 * An event is recorded in every active context, and all are polled, with pauses that
 * grow: a wait in the driver would hold up every other thread that calls it, and could
 * not be ended by a signal. Where an event cannot be recorded here and now, as in a
 * capture, there is nothing that may be waited for.
 */
#include "core/pin_wait.h"

#include "base/bits.h"
#include "core/hooks.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "cuda/event.h"
#include "os/system.h"

#define PAUSE_FIRST_NS UINT64_C(20000) /* between two looks; doubled up to ... */
#define PAUSE_LAST_NS UINT64_C(500000)
#define ASK_NS UINT64_C(50000000) /* between two questions whether the wait goes on */

static void
recycle(struct nrm__cuda_event *events, int n)
{
    while (n > 0) {
        nrm__cuda_event_recycle(&events[--n]);
    }
}

/* -1: an event could not be recorded here and now, so nothing may be waited for. */
static int
record_all(struct nrm__cuda_event *events)
{
    int devices[NRM__MAX_DEVICES], n = 0;
    int n_devices = nrm__cuda_active_devices(devices);
    for (int i = 0; i < n_devices; i++) {
        enum nrm__record record = nrm__cuda_record(devices[i], &events[n]);
        if (record == NRM__RECORDED) {
            n++;
        }
        else if (record != NRM__RECORD_IDLE) {
            if (record == NRM__RECORD_INVALIDATED) {
                nrm__epoch_warn_capture(devices[i]);
            }
            recycle(events, n);
            return -1;
        }
    }
    return n;
}

static bool
goes_on(struct nrm__pin_wait *wait)
{
    uint64_t now = nrm__clock_ns();
    if (wait->ask == NULL || now < wait->next_ns) {
        return true;
    }
    nrm__attach(wait->token);
    bool yes = wait->ask();
    wait->token = nrm__detach();
    wait->next_ns = now + ASK_NS;
    return yes;
}

void
nrm__pin_wait_begin(struct nrm__pin_wait *wait, bool (*ask)(void))
{
    wait->ask = ask;
    wait->next_ns = nrm__clock_ns() + ASK_NS;
    wait->token = nrm__detach();
}

void
nrm__pin_wait_end(struct nrm__pin_wait *wait)
{
    nrm__attach(wait->token);
}

bool
nrm__pin_wait_for_all(struct nrm__pin_wait *wait)
{
    struct nrm__cuda_event events[NRM__MAX_DEVICES];
    uint64_t pause = PAUSE_FIRST_NS;
    int n = record_all(events);
    while (n > 0 && !nrm__is_exiting()) {
        nrm_status status = nrm__cuda_event_query(&events[n - 1]);
        if (status == NRM_OK) {
            nrm__cuda_event_recycle(&events[--n]);
        }
        else if (status == NRM_DEVICE_LOST || !goes_on(wait)) {
            recycle(events, n);
            return false;
        }
        else {
            nrm__sleep_ns(pause);
            pause = nrm__min(2 * pause, PAUSE_LAST_NS);
        }
    }
    return n == 0;
}
