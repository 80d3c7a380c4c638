/* What a scope has counted, against what it should have. */
#ifndef NRM_TESTS_COUNTS_H
#define NRM_TESTS_COUNTS_H

#include "check.h"
#include "nrm/adaptors.h"

#define CHECK_COUNTS(counts, bytes, count, high_bytes, high_count, all_bytes, all)     \
    do {                                                                               \
        nrm_counts check__c = (counts);                                                \
        CHECK_EQ(check__c.current_bytes, bytes);                                       \
        CHECK_EQ(check__c.current_count, count);                                       \
        CHECK_EQ(check__c.peak_bytes, high_bytes);                                     \
        CHECK_EQ(check__c.peak_count, high_count);                                     \
        CHECK_EQ(check__c.total_bytes, all_bytes);                                     \
        CHECK_EQ(check__c.total_count, all);                                           \
    } while (0)

#endif
