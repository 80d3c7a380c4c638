/*
 * The length of a tick is that of all ticks since the first log was opened, measured
 * against the monotonic clock, which nobody sets. The real-time clock is asked at each
 * drain.
 */
#include "core/log_scale.h"

#include <time.h>

#include "os/ticks.h"

/* When the tick was what time of the monotonic clock. */
static struct {
    uint64_t ticks, monotonic_ns;
} known;

/* Two drains find another length, by some nanoseconds: then time stands still for a
   moment, and does not go back unless somebody has set the clock. */
#define NOISE_NS INT64_C(1000000)
static int64_t last_ns;

void
nrm__log_scale_begin(void)
{
    if (known.ticks == 0) {
        known.ticks = nrm__ticks();
        known.monotonic_ns = nrm__clock_ns();
    }
}

static int64_t
real_ahead_ns(uint64_t monotonic_ns)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec - (int64_t)monotonic_ns;
}

struct nrm__log_scale
nrm__log_scale_now(void)
{
    uint64_t ticks = nrm__ticks(), now_ns = nrm__clock_ns();
    struct nrm__log_scale scale = {.ticks = ticks,
                                   .real_ns = (int64_t)now_ns + real_ahead_ns(now_ns)};
    if (ticks > known.ticks) {
        scale.ns_per_tick =
            (double)(now_ns - known.monotonic_ns) / (double)(ticks - known.ticks);
    }
    return scale;
}

int64_t
nrm__log_real_ns(const struct nrm__log_scale *scale, uint64_t ticks)
{
    double since = (double)((int64_t)ticks - (int64_t)scale->ticks);
    int64_t real_ns = scale->real_ns + (int64_t)(since * scale->ns_per_tick);
    if (real_ns < last_ns && last_ns - real_ns < NOISE_NS) {
        return last_ns;
    }
    last_ns = real_ns;
    return real_ns;
}
