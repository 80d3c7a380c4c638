"""The C API: another extension allocates from the one registry of the process."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr
from numpy_rmm.testing import Driver

SOURCE = r"""
#include "nrm/import.h"

static const struct nrm_functions *nrm;

static PyObject *
allocate(PyObject *module, PyObject *object)
{
    void *ptr;
    nrm_resource *mr = nrm->resource_from_object(object);
    if (mr == NULL) {
        return NULL;
    }
    if (nrm->resource_allocate(mr, 1000, 0, NULL, &ptr) != NRM_OK) {
        return PyErr_Format(PyExc_MemoryError, "%s", nrm->last_error()->message);
    }
    return PyLong_FromVoidPtr(ptr);
}

static PyObject *
deallocate(PyObject *module, PyObject *args)
{
    PyObject *object;
    unsigned long long ptr;
    if (!PyArg_ParseTuple(args, "OK", &object, &ptr)) {
        return NULL;
    }
    nrm_resource *mr = nrm->resource_from_object(object);
    return mr == NULL ? NULL : PyLong_FromLong(nrm->resource_deallocate(
                                   mr, (void *)(uintptr_t)ptr, 1000, NULL));
}

static PyObject *
find(PyObject *module, PyObject *name)
{
    nrm_resource *mr;
    if (nrm->registry_get(PyUnicode_AsUTF8(name), &mr) != NRM_OK) {
        return PyErr_Format(PyExc_KeyError, "%s", nrm->last_error()->message);
    }
    PyObject *object = nrm->resource_to_object(mr);
    nrm->resource_release(mr);
    return object;
}

/* A limit of their own over a resource of ours, and counters over that. */
static PyObject *
adapt(PyObject *module, PyObject *object)
{
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    nrm_resource *limited, *counted;
    nrm_counts counts;
    options.allocation_limit = 4096;
    nrm_resource *mr = nrm->resource_from_object(object);
    if (mr == NULL || nrm->limiting_create(mr, &options, &limited) != NRM_OK ||
        nrm->statistics_create(limited, &counted) != NRM_OK ||
        nrm->statistics_push(counted, &counts) != NRM_OK) {
        return PyErr_Format(PyExc_RuntimeError, "%s", nrm->last_error()->message);
    }
    nrm->resource_release(limited);
    PyObject *result = nrm->resource_to_object(counted);
    nrm->resource_release(counted);
    return result;
}

static char memory[1 << 16];
static nrm_pin *pinned;

/* Page-locks static memory, or lets it go: its address. */
static PyObject *
toggle_pin(PyObject *module, PyObject *unused)
{
    nrm_pin_options options = NRM_OPTIONS(nrm_pin_options);
    if (pinned != NULL) {
        nrm->pin_destroy(pinned);
        pinned = NULL;
    }
    else if (nrm->pin_create(memory, sizeof memory, &options, &pinned) != NRM_OK) {
        return PyErr_Format(PyExc_RuntimeError, "%s", nrm->last_error()->message);
    }
    return PyLong_FromVoidPtr(memory);
}

static PyMethodDef methods[] = {
    {"adapt", adapt, METH_O, NULL},
    {"allocate", allocate, METH_O, NULL},
    {"deallocate", deallocate, METH_VARARGS, NULL},
    {"find", find, METH_O, NULL},
    {"toggle_pin", toggle_pin, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef theirs = {PyModuleDef_HEAD_INIT, "theirs", NULL, -1, methods};

PyMODINIT_FUNC
PyInit_theirs(void)
{
    nrm = nrm_import();
    return nrm == NULL ? NULL : PyModule_Create(&theirs);
}
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A module of another project, built with our headers alone."""
    folder = tmp_path_factory.mktemp("theirs")
    source, built = folder / "theirs.c", folder / "theirs.so"
    source.write_text(SOURCE)
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wall", "-Werror"]
    command += [f"-I{sysconfig.get_path('include')}", f"-I{numpy_rmm.get_include()}"]
    subprocess.run([*command, "-o", built, source], check=True)
    return load(built)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("theirs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_allocate_from_our_resources(theirs: ModuleType) -> None:
    pool = mr.PoolMemoryResource(mr.HostMemoryResource())
    ptr = theirs.allocate(pool)
    assert pool.statistics().current_bytes == 1000
    assert theirs.deallocate(pool, ptr) == 0
    assert theirs.deallocate(pool, ptr) != 0
    assert pool.statistics().current_bytes == 0


def test_they_see_the_same_registry(theirs: ModuleType) -> None:
    assert theirs.find("host") is numpy_rmm.registry["host"]
    with pytest.raises(KeyError, match="'nope'"):
        theirs.find("nope")


def test_they_make_adaptors(theirs: ModuleType) -> None:
    adaptor = theirs.adapt(mr.HostMemoryResource())
    assert type(adaptor) is mr.StatisticsResourceAdaptor
    assert type(adaptor.upstream) is mr.LimitingResourceAdaptor
    ptr = theirs.allocate(adaptor)
    assert adaptor.pop_counters().current_bytes == 1000
    assert adaptor.upstream.get_allocated_bytes() == 1024
    with pytest.raises(MemoryError, match="limit 4 KiB"):
        adaptor.allocate(4096)
    assert theirs.deallocate(adaptor, ptr) == 0


def test_they_page_lock_memory_of_their_own(theirs: ModuleType, cuda: Driver) -> None:
    address = theirs.toggle_pin()
    values = np.ctypeslib.as_array((ctypes.c_uint8 * (1 << 16)).from_address(address))
    assert numpy_rmm.memory_kind(values) == "registered"
    with numpy_rmm.pin(values[5:10]):  # counted: it is locked already
        theirs.toggle_pin()
        assert numpy_rmm.is_pinned(values)
    assert not numpy_rmm.is_pinned(values)


def test_they_are_told_what_is_no_resource(theirs: ModuleType) -> None:
    with pytest.raises(TypeError, match="must be a MemoryResource, not int"):
        theirs.allocate(3)
