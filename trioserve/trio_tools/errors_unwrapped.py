"""A nursery wraps what it raises in a group. Users who entered ours without knowing of it get the error itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["errors_unwrapped", "unwrapped"]


@contextmanager
def errors_unwrapped() -> Iterator[None]:
    """Let a group that holds one error, once or several times, come out as that error; other groups as they are."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = unwrapped(group)
        if error is group:
            raise
        raise error from error.__cause__


def unwrapped(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that it holds, once or several times; a group with more than one as it is."""
    errors = {id(error): error for error in _leaves(group)}
    return group if len(errors) > 1 else next(iter(errors.values()))


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
