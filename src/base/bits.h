/* Arithmetic on sizes and addresses. */
#ifndef NRM_BASE_BITS_H
#define NRM_BASE_BITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NRM__KIB ((size_t)1 << 10)
#define NRM__MIB ((size_t)1 << 20)
#define NRM__GIB ((size_t)1 << 30)
#define NRM__HUGE_PAGE (2 * NRM__MIB)

static inline bool
nrm__is_power_of_two(size_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

/* `alignment` is a power of two; the caller has excluded overflow. */
static inline size_t
nrm__align_up(size_t value, size_t alignment)
{
    return (value + alignment - 1) & ~(alignment - 1);
}

static inline size_t
nrm__align_down(size_t value, size_t alignment)
{
    return value & ~(alignment - 1);
}

static inline bool
nrm__is_aligned(const void *ptr, size_t alignment)
{
    return ((uintptr_t)ptr & (alignment - 1)) == 0;
}

static inline size_t
nrm__min(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t
nrm__max(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* The structure of `type` whose field `member` is at `ptr`. */
#define NRM__CONTAINER(ptr, type, member)                                              \
    ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

#endif
