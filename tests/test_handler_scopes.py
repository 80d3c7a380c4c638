"""Where a handler holds: scopes, contexts, threads and the process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import numpy_rmm
from handlers import DEFAULT, current, in_thread

# ---- use_handler ---------------------------------------------------------------------


def test_a_scope_puts_back_what_it_found() -> None:
    numpy_rmm.set_handler("huge_pages")
    before = numpy_rmm.get_handler()
    with numpy_rmm.use_handler("host") as handler:
        assert numpy_rmm.get_handler() == handler
    assert numpy_rmm.get_handler() == before


def test_a_scope_ends_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), numpy_rmm.host():
        _ = 1 / 0
    assert current() == DEFAULT


def test_one_scope_object_nests_and_reenters() -> None:
    scope = numpy_rmm.host()
    with scope as outer, numpy_rmm.use_handler(None), scope as inner:
        assert outer == inner == numpy_rmm.get_handler()
    assert current() == DEFAULT
    with scope:
        assert numpy_rmm.get_handler() == outer


def test_a_scope_of_none_is_numpy_default() -> None:
    with numpy_rmm.host(), numpy_rmm.use_handler(None) as handler:
        assert handler.name == DEFAULT
        assert numpy_rmm.get_handler_name(np.empty(3)) == DEFAULT


def test_a_handler_set_inside_a_scope_stays_and_is_told() -> None:
    text = "has got another handler"
    with pytest.warns(RuntimeWarning, match=text), numpy_rmm.host():
        numpy_rmm.set_handler("huge_pages")
    assert current().startswith("numpy_rmm:huge_pages#")


def test_a_scope_left_in_another_thread_is_told() -> None:
    scope = numpy_rmm.host()
    stack = contextlib.ExitStack()
    stack.enter_context(scope)

    def leave() -> str:
        with pytest.warns(RuntimeWarning, match="entered in another context or thread"):
            stack.close()
        return current()

    assert in_thread(leave) == DEFAULT
    assert current().startswith("numpy_rmm:host#")


def test_a_generator_that_is_closed_does_not_disturb_its_consumer() -> None:
    def generate() -> Iterator[int]:
        with numpy_rmm.use_handler("huge_pages"):
            yield 1

    generator = generate()
    next(generator)
    with numpy_rmm.host() as handler:
        with pytest.warns(RuntimeWarning, match="has got another handler"):
            generator.close()
        assert numpy_rmm.get_handler() == handler
    assert current() == DEFAULT


def test_decorated_functions() -> None:
    @numpy_rmm.host()
    def function(a: int, *, b: int) -> tuple[str, int]:
        """Its docstring."""
        return current(), a + b

    assert function.__doc__ == "Its docstring."
    name, total = function(1, b=2)
    assert name.startswith("numpy_rmm:host#")
    assert total == 3
    assert current() == DEFAULT


def test_a_decorated_coroutine_function_enters_inside_the_coroutine() -> None:
    @numpy_rmm.host()
    async def function() -> str:
        await asyncio.sleep(0)
        return current()

    coroutine = function()
    assert inspect.iscoroutinefunction(function)
    assert current() == DEFAULT
    assert asyncio.run(coroutine).startswith("numpy_rmm:host#")


def test_generator_functions_are_refused() -> None:
    def generate() -> Iterator[int]:
        yield 1

    async def generate_async():  # type: ignore[no-untyped-def]
        yield 1

    for function in (generate, generate_async):
        with pytest.raises(TypeError, match=r"Handler\.run"):
            numpy_rmm.host()(function)
    with pytest.raises(TypeError, match="a function is needed, not int"):
        numpy_rmm.host()(3)  # type: ignore[arg-type]


def test_tasks_have_their_own_scopes() -> None:
    async def work(name: str | None, gate: asyncio.Barrier) -> str:
        with numpy_rmm.use_handler(name):
            await gate.wait()
            return current()

    async def main() -> list[str]:
        gate = asyncio.Barrier(3)
        names = ("host", "huge_pages", None)
        return await asyncio.gather(*(work(name, gate) for name in names))

    host, huge_pages, default = asyncio.run(main())
    assert host.startswith("numpy_rmm:host#")
    assert huge_pages.startswith("numpy_rmm:huge_pages#")
    assert default == DEFAULT
    assert current() == DEFAULT


# ---- where a handler holds -----------------------------------------------------------


INHERITS = bool(getattr(sys.flags, "thread_inherit_context", False))


def thread_name_of(target) -> str:  # type: ignore[no-untyped-def]
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(target()))
    thread.start()
    thread.join()
    return found[0]


async def places() -> dict[str, str]:
    """The handler's name in each kind of place."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        return {
            "task": await asyncio.create_task(asyncio.to_thread(current)),
            "to_thread": await asyncio.to_thread(current),
            "thread": thread_name_of(current),
            "executor": await loop.run_in_executor(pool, current),
            "submit": pool.submit(current).result(),
        }


