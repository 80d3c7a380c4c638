/* What the files of the simulator share.
 *
 * The simulator stands alone: it includes the declared driver interface, libc and
 * pthread, and exports only entry points and controls, so its internal names carry the
 * short prefix sim_. They follow the verbs of the core.
 *
 * Two locks order everything, taken in this order:
 *
 *   driver   held by calls that submit, register, allocate or free, for as long as they
 *            last. A free that waits for work keeps it, as the real driver does, and so
 *            stalls those calls in all threads. Queries and synchronisation go without.
 *   state    protects every structure here. Held for the body of every call and let go
 *            only inside waits and around long copies.
 *
 * A third, inside trace.c, protects the log and the plans of failure; nothing is taken
 * under it. Work executes with none of them held.
 */
#ifndef NRM_CUDASIM_SIM_H
#define NRM_CUDASIM_SIM_H

#include "cuda/abi.h"
#include "cudasim.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Found without a look into the table of what other libraries may replace. */
#define SIM_HIDDEN __attribute__((visibility("hidden")))

enum {
    SIM_MAX_DEVICES = 16,
    SIM_MAX_FOREIGN = 16, /* contexts that programs have made and not destroyed */
    SIM_MAX_CONTEXTS = SIM_MAX_DEVICES + SIM_MAX_FOREIGN,
    SIM_MAX_ATTRIBUTES = 192, /* their numbers are dense; later drivers append */
    SIM_MAX_CONTEXT_STACK = 32,
    SIM_N_ARGS = 4, /* that the log shows */
};

enum sim_call_id {
#define X(name, symbol, version, required, result, arguments) SIM_CALL_##name,
    NRM_CUDA_ALL_CALLS(X)
#undef X
        SIM_N_CALLS,
};

/* ---- memory (ranges.c, memory.c, registration.c, virtual.c) ---------------------- */

enum sim_range_kind {
    SIM_REGISTERED,
    SIM_HOST,
    SIM_MANAGED,
    SIM_DEVICE,
    SIM_VIRTUAL,  /* reserved addresses */
    SIM_PHYSICAL, /* what is mapped there; nobody is told its addresses */
};

/* Memory that the driver knows, to the byte. */
struct sim_range {
    uintptr_t start;
    size_t nbytes;
    enum sim_range_kind kind;
    unsigned int flags;           /* as given to the call that made it */
    struct nrm_CUctx_st *context; /* that it belongs to, borrowed; NULL: reserved */
    unsigned char *shadow;        /* registered: the bytes as they were; or NULL */
    struct sim_mapping *mappings; /* reserved: owned, in order of address */
    struct nrm_CUmemPoolHandle_st *pool; /* a chunk of one, borrowed; or NULL */
    struct sim_piece *pieces;            /* a chunk's, owned */
};

struct sim_range *sim_range_find(uintptr_t address); /* that holds it, or NULL */
struct sim_range *sim_range_find_overlap(uintptr_t start, size_t nbytes);
bool sim_range_add(struct sim_range *range); /* owns; false: out of memory */
struct sim_range *sim_range_create(enum sim_range_kind kind, uintptr_t start,
                                   size_t nbytes, unsigned int flags,
                                   struct nrm_CUctx_st *context);
void sim_range_remove(struct sim_range *range); /* and frees it */
/* The range of this index, in order of address, or NULL behind the last. */
struct sim_range *sim_range_at(size_t index);
/* First index whose range ends behind the address. */
size_t sim_range_index(uintptr_t address);

nrm_CUresult sim_page_lock(size_t nbytes); /* counts them, up to the limit */
nrm_CUresult sim_range_give_back(struct sim_range *range); /* waits; frees the range */
void sim_memory_forget(struct nrm_CUctx_st *context);      /* everything that is its */
void sim_device_memory_finish(int ordinal);
/* Bytes of the context's device, of the kind DEVICE or PHYSICAL. */
nrm_CUresult sim_device_memory_take(struct nrm_CUctx_st *context,
                                    enum sim_range_kind kind, size_t nbytes,
                                    struct sim_range **out);
