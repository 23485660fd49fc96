"""A nursery wraps what it raises in a group. Users who entered ours without knowing of it get the error itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["errors_unwrapped"]


@contextmanager
def errors_unwrapped() -> Iterator[None]:
    """Let a group that holds one error, once or several times, come out as that error; other groups as they are."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = {id(error): error for error in _leaves(group)}
        if len(errors) > 1:
            raise
        (error,) = errors.values()
        raise error from error.__cause__


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
