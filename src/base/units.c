/*
 * Reading and writing quantities.
 *
 * A number is kept as its digits and a power of ten. Digits times the factor of the
 * unit fit 128 bits (64 for the digits, 50 for the largest factor), so the power of ten
 * is applied last and the result is exact.
 */
#include "base/units.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "nrm/options.h"

__extension__ typedef unsigned __int128 uint128;

const struct nrm__unit nrm__size_units[] = {
    {"PiB", UINT64_C(1) << 50, true},
    {"PB", UINT64_C(1000000000000000), false},
    {"TiB", UINT64_C(1) << 40, true},
    {"TB", UINT64_C(1000000000000), false},
    {"GiB", UINT64_C(1) << 30, true},
    {"GB", UINT64_C(1000000000), false},
    {"MiB", UINT64_C(1) << 20, true},
    {"MB", UINT64_C(1000000), false},
    {"KiB", UINT64_C(1) << 10, true},
    {"kB", UINT64_C(1000), false},
    {"B", 1, true},
    {NULL, 0, false},
};

const struct nrm__unit nrm__time_units[] = {
    {"min", UINT64_C(60000000000), false},
    {"s", UINT64_C(1000000000), true},
    {"ms", UINT64_C(1000000), true},
    {"us", UINT64_C(1000), true},
    {"\xc2\xb5s", UINT64_C(1000), false}, /* µs */
    {"ns", 1, true},
    {NULL, 0, false},
};

/* digits * 10^exponent */
struct number {
    uint64_t digits;
    int exponent;
};

static const char too_large[] = "is too large";
static const char too_long[] = "has more digits than can be kept";

static bool
is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static const char *
skip_spaces(const char *text)
{
    while (*text == ' ' || *text == '\t' || *text == '\n' || *text == '\r') {
        text++;
    }
    return text;
}

/* Appends the digits at *text; `weight` is what one more of them adds to the
   exponent. */
static const char *
read_digits(const char **text, int weight, struct number *number, bool *any)
{
    for (; is_digit(**text); (*text)++) {
        uint64_t digit = (uint64_t)(**text - '0');
        *any = true;
        if (number->digits > (UINT64_MAX - digit) / 10) {
            if (digit != 0) {
                return too_long;
            }
            number->exponent += weight + 1; /* a zero is kept in the exponent */
            continue;
        }
        number->digits = number->digits * 10 + digit;
        number->exponent += weight;
    }
    return NULL;
}

/* "e9", "E-3"; an 'e' without digits is left alone. */
static void
read_exponent(const char **text, struct number *number)
{
    const char *at = *text;
    int exponent = 0;
    if (*at != 'e' && *at != 'E') {
        return;
    }
    at++;
    bool is_negative = *at == '-';
    if (*at == '-' || *at == '+') {
        at++;
    }
    if (!is_digit(*at)) {
        return;
    }
    for (; is_digit(*at); at++) {
        exponent = exponent < 10000 ? exponent * 10 + (*at - '0') : exponent;
    }
    number->exponent += is_negative ? -exponent : exponent;
    *text = at;
}

/* "12", "1.5", ".5", "1e9" */
static const char *
read_number(const char **text, struct number *out)
{
    bool any = false;
    *out = (struct number){0, 0};
    const char *problem = read_digits(text, 0, out, &any);
    if (problem == NULL && **text == '.') {
        (*text)++;
        problem = read_digits(text, -1, out, &any);
    }
    if (problem != NULL) {
        return problem;
    }
    if (!any) {
        return "does not start with a number";
    }
    read_exponent(text, out);
    return NULL;
}

static const char *
scale(struct number number, uint64_t factor, uint64_t *out)
{
    uint128 value = (uint128)number.digits * factor;
    bool is_whole = true;
    if (value == 0) {
        *out = 0;
        return NULL;
    }
    for (; number.exponent > 0; number.exponent--) {
        value *= 10;
        if (value > UINT64_MAX) {
            return too_large;
        }
    }
    for (; number.exponent < 0 && value != 0; number.exponent++) {
        is_whole = is_whole && value % 10 == 0;
        value /= 10;
    }
    if (value > UINT64_MAX) {
        return too_large;
    }
    if (factor == 1 && !is_whole) {
        return "is not a whole number of the smallest unit";
    }
    *out = (uint64_t)value;
    return NULL;
}

/* The unit whose name is all that is left of the text, or NULL. */
static const struct nrm__unit *
find_unit(const char *text, const struct nrm__unit *units)
{
    size_t length = strlen(text);
    while (length > 0 && skip_spaces(text + length - 1)[0] == '\0') {
        length--;
    }
    for (const struct nrm__unit *unit = units; unit->name != NULL; unit++) {
        if (strlen(unit->name) == length &&
            strncasecmp(unit->name, text, length) == 0) {
            return unit;
        }
    }
    return NULL;
}