void sim_device_memory_give(struct sim_range *range); /* waits for nothing */
nrm_CUresult sim_managed_memory_take(struct nrm_CUctx_st *context, size_t nbytes,
                                     struct sim_range **out);

struct sim_span;
/* Whether all of it is mapped, and the (physical) device may read or write there. */
bool sim_virtual_is_open(const struct sim_range *range, uintptr_t start, size_t nbytes,
                         int device, bool writes);
/* Where the memory at the address is, -1: nothing is mapped. */
int sim_virtual_device(const struct sim_range *range, uintptr_t address);
/* Turns a span of a reservation into the memory behind it, *nbytes to what lies there
 * in one piece. The memory stays until unuse. NULL: *nbytes are not mapped. */
struct sim_physical *sim_virtual_use(struct sim_span *span, size_t *nbytes);
void sim_virtual_unuse(struct sim_physical *physical); /* NULL is fine */
void sim_virtual_count_mappings(uint64_t *count, uint64_t *nbytes);
void sim_virtual_forget(void); /* all of it */

struct sim_call;
struct sim_clock; /* checker.h */
struct sim_op;
struct sim_queue;
/* ---- memory pools, advice (pools.c, advice.c) ------------------------------------ */

/* Whether a program may touch all of it, where the range is a chunk of a pool. */
bool sim_pool_holds(const struct sim_range *range, uintptr_t start, size_t nbytes);
/* The piece of a chunk that is in use there; false: none is. */
bool sim_pool_piece(const struct sim_range *range, uintptr_t address,
                    uintptr_t *out_start, size_t *out_nbytes);
nrm_CUresult sim_pool_free_now(uintptr_t ptr);     /* waits for nothing */
void sim_pool_drop_chunk(struct sim_range *range); /* its memory goes */
void sim_pools_synchronized(void);                 /* somebody has waited for work */
void sim_pools_forget(void);                       /* all of them */
void sim_pools_count(uint64_t *count);             /* of programs */
void sim_pools_count_pieces(uint64_t *count, uint64_t *nbytes);

void sim_advice_forget(uintptr_t start, size_t nbytes);
void sim_advice_count(uint64_t *count, uint64_t *nbytes);
void sim_advice_reset(void);
/* Whether it is memory whose pages migrate: managed, or pageable where a device reads
   that. */
bool sim_memory_moves(uintptr_t start, size_t nbytes);

/* ---- bytes (transfer.c) ---------------------------------------------------------- */

/* One side of a copy. Host memory is only ever touched through the kernel, which
 * answers where a load would be a segmentation fault. */
struct sim_span {
    struct sim_range *range; /* borrowed while work on it is pending; NULL: pageable */
    uintptr_t address;       /* of the first byte */
    size_t pitch;            /* bytes from row to row */
    size_t slice;            /* bytes from plane to plane */
    bool is_reserved;        /* found by its address when it runs, never by `range` */
};

struct sim_copy {
    struct sim_span dst;
    struct sim_span src;
    size_t width;  /* bytes of a row */
    size_t height; /* rows of a plane; 0: this is no copy */
    size_t depth;  /* planes */
};

struct sim_copy sim_copy_flat(uintptr_t dst, uintptr_t src, size_t nbytes);
/* From the first byte of a side to the last. */
size_t sim_copy_extent(const struct sim_copy *copy, const struct sim_span *span);
/* The rows of all planes are counted through. */
size_t sim_copy_n_rows(const struct sim_copy *copy);
uintptr_t sim_copy_row(const struct sim_copy *copy, const struct sim_span *span,
                       size_t row);
void sim_copy_execute(const struct sim_copy *copy, enum sim_call_id call);
void sim_fill_execute(const struct sim_copy *copy, unsigned char value,
                      enum sim_call_id call);
/* False, and nothing recorded, when some of it is not mapped. */
bool sim_bytes_read(void *to, uintptr_t from, size_t nbytes);
uint32_t sim_word_read(const struct sim_span *span); /* 4 bytes, atomically */
void sim_transfer_fork_child(void);

/* ---- what copies accept (copies.c) ----------------------------------------------- */

enum sim_side {
    SIM_DRIVERS, /* must be memory that the driver knows */
    SIM_ANY,     /* may be pageable */
};

