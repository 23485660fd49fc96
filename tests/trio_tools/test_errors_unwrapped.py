"""Tests that a group with a single error becomes this error. Groups with several errors are not changed."""

from __future__ import annotations

import pytest
import trio

from trioserve.trio_tools.errors_unwrapped import errors_unwrapped


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_single_error_is_unwrapped_with_its_cause_at_any_depth(depth):
    error = KeyError("mine")
    error.__cause__ = cause = OSError("why")
    group: BaseException = error
    for _ in range(depth):
        group = ExceptionGroup("group", [group])  # type: ignore[list-item]
    with pytest.raises(KeyError) as caught, errors_unwrapped():
        raise group
    assert caught.value is error
    assert caught.value.__cause__ is cause


def test_one_error_object_in_several_places_is_unwrapped():
    error = KeyError("shared")
    with pytest.raises(KeyError) as caught, errors_unwrapped():
        raise ExceptionGroup("outer", [error, ExceptionGroup("inner", [error, error])])
    assert caught.value is error


def test_group_with_two_different_error_objects_that_are_equal_is_not_unwrapped():
    group = ExceptionGroup("group", [KeyError("x"), KeyError("x")])
    with pytest.raises(ExceptionGroup) as caught, errors_unwrapped():
        raise group
    assert caught.value is group


def test_error_without_a_group_passes_unchanged():
    with pytest.raises(ZeroDivisionError), errors_unwrapped():
        raise ZeroDivisionError


async def test_cancellation_next_to_an_error_reaches_its_scope(autojump_clock):
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


async def test_cancellation_alone_reaches_its_scope(autojump_clock):
    with trio.move_on_after(1) as scope, errors_unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(trio.sleep_forever)
    assert scope.cancelled_caught
