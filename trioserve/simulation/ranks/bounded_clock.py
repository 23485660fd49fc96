"""A clock of virtual time that ends a run in which nobody can go on any more: what waits for its step cannot be
cancelled, and would wait for ever."""

from __future__ import annotations

from collections.abc import Callable

from trio.testing import MockClock

__all__ = ["bounded_clock"]

IN_VAIN_MAX = 1_000  # jumps by nothing: what is awaited outside of the run has come by then


def bounded_clock(seconds_max: float, is_bounded: Callable[[], bool]) -> MockClock:
    """Jumps as soon as nobody can go on. Raises AssertionError out of the run (as the cause of a TrioInternalError)
    when there is nothing to jump to, or so much time has passed, as long as is_bounded says so: nobody may wait for a
    real thread meanwhile."""
    clock = MockClock(autojump_threshold=0)
    jump, in_vain = clock._autojump, 0

    def bounded_jump() -> None:
        nonlocal in_vain
        before = clock.current_time()
        jump()
        now = clock.current_time()
        in_vain = in_vain + 1 if now == before else 0
        if not is_bounded():
            return
        assert in_vain < IN_VAIN_MAX, f"at {now:.3f} everybody waits for something that never comes"
        assert now < seconds_max, f"somebody waits for something that does not come in {now:.0f} s"

    clock._autojump = bounded_jump  # type: ignore[method-assign]  # Trio has no other place for it
    return clock
