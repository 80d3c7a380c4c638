/* Controls of the simulated CUDA driver.
 *
 * The simulator is a shared library with the driver's entry points. A program that uses
 * it as a driver needs nothing from this header; a test does, to say what the machine
 * looks like, to make calls fail, to hold streams and to ask what has happened.
 *
 * Everything is callable through a foreign function interface: plain integers, pointers
 * and texts. Functions that can fail return a CUresult as int, 0 for success. They work
 * before cuInit and may be called from any thread, except inside a host function.
 */
#ifndef NRM_CUDASIM_H
#define NRM_CUDASIM_H

#include <stddef.h>
#include <stdint.h>

#define NRM_CUDASIM_API __attribute__((visibility("default")))

struct nrm_cudasim_config {
    size_t size;            /* sizeof(struct nrm_cudasim_config), for later growth */
    int devices;            /* 0 to 16 */
    int driver;             /* what cuDriverGetVersion answers, 13000 for 13.0 */
    int init_result;        /* what cuInit answers if it is not 0 */
    int manual;             /* an enum nrm_cudasim_manual: when work runs */
    uint64_t memory_nbytes; /* of each device */
    uint64_t page_locked_nbytes; /* that can be page-locked in all; 0: no limit */
    uint64_t seed;               /* not 0: ready work is chosen at random, repeatably */
    int check; /* an enum nrm_cudasim_check: whether races are looked for */
};

enum nrm_cudasim_manual {
    NRM_CUDASIM_BY_ITSELF,
    NRM_CUDASIM_IN_WAITS, /* in nrm_cudasim_step, and where a call waits for it */
    NRM_CUDASIM_IN_CALLS, /* there, and as the seed says at the beginning of each call:
                             a program of one thread meets the same order each time */
};

enum nrm_cudasim_check {
    NRM_CUDASIM_CHECK_OFF,
    NRM_CUDASIM_CHECK_ON,
    NRM_CUDASIM_CHECK_ALOUD, /* and written to stderr as they are found */
};

/* Fills `out` with what the environment says (NUMPY_RMM_SIMULATED_DEVICES, _MEMORY,
 * _DRIVER and _CHECK), or with one device of 8 GiB under a driver 13.0. What the
 * library starts with. A variable that cannot be read is an error: its name and value
 * are in fault_text. */
NRM_CUDASIM_API int nrm_cudasim_default_config(struct nrm_cudasim_config *out);

/* A new machine: pending work is dropped, memory unmapped, handles, the log, injected
 * failures and changed attributes are forgotten. NULL: the default configuration.
 * Waits for a host function that is running. NOT_INITIALIZED in a forked child whose
 * parent had called cuInit: it keeps its broken driver, as it would with a real one. */
NRM_CUDASIM_API int nrm_cudasim_reset(const struct nrm_cudasim_config *config);

/* Of the physical device, whatever CUDA_VISIBLE_DEVICES shows. */
NRM_CUDASIM_API int nrm_cudasim_set_attribute(int device, int attribute, int value);

/* Every call that involves the device answers `error` until its context is reset;
 * 0 takes it back. */
NRM_CUDASIM_API int nrm_cudasim_set_sticky(int device, int error);

/* The nth call of `name` from now (1: the next one), and the `times - 1` calls after it
 * (0: all of them), answer `error` and do nothing. One plan a name; error 0 ends it. */
NRM_CUDASIM_API int nrm_cudasim_fail(const char *name, uint64_t nth, int error,
                                     uint64_t times);

/* The number of an error by its name, with or without CUDA_ and ERROR_ before it; -1:
 * there is none of that name. */
NRM_CUDASIM_API int nrm_cudasim_error_code(const char *name);

/* Keeps the stream's further work from starting. NULL, 1 and 2 name streams of the
 * calling thread's current context. */
NRM_CUDASIM_API int nrm_cudasim_hold_stream(void *stream);
NRM_CUDASIM_API int nrm_cudasim_release_stream(void *stream);

/* Runs the stream's next operation if it is ready: 1 when it did, else 0. */
NRM_CUDASIM_API int nrm_cudasim_step(void *stream);

/* For a program that explores schedules, in manual mode. It is asked at the beginning
 * and the end of each call, with no lock held, where it may let other threads go first;
 * and, with locks held, what a query shall answer where both can be: 1, that what it
 * asks about is done, which it then is, 0, that it is not. Meanwhile no work runs but
 * what is waited for, or answered to be done, and what must be done for that: the rest
 * commutes with everything that the program sees. NULL: nobody is asked. */
