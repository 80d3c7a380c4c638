/*
 * Page-locking memory that is there already, in place.
 *
 * A pin registers exactly the bytes that it is given with the driver, for all devices:
 * give it the whole buffer, as a copy that begins inside the registered bytes and ends
 * outside fails. Pins of the same bytes, or of bytes within those of another pin, are
 * counted, and the last one lets go. Until then the memory must not be unmapped, moved
 * or given back.
 */
#ifndef NRM_PIN_H
#define NRM_PIN_H

#include <stdbool.h>
#include <stddef.h>

#include "nrm/status.h"

typedef struct nrm_pin nrm_pin;

typedef struct nrm_pin_options {
    size_t size;    /* of this struct: NRM_OPTIONS(nrm_pin_options) of nrm/sources.h */
    bool read_only; /* the device may only read it; pages that cannot be written to are
                        found out by themselves */
    bool
        is_private; /* known to be ordinary memory of this process, as malloc gives: the
                        kernel's table of mappings need not be read */
    void *keepalive; /* owned by the pin from success on; what keeps the bytes alive */
    void (*drop)(
        void *keepalive); /* called when they are unlocked, from any thread; may
                                      be NULL */
} nrm_pin_options;

/*
 * Page-locks `nbytes` at `ptr`; no byte of it is written. 0 bytes, and what lies in a
 * block of a page-locked resource of ours, is only kept alive. `options` may be NULL:
 * nothing of the above. Initialises CUDA and may block. NRM_INVALID_VALUE: a part is
 * page-locked already, by others or by a pin of other bytes (the error names both
 * ranges); a writable mapping of a file, whose pages cannot be locked; device or
 * managed memory; addresses that are not mapped. NRM_NOT_SUPPORTED: the device cannot.
 * NRM_OUT_OF_MEMORY, NRM_CUDA_ERROR: the driver refused.
 */
NRM_API NRM_NODISCARD nrm_status nrm_pin_create(void *ptr, size_t nbytes,
                                                const nrm_pin_options *options,
                                                nrm_pin **out);

/*
 * Lets go. The last pin of some bytes waits until all work that was submitted to any
 * device before this call is done, then unlocks them and drops what kept them. While a
 * capture is announced, in a host function, and when an event cannot be recorded, it
 * does not wait: that is done later, by whoever allocates page-locked memory or trims.
 * NULL is no error.
 */
NRM_API void nrm_pin_destroy(nrm_pin *pin);

#endif
