/* How a thread that closes a pin waits for the GPU. */
#ifndef NRM_CORE_PIN_WAIT_H
#define NRM_CORE_PIN_WAIT_H

#include <stdbool.h>
#include <stdint.h>

struct nrm__pin_wait {
    bool (*ask)(void); /* attached, now and then: whether it goes on; NULL: it does */
    void *token;       /* of the detachment */
    uint64_t next_ns;  /* when it is asked */
};

/* Detaches; and attaches. */
void nrm__pin_wait_begin(struct nrm__pin_wait *wait, bool (*ask)(void));
void nrm__pin_wait_end(struct nrm__pin_wait *wait);

/* Until everything that was submitted before is done. False: it is not, and may be
   waited for by epochs only. */
bool nrm__pin_wait_for_all(struct nrm__pin_wait *wait);

#endif
