/*
 * Traces: what a program allocated and freed, in order, to be played back on any of the
 * allocators. The format is text, so that a trace can be read, cut and written by
 * anything; docs/benchmarks.md describes it:
 *
 *     nrm-trace 1
 *     +65536          block 0, of 65536 bytes
 *     +300@2          block 1, on stream 2
 *     =0 131072       block 0 gets another size and keeps what is in it
 *     -1@2            block 1 is freed on stream 2
 *
 * A synthetic trace has sizes uniform in the logarithm, four of five repeated from one
 * of the last sixteen (programs allocate the same shapes again and again), and blocks
 * of three lives: seven of ten last in first out, two first in first out, one long.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

#define MAX_OPERATIONS ((size_t)1 << 24)

struct operation {
    char kind; /* '+', '-', '=' */
    uint8_t stream;
    uint32_t block;
    uint64_t nbytes; /* not of '-' */
};

struct trace {
    struct operation *operations;
    size_t n_operations, n_blocks, n_streams;
};

static void
append(struct trace *trace, struct operation operation)
{
    if (trace->n_operations == MAX_OPERATIONS) {
        fail("a trace has at most %zu operations", MAX_OPERATIONS);
    }
    trace->operations[trace->n_operations++] = operation;
    if (operation.stream >= trace->n_streams) {
        trace->n_streams = operation.stream + (size_t)1;
    }
}

/* ---- synthetic ---- */

#define N_SHAPES 16
#define N_LIVES 3 /* last in first out, first in first out, long */

struct life {
    uint32_t *blocks;
    size_t first, last; /* the live ones, in [first, last) */
};

struct synthesis {
    struct trace *trace;
    uint64_t random;
    uint64_t *nbytes; /* of every block */
    uint8_t *streams;
    size_t shapes[N_SHAPES];
    struct life lives[N_LIVES];
    uint64_t live_nbytes;
    size_t n_streams, min, max;
};

static void
make_block(struct synthesis *s)
{
    uint32_t block = (uint32_t)s->trace->n_blocks++;
    size_t *shape = &s->shapes[random_between(&s->random, 0, N_SHAPES - 1)];
    size_t chance = random_between(&s->random, 0, 9);
    if (*shape == 0 || random_between(&s->random, 0, 9) >= 8) {
        *shape = random_log(&s->random, s->min, s->max);
    }
    struct life *life = &s->lives[chance < 7 ? 0 : chance < 9 ? 1 : 2];
    life->blocks[life->last++] = block;
    s->nbytes[block] = *shape;
    s->streams[block] = (uint8_t)random_between(&s->random, 0, s->n_streams - 1);
    s->live_nbytes += *shape;
    append(s->trace, (struct operation){'+', s->streams[block], block, *shape});
}

static void
drop_block(struct synthesis *s)
{
    size_t chance = random_between(&s->random, 0, 99);
    size_t i = chance < 72 ? 0 : chance < 92 ? 1 : 2;
    for (size_t n = 0; s->lives[i].first == s->lives[i].last; n++) {
        if (n == N_LIVES) {
            return;
        }
        i = (i + 1) % N_LIVES;
    }
    struct life *life = &s->lives[i];
    if (i == 2) { /* any of them: exchange it with the last */
        size_t place = random_between(&s->random, life->first, life->last - 1);
        uint32_t block = life->blocks[place];
        life->blocks[place] = life->blocks[life->last - 1];
        life->blocks[life->last - 1] = block;
    }
    uint32_t block = i == 1 ? life->blocks[life->first++] : life->blocks[--life->last];
    s->live_nbytes -= s->nbytes[block];
    append(s->trace, (struct operation){'-', s->streams[block], block, 0});
}

/* `live` bytes are live most of the time, after a beginning that only grows. */
static struct trace
synthesize(size_t seed)
{
    size_t n = parameter("operations", 100000), live = parameter("live", 4UL << 30);
    struct trace trace = {.operations = table(n, sizeof *trace.operations)};
    struct synthesis s = {.trace = &trace,
                          .random = seed + 1,
                          .nbytes = table(n, sizeof *s.nbytes),
                          .streams = table(n, sizeof *s.streams),
                          .n_streams = parameter("trace_streams", 1),
                          .min = parameter("min", 256),
                          .max = parameter("max", 64 << 20)};
    for (size_t i = 0; i < N_LIVES; i++) {
        s.lives[i].blocks = table(n, sizeof *s.lives[i].blocks);
    }
    bool is_grown = false;
    while (trace.n_operations < n) {
        is_grown = is_grown || s.live_nbytes >= live;
        size_t chance = !is_grown ? 80 : s.live_nbytes < live ? 60 : 40;
        if (random_between(&s.random, 0, 99) < chance) {
            make_block(&s);
        }
        else {
            drop_block(&s);
        }
    }
    return trace;
}

