/* Advice about where managed memory should be: kept, told, and of no effect, as where
 * pages are is not modelled.
 *
 * What holds of an address is one note of each kind; a note covers a range, and a later
 * one takes the place of what it covers. Pageable memory can be advised about where the
 * device reads it in place; nobody hears of its end, so a note stays until it is taken
 * back. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

enum kind { READ_MOSTLY, PREFERRED, ACCESSED_BY, N_KINDS };

struct note {
    uintptr_t start, end;
    enum kind kind;
    int place; /* a device, or HOST; of ACCESSED_BY one note for each */
};

enum { HOST = -1, NOWHERE = -2 }; /* as the attribute tells */

static struct {
    struct note *items;
    size_t n;
    size_t capacity;
} notes;

static bool
add(struct note note)
{
    if (notes.n == notes.capacity) {
        size_t capacity = notes.capacity == 0 ? 32 : 2 * notes.capacity;
        void *items = realloc(notes.items, capacity * sizeof note);
        if (items == NULL) {
            return false;
        }
        notes.items = items;
        notes.capacity = capacity;
    }
    notes.items[notes.n++] = note;
    return true;
}

/* Takes back what is noted in a range. False: no memory for what is left beside it. */
static bool
take_back(struct note range)
{
    for (size_t i = 0; i < notes.n;) {
        struct note old = notes.items[i];
        bool is_other = old.kind != range.kind ||
                        (range.kind == ACCESSED_BY && old.place != range.place) ||
                        old.end <= range.start || range.end <= old.start;
        if (is_other) {
            i++;
            continue;
        }
        notes.items[i] = notes.items[--notes.n];
        struct note before = old, after = old;
        before.end = range.start;
        after.start = range.end;
        if ((before.start < before.end && !add(before)) ||
            (after.start < after.end && !add(after))) {
            return false;
        }
    }
    return true;
}

void
sim_advice_forget(uintptr_t start, size_t nbytes)
{
    for (int kind = 0; kind < N_KINDS; kind++) {
        for (int place = HOST; place < SIM_MAX_DEVICES; place++) {
            (void)take_back((struct note){start, start + nbytes, kind, place});
        }
    }
}

void
sim_advice_reset(void)
{
    notes.n = 0;
}

void
sim_advice_count(uint64_t *count, uint64_t *nbytes)
{
    for (size_t i = 0; i < notes.n; i++) {
        *count += 1;
        *nbytes += notes.items[i].end - notes.items[i].start;
    }
}

/* ---- calls ----------------------------------------------------------------------- */

/* Managed memory, or pageable memory that some device reads in place. */
bool
sim_memory_moves(uintptr_t start, size_t nbytes)
{
    const struct sim_range *range = sim_range_find(start);
    if (nbytes == 0) {
        return false;
    }
    if (range != NULL) {
        return range->kind == SIM_MANAGED &&
               nbytes <= range->nbytes - (start - range->start);
    }
    for (int i = 0; i < sim.n_visible; i++) {
        const int *attributes = sim.devices[sim.visible[i]].attributes;
        if (attributes[NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS] != 0) {
            return sim_range_find_overlap(start, nbytes) == NULL;
        }
    }
    return false;
}

static nrm_CUresult
find_place(nrm_CUmemLocation location, int *out)
{
    if (location.type == NRM_CU_MEM_LOCATION_TYPE_HOST) {
        *out = HOST;
        return NRM_CUDA_SUCCESS;
    }
    if (location.type != NRM_CU_MEM_LOCATION_TYPE_DEVICE) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    *out = location.id;
    return location.id >= 0 && location.id < sim.n_visible
               ? NRM_CUDA_SUCCESS
               : NRM_CUDA_ERROR_INVALID_DEVICE;
}

nrm_CUresult
cuMemAdvise_v2(nrm_CUdeviceptr ptr, size_t nbytes, nrm_CUmem_advise advice,
               nrm_CUmemLocation location)
{
    SIM_BEGIN(call, cuMemAdvise, ptr, nbytes, advice, (uint64_t)location.id);
    int place = HOST;
    bool sets = advice % 2 == 1; /* each is undone by the number behind it */
    bool needs_place = advice == NRM_CU_MEM_ADVISE_SET_PREFERRED_LOCATION ||
                       advice >= NRM_CU_MEM_ADVISE_SET_ACCESSED_BY;
    nrm_CUresult result = NRM_CUDA_SUCCESS;
    if (advice < NRM_CU_MEM_ADVISE_SET_READ_MOSTLY ||
        advice > NRM_CU_MEM_ADVISE_UNSET_ACCESSED_BY ||
        !sim_memory_moves(ptr, nbytes)) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS && needs_place) {
        result = find_place(location, &place);
    }
    if (result == NRM_CUDA_SUCCESS) {
        struct note note = {ptr, ptr + nbytes, (enum kind)((advice - 1) / 2), place};
        if (!take_back(note) || (sets && !add(note))) {
            result = NRM_CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    return sim_call_end(&call, result);
}

/* What all the bytes have in common; NOWHERE: nothing. */
static int
common_place(uintptr_t start, uintptr_t end, enum kind kind)
{
    int place = NOWHERE;
    uintptr_t at = start;
    while (at < end) {
        uintptr_t reached = at;
        for (size_t i = 0; i < notes.n; i++) {
            const struct note *note = &notes.items[i];
            if (note->kind == kind && note->start <= at && note->end > at &&
                (at == start || note->place == place)) {
                place = note->place;
                reached = note->end;
            }
        }
        if (reached == at) {
            return NOWHERE;
        }
        at = reached;
    }
    return place;
}

nrm_CUresult
cuMemRangeGetAttribute(void *value, size_t nbytes_value,
                       nrm_CUmem_range_attribute attribute, nrm_CUdeviceptr ptr,
                       size_t nbytes)
{
    SIM_BEGIN(call, cuMemRangeGetAttribute, SIM_PTR(value), attribute, ptr, nbytes);
    int answer;
    if (value == NULL || nbytes_value != sizeof answer ||
        !sim_memory_moves(ptr, nbytes)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    switch (attribute) {
    case NRM_CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        answer = common_place(ptr, ptr + nbytes, READ_MOSTLY) != NOWHERE;
        break;
    case NRM_CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
        answer = common_place(ptr, ptr + nbytes, PREFERRED);
        break;
    default:
        return sim_call_end(&call, NRM_CUDA_ERROR_NOT_SUPPORTED);
    }
    memcpy(value, &answer, sizeof answer);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}
