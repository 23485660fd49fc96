"""Fixtures for tests with pytest-trio: engines and servers without weights. After each test, the fixtures check that no
resource is still in use.

pytest loads this plugin automatically if trioserve is installed. The plugin imports no other module of trioserve before
a test uses a fixture.
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
    except ImportError:  # Without pytest-trio, no test can use the fixtures, so the plugin defines none.

        def trio_fixture(function):
            return function


T = TypeVar("T")

WAITS = "trioserve.testing.accounting"
"""Module that is looked up in sys.modules. Programs that use no test kit never load it."""

__all__ = ["fake_engine", "fake_engine_options", "fake_image_engine", "memory_server"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "fake_engine(**options): options of trioserve.testing.open_fake_engine, for this test's fixtures fake_engine "
        "and memory_server (which also accepts options of open_memory_server)",
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
    """Put the message of a failure first, and add what the requests of a hung test wait for.

    Reports of tests without fake engines stay unchanged.

    Args:
        item: the test.
        call: the call of the test. If its exception is a group with one error, this error replaces the group.
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
    """Return the errors in a group, in order.

    A TrioInternalError is replaced by its cause, because pytest-timeout raises inside of Trio's run loop.
    """
    if isinstance(error, BaseExceptionGroup):
        leaves = [leaf for part in error.exceptions for leaf in _errors_of(part)]
        return list({id(leaf): leaf for leaf in leaves}.values())
    while type(error).__name__ == "TrioInternalError" and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return [error]


def _sentence_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _is_hang(error: BaseException) -> bool:
    """Return True for the failure of pytest-timeout and for the TooSlowError of trio.fail_after."""
    is_from_timeout = isinstance(error, pytest.fail.Exception) and "Timeout" in str(error)
    return is_from_timeout or type(error).__name__ == "TooSlowError"


@pytest.fixture
def fake_engine_options() -> dict[str, Any]:
    """Options for all fake engines of a module or folder. To set options, override this fixture in the module or
    folder. Options of a test's marker have priority.
    """
    return {}


@trio_fixture
async def fake_engine(request: pytest.FixtureRequest, fake_engine_options: dict[str, Any]) -> AsyncIterator[FakeEngine]:
    """An engine without weights. The test fails if a KV block or a queue slot is still in use at its end.

    Args:
        request: the pytest request, whose marker may have options.
        fake_engine_options: options of the module or folder.
    """
    from trioserve.testing.fake_engine import open_fake_engine

    async with _kept(open_fake_engine(**_options(request, fake_engine_options))) as engine:
        yield engine
        if engine.fault is None:
            await engine.finish_step()
            engine.assert_all_free()


@trio_fixture
async def fake_image_engine(request: pytest.FixtureRequest) -> AsyncIterator[FakeImageEngine]:
    """An image engine without weights. The test fails if a latent slot or a queue place is still in use at its end.

    Args:
        request: the pytest request, whose marker may have options.
    """
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
    """A server in memory with a fake engine. The test fails if a request has not ended at the end of the test.

    Args:
        request: the pytest request, whose marker may have options.
        fake_engine_options: options of the module or folder.
    """
    from trioserve.testing.memory_server import open_memory_server

    async with _kept(open_memory_server(**_options(request, fake_engine_options))) as server:
        yield server
        if server.engine.fault is None:
            await server.assert_all_free()


@asynccontextmanager
async def _kept(opened: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Keep a context open in a separate task, so that a fault that a test injects does not cancel the test.

    Any other fault of the engine fails the test. Errors are raised without exception groups, so that the summary of
    pytest shows their messages.
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
