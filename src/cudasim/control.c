/* The simulator as a whole: its state, its beginning, its reset, its fork, and the
 * controls that look into it. */
#include "checker.h"

#include <stdlib.h>
#include <string.h>

struct sim_state sim = {
    .driver_lock = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .progress = PTHREAD_COND_INITIALIZER,
    .work = PTHREAD_COND_INITIALIZER,
};

atomic_bool sim_is_forked;

static pthread_once_t start_once = PTHREAD_ONCE_INIT;

/* A child starts with locks that no lost thread holds, and with none of the threads.
 * When the parent had called cuInit it has no driver for ever, and only the controls
 * that ask what was still work. */
static void
fork_child(void)
{
    atomic_store(&sim_is_forked, sim.initialized || atomic_load(&sim_is_forked));
    pthread_mutex_init(&sim.driver_lock, NULL);
    pthread_mutex_init(&sim.lock, NULL);
    pthread_cond_init(&sim.progress, NULL);
    pthread_cond_init(&sim.work, NULL);
    sim_trace_fork_child();
    sim_transfer_fork_child();
    sim_engine_reset(true);
}

static void
apply_config(const struct nrm_cudasim_config *config)
{
    sim.config = *config;
    for (int i = 0; i < config->devices; i++) {
        memset(&sim.devices[i], 0, sizeof sim.devices[i]);
        sim_device_defaults(&sim.devices[i], i);
    }
    sim.n_foreign = 0;
}

