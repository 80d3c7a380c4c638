/*
 * See order_record.h. Whoever fails half-way gives back what it has: an event that
 * covers a part of the work would say that all of it is done.
 */
#include "core/order_record.h"

#include "base/error.h"
#include "core/background.h"
#include "core/nodes.h"
#include "core/uses.h"
#include "cuda/stream.h"

enum {
    MAX_EVENTS = NRM__CUDA_EVENTS_POOLED - 64, /* kept in all; the rest is in passing */
};

static atomic_uint_least64_t n_events;

uint64_t
nrm__order_n_events(void)
{
    return atomic_load(&n_events);
}

/* ---- lives ---- */

static void
drop_parts(struct nrm__order_part *part)
{
    while (part != NULL) {
        struct nrm__order_part *next = part->next;
        nrm__cuda_event_recycle(&part->event);
        nrm__cuda_foreign_drop(part->driver, &part->lone);
        nrm__node_deallocate(part, sizeof *part);
        part = next;
    }
}

/* Owns both. NULL: no memory, or enough are kept; they went back. */
static struct nrm__order_event *
share(struct nrm__cuda_event *event, struct nrm__order_part *parts)
{
    struct nrm__order_event *shared = NULL;
    if (atomic_fetch_add(&n_events, 1) < MAX_EVENTS) {
        shared = nrm__node_allocate(sizeof *shared);
    }
    if (shared == NULL) {
        atomic_fetch_sub(&n_events, 1);
        nrm__cuda_event_recycle(event);
        drop_parts(parts);
        return NULL;
    }
    atomic_init(&shared->refs, 1);
    shared->event = *event;
    shared->parts = parts;
    return shared;
}

/* Never under the lock of the slots. */
void
nrm__order_event_release(struct nrm__order_event *shared)
{
    if (shared != NULL && atomic_fetch_sub(&shared->refs, 1) == 1) {
        nrm__cuda_event_recycle(&shared->event);
        drop_parts(shared->parts);
        nrm__node_deallocate(shared, sizeof *shared);
        atomic_fetch_sub(&n_events, 1);
    }
}

/* ---- recording ---- */

/* Owns the event. */
static nrm_status
add_part(struct nrm__order_part **parts, struct nrm__order_part *from)
{
    struct nrm__order_part *part = nrm__node_allocate(sizeof *part);
    if (part == NULL) {
        nrm__cuda_event_recycle(&from->event);
        nrm__cuda_foreign_drop(from->driver, &from->lone);
        return NRM_NOT_SUPPORTED;
    }
    *part = *from;
    part->next = *parts;
    *parts = part;
    return NRM_OK;
}

static nrm_status
status_of(enum nrm__record result, int device)
{
    switch (result) {
    case NRM__RECORDED:
    case NRM__RECORD_IDLE:
        return NRM_OK;
    case NRM__RECORD_LOST:
        return NRM_DEVICE_LOST;
    case NRM__RECORD_INVALIDATED:
        nrm__epoch_warn_capture(device);
        break;
    case NRM__RECORD_CAPTURE:
        break;
    }
    return NRM_NOT_FOUND;
}

/* An event of a whole primary context; without a handle: there is nothing to wait for.
   The background thread records none, as it cannot know of captures
   (nrm__epoch_close). */
static nrm_status
record_context(int device, struct nrm__cuda_event *out)
{
    if (nrm__background_is_here()) {
        return NRM_NOT_FOUND;
    }
    *out = (struct nrm__cuda_event){.device = device};
    return status_of(nrm__cuda_record(device, out), device);
}

/* Where no primary context is active, nothing of it is under way. */
static nrm_status
record_stream(int device, const nrm_stream *stream, struct nrm__cuda_event *out)
{
    nrm_status status = nrm__cuda_stream_record(device, stream->handle, out);
    if (status == NRM_NOT_SUPPORTED && nrm__stream_is_special(stream) &&
        nrm__cuda_is_asleep(device)) {
        *out = (struct nrm__cuda_event){0};
        return NRM_OK;
    }
    return status;
}

static nrm_status
record_foreign(const struct nrm__cuda_foreign *foreign, uintptr_t handle,
               struct nrm__order_part **parts)
{
    struct nrm__order_part part = {.driver = foreign->driver};
    if (handle == NRM__CUDA_ALL_STREAMS && nrm__background_is_here()) {
        return NRM_NOT_FOUND;
    }
    NRM_TRY(status_of(nrm__cuda_foreign_record(foreign, handle, &part.lone),
                      foreign->device));
    return part.lone.handle != NULL ? add_part(parts, &part) : NRM_OK;
}

/* Of all the program's contexts on a device (-1: on any). */
static nrm_status
record_foreigners(int device, uintptr_t handle, struct nrm__order_part **parts)
{
    struct nrm__cuda_foreign foreign;
    unsigned place = 0;
    nrm__cuda_foreign_note_current();
    if (nrm__cuda_foreign_is_full()) {
        return NRM_NOT_FOUND;
    }
    while (nrm__cuda_foreign_next(device, &place, &foreign)) {
        NRM_TRY(record_foreign(&foreign, handle, parts));
    }
    return NRM_OK;
}

