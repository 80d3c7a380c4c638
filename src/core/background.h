/*
 * The background thread: gives back what is retired and done while the program does
 * something else. It starts when something is retired for the first time, never at
 * import, and sleeps for good while nothing is. It queries epochs and never records one:
 * only an allocation or a trim knows that no capture of its thread is in progress.
 */
#ifndef NRM_CORE_BACKGROUND_H
#define NRM_CORE_BACKGROUND_H

#include <stdbool.h>
#include <stdint.h>

/* Something was retired. Cheap; called from an array's deallocation. */
void nrm__background_wake(void);

/* After nrm__exit_begin: returns when it is out of the driver, which is about to unload
   itself, or after `limit_ns`. */
void nrm__background_settle(uint64_t limit_ns);

bool nrm__background_is_running(void);

#endif