/* Finds the memory of both sides; INVALID_VALUE where the queue cannot copy there. */
nrm_CUresult sim_copy_resolve(const struct sim_queue *queue, struct sim_copy *copy,
                              enum sim_side dst, enum sim_side src);
bool sim_copy_is_in_place(const struct sim_queue *queue); /* what is pageable, too */
/* Takes the source, which is host memory, as it is now, rows side by side. */
nrm_CUresult sim_copy_stage(struct sim_op *op);
/* The rest of the call has no part in the driver's lock. */
nrm_CUresult sim_copy_wait(struct sim_call *call, struct sim_queue *queue);

/* ---- contexts and threads (contexts.c, foreign.c, threads.c) --------------------- */

/* A context. Its address is its handle: that of a primary one outlives every reset,
 * that of one that a program has made is the next one's when it is destroyed. */
struct nrm_CUctx_st {
    int ordinal;              /* of the physical device */
    int index;                /* among all contexts there can be */
    bool alive;               /* between retain and the last release or a reset */
    unsigned int refs;        /* retains less releases; a reset does not touch it */
    unsigned long long id;    /* of this life */
    struct sim_queue *queues; /* all with work or a handle, the legacy one among them */
    struct sim_queue *legacy;
    int n_executing;         /* operations that run at this moment */
    struct sim_clock *ended; /* checker: what queues did that have left, and ... */
    struct sim_clock *ended_blocking; /* ... the blocking ones among them */
};

struct sim_device {
    struct nrm_CUctx_st context;
    nrm_CUresult sticky;
    int attributes[SIM_MAX_ATTRIBUTES];
    uint64_t total_nbytes;
    uint64_t used_nbytes;
    uintptr_t base; /* of the reserved addresses, 0 before the first allocation */
    size_t reserved_nbytes;
    int fd;                    /* the bytes: a sparse file; offset 0 is `base` */
    nrm_CUmemoryPool pools[2]; /* the default ones: of its memory, of managed memory */
};

struct sim_thread {
    uint64_t serial;
    uint64_t epoch; /* of the simulator when this was last valid */
    struct nrm_CUctx_st *stack[SIM_MAX_CONTEXT_STACK];
    int depth;
    nrm_CUstreamCaptureMode capture_mode;
    bool in_host_function;
    const struct sim_op *running; /* whose host function this thread is in, or NULL */
    struct sim_queue *queues[SIM_MAX_CONTEXTS]; /* its per-thread streams */
};

struct sim_thread *sim_thread_get(void); /* the calling one; NULL: out of memory */
nrm_CUresult sim_context_check(const struct nrm_CUctx_st *context);
nrm_CUresult sim_context_visible(nrm_CUdevice device, struct nrm_CUctx_st **out);
bool sim_context_is_handle(nrm_CUcontext context);
nrm_CUresult sim_context_begin(struct nrm_CUctx_st *context);
bool sim_context_is_primary(const struct nrm_CUctx_st *context);
/* The next context in a walk over all that may have work, NULL: the first, or no
   more. */
struct nrm_CUctx_st *sim_context_next(const struct nrm_CUctx_st *context);
nrm_CUresult sim_context_push(struct sim_thread *thread, nrm_CUcontext context);
void sim_context_stop(struct nrm_CUctx_st *context); /* its work */
void sim_context_end(struct nrm_CUctx_st *context);  /* this life of it */

/* ---- handles (handles.c) --------------------------------------------------------- */

/* First field of every object whose address is a handle. */
struct sim_handle {
    bool live;
    struct sim_handle *next_free;
};

struct sim_handles {
    size_t object_nbytes;
    struct sim_chunk *chunks;
    struct sim_handle *free; /* the last one destroyed comes first */
    size_t n_live;
};

void *sim_handle_create(struct sim_handles *pool); /* zeroed; NULL: out of memory */
bool sim_handle_is_live(const struct sim_handles *pool, const void *handle);
void sim_handle_destroy(struct sim_handles *pool, void *handle);
void sim_handles_each(struct sim_handles *pool, void (*visit)(void *handle, void *arg),
                      void *arg);