/* ---- text ---- */

/* What stands behind the kind, "SIZE", "BLOCK" or "BLOCK SIZE", then perhaps "@STREAM";
   false if it is none of them. */
static bool
read_numbers(const char *text, char kind, uint64_t *value, uint64_t *nbytes,
             unsigned *stream)
{
    int end = 0;
    if (sscanf(text, "%" SCNu64 "%n", value, &end) != 1) {
        return false;
    }
    text += end;
    if (kind == '=') {
        if (sscanf(text, " %" SCNu64 "%n", nbytes, &end) != 1) {
            return false;
        }
        text += end;
    }
    if (text[0] == '@') {
        if (sscanf(text, "@%u%n", stream, &end) != 1) {
            return false;
        }
        text += end;
    }
    return text[0] == '\0';
}

static void
read_line(struct trace *trace, const char *line, size_t number)
{
    uint64_t value = 0, nbytes = 1;
    unsigned stream = 0;
    char kind = line[0];
    bool is_read = (kind == '+' || kind == '-' || kind == '=') &&
                   read_numbers(line + 1, kind, &value, &nbytes, &stream);
    size_t block = kind == '+' ? trace->n_blocks : value;
    if (kind == '+') {
        nbytes = value;
    }
    if (!is_read || stream >= MAX_STREAMS || nbytes == 0 ||
        (kind != '+' && block >= trace->n_blocks)) {
        fail("line %zu of the trace is none: %s", number, line);
    }
    trace->n_blocks += kind == '+';
    append(trace, (struct operation){kind, (uint8_t)stream, (uint32_t)block, nbytes});
}

/* A block must be freed once at most, and not be used afterwards. */
static void
check_trace(const struct trace *trace)
{
    bool *is_dead = table(trace->n_blocks + 1, sizeof *is_dead);
    for (size_t i = 0; i < trace->n_operations; i++) {
        const struct operation *operation = &trace->operations[i];
        if (operation->kind != '+' && is_dead[operation->block]) {
            fail("block %" PRIu32 " of the trace is used after it was freed",
                 operation->block);
        }
        is_dead[operation->block] = operation->kind == '-';
    }
}

static struct trace
read_trace(const char *path)
{
    struct trace trace = {.operations =
                              table(MAX_OPERATIONS, sizeof(struct operation))};
    char line[128];
    FILE *file = fopen(path, "r");
    if (file == NULL || fgets(line, sizeof line, file) == NULL ||
        strcmp(line, "nrm-trace 1\n") != 0) {
        fail("not a readable trace, which begins with 'nrm-trace 1': %s", path);
    }
    for (size_t number = 2; fgets(line, sizeof line, file) != NULL; number++) {
        line[strcspn(line, "\n")] = '\0';
        if (line[0] != '\0' && line[0] != '#') {
            read_line(&trace, line, number);
        }
    }
    fclose(file);
    check_trace(&trace);
    return trace;
}

void
write_trace(void)
{
    struct trace trace = synthesize(parameter("seed", 1));
    puts("nrm-trace 1");
    for (size_t i = 0; i < trace.n_operations; i++) {
        const struct operation *operation = &trace.operations[i];
        uint64_t value = operation->kind == '+' ? operation->nbytes : operation->block;
        printf("%c%" PRIu64, operation->kind, value);
        if (operation->stream != 0) {
            printf("@%u", operation->stream);
        }
        putchar('\n');
    }
}

static struct trace
open_trace(const struct allocator *a, size_t seed)
{
    const char *path = text_parameter("file", "");
    struct trace trace = path[0] != '\0' ? read_trace(path) : synthesize(seed);
    if (trace.n_streams > 1 && a->n_streams < trace.n_streams && a->mr != NULL &&
        parameter("streams", 0) != 0) {
        fail("the trace needs %zu streams", trace.n_streams);
    }
    return trace;
}

/* ---- playing it back ---- */

struct player {
    struct allocator *a;
    struct block *blocks;
    uint64_t live_nbytes;
    size_t n_live;
};

static inline void
play(struct player *player, const struct operation *operation)
{
    struct allocator *a = player->a;
    struct block *block = &player->blocks[operation->block];
    size_t stream = operation->stream < a->n_streams ? operation->stream : 0;
    switch (operation->kind) {
    case '+':
        block->nbytes = operation->nbytes;
        block->ptr = allocate(a, block->nbytes, stream);
        player->live_nbytes += block->nbytes;
        player->n_live++;
        touch(a, block->ptr);
        break;
    case '=':
        block->ptr =
            reallocate(a, block->ptr, block->nbytes, operation->nbytes, stream);
        player->live_nbytes += operation->nbytes - block->nbytes;
        block->nbytes = operation->nbytes;
        break;
    default:
        a->deallocate(a, block->ptr, block->nbytes, stream);
        player->live_nbytes -= block->nbytes;
        player->n_live--;
        block->ptr = NULL;
    }
}

