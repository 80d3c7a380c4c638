/* What the checker has found, in words that name both sides. */
#include "checker.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { N_TEXTS = 64, TEXT_NBYTES = NRM_CUDASIM_RACE_NBYTES, SIDE_NBYTES = 200 };

static struct {
    uint64_t n;
    char texts[N_TEXTS][TEXT_NBYTES];
    uint64_t earlier; /* the numbers of the pair that was reported last */
    uint64_t later;
} races;

void
sim_races_reset(void)
{
    races.n = 0;
    races.earlier = 0;
    races.later = 0;
}

void
sim_race_tell(const char *format, ...)
{
    char text[TEXT_NBYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (races.n < N_TEXTS) {
        memcpy(races.texts[races.n], text, sizeof text);
    }
    races.n++;
    if (sim.config.check == NRM_CUDASIM_CHECK_ALOUD) {
        fprintf(stderr, "numpy_rmm: race: %s\n", text);
    }
}

/* ---- both sides ------------------------------------------------------------------ */

static void
describe_actor(const struct sim_access *access, char *out, size_t size)
{
    if (access->device < 0) {
        snprintf(out, size, "thread %d", access->thread);
        return;
    }
    snprintf(out, size, "%sstream %llu of device %d (thread %d)",
             access->in_host_function ? "a host function on " : "", access->stream,
             access->device, access->thread);
}

static void
describe(const struct sim_access *access, char *out, size_t size)
{
    char actor[96];
    const char *does = access->writes ? "writes" : "reads";
    describe_actor(access, actor, sizeof actor);
    if (access->kind == SIM_ACCESS_HANDING_OUT) {
        snprintf(out, size, "#%" PRIu64 ": %zu B at 0x%zx handed out to %s%s",
                 access->seq, access->nbytes, (size_t)access->start, actor,
                 access->device < 0 ? ", which may write them" : "");
        return;
    }
    if (access->kind == SIM_ACCESS_MARKED) {
        snprintf(out, size, "#%" PRIu64 ": %s %s %zu B at 0x%zx", access->seq, actor,
                 does, access->nbytes, (size_t)access->start);
        return;
    }
    snprintf(out, size, "#%" PRIu64 ": %s%s on %s %s %zu B at 0x%zx", access->seq,
             sim_call_name(access->call), access->of_graph ? " of a graph" : "", actor,
             does, access->nbytes, (size_t)access->start);
}

void
sim_race_report(const struct sim_access *earlier, const struct sim_access *later,
                size_t nbytes)
{
    char first[SIDE_NBYTES];
    char second[SIDE_NBYTES];
    char given[64] = "";
    if (races.earlier == earlier->seq && races.later == later->seq) {
        return; /* other bytes of the same two */
    }
    races.earlier = earlier->seq;
    races.later = later->seq;
    describe(earlier, first, sizeof first);
    describe(later, second, sizeof second);
    const struct sim_block *block = sim_block_newest(later->start, later->nbytes);
    if (block != NULL && block->given > earlier->seq) {
        snprintf(given, sizeof given, "; given back: #%" PRIu64 " (thread %d)",
                 block->given, block->thread);
    }
    sim_race_tell("nothing orders %s and %s (%zu B in common%s)", first, second, nbytes,
                  given);
}

/* ---- controls -------------------------------------------------------------------- */

uint64_t
nrm_cudasim_race_count(void)
{
    sim_lock();
    uint64_t n = races.n;
    sim_unlock();
    return n;
}

int
nrm_cudasim_race_text(uint64_t index, char *text, size_t nbytes)
{
    int result = NRM_CUDA_ERROR_NOT_FOUND;
    sim_lock();
    if (index < races.n && index < N_TEXTS) {
        snprintf(text, nbytes, "%s", races.texts[index]);
        result = NRM_CUDA_SUCCESS;
    }
    sim_unlock();
    return result;
}
