"""Whether time passes while somebody waits for nothing: virtual time moves on only when no task can go on, so whoever
waits for a step at that moment, while none runs and no image is encoded, has been forgotten."""

from __future__ import annotations

import trio

from trioserve.testing.fake_engine import FakeEngine

__all__ = ["IdleWatch"]


class IdleWatch(trio.abc.Instrument):
    """An instrument of trio.run; it sees every turn of the scheduler and changes nothing. Of an engine without a
    connector: nobody there waits for anything but a step, or an image that is encoded. engine: to be set when there
    is one."""

    def __init__(self) -> None:
        self.engine: FakeEngine | None = None
        self._since: tuple[str, float] | None = None
        self._violation: str | None = None

    def before_io_wait(self, timeout: float) -> None:
        now, who = trio.current_time(), self._who_waits_in_vain()
        if who is None:
            self._since = None
        elif self._since is None or self._since[0] != who:
            self._since = who, now
        elif now > self._since[1] and self._violation is None:
            self._violation = f"{who} waits from {self._since[1]:.3f} to {now:.3f}, and nothing is computed"

    def check(self) -> None:
        """Assert that time has never passed so. (An instrument must not raise.)"""
        assert self._violation is None, self._violation

    def _who_waits_in_vain(self) -> str | None:
        engine = self.engine
        if engine is None or engine.fault is not None or engine.core.flights:
            return None
        if engine.image_encoder is not None and engine.image_encoder.encoding_count:
            return None
        first = next(iter(engine.core.live_requests()), None)
        return engine.first_unfinished_id if first is None else first.request.id
