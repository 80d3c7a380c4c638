/* What is known of memory that was page-locked in place: see nrm/pin.h. */
#ifndef NRM_CORE_PIN_H
#define NRM_CORE_PIN_H

#include <stdbool.h>
#include <stddef.h>

#include "nrm/pin.h"

/* Whether the bytes from `first` to `last` lie in what one pin has page-locked. One
   load while there is no pin; makes no driver call. */
bool nrm__pins_cover(const void *first, const void *last);

/* As nrm_pin_destroy, but waits for the GPU only while `ask` says so, which is called
   now and then, attached. What is not done then is unlocked later. */
void nrm__pin_destroy_while(nrm_pin *pin, bool (*ask)(void));

/* Bytes that pins have page-locked now, each counted once. 0 in a forked child. */
size_t nrm__pins_nbytes(void);

/* Of them, those that a fork copies: what is mapped shared it does not. */
size_t nrm__pins_private_nbytes(void);

#endif
