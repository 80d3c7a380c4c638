/* The options table. The environment is read once, so what is read from it is tested
   in a second run of this program. */

#include "check.h"

#include "nrm/options.h"

TEST(every_option_has_a_name_a_variable_and_a_meaning)
{
    for (nrm_option option = 0; option < NRM_OPT_COUNT; option++) {
        nrm_option_info info;
        nrm_option found = NRM_OPT_COUNT;
        nrm_option_info_get(option, &info);
        CHECK_STR_HAS(info.environment, "NUMPY_RMM_");
        CHECK_GT(strlen(info.doc), 0u);
        CHECK_STR_EQ(info.text, info.default_text);
        CHECK_EQ(info.source, NRM_OPTION_DEFAULT);
        CHECK_OK(nrm_option_find(info.name, &found));
        CHECK_EQ(found, option);
        for (size_t i = 0; info.name[i] != '\0'; i++) {
            char upper = info.name[i] == '_' ? '_' : (char)(info.name[i] - 32);
            CHECK_EQ(info.environment[strlen("NUMPY_RMM_") + i], upper);
        }
    }
}

TEST(an_unknown_name_is_not_found)
{
    nrm_option option;
    CHECK_STATUS(nrm_option_find("pinned_treshold", &option), NRM_NOT_FOUND);
    CHECK_STR_HAS(nrm_last_error()->message, "pinned_treshold");
    CHECK_STATUS(nrm_option_set((nrm_option)NRM_OPT_COUNT, "1"), NRM_NOT_FOUND);
}

TEST(the_defaults_are_those_of_the_table)
{
    nrm_option_info info;
    char text[64];
    CHECK_EQ(nrm_option_get(NRM_OPT_PINNED_THRESHOLD), 65536);
    CHECK_EQ(nrm_option_get(NRM_OPT_WAIT_LIMIT), 20000000);
    CHECK_EQ(nrm_option_get(NRM_OPT_DEBUG), 0);
    nrm_option_get_text(NRM_OPT_CUDA_LIBRARY, text, sizeof text);
    CHECK_STR_EQ(text, "");
    nrm_option_info_get(NRM_OPT_PINNED_THRESHOLD, &info);
    CHECK_STR_EQ(info.text, "64 KiB");
    nrm_option_info_get(NRM_OPT_WAIT_LIMIT, &info);
    CHECK_STR_EQ(info.text, "20 ms");
    nrm_option_info_get(NRM_OPT_REUSE, &info);
    CHECK_STR_EQ(info.text, "context");
    CHECK_STR_EQ(info.choices, "context|immediate|recorded");
    nrm_option_info_get(NRM_OPT_DEBUG, &info);
    CHECK_STR_EQ(info.text, "false");
    CHECK_STR_EQ(info.choices, "");
}

static const struct {
    const char *name; /* of the case */
    nrm_option option;
    const char *text;
    int64_t number;
    const char *written;
} settings[] = {
    {"size", NRM_OPT_PINNED_THRESHOLD, "1.5 MiB", 1572864, "1.5 MiB"},
    {"zero", NRM_OPT_PINNED_THRESHOLD, "0", 0, "0 B"},
    {"time", NRM_OPT_WAIT_LIMIT, "500 us", 500000, "500 us"},
    {"int", NRM_OPT_TOUCH_THREADS, " 8 ", 8, "8"},
    {"choice", NRM_OPT_ON_EXHAUSTED, "wait", 3, "wait"},
    {"first choice", NRM_OPT_ON_EXHAUSTED, "auto", 0, "auto"},
    {"bool word", NRM_OPT_DEBUG, "Yes", 1, "true"},
    {"bool digit", NRM_OPT_DEBUG, "1", 1, "true"},
};

static int current_setting;

static void
sets(void)
{
    nrm_option_info info;
    nrm_option option = settings[current_setting].option;
    CHECK_OK(nrm_option_set(option, settings[current_setting].text));
    CHECK_EQ(nrm_option_get(option), settings[current_setting].number);
    nrm_option_info_get(option, &info);
    CHECK_STR_EQ(info.text, settings[current_setting].written);
    CHECK_EQ(info.source, NRM_OPTION_PROGRAM);
}

static void
reads_from_the_environment(void)
{
    nrm_option_info info;
    nrm_option option = settings[current_setting].option;
    CHECK_EQ(nrm_option_get(option), settings[current_setting].number);
    nrm_option_info_get(option, &info);
    CHECK_STR_EQ(info.text, settings[current_setting].written);
    CHECK_EQ(info.source, NRM_OPTION_ENVIRONMENT);
    CHECK_EQ(nrm_last_error()->status, NRM_OK);
}

TEST_EACH(a_program_sets_an_option, settings)
{
    current_setting = (int)(row - settings);
    CHECK_IN_CHILD(sets);
}

/* Whether this is the program that run_again_with started. */
static bool
is_second_run(void)
{
    return getenv("TEST_OPTIONS_SECOND_RUN") != NULL;
}

/* Runs one test of this program again with a variable set that nobody has read yet. */
static void
run_again_with(const char *variable, const char *value, const char *test)
{
    char program[4096];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program);
    REQUIRE(length > 0 && length < (ssize_t)sizeof program);
    program[length] =
        '\0'; /* by its name: the link itself leads to Valgrind, under that */
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        setenv("TEST_OPTIONS_SECOND_RUN", "1", 1);
        setenv(variable, value, 1);
        (void)!freopen("/dev/null", "w", stdout); /* its lines are not ours */
        execl(program, "test_options", test, (char *)NULL);
        _exit(2);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK_MSG(status == 0,
              "TEST_OPTIONS_SECOND_RUN=1 %s=\"%s\" test_options \"%s\" fails", variable,
              value, test);
}

