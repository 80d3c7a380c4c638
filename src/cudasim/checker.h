/* The checker: reuse of memory, and access by the host, that nothing puts in order.
 *
 * It is a race detector by vector clocks. Every queue is an actor, and so are all host
 * threads together, whose order among themselves is taken as it happened: a program has
 * locks that nobody sees here. What one actor does is numbered, and a clock says of
 * each actor up to which number its doings come before. Everything that makes one thing
 * wait for another is a marker (queues.c), so a marker carries the clock of what it
 * awaits, and whoever has waited for it follows that clock. An answer "not ready"
 * orders nothing.
 *
 * Work is looked at when it is submitted, not when it runs: what it comes after is
 * known by then, so a race is found whatever the GPU does first, also when it happens
 * to have finished. Only what a host function does is known later, and it stands where
 * its operation does.
 *
 * Everything here is called with the state lock held, and does nothing while the
 * configuration does not ask for it. */
#ifndef NRM_CUDASIM_CHECKER_H
#define NRM_CUDASIM_CHECKER_H

#include "intervals.h"
#include "sim.h"

enum { SIM_HOST_ACTOR = 0 };

/* ---- clocks (clock.c) ------------------------------------------------------------ */

/* Shared and never changed but by sim_clock_set. NULL is the clock of nothing. Where
 * there is no memory left a clock is too small, which reports too much: a fault says
 * so. */
struct sim_clock;

uint64_t sim_clock_get(const struct sim_clock *clock, uint32_t actor);
struct sim_clock *sim_clock_retain(struct sim_clock *clock);
void sim_clock_release(struct sim_clock *clock);
/* Makes *clock one that knows what `other` does, too. */
void sim_clock_join(struct sim_clock **clock, struct sim_clock *other);
void sim_clock_set(struct sim_clock **clock, uint32_t actor, uint64_t count);

/* ---- accesses (shadow.c, races.c) ------------------------------------------------ */

enum sim_access_kind {
    SIM_ACCESS_WORK,        /* of a stream */
    SIM_ACCESS_STAGING,     /* a call reads pageable memory before it returns */
    SIM_ACCESS_MARKED,      /* the program has said so */
    SIM_ACCESS_HANDING_OUT, /* of a block */
};

/* Who touched some bytes, in words for a report and in numbers for the order. */
struct sim_access {
    unsigned int refs;
    enum sim_access_kind kind;
    bool writes;
    bool in_host_function;
    bool of_graph;
    uint32_t actor;
    uint64_t count;          /* its number among those of the actor */
    struct sim_clock *clock; /* what comes before it, itself included; owned */
    enum sim_call_id call;   /* WORK, STAGING */
    uint64_t seq;            /* in the process */
    int thread;              /* that asked for it */
    int device;              /* of the stream; -1: none */
    unsigned long long stream;
    uintptr_t start; /* as the program named it */
    size_t nbytes;
};

void sim_access_release(struct sim_access *access);
/* Whether everything of `before` comes before `after`. */
bool sim_access_precedes(const struct sim_access *before,
                         const struct sim_access *after);

/* Compares the access with all that is known of the bytes, and reports. With `stays` it
 * is known of them from then on. Retains it. */
void sim_shadow_touch(struct sim_access *access, uintptr_t start, size_t nbytes,
                      bool stays);
/* What comes before and with all that is known of the bytes. */
void sim_shadow_await(struct sim_clock **clock, uintptr_t start, size_t nbytes);
void sim_shadow_forget(uintptr_t start, size_t nbytes);
void sim_shadow_reset(void);

/* Two accesses to `nbytes` bytes of which neither comes before the other; once for each
 * pair. */
void sim_race_report(const struct sim_access *earlier, const struct sim_access *later,
                     size_t nbytes);
__attribute__((format(printf, 1, 2))) void sim_race_tell(const char *format, ...);
void sim_races_reset(void);

/* ---- blocks (blocks.c) ----------------------------------------------------------- */

struct sim_block {
    struct sim_interval where;
    uint64_t taken; /* the number of the handing out */
    uint64_t given; /* of the giving back; 0: it is in use */
    int thread;     /* that gave it back */
};

/* The latest handing out of any of the bytes; NULL: none is known. */
const struct sim_block *sim_block_newest(uintptr_t start, size_t nbytes);
/* The first of them that has been given back and not handed out since; NULL: none. */
const struct sim_block *sim_block_given(uintptr_t start, size_t nbytes);
void sim_blocks_forget(uintptr_t start, size_t nbytes);
void sim_blocks_reset(void);

/* ---- what calls mean (checker.c) ------------------------------------------------- */

uint64_t sim_checker_number(void); /* the next one, of calls and accesses alike */
int sim_checker_thread(void);      /* the number of the calling thread in the system */
void sim_checker_begin_queue(struct sim_queue *queue);
void sim_checker_end_queue(struct sim_queue *queue); /* leaves its context, empty */
/* An operation that joins the end of its queue, or a capture. */
void sim_checker_submit(struct sim_queue *queue, struct sim_op *op);
void sim_checker_capture(struct sim_op *op);
/* The host reads what a copy stages. */
void sim_checker_stage(const struct sim_op *op);
/* What a marker over this queue awaits, with those that the legacy stream orders. */
void sim_checker_await_queue(struct sim_clock **clock, const struct sim_queue *queue);
void sim_checker_await_context(struct sim_clock **clock,
                               const struct nrm_CUctx_st *context);
void sim_checker_await_memory(struct sim_clock **clock, const struct sim_range *range);
/* Somebody has waited. */
void sim_checker_host_follows(struct sim_clock *clock);
void sim_checker_queue_follows(struct sim_queue *queue, struct sim_clock *clock);
/* The context has ended; its work is done or will never be. */
void sim_checker_end_context(struct nrm_CUctx_st *context);
void sim_checker_forget(uintptr_t start, size_t nbytes); /* memory that has gone */
void sim_checker_reset(void);

/* An access by the calling thread, or by the queue whose host function it runs. NULL:
 * no memory. For the caller to release. */
struct sim_access *sim_checker_host_access(enum sim_access_kind kind, bool writes,
                                           uintptr_t start, size_t nbytes);
/* One at the end of a queue, which leaves no trace there. */
struct sim_access *sim_checker_queue_access(struct sim_queue *queue, uintptr_t start,
                                            size_t nbytes);
/* Reserved addresses stand for the memory that is mapped there. */
void sim_checker_touch(struct sim_access *access, uintptr_t start, size_t nbytes,
                       bool stays);

#endif