const char *
nrm__quantity_parse(const char *text, const struct nrm__unit *units, bool needs_unit,
                    uint64_t *out)
{
    static const struct nrm__unit none = {"", 1, false};
    struct number number;
    text = skip_spaces(text);
    if (*text == '\0') {
        return "is empty";
    }
    if (*text == '-') {
        return "is negative";
    }
    if (*text == '+') {
        text++;
    }
    const char *problem = read_number(&text, &number);
    if (problem != NULL) {
        return problem;
    }
    text = skip_spaces(text);
    const struct nrm__unit *unit = *text == '\0' ? &none : find_unit(text, units);
    if (unit == NULL) {
        return units == nrm__time_units
                   ? "has no unit out of s, ms, us, ns, min"
                   : "has no unit out of B, KiB, MiB, GiB, TiB, PiB, "
                     "kB, MB, GB, TB, PB";
    }
    if (unit == &none && needs_unit && number.digits != 0) {
        return "needs a unit";
    }
    return scale(number, unit->factor, out);
}

/* Decimals without the zeros at their end. */
static void
format_decimals(uint64_t whole, uint64_t thousandths, const char *unit, char *out,
                size_t size)
{
    char digits[] = {(char)('0' + thousandths / 100),
                     (char)('0' + thousandths / 10 % 10),
                     (char)('0' + thousandths % 10), '\0'};
    for (size_t last = 2; digits[last] == '0'; last--) {
        digits[last] = '\0';
    }
    snprintf(out, size, "%" PRIu64 ".%s %s", whole, digits, unit);
}

void
nrm__quantity_format(uint64_t value, const struct nrm__unit *units, char *out,
                     size_t size)
{
    for (const struct nrm__unit *unit = units; unit->name != NULL; unit++) {
        uint64_t whole = value / unit->factor;
        uint64_t rest = value % unit->factor;
        if (!unit->is_shown || (whole == 0 && unit->factor != 1)) {
            continue;
        }
        if (rest == 0) {
            snprintf(out, size, "%" PRIu64 " %s", whole, unit->name);
            return;
        }
        /* rest * 1000 stays under 2^50 * 2^10 */
        if (rest * 1000 % unit->factor == 0) {
            format_decimals(whole, rest * 1000 / unit->factor, unit->name, out, size);
            return;
        }
    }
}

/* ---- the public calls ---- */

/* "50%": NULL and the number, or what is wrong. */
static const char *
parse_percent(const char *text, double *out)
{
    struct number number;
    uint64_t thousandths;
    text = skip_spaces(text);
    if (*text == '-') {
        return "is negative";
    }
    const char *problem = read_number(&text, &number);
    if (problem != NULL) {
        return problem;
    }
    if (skip_spaces(text)[0] != '%' || *skip_spaces(skip_spaces(text) + 1) != '\0') {
        return "is not a percentage";
    }
    problem = scale(number, 1000, &thousandths);
    if (problem != NULL || thousandths > 100000) {
        return "is more than 100%";
    }
    *out = (double)thousandths / 1000.0;
    return NULL;
}

nrm_status
nrm_parse_nbytes(const char *text, size_t *out, double *out_percent)
{
    const char *problem;
    double percent = -1;
    uint64_t nbytes = 0;
    if (text == NULL) {
        return nrm__error(NRM_INVALID_VALUE, "no text was given for a number of bytes");
    }
    if (strchr(text, '%') == NULL) {
        problem = nrm__quantity_parse(text, nrm__size_units, false, &nbytes);
    }
    else if (out_percent != NULL) {
        problem = parse_percent(text, &percent);
    }
    else {
        problem = "is a percentage, where a number of bytes is needed";
    }
    if (problem != NULL) {
        return nrm__error(NRM_INVALID_VALUE, "the size \"%.80s\" %s", text, problem);
    }
    *out = (size_t)nbytes;
    if (out_percent != NULL) {
        *out_percent = percent;
    }
    return NRM_OK;
}

/* The exact text when its number is short, else the number rounded to a tenth of its
   unit: this is for people. */
void
nrm_format_nbytes(size_t nbytes, char *out, size_t size)
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    char exact[40];
    nrm__quantity_format(nbytes, nrm__size_units, exact, sizeof exact);
    size_t n_digits = strcspn(exact, " ");
    if (n_digits <= 5 || nbytes < 1024) {
        snprintf(out, size, "%s", exact);
        return;
    }
    unsigned unit = 0;
    while (unit < 5 && nbytes >> (10 * (unit + 2)) != 0) {
        unit++;
    }
    unsigned shift = 10 * (unit + 1);
    uint64_t whole = nbytes >> shift;
    uint64_t tenths = ((nbytes & (((size_t)1 << shift) - 1)) * 10) >> shift;
    snprintf(out, size, "%" PRIu64 ".%" PRIu64 " %s", whole, tenths, units[unit]);
}

struct nrm__nbytes_text
nrm__nbytes_text(size_t nbytes)
{
    struct nrm__nbytes_text text;
    nrm_format_nbytes(nbytes, text.chars, sizeof text.chars);
    return text;
}
