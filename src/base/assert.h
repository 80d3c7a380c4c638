/*
 * Asserts in three strengths: NRM_ASSERT always, NRM_DEBUG_ASSERT in debug builds,
 * NRM_SLOW_ASSERT with -Dslow_asserts=true (it may walk a whole pool).
 */
#ifndef NRM_BASE_ASSERT_H
#define NRM_BASE_ASSERT_H

/* Prints what failed and where, and aborts. */
_Noreturn void nrm__assert_failed(const char *text, const char *file, int line);

#define NRM_ASSERT(condition)                                                          \
    ((condition) ? (void)0 : nrm__assert_failed(#condition, __FILE__, __LINE__))

#ifdef NDEBUG
#define NRM_DEBUG_ASSERT(condition) ((void)sizeof(condition))
#else
#define NRM_DEBUG_ASSERT(condition) NRM_ASSERT(condition)
#endif

#ifdef NRM_SLOW_ASSERTS
#define NRM_SLOW_ASSERT(condition) NRM_ASSERT(condition)
#else
#define NRM_SLOW_ASSERT(condition) ((void)sizeof(condition))
#endif

#endif