def test_the_scope_of_a_context() -> None:
    with numpy_rmm.host() as handler:
        found = asyncio.run(places())
    expected = handler.name if INHERITS else DEFAULT
    assert found["task"] == found["to_thread"] == handler.name
    assert {found["thread"], found["executor"], found["submit"]} == {expected}


def test_the_scope_of_a_process() -> None:
    numpy_rmm.set_handler("host", scope="process")
    found = asyncio.run(places())
    assert set(found.values()) == {current()}
    assert current().startswith("numpy_rmm:host#")
    numpy_rmm.reset_handler(scope="process")
    assert set(asyncio.run(places()).values()) == {DEFAULT}


def test_process_scope_leaves_profile_and_trace_functions_alone() -> None:
    seen: list[str] = []

    def profile(frame: object, event: str, argument: object) -> None:
        seen.append(event)

    threading.setprofile(profile)
    try:
        numpy_rmm.set_handler("host", scope="process")
        assert threading.getprofile() is profile
        assert thread_name_of(current).startswith("numpy_rmm:host#")
        numpy_rmm.reset_handler(scope="process")
        assert threading.getprofile() is profile
    finally:
        threading.setprofile(None)
    assert "call" in seen


def test_process_scope_tells_what_it_did_not_reach() -> None:
    gate = threading.Event()
    early = threading.Thread(target=gate.wait, name="the early one")
    early.start()
    try:
        numpy_rmm.set_handler("host", scope="process")
        thread_name_of(current)
        report = numpy_rmm.info()["process_scope"]
    finally:
        gate.set()
        early.join()
    assert report["handler"] == current()
    assert "1 thread started since" in report["reached"]
    assert any("the early one" in text for text in report["not_reached"])


def test_process_scope_keeps_a_threads_own_tracebacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise OSError("no such thing")

    numpy_rmm.set_handler("host", scope="process")
    hook, threading.excepthook = threading.excepthook, threading.__excepthook__
    try:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    finally:
        threading.excepthook = hook
    text = capsys.readouterr().err
    assert "no such thing" in text
    assert "_process_scope" not in text


def test_process_scope_survives_subclasses_and_timers() -> None:
    class Worker(threading.Thread):
        def run(self) -> None:
            self.found = current()

    numpy_rmm.set_handler("host", scope="process")
    worker = Worker()
    worker.start()
    worker.join()
    assert worker.found.startswith("numpy_rmm:host#")
    assert "run" not in vars(worker)
    with pytest.raises(RuntimeError, match="once"):
        worker.start()


def test_run_leaks_nothing() -> None:
    handler = numpy_rmm.host().handler
    variable = contextvars.ContextVar[int]("variable", default=0)

    def function(
        *args: int, **kwargs: int
    ) -> tuple[str, tuple[int, ...], dict[str, int]]:
        variable.set(1)
        numpy_rmm.set_handler(None)
        return handler.name, args, kwargs

    assert handler.run(function, 1, b=2) == (handler.name, (1,), {"b": 2})
    assert handler.run(current) == handler.name
    assert variable.get() == 0
    assert current() == DEFAULT


def test_run_passes_exceptions_on() -> None:
    with pytest.raises(ZeroDivisionError):
        numpy_rmm.host().handler.run(lambda: 1 / 0)
    with pytest.raises(TypeError, match="needs a function"):
        numpy_rmm.host().handler.run()  # type: ignore[call-arg]
    assert current() == DEFAULT


def test_run_serves_a_generator_step_by_step() -> None:
    def generate() -> Iterator[str]:
        while True:
            yield current()

    generator = generate()
    handler = numpy_rmm.host().handler
    assert handler.run(next, generator) == handler.name
    assert next(generator) == DEFAULT


def test_assert_active() -> None:
    with pytest.raises(RuntimeError, match=r"should have a handler of numpy_rmm"):
        numpy_rmm.assert_active()
    with numpy_rmm.host():
        numpy_rmm.assert_active()
        numpy_rmm.assert_active("host")
        with pytest.raises(RuntimeError, match="huge_pages"):
            numpy_rmm.assert_active("huge_pages")
        if not INHERITS:
            with pytest.raises(RuntimeError, match="new threads begin without"):
                in_thread(numpy_rmm.assert_active)
