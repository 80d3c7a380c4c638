/*
 * What libraries hand each other, as the DLPack specification (1.3) lays it out in
 * memory.
 */
#ifndef NRM_PYTHON_DLPACK_LAYOUT_H
#define NRM_PYTHON_DLPACK_LAYOUT_H

#include <Python.h>

#include <stdint.h>

/* Of tensors: nothing after 1.0 changed how one is laid out. */
enum { DLPACK_MAJOR = 1, DLPACK_MINOR = 0 };

enum dlpack_device_type {
    DLPACK_ON_HOST = 1,
    DLPACK_ON_DEVICE = 2,
    DLPACK_PAGE_LOCKED = 3,
    DLPACK_MANAGED = 13,
};

enum dlpack_flag { DLPACK_IS_READ_ONLY = 1u << 0, DLPACK_IS_COPIED = 1u << 1 };

enum dlpack_type_code {
    DLPACK_INT = 0,
    DLPACK_UINT = 1,
    DLPACK_FLOAT = 2,
    DLPACK_BFLOAT = 4,
    DLPACK_COMPLEX = 5,
    DLPACK_BOOL = 6,
};

struct dlpack_type {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct dlpack_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t n_dims;
    struct dlpack_type type;
    int64_t *shape;
    int64_t *strides; /* in items */
    uint64_t byte_offset;
};

/* With and without a version. */
struct dlpack_plain {
    struct dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct dlpack_plain *self);
};

struct dlpack_version {
    uint32_t major, minor;
};

struct dlpack_versioned {
    struct dlpack_version version;
    void *context;
    void (*deleter)(struct dlpack_versioned *self);
    uint64_t flags;
    struct dlpack_tensor tensor;
};

/* Lets the library that made it know that it is not used any more. */
static inline void
dlpack_drop(struct dlpack_versioned *tensor)
{
    if (tensor->deleter != NULL) {
        tensor->deleter(tensor);
    }
}

/* ---- the functions of a type, which a capsule in it leads to ---- */

#define DLPACK_EXCHANGE_ATTRIBUTE "__dlpack_c_exchange_api__"
#define DLPACK_EXCHANGE_CAPSULE "dlpack_exchange_api"

struct dlpack_exchange {
    struct dlpack_version version;
    const struct dlpack_exchange *older;
    /* Of the shape, type and place of another; calls `set_error` when it fails. */
    int (*allocate)(struct dlpack_tensor *like, struct dlpack_versioned **out,
                    void *context,
                    void (*set_error)(void *context, const char *kind,
                                      const char *message));
    int (*from_object)(void *object, struct dlpack_versioned **out);
    int (*to_object)(struct dlpack_versioned *tensor, void **out); /* steals it */
    int (*borrow)(void *object, struct dlpack_tensor *out);
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
};

#endif
