"""Options: policy with numbers, from the environment and from the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr, options

EXAMPLES = {
    "pinned_threshold": ("1 MiB", 1 << 20),
    "wait_limit": ("5 ms", 0.005),
    "touch_threads": ("3", 3),
    "on_exhausted": ("wait", "wait"),
    "fork": ("dontfork", "dontfork"),
    "debug": ("1", True),
    "cuda_library": ("/some/where", "/some/where"),
}


def test_the_rows() -> None:
    assert set(EXAMPLES) <= set(options)
    assert len(options) == len(list(options))
    assert "pinned_threshold" in options
    assert "nope" not in options
    assert repr(options).startswith("options({")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_option_is_set_for_a_while(name: str) -> None:
    text, value = EXAMPLES[name]
    before = options[name]
    with options(**{name: text}):
        assert options[name] == value
        assert type(options[name]) is type(value)
        with options(**{name: value}):
            assert options[name] == value
    assert options[name] == before


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_option_comes_from_the_environment(name: str, run_python) -> None:  # type: ignore[no-untyped-def]
    text, value = EXAMPLES[name]
    done = run_python(
        f"""
        import numpy_rmm
        assert numpy_rmm.options[{name!r}] == {value!r}
        assert numpy_rmm.info()["options"][{name!r}]["source"] == "environment"
        """,
        **{f"NUMPY_RMM_{name.upper()}": text},
    )
    assert done.returncode == 0, done.stderr


def test_a_variable_that_cannot_be_read_is_told(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import numpy_rmm
        assert numpy_rmm.options["pinned_threshold"] == 65536
        page = repr(numpy_rmm.info())
        assert "NUMPY_RMM_PINNED_THRESHOLD could not be read" in page
        """,
        NUMPY_RMM_PINNED_THRESHOLD="lots",
    )
    assert done.returncode == 0, done.stderr


def test_delete_restores_the_default() -> None:
    options["pinned_threshold"] = 3
    del options["pinned_threshold"]
    assert options["pinned_threshold"] == 65536


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("pinned_threshold", -1, ValueError),
        ("pinned_threshold", 2**70, ValueError),
        ("pinned_threshold", "lots", ValueError),
        ("pinned_threshold", 1.5, TypeError),
        ("pinned_threshold", None, TypeError),
        ("wait_limit", -1.0, ValueError),
        ("wait_limit", "soon", ValueError),
        ("wait_limit", float("nan"), ValueError),
        ("wait_limit", [], TypeError),
        ("reuse", "never", ValueError),
        ("reuse", 1, TypeError),
        ("fork", "share", ValueError),
        ("fork", "", ValueError),
        ("fork", "DONTFORK", ValueError),
        ("fork", True, TypeError),
        ("fork", None, TypeError),
        ("debug", "perhaps", ValueError),
        ("debug", 2, TypeError),
        ("device", "first", ValueError),
        ("device", -1, ValueError),
        ("nope", 1, KeyError),
    ],
)
def test_a_value_that_an_option_cannot_have(
    name: str, value: object, error: type
) -> None:
    before = dict(options)
    with pytest.raises(error):
        options[name] = value  # type: ignore[assignment]
    with pytest.raises(error), options(segment_nbytes="8 MiB", **{name: value}):
        pass
    assert dict(options) == before


def test_a_change_holds_for_handlers_made_later(cuda: object) -> None:
    before = numpy_rmm.pinned().handler
    with options(pinned_threshold="1 MiB"):
        assert numpy_rmm.pinned().handler.threshold == 1 << 20
        assert before.threshold == 65536


@pytest.mark.parametrize(
    ("policy", "name", "has_fallback"),
    [
        ("auto", "pinned", True),
        ("auto", "managed", False),
        ("auto", "pinned_direct", False),
        ("error", "pinned", False),
        ("host", "managed", True),
        ("host", "host_direct", False),
        ("wait", "pinned", True),
    ],
)
def test_the_fallback_follows_on_exhausted(
    cuda: object, policy: str, name: str, has_fallback: bool
) -> None:
    with options(on_exhausted=policy):
        handler = numpy_rmm.use_handler(name).handler
    assert (handler.fallback is numpy_rmm.registry["host"]) == has_fallback


@pytest.mark.parametrize("policy", ["auto", "host", "error", "wait"])
@pytest.mark.parametrize("own", [None, "host", "error", "wait"])
@pytest.mark.parametrize("kind", ["pinned", "managed"])
@pytest.mark.parametrize("is_counted", [False, True])
def test_what_a_pool_was_told_comes_before_the_option(
    cuda: object, policy: str, own: Any, kind: str, is_counted: bool
) -> None:
    sources = {
        "pinned": mr.PinnedHostMemoryResource,
        "managed": mr.ManagedMemoryResource,
    }
    with options(on_exhausted=policy):
        pool: mr.MemoryResource = mr.PoolMemoryResource(
            sources[kind](), on_exhausted=own
        )
        pool = mr.StatisticsResourceAdaptor(pool) if is_counted else pool
        handler = numpy_rmm.use_handler(pool).handler
    assert (handler.fallback is not None) == ((own or policy) == "host")


def test_a_full_pool_that_falls_back_to_the_host(cuda: object) -> None:
    pool = mr.PoolMemoryResource(
        mr.PinnedHostMemoryResource(),
        maximum_pool_size="4 MiB",
        on_exhausted="host",
    )
    handler = numpy_rmm.use_handler(pool).handler
    arrays = handler.run(lambda: [np.zeros(1 << 20, np.uint8) for _ in range(5)])
    with pytest.warns(RuntimeWarning, match="ordinary host memory"):
        kinds = [numpy_rmm.memory_kind(array) for array in arrays]
    assert kinds == 4 * ["pinned"] + ["host"]
    assert "fell back" in (numpy_rmm.array_info(arrays[-1]).reason or "")
    assert handler.statistics().fallbacks == 1
    with pytest.raises(numpy_rmm.OutOfMemoryError):
        pool.allocate(1 << 20)


def test_a_users_own_resource_has_no_fallback(cuda: object) -> None:
    pool = mr.PoolMemoryResource(mr.PinnedHostMemoryResource())
    assert numpy_rmm.use_handler(pool).handler.fallback is None
    with numpy_rmm.use_handler(pool, fallback=numpy_rmm.registry["host_direct"]) as h:
        assert h.fallback is numpy_rmm.registry["host_direct"]
