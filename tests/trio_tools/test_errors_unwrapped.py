"""Which errors come out of a group, and which groups stay."""

from __future__ import annotations

import pytest
import trio

from trioserve.trio_tools.errors_unwrapped import errors_unwrapped


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_single_error_comes_out_with_its_cause_however_deep_it_is(depth):
    error = KeyError("mine")
    error.__cause__ = cause = OSError("why")
    group: BaseException = error
    for _ in range(depth):
        group = ExceptionGroup("group", [group])  # type: ignore[list-item]
    with pytest.raises(KeyError) as caught, errors_unwrapped():
        raise group
    assert caught.value is error
    assert caught.value.__cause__ is cause


def test_the_same_error_told_to_several_comes_out_once():
    error = KeyError("told to all")
    with pytest.raises(KeyError) as caught, errors_unwrapped():
        raise ExceptionGroup("outer", [error, ExceptionGroup("inner", [error, error])])
    assert caught.value is error


def test_equal_errors_are_not_the_same_error():
    group = ExceptionGroup("group", [KeyError("x"), KeyError("x")])
    with pytest.raises(ExceptionGroup) as caught, errors_unwrapped():
        raise group
    assert caught.value is group


def test_an_error_without_a_group_passes():
    with pytest.raises(ZeroDivisionError), errors_unwrapped():
        raise ZeroDivisionError


async def test_a_cancellation_among_errors_stays_in_the_group_and_finds_its_scope(autojump_clock):
    async def fail_late() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError("mine")

    with pytest.raises(ExceptionGroup) as caught, trio.CancelScope() as scope, errors_unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_late)
            await trio.lowlevel.checkpoint()
            scope.cancel()
            await trio.sleep_forever()
    assert [type(error) for error in caught.value.exceptions] == [KeyError]


async def test_a_cancellation_alone_is_caught_by_its_scope(autojump_clock):
    with trio.move_on_after(1) as scope, errors_unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(trio.sleep_forever)
    assert scope.cancelled_caught