/* ---- queues of work (queues.c, engine.c) ----------------------------------------- */

enum sim_op_kind {
    SIM_OP_COPY,
    SIM_OP_FILL,
    SIM_OP_WAIT_VALUE,
    SIM_OP_WAIT_MARKER,
    SIM_OP_HOST_FUNCTION,
    SIM_OP_KERNEL,     /* touches some memory, and does nothing */
    SIM_OP_END_LAUNCH, /* of a graph: does nothing, and keeps its objects until then */
    SIM_OP_FREE,       /* to a pool: a moment, and no more */
};

struct sim_objects;

struct sim_op {
    struct sim_op *next;
    struct sim_queue *queue; /* that it was submitted to */
    uint64_t seq;            /* order of submission in the process */
    enum sim_op_kind kind;
    enum sim_call_id call; /* that submitted it, for faults */
    bool running;
    struct sim_copy copy;      /* COPY, FILL; WAIT_VALUE: copy.src is the word */
    unsigned char *staged;     /* owned: the pageable source as it was at the call */
    uint32_t value;            /* FILL, WAIT_VALUE */
    unsigned int condition;    /* WAIT_VALUE */
    struct sim_marker *marker; /* WAIT_MARKER, retained */
    struct nrm_cudasim_area *areas; /* KERNEL, owned */
    size_t n_areas;
    nrm_CUhostFn function; /* HOST_FUNCTION */
    void *user_data;
    struct sim_objects *objects; /* END_LAUNCH, retained */
    bool is_captured;            /* it was, also in its launches */
    struct sim_clock *clock;     /* checker: what comes before it, itself included */
    uint64_t n_doing;            /* of its queue */
    uint64_t newest_taken;       /* captured: the latest handing out of its memory */
};

struct sim_queue {
    struct sim_queue *next;       /* in its context */
    struct nrm_CUctx_st *context; /* NULL once that life ended */
    unsigned int refs;            /* context, handle or thread, markers, captures */
    unsigned long long id;
    bool legacy;
    bool blocking; /* orders itself with the legacy stream */
    bool held;
    bool closed;          /* no handle any more: leaves its context when it is empty */
    struct sim_op *first; /* oldest; everything not done yet */
    struct sim_op *last;
    uint64_t n_submitted;
    uint64_t n_done;
    struct sim_capture *capture; /* that it is part of, or NULL */
    bool unjoined;     /* forked into the capture, and its origin does not await it */
    size_t n_captured; /* operations of this queue in the capture */
    uint32_t actor;    /* checker: its number in clocks */
    uint64_t n_doings; /* operations it has been given */
    struct sim_clock *clock; /* what its next operation comes after */
};

/* A point in some queues: passed when each has done as much as had been submitted. */
struct sim_marker {
    unsigned int refs;
    struct sim_clock *clock; /* checker: what has been done when it is passed */
    size_t n_points;
    struct {
        struct sim_queue *queue; /* retained */
        uint64_t count;
    } points[];
};

struct sim_queue *sim_queue_create(struct nrm_CUctx_st *context);
void sim_queue_retain(struct sim_queue *queue);
void sim_queue_release(struct sim_queue *queue);
void sim_queue_close(struct sim_queue *queue); /* releases the owner's reference too */
void sim_queue_drop(struct sim_queue *queue);  /* pending work is forgotten */
size_t sim_queue_pending(void);                /* operations in all queues */

struct sim_op *sim_op_create(enum sim_op_kind kind, enum sim_call_id call);
bool sim_op_uses(const struct sim_op *op, const struct sim_range *range);
bool sim_op_set_areas(struct sim_op *op, const struct nrm_cudasim_area *areas,
                      size_t n_areas); /* copies them; false: no memory */
/* Whether what a kernel touches is memory that the driver knows. */
bool sim_op_finds_areas(const struct sim_op *op);
void sim_op_destroy(struct sim_op *op);

