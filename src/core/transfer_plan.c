/*
 * How a copy is cut. transfer.h says what a plan is.
 *
 * The order of axes is free, as each element has its own place on both sides. So they
 * are sorted by the destination's strides, the innermost last, and neighbours are
 * merged where the outer one continues the inner one on both sides. Then the innermost
 * axis is a run of bytes if it is contiguous on both sides. Of the others those two
 * become the rows and the planes of a box that leave the fewest boxes, and what is left
 * is looped over.
 */
#include "core/transfer.h"

/* The least that devices allow is a little more. */
#define PITCH_MAX INT32_MAX

static void
swap_axes(struct nrm__transfer *t, int i, int j)
{
    size_t n = t->shape[i];
    ptrdiff_t dst = t->dst_strides[i], src = t->src_strides[i];
    t->shape[i] = t->shape[j];
    t->dst_strides[i] = t->dst_strides[j];
    t->src_strides[i] = t->src_strides[j];
    t->shape[j] = n;
    t->dst_strides[j] = dst;
    t->src_strides[j] = src;
}

static void
remove_axis(struct nrm__transfer *t, int axis)
{
    for (int i = axis; i + 1 < t->n_dims; i++) {
        swap_axes(t, i, i + 1);
    }
    t->n_dims--;
}

/* An axis that runs backwards on both sides runs forwards from its other end. */
static void
flip_axes(struct nrm__transfer *t)
{
    for (int i = 0; i < t->n_dims; i++) {
        if (t->dst_strides[i] < 0 && t->src_strides[i] < 0) {
            ptrdiff_t last = (ptrdiff_t)t->shape[i] - 1;
            t->dst += last * t->dst_strides[i];
            t->src += last * t->src_strides[i];
            t->dst_strides[i] = -t->dst_strides[i];
            t->src_strides[i] = -t->src_strides[i];
        }
    }
}

static size_t
magnitude(ptrdiff_t stride)
{
    return stride < 0 ? (size_t)-stride : (size_t)stride;
}

static void
sort_axes(struct nrm__transfer *t)
{
    for (int i = 1; i < t->n_dims; i++) {
        for (int j = i;
             j > 0 && magnitude(t->dst_strides[j - 1]) < magnitude(t->dst_strides[j]);
             j--) {
            swap_axes(t, j - 1, j);
        }
    }
}

static void
merge_axes(struct nrm__transfer *t)
{
    for (int i = t->n_dims - 1; i > 0; i--) {
        ptrdiff_t n = (ptrdiff_t)t->shape[i];
        if (t->dst_strides[i - 1] == n * t->dst_strides[i] &&
            t->src_strides[i - 1] == n * t->src_strides[i]) {
            t->shape[i] *= t->shape[i - 1];
            remove_axis(t, i - 1);
        }
    }
}

static bool
is_pitch(ptrdiff_t stride, size_t width)
{
    return stride > 0 && (size_t)stride >= width && stride <= PITCH_MAX;
}

static bool
can_be_rows(const struct nrm__transfer *t, int axis, size_t width)
{
    return is_pitch(t->dst_strides[axis], width) &&
           is_pitch(t->src_strides[axis], width);
}

/* From one plane to the next there are so many whole rows; 0: that is no plane. */
static size_t
height(ptrdiff_t stride, ptrdiff_t pitch, size_t n_rows)
{
    bool is_plane = stride > 0 && stride % pitch == 0 &&
                    stride / pitch >= (ptrdiff_t)n_rows;
    return is_plane ? (size_t)(stride / pitch) : 0;
}

static bool
can_be_planes(const struct nrm__transfer *t, int axis, int rows)
{
    size_t n = t->shape[rows];
    return axis != rows && height(t->dst_strides[axis], t->dst_strides[rows], n) != 0 &&
           height(t->src_strides[axis], t->src_strides[rows], n) != 0;
}

/* Which axes are rows and planes; -1: none is. */
struct box {
    int rows, planes;
    size_t n_rows; /* of all planes */
};

static struct box
find_box(const struct nrm__transfer *t, size_t width)
{
    struct box found = {-1, -1, 1};
    for (int i = 0; i < t->n_dims; i++) {
        if (!can_be_rows(t, i, width)) {
            continue;
        }
        if (t->shape[i] > found.n_rows) {
            found = (struct box){i, -1, t->shape[i]};
        }
        for (int j = 0; j < t->n_dims; j++) {
            size_t n = t->shape[i] * t->shape[j];
            if (n > found.n_rows && can_be_planes(t, j, i)) {
                found = (struct box){i, j, n};
            }
        }
    }
    return found;
}

/* Takes the axes of the largest box out of the transfer. */
static void
take_box(struct nrm__transfer *t, struct nrm__transfer_plan *plan)
{
    struct box box = find_box(t, plan->width);
    if (box.rows < 0) {
        return;
    }
    plan->n_rows = t->shape[box.rows];
    plan->dst_pitch = t->dst_strides[box.rows];
    plan->src_pitch = t->src_strides[box.rows];
    if (box.planes >= 0) {
        plan->n_planes = t->shape[box.planes];
        plan->dst_height =
            height(t->dst_strides[box.planes], plan->dst_pitch, plan->n_rows);
        plan->src_height =
            height(t->src_strides[box.planes], plan->src_pitch, plan->n_rows);
    }
    remove_axis(t, box.rows > box.planes ? box.rows : box.planes);
    if (box.planes >= 0) {
        remove_axis(t, box.rows > box.planes ? box.planes : box.rows);
    }
}

/* Whether what the axes lead to may have bytes in common; they are sorted. */
static bool
overlaps_itself(const struct nrm__transfer *t, size_t extent)
{
    for (int i = t->n_dims - 1; i >= 0; i--) {
        if (magnitude(t->dst_strides[i]) < extent) {
            return true;
        }
        extent += (t->shape[i] - 1) * magnitude(t->dst_strides[i]);
    }
    return false;
}

static bool
is_empty(const struct nrm__transfer *t)
{
    bool empty = t->itemsize == 0;
    for (int i = 0; i < t->n_dims; i++) {
        empty = empty || t->shape[i] == 0;
    }
    return empty;
}

void
nrm__transfer_plan(struct nrm__transfer *t, struct nrm__transfer_plan *out)
{
    *out = (struct nrm__transfer_plan){0};
    if (is_empty(t)) {
        return;
    }
    for (int i = t->n_dims - 1; i >= 0; i--) {
        if (t->shape[i] == 1) {
            remove_axis(t, i);
        }
    }
    flip_axes(t);
    sort_axes(t);
    merge_axes(t);
    *out = (struct nrm__transfer_plan){
        .n_calls = 1, .n_planes = 1, .n_rows = 1, .width = t->itemsize};
    int last = t->n_dims - 1;
    if (last >= 0 && t->dst_strides[last] == (ptrdiff_t)t->itemsize &&
        t->src_strides[last] == (ptrdiff_t)t->itemsize) {
        out->width *= t->shape[last];
        remove_axis(t, last);
    }
    out->has_order = overlaps_itself(t, out->width);
    take_box(t, out);
    for (int i = 0; i < t->n_dims; i++) {
        out->n_calls *= t->shape[i];
    }
}
