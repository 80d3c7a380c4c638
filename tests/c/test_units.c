/* Sizes and times as text. */

#include "check.h"

#include "base/units.h"
#include "nrm/options.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

static const struct {
    const char *text;
    size_t nbytes;
} readable[] = {
    {"0", 0},
    {"123", 123},
    {"123 B", 123},
    {"123b", 123},
    {"+5", 5},
    {"64 KiB", 64 * KIB},
    {"64KiB", 64 * KIB},
    {"64 kib", 64 * KIB},
    {"  64   KiB  ", 64 * KIB},
    {"1.5 GiB", 3 * GIB / 2},
    {".5 MiB", MIB / 2},
    {"1. MiB", MIB},
    {"2 TiB", 2048 * GIB},
    {"1 PiB", 1024 * 1024 * GIB},
    {"10 kB", 10000},
    {"10 KB", 10000},
    {"10 MB", 10000000},
    {"10 GB", 10000000000},
    {"10 TB", 10000000000000},
    {"10 PB", 10000000000000000},
    {"1e9", 1000000000},
    {"1E+3 KiB", 1000 * KIB},
    {"2.5e-1 MiB", MIB / 4},
    {"0.1 KiB", 102}, /* parts of a byte are dropped */
    {"1.10 KiB", 1126},
    {"1.5e1", 15},
    {"18446744073709551615", SIZE_MAX},
    {"18446744073709551615 B", SIZE_MAX},
    {"15.999 PiB", 18013272609575141},
    {"0.0000000000000000000000001 GiB", 0},
    {"1.0000000000000000000000000 GiB", GIB},
    {"10000000000000000000000e-22 KiB", KIB},
    {"0e99999999999", 0},
};

TEST_EACH(a_size_is_read_exactly, readable)
{
    size_t nbytes = 1;
    double percent = 0;
    CHECK_OK(nrm_parse_nbytes(row->text, &nbytes, NULL));
    CHECK_EQ(nbytes, row->nbytes);
    CHECK_OK(nrm_parse_nbytes(row->text, &nbytes, &percent));
    CHECK_EQ(percent, -1.0);
}

static const struct {
    const char *text;
    const char *message;
} unreadable[] = {
    {"", "is empty"},
    {"   ", "is empty"},
    {"-1", "is negative"},
    {"-1 GiB", "the size \"-1 GiB\" is negative"},
    {"nan", "does not start with a number"},
    {"inf", "does not start with a number"},
    {"GiB", "does not start with a number"},
    {".", "does not start with a number"},
    {"0x10", "has no unit out of B, KiB"},
    {"1 GiBs", "has no unit"},
    {"1 G", "has no unit"},
    {"1 GiB 2", "has no unit"},
    {"1,5 GiB", "has no unit"},
    {"1e GiB", "has no unit"},
    {"1.5", "is not a whole number"},
    {"0.5 B", "is not a whole number"},
    {"18446744073709551616", "has more digits than can be kept"},
    {"16384 PiB", "is too large"},
    {"1e30 KiB", "is too large"},
    {"1e999999999", "is too large"},
    {"1.23456789012345678901 GiB", "has more digits than can be kept"},
    {"50%", "is a percentage, where a number of bytes is needed"},
};

TEST_EACH(what_is_no_size_says_why, unreadable)
{
    size_t nbytes = 77;
    CHECK_STATUS(nrm_parse_nbytes(row->text, &nbytes, NULL), NRM_INVALID_VALUE);
    CHECK_EQ(nbytes, 77u);
    CHECK_STR_HAS(nrm_last_error()->message, row->message);
    CHECK_STR_HAS(nrm_last_error()->message, row->text);
}

TEST(no_text_is_invalid)
{
    size_t nbytes;
    CHECK_STATUS(nrm_parse_nbytes(NULL, &nbytes, NULL), NRM_INVALID_VALUE);
}

static const struct {
    const char *text;
    double percent; /* negative: invalid */
} percentages[] = {
    {"50%", 50},       {" 12.5 % ", 12.5}, {"100%", 100}, {"0%", 0},
    {"0.125%", 0.125}, {"101%", -1},       {"-5%", -1},   {"%", -1},
    {"5%%", -1},       {"5 GiB%", -1},     {"5%6", -1},   {"1e99%", -1},
};