enum nrm_cudasim_moment {
    NRM_CUDASIM_CALL_BEGINS,
    NRM_CUDASIM_CALL_ENDS,
    NRM_CUDASIM_ASKS,
};
typedef int nrm_cudasim_choose_fn(void *arg, int moment, const char *call);
NRM_CUDASIM_API void nrm_cudasim_set_chooser(nrm_cudasim_choose_fn *choose, void *arg);

/* What a kernel reads or writes. */
struct nrm_cudasim_area {
    uintptr_t start;
    size_t nbytes;
    int writes; /* else it reads */
};

/* Submits a kernel that touches these areas, which must be memory that the driver
 * knows, and does nothing: it stands in its stream, keeps the memory in use and is
 * checked like a copy, and can be captured. */
NRM_CUDASIM_API int
nrm_cudasim_launch(void *stream, const struct nrm_cudasim_area *areas, size_t n_areas);

/* Calls of `name` since the reset, failed ones included; all calls for NULL. */
NRM_CUDASIM_API uint64_t nrm_cudasim_call_count(const char *name);

/* The log keeps the latest calls; each has a number, the first of all is 0. Writes the
 * text of the oldest kept call from number *cursor on into `text`, moves *cursor behind
 * it and returns 1, or 0 when there is none. */
NRM_CUDASIM_API int nrm_cudasim_log_read(uint64_t *cursor, char *text, size_t nbytes);
NRM_CUDASIM_API void nrm_cudasim_log_clear(void);

/* Faults: what a real driver lets pass silently, or dies of, and a correct program
 * never does. Returns the number since the reset; the first ones have texts. */
NRM_CUDASIM_API uint64_t nrm_cudasim_fault_count(void);
NRM_CUDASIM_API int nrm_cudasim_fault_text(uint64_t index, char *text, size_t nbytes);

/* Races: reuse of memory, or access to it by the host, that nothing puts in order with
 * what the GPU does there. Returns the number since the reset; the first ones have
 * texts. */
#define NRM_CUDASIM_RACE_NBYTES 640
NRM_CUDASIM_API int nrm_cudasim_checks(void); /* whether they are looked for */
NRM_CUDASIM_API uint64_t nrm_cudasim_race_count(void);
NRM_CUDASIM_API int nrm_cudasim_race_text(uint64_t index, char *text, size_t nbytes);

/* The program reads or writes memory at this moment, which nobody sees by itself; in a
 * host function too. NOT_SUPPORTED: races are not looked for. */
NRM_CUDASIM_API int nrm_cudasim_host_access(const void *ptr, size_t nbytes, int writes);

/* What an allocator says: it hands out a block, to the host or in the order of a stream
 * of the device, or has got one back. See NRM_CUDA_WATCH_NO_STREAM. */
NRM_CUDASIM_API void nrm_cudasim_block_taken(uintptr_t ptr, size_t nbytes, int device,
                                             uintptr_t stream);
NRM_CUDASIM_API void nrm_cudasim_block_given(uintptr_t ptr, size_t nbytes);

enum nrm_cudasim_what {
    NRM_CUDASIM_REGISTRATIONS,
    NRM_CUDASIM_HOST_ALLOCATIONS,
    NRM_CUDASIM_MANAGED_ALLOCATIONS,
    NRM_CUDASIM_DEVICE_ALLOCATIONS,
    NRM_CUDASIM_STREAMS,
    NRM_CUDASIM_EVENTS,
    NRM_CUDASIM_OPERATIONS, /* submitted and not done */
    NRM_CUDASIM_GRAPHS,
    NRM_CUDASIM_RESERVATIONS, /* of addresses */
    NRM_CUDASIM_PHYSICAL,     /* memory that can be mapped there */
    NRM_CUDASIM_MAPPINGS,
    NRM_CUDASIM_POOLS, /* made by programs */
    NRM_CUDASIM_POOL_ALLOCATIONS,
    NRM_CUDASIM_ADVICE, /* ranges with advice about where they should be */
    NRM_CUDASIM_N_WHATS,
};

/* How many of them live, and their bytes (0 for what has none). */
NRM_CUDASIM_API int nrm_cudasim_outstanding(int what, uint64_t *count,
                                            uint64_t *nbytes);

#endif
