/* The machine and the process, read afresh at each call. */
#include "python/system_info.h"

#include "core/left_out.h"
#include "core/pin.h"
#include "core/uses.h"
#include "cuda/page_lock.h"
#include "os/memory.h"
#include "os/numa.h"
#include "os/system.h"

/* Bytes, or None: no limit, or not known. */
static PyObject *
bytes_or_none(size_t nbytes)
{
    return nbytes == SIZE_MAX ? Py_NewRef(Py_None) : PyLong_FromSize_t(nbytes);
}

static PyObject *
system_info(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    struct nrm__memory_state memory;
    struct nrm__epoch_counts epochs;
    nrm__memory_state(&memory);
    nrm__epoch_counts(&epochs);
    return Py_BuildValue(
        "{s:i,s:i,s:N,s:n,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:K,s:I}", "cores",
        nrm__n_cores(), "numa_nodes", nrm__numa_n_nodes(), "transparent_huge_pages",
        PyBool_FromLong(nrm__has_transparent_huge_pages()), "page_nbytes",
        (Py_ssize_t)nrm__page_size(), "memory_nbytes",
        bytes_or_none(memory.total_nbytes), "memory_available_nbytes",
        bytes_or_none(memory.available_nbytes), "cgroup_limit_nbytes",
        bytes_or_none(memory.cgroup_limit_nbytes), "cgroup_available_nbytes",
        bytes_or_none(memory.cgroup_available_nbytes), "memlock_limit_nbytes",
        bytes_or_none(memory.memlock_limit_nbytes), "page_locked_nbytes",
        PyLong_FromSize_t(nrm__page_locked_nbytes()), "page_locked_by_pin_nbytes",
        PyLong_FromSize_t(nrm__pins_nbytes()), "copied_at_fork_nbytes",
        PyLong_FromSize_t(nrm__left_out_copied_nbytes()), "epochs_closed",
        (unsigned long long)epochs.closed, "epochs_pending", epochs.pending);
}

PyMethodDef system_info_methods[] = {
    {"_system_info", system_info, METH_NOARGS,
     PyDoc_STR("_system_info($module)\n--\n\n"
               "Cores, memory, huge pages, NUMA and limits, as a dict.")},
    {NULL, NULL, 0, NULL},
};
