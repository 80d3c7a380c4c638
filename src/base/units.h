/*
 * Quantities as people write them, exactly: "1.5 GiB", "20 ms". Only integers are
 * calculated with, so neither the locale nor rounding has a say.
 */
#ifndef NRM_BASE_UNITS_H
#define NRM_BASE_UNITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct nrm__unit {
    const char *name; /* read in any case */
    uint64_t factor;
    bool is_shown; /* by nrm__quantity_format; the others are only read */
};

/* From the largest to the smallest, which comes with factor 1; ended by a NULL name. */
extern const struct nrm__unit nrm__size_units[];
extern const struct nrm__unit nrm__time_units[]; /* nanoseconds */

/*
 * Reads "<number><spaces><unit>"; parts smaller than the smallest unit are dropped.
 * NULL: `out` is set; otherwise what is wrong, to stand behind the text: "is negative".
 * Without a unit the number counts the smallest one, or, with `needs_unit`, must be
 * zero.
 */
const char *nrm__quantity_parse(const char *text, const struct nrm__unit *units,
                                bool needs_unit, uint64_t *out);

/* The shortest text that is read as exactly `value`, with at most three decimals. */
void nrm__quantity_format(uint64_t value, const struct nrm__unit *units, char *out,
                          size_t size);

struct nrm__nbytes_text {
    char chars[32];
};

/* nrm_format_nbytes as a value, for several in one message. */
struct nrm__nbytes_text nrm__nbytes_text(size_t nbytes);

#endif
