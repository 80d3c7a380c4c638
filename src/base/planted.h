/*
 * Faults that tests plant in the core, to see that they are found.
 *
 * Each is a known way to get the reuse of memory wrong. In the product all of this is
 * the constant false. The tests compile the few files that have such a place a second
 * time, with NRM_PLANTED_FAULTS, and choose one at run time (tests/c/test_planted.c).
 */
#ifndef NRM_BASE_PLANTED_H
#define NRM_BASE_PLANTED_H

#ifdef NRM_PLANTED_FAULTS

#include <stdbool.h>

enum nrm__plant {
    NRM_PLANT_NONE,
    NRM_PLANT_MERGE_WITHOUT_RECORD,  /* behind a wait, under the event from before */
    NRM_PLANT_EVENT_OF_WRONG_DEVICE, /* every device is recorded on the first one */
    NRM_PLANT_DESTROYED_STREAM,      /* its work counts as done when it ends */
    NRM_PLANT_REUSED_HANDLE,         /* a stream is named by its handle */
    NRM_PLANT_RECORD_BEFORE_PUBLISH, /* an epoch closes behind its event */
    NRM_PLANT_KNOWN_USE_SHORTENS,    /* known uses that are done stand for the epoch */
};

extern enum nrm__plant nrm__planted;

/* Of KNOWN_USE_SHORTENS: what the block that this thread gives back had to wait for is
   done. */
extern _Thread_local bool nrm__planted_is_done;

#define NRM_PLANTED(name) (nrm__planted == NRM_PLANT_##name)

#else

#define NRM_PLANTED(name) false

#endif

#endif