/* Frees what the trace leaves, after a look at whether all of it is disjoint. */
static void
finish(struct player *player, size_t n_blocks)
{
    struct block *live = table(player->n_live + 1, sizeof *live);
    size_t n = 0;
    for (size_t i = 0; i < n_blocks; i++) {
        if (player->blocks[i].ptr != NULL) {
            live[n++] = player->blocks[i];
            player->blocks[i].ptr = NULL;
        }
    }
    check_disjoint(live, n, 16);
    for (size_t i = 0; i < n; i++) {
        player->a->deallocate(player->a, live[i].ptr, live[i].nbytes, 0);
    }
    player->live_nbytes = 0;
    player->n_live = 0;
}

/* Nanoseconds an operation, the whole trace at a time; the first time is not
   counted. */
void
run_replay(struct allocator *a)
{
    struct trace trace = open_trace(a, parameter("seed", 1));
    size_t n_samples = parameter("samples", 5);
    struct player player = {.a = a,
                            .blocks = table(trace.n_blocks + 1, sizeof *player.blocks)};
    for (size_t i = 0; i < n_samples + 1; i++) {
        uint64_t start = now_ns();
        for (size_t j = 0; j < trace.n_operations; j++) {
            play(&player, &trace.operations[j]);
        }
        if (i > 0) {
            sample((double)(now_ns() - start) / (double)trace.n_operations);
        }
        finish(&player, trace.n_blocks);
    }
    extra("operations", (double)trace.n_operations);
}

/* ---- how much memory it takes ---- */

static uint64_t
resident_nbytes(void)
{
    unsigned long total = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%lu %lu", &total, &resident) != 2) {
        fail("/proc/self/statm cannot be read");
    }
    fclose(file);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void
fill(const struct allocator *a, const struct block *block)
{
    if (a->is_accessible) {
        memset(block->ptr, 1, block->nbytes);
    }
}

struct peaks {
    uint64_t live, reserved, resident;
};

static void
look(struct player *player, struct peaks *peaks)
{
    uint64_t live = player->live_nbytes, resident = resident_nbytes();
    uint64_t reserved = allocator_reserved(player->a);
    peaks->live = live > peaks->live ? live : peaks->live;
    peaks->reserved = reserved > peaks->reserved ? reserved : peaks->reserved;
    peaks->resident = resident > peaks->resident ? resident : peaks->resident;
}

/* Plays a trace and looks at every 64th step and wherever more is live than before. */
static struct peaks
play_and_look(struct allocator *a, const struct trace *trace)
{
    struct player player = {
        .a = a, .blocks = table(trace->n_blocks + 1, sizeof *player.blocks)};
    struct peaks peaks = {0};
    uint64_t before = resident_nbytes(), last_peak = 0;
    for (size_t i = 0; i < trace->n_operations; i++) {
        const struct operation *operation = &trace->operations[i];
        play(&player, operation);
        if (operation->kind != '-') {
            fill(a, &player.blocks[operation->block]);
        }
        if (player.live_nbytes > last_peak + last_peak / 1000 || i % 64 == 0) {
            last_peak = player.live_nbytes > last_peak ? player.live_nbytes : last_peak;
            look(&player, &peaks);
        }
    }
    finish(&player, trace->n_blocks);
    peaks.resident -= before;
    return peaks;
}

/* Peak reserved over peak live: of what an allocator says it has taken (ours), and of
   what the system has given to a process that writes every byte (all). Of device memory
   nothing is used: what is freed counts as free, whether the allocator knows that it is
   done or not. A sample is a synthetic trace of its own. */
void
run_usage(struct allocator *a)
{
    size_t seed = parameter("seed", 1), n_samples = parameter("samples", 1);
    bool by_resident = parameter("resident", a->mr == NULL) != 0;
    for (size_t i = 0; i < n_samples; i++) {
        struct trace trace = open_trace(a, seed + i);
        struct peaks peaks = play_and_look(a, &trace);
        uint64_t most = by_resident ? peaks.resident : peaks.reserved;
        sample((double)most / (double)peaks.live);
        extra("peak_live_bytes", (double)peaks.live);
        extra("peak_reserved_bytes", (double)peaks.reserved);
        extra("peak_resident_bytes", (double)peaks.resident);
        allocator_trim(a);
    }
}