TEST_EACH(a_percentage_is_read_where_it_is_allowed, percentages)
{
    size_t nbytes = 7;
    double percent = -2;
    nrm_status status = nrm_parse_nbytes(row->text, &nbytes, &percent);
    CHECK_EQ(status, row->percent < 0 ? NRM_INVALID_VALUE : NRM_OK);
    CHECK_EQ(percent, row->percent < 0 ? -2.0 : row->percent);
    CHECK_EQ(nbytes, row->percent < 0 ? 7u : 0u);
}

static const struct {
    const char *text;
    size_t nbytes;
} formatted[] = {
    {"0 B", 0},
    {"1 B", 1},
    {"100 B", 100},
    {"1023 B", 1023},
    {"1 KiB", KIB},
    {"1025 B", 1025},
    {"1.5 KiB", 1536},
    {"1.125 KiB", 1152},
    {"64 KiB", 64 * KIB},
    {"1000 B", 1000},
    {"1.5 GiB", 3 * GIB / 2},
    {"23826 MiB", 23826 * MIB},
    {"1 PiB", 1024 * 1024 * GIB},
    {"18446744073709551615 B", SIZE_MAX},
};

TEST_EACH(a_size_is_written_exactly, formatted)
{
    char text[32];
    nrm__quantity_format(row->nbytes, nrm__size_units, text, sizeof text);
    CHECK_STR_EQ(text, row->text);
}

TEST(what_was_written_reads_as_the_same_number)
{
    uint64_t seed = 3;
    char text[32];
    for (int i = 0; i < 200000; i++) {
        size_t nbytes = (size_t)check_random(&seed) >> check_random(&seed) % 64;
        if (i % 2 == 0) {
            nbytes &= ~(size_t)0 << check_random(&seed) % 40;
        }
        size_t again = 0;
        nrm__quantity_format(nbytes, nrm__size_units, text, sizeof text);
        if (!CHECK_OK(nrm_parse_nbytes(text, &again, NULL)) ||
            !CHECK_EQ(again, nbytes)) {
            return;
        }
    }
}

static const struct {
    const char *text;
    size_t nbytes;
} for_people[] = {
    {"0 B", 0},
    {"999 B", 999},
    {"64 KiB", 64 * KIB},
    {"1.5 GiB", 1536 * MIB},
    {"762.9 MiB", 800000000},
    {"97.6 KiB", 100001},
    {"15.9 EiB", SIZE_MAX},
};

TEST_EACH(people_read_a_rounded_size, for_people)
{
    char text[32];
    nrm_format_nbytes(row->nbytes, text, sizeof text);
    CHECK_STR_EQ(text, row->text);
}

TEST(a_short_buffer_is_not_overrun)
{
    char text[5] = "wxyz";
    nrm_format_nbytes(64 * KIB, text, 4);
    CHECK_STR_EQ(text, "64 ");
    CHECK_EQ(text[4], '\0');
}

static const struct {
    const char *text;
    uint64_t ns;
    const char *written;
} times[] = {
    {"20 ms", 20000000, "20 ms"},
    {"1 s", 1000000000, "1 s"},
    {"500 us", 500000, "500 us"},
    {"500 \xc2\xb5s", 500000, "500 us"},
    {"1.5 s", 1500000000, "1.5 s"},
    {"2 min", 120000000000, "120 s"},
    {"7 ns", 7, "7 ns"},
    {"0", 0, "0 ns"},
    {"1500 ms", 1500000000, "1.5 s"},
};

TEST_EACH(a_time_is_read_and_written, times)
{
    uint64_t ns = 1;
    char text[32];
    CHECK_EQ(nrm__quantity_parse(row->text, nrm__time_units, true, &ns), NULL);
    CHECK_EQ(ns, row->ns);
    nrm__quantity_format(ns, nrm__time_units, text, sizeof text);
    CHECK_STR_EQ(text, row->written);
}

TEST(a_time_needs_its_unit)
{
    uint64_t ns = 1;
    CHECK_STR_EQ(nrm__quantity_parse("20", nrm__time_units, true, &ns), "needs a unit");
    CHECK_STR_HAS(nrm__quantity_parse("20 KiB", nrm__time_units, true, &ns),
                  "has no unit out of s");
    CHECK_EQ(ns, 1u);
}

CHECK_MAIN
