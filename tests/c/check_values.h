/* Values of any scalar type, for check.h: how they compare, whatever their types, and
   how they are shown. */

#ifndef CHECK_VALUES_H
#define CHECK_VALUES_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* A value of any scalar type, kept with its sign so that comparisons are by value. */
struct check__value {
    enum { CHECK__SIGNED, CHECK__UNSIGNED, CHECK__FLOAT, CHECK__POINTER } kind;
    union {
        intmax_t s;
        uintmax_t u;
        double f;
        const volatile void *p;
    } as;
};

static inline struct check__value
check__from_signed(intmax_t value)
{
    return (struct check__value){.kind = CHECK__SIGNED, .as.s = value};
}

static inline struct check__value
check__from_unsigned(uintmax_t value)
{
    return (struct check__value){.kind = CHECK__UNSIGNED, .as.u = value};
}

static inline struct check__value
check__from_float(double value)
{
    return (struct check__value){.kind = CHECK__FLOAT, .as.f = value};
}

static inline struct check__value
check__from_pointer(const volatile void *value)
{
    return (struct check__value){.kind = CHECK__POINTER, .as.p = value};
}

#define CHECK__VALUE(x)                                                                \
    _Generic((x),                                                                      \
        bool: check__from_unsigned,                                                    \
        char: check__from_signed,                                                      \
        signed char: check__from_signed,                                               \
        short: check__from_signed,                                                     \
        int: check__from_signed,                                                       \
        long: check__from_signed,                                                      \
        long long: check__from_signed,                                                 \
        unsigned char: check__from_unsigned,                                           \
        unsigned short: check__from_unsigned,                                          \
        unsigned: check__from_unsigned,                                                \
        unsigned long: check__from_unsigned,                                           \
        unsigned long long: check__from_unsigned,                                      \
        float: check__from_float,                                                      \
        double: check__from_float,                                                     \
        default: check__from_pointer)(x)

/* Less than, equal, greater: -1, 0, 1; pointers by address, NaN unequal to all (2). */
static inline int
check__order(struct check__value a, struct check__value b)
{
    if (a.kind == CHECK__FLOAT || b.kind == CHECK__FLOAT) {
        double x = a.kind == CHECK__FLOAT    ? a.as.f
                   : a.kind == CHECK__SIGNED ? (double)a.as.s
                                             : (double)a.as.u;
        double y = b.kind == CHECK__FLOAT    ? b.as.f
                   : b.kind == CHECK__SIGNED ? (double)b.as.s
                                             : (double)b.as.u;
        return x < y ? -1 : x > y ? 1 : x >= y ? 0 : 2;
    }
    bool a_negative = a.kind == CHECK__SIGNED && a.as.s < 0;
    bool b_negative = b.kind == CHECK__SIGNED && b.as.s < 0;
    if (a_negative != b_negative) {
        return a_negative ? -1 : 1;
    }
    /* of one sign, so two's complement orders like the numbers themselves */
    uintmax_t x = a.kind == CHECK__POINTER ? (uintptr_t)a.as.p : a.as.u;
    uintmax_t y = b.kind == CHECK__POINTER ? (uintptr_t)b.as.p : b.as.u;
    return x < y ? -1 : x > y;
}

static inline void
check__show(struct check__value value, char *text, size_t nbytes)
{
    switch (value.kind) {
    case CHECK__SIGNED:
        snprintf(text, nbytes, "%" PRIdMAX, value.as.s);
        break;
    case CHECK__UNSIGNED:
        snprintf(text, nbytes, "%" PRIuMAX, value.as.u);
        break;
    case CHECK__FLOAT:
        snprintf(text, nbytes, "%.17g", value.as.f);
        break;
    case CHECK__POINTER:
        snprintf(text, nbytes, "%p", (void *)(uintptr_t)value.as.p);
        break;
    }
}

static inline bool
check__sign_holds(int order, const char *sign)
{
    switch (sign[0]) {
    case '=':
        return order == 0;
    case '!':
        return order != 0;
    case '<':
        return order == -1 || (order == 0 && sign[1] == '=');
    default:
        return order == 1 || (order == 0 && sign[1] == '=');
    }
}

#endif