/* NULL: out of memory. */
struct sim_marker *sim_marker_of_queue(struct sim_queue *queue);
struct sim_marker *sim_marker_of_context(struct nrm_CUctx_st *context);
struct sim_marker *sim_marker_of_memory(const struct sim_range *range);
void sim_marker_retain(struct sim_marker *marker);
void sim_marker_release(struct sim_marker *marker);         /* NULL is fine */
bool sim_marker_is_passed(const struct sim_marker *marker); /* true for NULL */
/* The same, as the answer to a program; true: it knows what that means. */
bool sim_marker_ask(struct sim_marker *marker, enum sim_call_id call);

/* Steals the operation. Runs it later, or makes it part of the queue's capture. */
nrm_CUresult sim_submit(struct sim_queue *queue, struct sim_op *op);
/* Waits with the state lock let go; steals the marker. */
nrm_CUresult sim_marker_wait(struct sim_marker *marker);
bool sim_queue_step(struct sim_queue *queue);  /* runs its next operation if ready */
void sim_engine_run_some_locked(void);         /* as many as chance says, often none */
void sim_queue_shift(struct sim_queue *queue); /* its oldest operation is done */
void sim_engine_stop_work(struct nrm_CUctx_st *context); /* until nothing executes */
void sim_engine_wake(void);
void sim_engine_reset(bool forked);

/* ---- streams, events, capture ---------------------------------------------------- */

struct nrm_CUstream_st {
    struct sim_handle handle;
    struct sim_queue *queue; /* retained */
};

struct nrm_CUevent_st {
    struct sim_handle handle;
    struct nrm_CUctx_st *context;
    unsigned int flags;
    struct sim_marker *marker;   /* of the latest record, or NULL */
    struct sim_capture *capture; /* the latest record was captured into it */
    struct sim_queue *fork; /* that it was captured from, borrowed from `capture` */
    size_t fork_length;     /* of that queue's captured work at the record */
};

/* Operations in order of capture, of nobody's queue. */
struct sim_ops {
    struct sim_op *first;
    struct sim_op *last;
};

struct nrm_CUgraph_st {
    struct sim_handle handle;
    struct sim_ops ops;
    struct sim_objects *objects; /* owned references of user objects; NULL: none */
};

struct nrm_CUgraphExec_st {
    struct sim_handle handle;
    struct sim_ops ops;
    struct sim_objects *objects;
};

struct nrm_CUuserObject_st {
    struct sim_handle handle;
    uint64_t refs; /* of the user, of graphs and of executables */
    nrm_CUhostFn destroy;
    void *data;
    struct sim_clock *clock;          /* checker: of the launches that held it */
    struct nrm_CUuserObject_st *next; /* doomed: the destructor is to be called */
};

extern struct sim_handles sim_streams;
extern struct sim_handles sim_events;
extern struct sim_handles sim_graphs;
extern struct sim_handles sim_execs;
extern struct sim_handles sim_user_objects;

/* For controls: of the calling thread's current context, where the handle needs one. */
nrm_CUresult sim_control_find_locked(void *stream, struct sim_queue **out);
nrm_CUresult sim_stream_find(const struct sim_call *call, nrm_CUstream stream,
                             struct sim_queue **out);
/* What submitting to the queue would do to captures; SUCCESS: nothing. */
nrm_CUresult sim_capture_check_submit(struct sim_queue *queue);
nrm_CUresult sim_capture_check_unsafe(const struct sim_thread *thread);
nrm_CUresult sim_capture_check_context(const struct nrm_CUctx_st *context);
nrm_CUresult sim_capture_join(struct sim_queue *queue,
                              const struct nrm_CUevent_st *event);
void sim_capture_record(struct sim_queue *queue, struct nrm_CUevent_st *event);
void sim_capture_add(struct sim_queue *queue, struct sim_op *op); /* steals */
/* A call that a capturing stream does not bear: UNSUPPORTED, and the capture is
 * over. */
nrm_CUresult sim_capture_spoil(struct sim_queue *queue);
void sim_capture_leave(struct sim_queue *queue); /* the stream goes away */
void sim_graph_destroy(struct nrm_CUgraph_st *graph);
void sim_exec_destroy(struct nrm_CUgraphExec_st *exec);
void sim_ops_append(struct sim_ops *ops, struct sim_op *op); /* steals */

