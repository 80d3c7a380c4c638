/*
 * The background thread: gives back what is retired and done while the program does
 * something else. It starts when something is retired for the first time, never at
 * import, and sleeps for good while nothing is. It queries epochs and never records one:
 * only an allocation or a trim knows that no capture of its thread is in progress.
 */
#ifndef NRM_CORE_BACKGROUND_H
#define NRM_CORE_BACKGROUND_H

#include <stdbool.h>

/* Something was retired. Cheap; called from an array's deallocation. */
void nrm__background_wake(void);

bool nrm__background_is_running(void);

#endif
