/* What is known of the devices. Nothing here initialises CUDA or makes a context. */
#ifndef NRM_CUDA_DEVICE_H
#define NRM_CUDA_DEVICE_H

#include "cuda/driver.h"

/* 0 before cuInit. */
int nrm__cuda_n_devices(void);

/* Attribute of a device; cached. -1 when it cannot be known: before cuInit, or when the
   driver has no such attribute. Never blocks. */
int nrm__cuda_attribute(int device, nrm_CUdevice_attribute attribute);

/* Whether any visible device reads ordinary host memory in place (false before cuInit):
   then blocks that are not page-locked carry the hazard too. */
bool nrm__cuda_reads_pageable(void);

/* The same for those who ask all the time; and what keeps it right, called when devices
   come or go. */
extern atomic_bool nrm__cuda_pageable_is_read;
void nrm__cuda_note_devices(void);

struct nrm__cuda_device_info {
    char name[128];  /* "NVIDIA H200" */
    char pci_id[32]; /* "0000:19:00.0"; "" when unknown */
    int capability_major, capability_minor;
    size_t total_nbytes;
    size_t free_nbytes; /* asked only where a context lives; SIZE_MAX: not known */
    bool is_active;     /* its primary context lives */
};

/* NRM_NOT_FOUND (not recorded): CUDA is not initialised, or there is no such device.
   May block: detached. */
nrm_status nrm__cuda_device_info(int device, struct nrm__cuda_device_info *out);

/* The attributes that this project knows, in order: "HOST_REGISTER_SUPPORTED" and its
   number; NULL past the end. */
const char *nrm__cuda_attribute_name(int index, nrm_CUdevice_attribute *out);

#endif
