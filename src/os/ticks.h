/*
 * A clock that costs little to read: the processor's counter where the kernel itself
 * relies on it, which is the same on all cores then; else the monotonic clock. What a
 * tick is, nobody knows: whoever wants times compares two readings with those of a real
 * clock.
 */
#ifndef NRM_OS_TICKS_H
#define NRM_OS_TICKS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/hidden.h"
#include "os/system.h"

/* Set once, when the library is loaded. */
extern bool nrm__ticks_are_cycles NRM__HIDDEN;

/* The processor's counter, where `nrm__ticks_are_cycles`: after what went before in
   this thread and before what comes next, as others see it. */
static inline uint64_t
nrm__cycles(void)
{
#if defined(__x86_64__)
    unsigned core;
    return __builtin_ia32_rdtscp(&core);
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("isb\n\tmrs %0, cntvct_el0" : "=r"(ticks)::"memory");
    return ticks;
#else
    return nrm__clock_ns();
#endif
}

/* The same, sooner: a processor may read it before it is done with what went before. */
static inline uint64_t
nrm__cycles_early(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks)::"memory");
    return ticks;
#else
    return nrm__clock_ns();
#endif
}

/* As nrm__cycles, of whichever clock it is. */
static inline uint64_t
nrm__ticks(void)
{
    return nrm__ticks_are_cycles ? nrm__cycles() : nrm__clock_ns();
}

#endif
