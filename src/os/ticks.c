/*
 * Which clock nrm__ticks reads.
 *
 * The counter of x86-64 can be used when it neither stops nor changes its rate and all
 * cores have the same. The kernel finds out about the last and gives the counter up
 * where it is not so; then its clock source is another one. That of aarch64 is so by
 * definition.
 */
#include "os/ticks.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

bool nrm__ticks_are_cycles;

#if defined(__x86_64__)

#define CPUID_FEATURES 0x80000001u
#define CPUID_FEATURE_RDTSCP (1u << 27)
#define CPUID_POWER 0x80000007u
#define CPUID_POWER_INVARIANT (1u << 8)

static bool
has_steady_counter(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(CPUID_FEATURES, &a, &b, &c, &d) != 0 &&
           (d & CPUID_FEATURE_RDTSCP) != 0 &&
           __get_cpuid(CPUID_POWER, &a, &b, &c, &d) != 0 &&
           (d & CPUID_POWER_INVARIANT) != 0;
}

/* Its sources that are made of the counter. */
static bool
kernel_relies_on_it(void)
{
    static const char *const sources[] = {"tsc\n", "kvm-clock\n",
                                          "hyperv_clocksource_tsc_page\n"};
    char text[64];
    int file = open("/sys/devices/system/clocksource/clocksource0/current_clocksource",
                    O_RDONLY | O_CLOEXEC);
    ssize_t n = file >= 0 ? read(file, text, sizeof text - 1) : -1;
    if (file >= 0) {
        close(file);
    }
    text[n > 0 ? n : 0] = '\0';
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        if (strcmp(text, sources[i]) == 0) {
            return true;
        }
    }
    return false;
}

#endif

__attribute__((constructor)) static void
choose(void)
{
#if defined(__x86_64__)
    nrm__ticks_are_cycles = has_steady_counter() && kernel_relies_on_it();
#elif defined(__aarch64__)
    nrm__ticks_are_cycles = true;
#endif
}