/* No thread and no file: those come with the first use. */
static void
start(void)
{
    struct nrm_cudasim_config config;
    pthread_atfork(NULL, NULL, fork_child);
    if (nrm_cudasim_default_config(&config) != NRM_CUDA_SUCCESS) {
        config.init_result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    apply_config(&config);
    sim.epoch = 1;
}

void
sim_lock(void)
{
    pthread_once(&start_once, start);
    pthread_mutex_lock(&sim.lock);
}

void
sim_unlock(void)
{
    pthread_mutex_unlock(&sim.lock);
}

/* ---- reset ----------------------------------------------------------------------- */

static bool
is_valid(const struct nrm_cudasim_config *config)
{
    return config->size == sizeof *config && config->devices >= 0 &&
           config->devices <= SIM_MAX_DEVICES && config->driver >= 1000 &&
           config->manual >= NRM_CUDASIM_BY_ITSELF &&
           config->manual <= NRM_CUDASIM_IN_CALLS && config->memory_nbytes > 0;
}

static void
destroy_graph(void *graph, void *unused)
{
    (void)unused;
    sim_graph_destroy(graph);
}

static void
destroy_exec(void *exec, void *unused)
{
    (void)unused;
    sim_exec_destroy(exec);
}

/* Threads that wait for work of the old machine must get on before the driver's lock,
 * which they may hold, can be had. */
static void
stop_everything(void)
{
    sim_lock();
    struct nrm_CUctx_st *context = NULL;
    while ((context = sim_context_next(context)) != NULL) {
        if (context->alive) {
            sim_context_stop(context);
        }
    }
    sim_unlock();
}

/* NULL: the default one. */
static int
choose_config(const struct nrm_cudasim_config *config, struct nrm_cudasim_config *out)
{
    if (config == NULL) {
        return nrm_cudasim_default_config(out);
    }
    if (!is_valid(config)) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    *out = *config;
    return NRM_CUDA_SUCCESS;
}

int
nrm_cudasim_reset(const struct nrm_cudasim_config *config)
{
    struct nrm_cudasim_config chosen;
    if (atomic_load(&sim_is_forked)) {
        return NRM_CUDA_ERROR_NOT_INITIALIZED;
    }
    int result = choose_config(config, &chosen);
    if (result != NRM_CUDA_SUCCESS) {
        return result;
    }
    stop_everything();
    pthread_mutex_lock(&sim.driver_lock);
    sim_lock();
    struct nrm_CUctx_st *context = NULL;
    while ((context = sim_context_next(context)) != NULL) {
        sim_context_end(context);
    }
    sim_virtual_forget();
    sim_pools_forget();
    sim_advice_reset();
    for (int i = 0; i < sim.config.devices; i++) {
        sim_device_memory_finish(i);
    }
    sim_handles_each(&sim_graphs, destroy_graph, NULL);
    sim_handles_each(&sim_execs, destroy_exec, NULL);
    sim_checker_reset();
    sim.initialized = false;
    sim.n_visible = 0;
    sim.page_locked_nbytes = 0;
    sim.epoch++;
    apply_config(&chosen);
    sim_trace_reset();
    sim_engine_reset(false);
    sim_unlock();
    pthread_mutex_unlock(&sim.driver_lock);
    sim_lock();
    sim_objects_run_destructors_locked();
    sim_unlock();
    return NRM_CUDA_SUCCESS;
}

/* ---- exploring ------------------------------------------------------------------- */

struct sim_explorer sim_explorer;

void
nrm_cudasim_set_chooser(nrm_cudasim_choose_fn *choose, void *arg)
{
    sim_lock();
    sim_explorer = (struct sim_explorer){choose, arg};
    sim_unlock();
}

/* ---- devices --------------------------------------------------------------------- */

int
nrm_cudasim_set_attribute(int device, int attribute, int value)
{
    if (attribute < 1 || attribute >= SIM_MAX_ATTRIBUTES) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    int result = NRM_CUDA_ERROR_INVALID_DEVICE;
    sim_lock();
    if (device >= 0 && device < sim.config.devices) {
        sim.devices[device].attributes[attribute] = value;
        result = NRM_CUDA_SUCCESS;
    }
    sim_unlock();
    return result;
}

int
nrm_cudasim_set_sticky(int device, int error)
{
    int result = NRM_CUDA_ERROR_INVALID_DEVICE;
    sim_lock();
    if (device >= 0 && device < sim.config.devices) {
        sim.devices[device].sticky = (nrm_CUresult)error;
        result = NRM_CUDA_SUCCESS;
    }
    sim_unlock();
    return result;
}

/* ---- streams --------------------------------------------------------------------- */

nrm_CUresult
sim_control_find_locked(void *stream, struct sim_queue **out)
{
    struct sim_call call = {.thread = sim_thread_get()};
    if (call.thread == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (call.thread->depth > 0) {
        call.context = call.thread->stack[call.thread->depth - 1];
        if (!call.context->alive) {
            return NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
    }
    bool is_special = stream == NULL || stream == (void *)NRM_CU_STREAM_LEGACY ||
                      stream == (void *)NRM_CU_STREAM_PER_THREAD;
    if (!is_special && !sim_handle_is_live(&sim_streams, stream)) {
        return NRM_CUDA_ERROR_INVALID_HANDLE; /* no driver was asked: no fault */
    }
    return sim_stream_find(&call, stream, out);
}

static int
set_held(void *stream, bool held)
{
    struct sim_queue *queue;
    sim_lock();
    nrm_CUresult result = sim_control_find_locked(stream, &queue);
    if (result == NRM_CUDA_SUCCESS) {
        queue->held = held;
        pthread_cond_signal(&sim.work);
        pthread_cond_broadcast(&sim.progress); /* manual mode: waiters do the work */
    }
    sim_unlock();
    return (int)result;
}

int
nrm_cudasim_hold_stream(void *stream)
{
    return set_held(stream, true);
}

int
nrm_cudasim_release_stream(void *stream)
{
    return set_held(stream, false);
}

int
nrm_cudasim_step(void *stream)
{
    struct sim_queue *queue;
    sim_lock();
    bool stepped = sim_control_find_locked(stream, &queue) == NRM_CUDA_SUCCESS &&
                   sim_queue_step(queue);
    sim_unlock();
    return stepped;
}

/* ---- what is left ---------------------------------------------------------------- */

static void
count_ranges(enum sim_range_kind kind, uint64_t *count, uint64_t *nbytes)
{
    const struct sim_range *range;
    for (size_t i = 0; (range = sim_range_at(i)) != NULL; i++) {
        if (range->kind == kind && range->pool == NULL) {
            *count += 1;
            *nbytes += range->nbytes;
        }
    }
}

static const enum sim_range_kind kinds[] = {
    [NRM_CUDASIM_REGISTRATIONS] = SIM_REGISTERED,
    [NRM_CUDASIM_HOST_ALLOCATIONS] = SIM_HOST,
    [NRM_CUDASIM_MANAGED_ALLOCATIONS] = SIM_MANAGED,
    [NRM_CUDASIM_DEVICE_ALLOCATIONS] = SIM_DEVICE,
    [NRM_CUDASIM_RESERVATIONS] = SIM_VIRTUAL,
    [NRM_CUDASIM_PHYSICAL] = SIM_PHYSICAL,
};

static void
count_locked(int what, uint64_t *count, uint64_t *nbytes)
{
    switch (what) {
    case NRM_CUDASIM_STREAMS:
        *count = sim_streams.n_live;
        break;
    case NRM_CUDASIM_EVENTS:
        *count = sim_events.n_live;
        break;
    case NRM_CUDASIM_GRAPHS:
        *count = sim_graphs.n_live;
        break;
    case NRM_CUDASIM_POOLS:
        sim_pools_count(count);
        break;
    case NRM_CUDASIM_POOL_ALLOCATIONS:
        sim_pools_count_pieces(count, nbytes);
        break;
    case NRM_CUDASIM_ADVICE:
        sim_advice_count(count, nbytes);
        break;
    case NRM_CUDASIM_MAPPINGS:
        sim_virtual_count_mappings(count, nbytes);
        break;
    case NRM_CUDASIM_OPERATIONS:
        *count = sim_queue_pending();
        break;
    default:
        count_ranges(kinds[what], count, nbytes);
    }
}

int
nrm_cudasim_outstanding(int what, uint64_t *count, uint64_t *nbytes)
{
    if (what < 0 || what >= NRM_CUDASIM_N_WHATS) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    *count = 0;
    *nbytes = 0;
    sim_lock();
    count_locked(what, count, nbytes);
    sim_unlock();
    return NRM_CUDA_SUCCESS;
}
