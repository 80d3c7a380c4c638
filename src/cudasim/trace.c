/* What was called, what is to fail, and what went wrong unseen.
 *
 * The log is a ring of the latest calls beside exact counters by name. The plans of
 * injected failures are looked up at the same place, because both happen once a call,
 * before anything else. Faults are what a real driver would let pass in silence, such
 * as copying from memory that was unmapped while it was registered. */
#include "sim.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LOG_LENGTH = 4096, N_FAULT_TEXTS = 64, FAULT_NBYTES = 240 };

struct entry {
    enum sim_call_id id;
    nrm_CUresult result;
    uint64_t args[SIM_N_ARGS];
};

struct plan {
    uint64_t countdown; /* calls until it strikes; 0: no plan */
    uint64_t times;     /* it still strikes then; UINT64_MAX: for ever */
    nrm_CUresult error;
};

static struct {
    pthread_mutex_t lock; /* leaf: nothing is taken under it */
    uint64_t counts[SIM_N_CALLS];
    struct plan plans[SIM_N_CALLS];
    struct entry log[LOG_LENGTH];
    uint64_t n_logged;  /* the number of the next entry */
    uint64_t log_start; /* entries before it were cleared */
    uint64_t n_faults;
    char faults[N_FAULT_TEXTS][FAULT_NBYTES];
} trace = {.lock = PTHREAD_MUTEX_INITIALIZER};

void
sim_trace_fork_child(void)
{
    pthread_mutex_init(&trace.lock, NULL);
}

static nrm_CUresult
strike_locked(struct plan *plan)
{
    if (plan->countdown == 0 || --plan->countdown != 0) {
        return NRM_CUDA_SUCCESS;
    }
    if (plan->times != UINT64_MAX) {
        plan->times--;
    }
    plan->countdown = plan->times > 0; /* the next call too, or over */
    return plan->error;
}

nrm_CUresult
sim_trace_count(enum sim_call_id id)
{
    pthread_mutex_lock(&trace.lock);
    trace.counts[id]++;
    nrm_CUresult result = strike_locked(&trace.plans[id]);
    pthread_mutex_unlock(&trace.lock);
    return result;
}

void
sim_trace_log(const struct sim_call *call, nrm_CUresult result)
{
    pthread_mutex_lock(&trace.lock);
    struct entry *entry = &trace.log[trace.n_logged++ % LOG_LENGTH];
    entry->id = call->id;
    entry->result = result;
    memcpy(entry->args, call->args, sizeof entry->args);
    pthread_mutex_unlock(&trace.lock);
}

void
sim_trace_reset(void)
{
    pthread_mutex_lock(&trace.lock);
    memset(trace.counts, 0, sizeof trace.counts);
    memset(trace.plans, 0, sizeof trace.plans);
    trace.n_logged = 0;
    trace.log_start = 0;
    trace.n_faults = 0;
    pthread_mutex_unlock(&trace.lock);
}

void
sim_fault(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&trace.lock);
    if (trace.n_faults < N_FAULT_TEXTS) {
        vsnprintf(trace.faults[trace.n_faults], FAULT_NBYTES, format, args);
    }
    trace.n_faults++;
    pthread_mutex_unlock(&trace.lock);
    va_end(args);
}

/* ---- controls -------------------------------------------------------------------- */

int
nrm_cudasim_fail(const char *name, uint64_t nth, int error, uint64_t times)
{
    enum sim_call_id id = sim_call_find(name);
    if (id == SIM_N_CALLS || (error != 0 && nth == 0)) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&trace.lock);
    trace.plans[id] = (struct plan){
        .countdown = error == 0 ? 0 : nth,
        .times = times == 0 ? UINT64_MAX : times,
        .error = (nrm_CUresult)error,
    };
    pthread_mutex_unlock(&trace.lock);
    return NRM_CUDA_SUCCESS;
}

uint64_t
nrm_cudasim_call_count(const char *name)
{
    enum sim_call_id id = name == NULL ? SIM_N_CALLS : sim_call_find(name);
    uint64_t count = 0;
    pthread_mutex_lock(&trace.lock);
    for (int i = 0; i < SIM_N_CALLS; i++) {
        if (name == NULL || i == (int)id) {
            count += trace.counts[i];
        }
    }
    pthread_mutex_unlock(&trace.lock);
    return count;
}

int
nrm_cudasim_log_read(uint64_t *cursor, char *text, size_t nbytes)
{
    pthread_mutex_lock(&trace.lock);
    uint64_t first = trace.n_logged > LOG_LENGTH ? trace.n_logged - LOG_LENGTH : 0;
    first = first < trace.log_start ? trace.log_start : first;
    uint64_t number = *cursor < first ? first : *cursor;
    bool found = number < trace.n_logged;
    struct entry entry = trace.log[number % LOG_LENGTH];
    pthread_mutex_unlock(&trace.lock);
    if (!found) {
        return 0;
    }
    const char *result = sim_result_name(entry.result);
    snprintf(text, nbytes,
             "%s(0x%" PRIx64 ", 0x%" PRIx64 ", 0x%" PRIx64 ", 0x%" PRIx64 ") = %s",
             sim_call_name(entry.id), entry.args[0], entry.args[1], entry.args[2],
             entry.args[3], result == NULL ? "?" : result);
    *cursor = number + 1;
    return 1;
}

void
nrm_cudasim_log_clear(void)
{
    pthread_mutex_lock(&trace.lock);
    trace.log_start = trace.n_logged;
    pthread_mutex_unlock(&trace.lock);
}

uint64_t
nrm_cudasim_fault_count(void)
{
    pthread_mutex_lock(&trace.lock);
    uint64_t count = trace.n_faults;
    pthread_mutex_unlock(&trace.lock);
    return count;
}

int
nrm_cudasim_fault_text(uint64_t index, char *text, size_t nbytes)
{
    int result = NRM_CUDA_ERROR_NOT_FOUND;
    pthread_mutex_lock(&trace.lock);
    if (index < trace.n_faults && index < N_FAULT_TEXTS) {
        snprintf(text, nbytes, "%s", trace.faults[index]);
        result = NRM_CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&trace.lock);
    return result;
}
