"""Takes single errors out of the exception groups that nurseries raise, for callers that do not expect a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["errors_unwrapped", "unwrapped"]


@contextmanager
def errors_unwrapped() -> Iterator[None]:
    """Raise the error itself instead of a group that contains only this error, once or several times.

    Groups with different errors pass unchanged.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        error = unwrapped(group)
        if error is group:
            raise
        raise error from error.__cause__


def unwrapped(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the only error of a group, or the group itself if it has different errors.

    Args:
        group: The group, which may contain further groups.
    """
    errors = {id(error): error for error in _leaves(group)}
    return group if len(errors) > 1 else next(iter(errors.values()))


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
