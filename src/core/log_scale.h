/* What the ticks of records are on the clock of the day. For whoever drains. */
#ifndef NRM_CORE_LOG_SCALE_H
#define NRM_CORE_LOG_SCALE_H

#include <stdint.h>

/* As of one moment. */
struct nrm__log_scale {
    double ns_per_tick;
    uint64_t ticks;
    int64_t real_ns; /* of the real-time clock, at that tick */
};

/* Once, before the first record. */
void nrm__log_scale_begin(void);

struct nrm__log_scale nrm__log_scale_now(void);

/* To be asked in the order of time. */
int64_t nrm__log_real_ns(const struct nrm__log_scale *scale, uint64_t ticks);

#endif