TEST_EACH(an_option_is_read_from_the_environment, settings)
{
    nrm_option_info info;
    char name[96];
    if (is_second_run()) {
        current_setting = (int)(row - settings);
        reads_from_the_environment();
        return;
    }
    snprintf(name, sizeof name, "an_option_is_read_from_the_environment[%s]",
             row->name);
    nrm_option_info_get(row->option, &info);
    run_again_with(info.environment, row->text, name);
}

static void
has_an_invalid_row(void)
{
    nrm_option_info info;
    nrm_option_info_get(NRM_OPT_PINNED_THRESHOLD, &info);
    CHECK_EQ(info.source, NRM_OPTION_INVALID);
    CHECK_STR_EQ(info.text, "64 KiB");
    CHECK_EQ(nrm_option_get(NRM_OPT_PINNED_THRESHOLD), 65536);
    CHECK_EQ(nrm_last_error()->status, NRM_OK);
    CHECK_OK(nrm_option_set(NRM_OPT_PINNED_THRESHOLD, "1 MiB"));
    nrm_option_info_get(NRM_OPT_PINNED_THRESHOLD, &info);
    CHECK_EQ(info.source, NRM_OPTION_PROGRAM);
}

static const struct {
    const char *text;
} unreadable[] = {{"many"}, {"-1"}, {"50%"}, {"1 KiB B"}};

TEST_EACH(an_unreadable_variable_keeps_the_default, unreadable)
{
    char name[96];
    if (is_second_run()) {
        has_an_invalid_row();
        return;
    }
    snprintf(name, sizeof name, "an_unreadable_variable_keeps_the_default[%s]",
             row->text);
    run_again_with("NUMPY_RMM_PINNED_THRESHOLD", row->text, name);
}

static const struct {
    const char *name;
    nrm_option option;
    const char *text;
    const char *message;
} wrong[] = {
    {"size", NRM_OPT_PINNED_THRESHOLD, "many",
     "pinned_threshold: \"many\" does not start"},
    {"negative size", NRM_OPT_PINNED_THRESHOLD, "-1", "is negative"},
    {"percent", NRM_OPT_PARKED_LIMIT, "50%", "has no unit"},
    {"huge size", NRM_OPT_PARKED_LIMIT, "1024 PiB", "is out of range: 0 B to 64 PiB"},
    {"small segment", NRM_OPT_SEGMENT_NBYTES, "1 KiB", "is out of range: 64 KiB"},
    {"time without unit", NRM_OPT_WAIT_LIMIT, "20", "needs a unit"},
    {"long time", NRM_OPT_WAIT_LIMIT, "1000 min", "is out of range: 0 ns to 3600 s"},
    {"int", NRM_OPT_DEVICE, "first", "is not a whole number"},
    {"fraction", NRM_OPT_DEVICE, "1.5", "is not a whole number"},
    {"negative int", NRM_OPT_DEVICE, "-1", "is out of range: 0 to 1023"},
    {"huge int", NRM_OPT_DEVICE, "99999999999999999999999", "is out of range"},
    {"choice", NRM_OPT_REUSE, "never", "is not one of context|immediate"},
    {"part of a choice", NRM_OPT_REUSE, "cont", "is not one of"},
    {"empty choice", NRM_OPT_REUSE, "", "is not one of"},
    {"bool", NRM_OPT_DEBUG, "maybe", "is neither true nor false"},
};

TEST_EACH(a_wrong_value_changes_nothing, wrong)
{
    int64_t before = nrm_option_get(row->option);
    CHECK_STATUS(nrm_option_set(row->option, row->text), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, row->message);
    CHECK_EQ(nrm_option_get(row->option), before);
}

TEST(a_text_that_is_too_long_is_refused)
{
    char text[400];
    memset(text, 'p', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    CHECK_STATUS(nrm_option_set(NRM_OPT_CUDA_LIBRARY, text), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "is longer than 255 bytes");
    CHECK_STATUS(nrm_option_set(NRM_OPT_CUDA_LIBRARY, NULL), NRM_INVALID_VALUE);
}

static void
sets_and_reads(unsigned index, void *arg)
{
    char text[64];
    (void)arg;
    for (int i = 0; i < 2000; i++) {
        if (index % 2 == 0) {
            CHECK_OK(
                nrm_option_set(NRM_OPT_EPOCH_NBYTES, index == 0 ? "1 MiB" : "2 MiB"));
            CHECK_OK(
                nrm_option_set(NRM_OPT_CUDA_LIBRARY, index == 0 ? "aaaa" : "bbbb"));
            continue;
        }
        int64_t nbytes = nrm_option_get(NRM_OPT_EPOCH_NBYTES);
        CHECK(nbytes == 1 << 20 || nbytes == 2 << 20);
        nrm_option_get_text(NRM_OPT_CUDA_LIBRARY, text, sizeof text);
        CHECK(strcmp(text, "aaaa") == 0 || strcmp(text, "bbbb") == 0);
    }
}

static void
threads_set_and_read(void)
{
    CHECK_OK(nrm_option_set(NRM_OPT_CUDA_LIBRARY, "aaaa"));
    check_threads(4, sets_and_reads, NULL);
}

TEST(threads_see_whole_values)
{
    CHECK_IN_CHILD(threads_set_and_read);
}

CHECK_MAIN