/* User objects that somebody holds together: a graph, an executable, its launches. */
void sim_objects_retain(struct sim_objects *objects); /* NULL is fine for both */
void sim_objects_release(struct sim_objects *objects);
void sim_objects_note(struct sim_objects *objects, struct sim_clock *clock);
/* Whether destructors are due; calls them, with the state lock let go meanwhile. */
bool sim_objects_are_due(void);
void sim_objects_run_destructors_locked(void);

/* ---- the frame of every entry point (calls.c, trace.c) --------------------------- */

struct sim_call {
    enum sim_call_id id;
    nrm_CUresult result;
    struct sim_thread *thread;
    struct nrm_CUctx_st *context; /* current and usable, or NULL where none is needed */
    bool has_driver_lock;
    uint64_t args[SIM_N_ARGS];
};

#define SIM_ENTRY __attribute__((visibility("default")))

/* First statement of every entry point: returns from it when the call may not go on. */
#define SIM_BEGIN(call, name, ...)                                                     \
    struct sim_call call = {.id = SIM_CALL_##name, .args = {__VA_ARGS__}};             \
    if (!sim_call_begin(&call)) {                                                      \
        return call.result;                                                            \
    }

#define SIM_PTR(pointer) ((uint64_t)(uintptr_t)(pointer))

bool sim_call_begin(struct sim_call *call);
nrm_CUresult sim_call_end(struct sim_call *call, nrm_CUresult result);
const char *sim_call_name(enum sim_call_id id);
enum sim_call_id sim_call_find(const char *name); /* SIM_N_CALLS: unknown */
int sim_call_version(enum sim_call_id id);
const char *sim_result_name(nrm_CUresult result); /* NULL: unknown */

nrm_CUresult sim_trace_count(enum sim_call_id id); /* counts; the injected failure */
void sim_trace_log(const struct sim_call *call, nrm_CUresult result);
void sim_trace_reset(void);
void sim_trace_fork_child(void);
__attribute__((format(printf, 1, 2))) void sim_fault(const char *format, ...);

/* ---- the one simulator ----------------------------------------------------------- */

struct sim_state {
    pthread_mutex_t driver_lock;
    pthread_mutex_t lock;
    pthread_cond_t progress; /* something was done */
    pthread_cond_t work;     /* something was submitted, released or flagged */
    struct nrm_cudasim_config config;
    bool initialized;             /* cuInit has succeeded */
    int visible[SIM_MAX_DEVICES]; /* ordinal of the user → physical device */
    int n_visible;
    struct sim_device devices[SIM_MAX_DEVICES];
    struct nrm_CUctx_st foreign[SIM_MAX_FOREIGN]; /* contexts that programs made */
    int n_foreign;                                /* that were ever needed at once */
    uint64_t page_locked_nbytes;
    uint64_t epoch; /* of resets: threads forget what they knew before */
    uint64_t next_seq;
    unsigned long long next_id; /* of contexts, queues and threads */
};

/* Whoever explores schedules; set while no call is being made. */
struct sim_explorer {
    nrm_cudasim_choose_fn *choose;
    void *arg;
};

extern struct sim_explorer sim_explorer SIM_HIDDEN;

static inline bool
sim_is_explored(void)
{
    return __builtin_expect(sim_explorer.choose != NULL, 0);
}

/* Asks; 0 where nobody explores. */
static inline int
sim_choose(enum nrm_cudasim_moment moment, enum sim_call_id call)
{
    return sim_is_explored()
               ? sim_explorer.choose(sim_explorer.arg, (int)moment, sim_call_name(call))
               : 0;
}

extern struct sim_state sim SIM_HIDDEN;
extern atomic_bool sim_is_forked
    SIM_HIDDEN; /* in a child whose parent had called cuInit */

void sim_lock(void);
void sim_unlock(void);
void sim_device_defaults(struct sim_device *device, int ordinal);

/* Every entry point, so that definitions are checked against the declared interface. */
#define X(name, symbol, version, required, result, arguments)                          \
    SIM_ENTRY result symbol arguments;
NRM_CUDA_ALL_CALLS(X)
#undef X

#endif
