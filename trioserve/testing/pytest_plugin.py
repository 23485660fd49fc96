"""Fixtures for tests under pytest-trio: an engine and a server without weights, to be left as they were found.

pytest loads this by itself once trioserve is installed. It imports nothing of trioserve until a fixture is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from trioserve.testing.fake_engine import FakeEngine
    from trioserve.testing.fake_image_engine import FakeImageEngine
    from trioserve.testing.memory_server import MemoryServer

    def trio_fixture(function: Callable[..., Any]) -> Callable[..., Any]: ...

else:
    try:
        from pytest_trio import trio_fixture
    except ImportError:  # then there are no tests that could ask for these fixtures

        def trio_fixture(function):
            return function


T = TypeVar("T")

WAITS = "trioserve.testing.waits"
"""Looked up among the loaded modules: a program without fake engines never loads it."""

__all__ = ["fake_engine", "fake_engine_options", "fake_image_engine", "memory_server"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "fake_engine(**options): options of trioserve.testing.open_fake_engine, for this test's fixtures fake_engine "
        "and memory_server (the latter takes those of open_memory_server, too)",
    )
    config.addinivalue_line(
        "markers",
        "fake_image_engine(**options): options of trioserve.testing.open_fake_image_engine, for this test's fixture "
        "fake_image_engine",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if (waits := sys.modules.get(WAITS)) is not None:
        waits.WATCH.begin_test()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report the sentence of a failure first, and of a hung test what its requests wait for.

    Tests that open no fake engine are reported as ever.
    """
    waits = sys.modules.get(WAITS)
    if waits is None or not waits.WATCH.is_used or call.excinfo is None:
        return (yield)
    errors = _errors_of(call.excinfo.value)
    if call.excinfo.value is not errors[0] and len(errors) == 1:
        call.excinfo = pytest.ExceptionInfo.from_exception(errors[0])
    report = yield
    if report.failed:
        if len(errors) > 1 and (crash := getattr(report.longrepr, "reprcrash", None)) is not None:
            crash.message = f"{_sentence_of(errors[0])} (and {len(errors) - 1} more)"
            report.sections.append(("Errors", "\n".join(map(_sentence_of, errors))))
        if any(_is_hang(error) for error in errors) and (lines := waits.WATCH.lines()):
            report.sections.append(("What requests wait for", "\n".join(lines)))
    return report


def _errors_of(error: BaseException) -> list[BaseException]:
    """The errors in a group, in order. What pytest-timeout raises inside of Trio's run loop is not Trio's fault."""
    if isinstance(error, BaseExceptionGroup):
        leaves = [leaf for part in error.exceptions for leaf in _errors_of(part)]
        return list({id(leaf): leaf for leaf in leaves}.values())
    while type(error).__name__ == "TrioInternalError" and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return [error]


def _sentence_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _is_hang(error: BaseException) -> bool:
    """pytest-timeout fails the test, and trio.fail_after raises TooSlowError."""
    is_from_timeout = isinstance(error, pytest.fail.Exception) and "Timeout" in str(error)
    return is_from_timeout or type(error).__name__ == "TooSlowError"


@pytest.fixture
def fake_engine_options() -> dict[str, Any]:
    """Override it in a module or a conftest.py to give options to all of its tests; those of a marker come on top."""
    return {}


@trio_fixture
async def fake_engine(request: pytest.FixtureRequest, fake_engine_options: dict[str, Any]) -> AsyncIterator[FakeEngine]:
    """An engine without weights. After the test, no KV block and no place may be taken."""
    from trioserve.testing.fake_engine import open_fake_engine

    async with _kept(open_fake_engine(**_options(request, fake_engine_options))) as engine:
        yield engine
        if engine.fault is None:
            await engine.finish_step()
            engine.assert_all_free()


@trio_fixture
async def fake_image_engine(request: pytest.FixtureRequest) -> AsyncIterator[FakeImageEngine]:
    """An engine of pictures without weights. After the test, no latent slot and no place may be taken."""
    from trioserve.testing.fake_image_engine import open_fake_image_engine

    async with _kept(open_fake_image_engine(**_options(request, {}, "fake_image_engine"))) as engine:
        yield engine
        if engine.fault is None:
            await engine.finish_step()
            engine.assert_all_free()


@trio_fixture
async def memory_server(
    request: pytest.FixtureRequest, fake_engine_options: dict[str, Any]
) -> AsyncIterator[MemoryServer]:
    """The same engine behind its front end, with clients in memory. After the test, no request may be left."""
    from trioserve.testing.memory_server import open_memory_server

    async with _kept(open_memory_server(**_options(request, fake_engine_options))) as server:
        yield server
        if server.engine.fault is None:
            await server.assert_all_free()


@asynccontextmanager
async def _kept(opened: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Keep it open in a task of its own, so that an engine that a test breaks does not cancel the test.

    Any other fault of the engine fails the test, as does what is left over. Errors come out without groups around them,
    so that the summary of pytest shows their sentence.
    """
    import trio

    from trioserve.contracts.errors import EngineFault
    from trioserve.testing.stepped_by_hand import InjectedFault
    from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

    async def keep(task_status: trio.TaskStatus[T]) -> None:
        try:
            async with opened as kept:
                task_status.started(kept)
                await trio.sleep_forever()
        except EngineFault as fault:
            if not isinstance(fault.__cause__, InjectedFault):
                raise

    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            yield await nursery.start(keep)
            nursery.cancel_scope.cancel()


def _options(
    request: pytest.FixtureRequest, options: dict[str, Any], marker_name: str = "fake_engine"
) -> dict[str, Any]:
    marker = request.node.get_closest_marker(marker_name)
    return {**options, **(marker.kwargs if marker else {})}