/* Of all primary contexts that are active. */
static nrm_status
record_primaries(struct nrm__order_part **parts)
{
    int devices[NRM__MAX_DEVICES];
    int n_devices = nrm__cuda_active_devices(devices);
    for (int i = 0; i < n_devices; i++) {
        struct nrm__order_part part = {0};
        NRM_TRY(record_context(devices[i], &part.event));
        if (part.event.handle != NULL) {
            NRM_TRY(add_part(parts, &part));
        }
    }
    return NRM_OK;
}

static nrm_status
record_all(struct nrm__order_part **parts)
{
    NRM_TRY(record_primaries(parts));
    return record_foreigners(-1, NRM__CUDA_ALL_STREAMS, parts);
}

/* What a default stream stands for: that of each context. */
static nrm_status
record_special(int device, const nrm_stream *stream, struct nrm__cuda_event *event,
               struct nrm__order_part **parts)
{
    bool is_here = nrm__stream_is_here(stream);
    NRM_TRY(is_here ? record_stream(device, stream, event)
                    : record_context(device, event));
    return record_foreigners(device, is_here ? stream->handle : NRM__CUDA_ALL_STREAMS,
                             parts);
}

static nrm_status
record_parts(const struct nrm__order *order, const nrm_stream *stream,
             struct nrm__cuda_event *event, struct nrm__order_part **parts)
{
    if (stream == NULL) {
        return atomic_load(&order->of_all) ? record_all(parts)
                                           : record_context(order->device, event);
    }
    if (stream->home != NULL) {
        return record_foreign(stream->home, stream->handle, parts);
    }
    return nrm__stream_is_special(stream)
               ? record_special(order->device, stream, event, parts)
               : record_stream(order->device, stream, event);
}

nrm_status
nrm__order_record(struct nrm__order *order, const nrm_stream *stream,
                  struct nrm__order_event **out)
{
    struct nrm__cuda_event event = {0};
    struct nrm__order_part *parts = NULL;
    uint64_t number = atomic_fetch_add(&order->count, 1);
    *out = NULL;
    nrm_status status = record_parts(order, stream, &event, &parts);
    if (status != NRM_OK) {
        nrm__cuda_event_recycle(&event);
        drop_parts(parts);
        return status;
    }
    if (event.handle == NULL && parts == NULL) {
        nrm__order_raise(&order->done, number);
        return NRM_OK;
    }
    *out = share(&event, parts);
    if (*out == NULL) {
        return NRM_NOT_SUPPORTED;
    }
    nrm__order_records_add(order, number, *out);
    return NRM_OK;
}

/* ---- asking and waiting ---- */

bool
nrm__order_event_is_done(const struct nrm__order_event *event)
{
    bool is_done = nrm__cuda_event_query(&event->event) == NRM_OK;
    for (const struct nrm__order_part *part = event->parts; part != NULL && is_done;
         part = part->next) {
        is_done = nrm__cuda_event_query(&part->event) == NRM_OK &&
                  nrm__cuda_foreign_query(part->driver, &part->lone) == NRM_OK;
    }
    return is_done;
}

/* A default stream is that of the context which is current, where that is the
   program's. */
static nrm_status
wait(const struct nrm__cuda_event *event, const nrm_stream *stream, int device)
{
    bool is_over = event->handle == NULL ||
                   nrm__cuda_generation_noticed(event->device) != event->generation;
    if (is_over || !nrm__stream_is_special(stream) ||
        nrm__cuda_foreign_current() == NULL) {
        return is_over ? NRM_OK : nrm__cuda_stream_wait(device, stream->handle, event);
    }
    return nrm__cuda_foreign_wait(stream->handle, event->handle);
}

static nrm_status
wait_for_part(const struct nrm__order_part *part, const nrm_stream *stream, int device)
{
    if (part->event.handle != NULL) {
        return wait(&part->event, stream, device);
    }
    if (!nrm__cuda_foreign_is_named(part->driver, &part->lone)) {
        return NRM_OK; /* its context has ended */
    }
    struct nrm__cuda_event event = {
        .handle = part->lone.handle,
        .device = device,
        .generation = nrm__cuda_generation_noticed(device),
    };
    return wait(&event, stream, device);
}

static nrm_status
wait_for_parts(const struct nrm__order_part *part, const nrm_stream *stream, int device)
{
    for (; part != NULL; part = part->next) {
        NRM_TRY(wait_for_part(part, stream, device));
    }
    return NRM_OK;
}

nrm_status
nrm__order_event_wait(const struct nrm__order_event *event, const nrm_stream *stream,
                      int device)
{
    if (event == NULL) {
        return NRM_OK;
    }
    NRM_TRY(wait(&event->event, stream, device));
    return wait_for_parts(event->parts, stream, device);
}

nrm_status
nrm__order_wait_for_all(const nrm_stream *stream, int device)
{
    struct nrm__order_part *parts = NULL;
    nrm_status status = record_all(&parts);
    if (status == NRM_OK) {
        status = wait_for_parts(parts, stream, device);
    }
    drop_parts(parts);
    return status;
}
