"""How much memory those pictures may take that are made, and that their clients have not taken. Slow clients may take
hours for them; the pace of responses is one for texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trioserve.contracts.errors import Overloaded

__all__ = ["UnsentPictures", "UnsentShare"]

UNSENT_BYTES_MAX = 2**30  # some hundreds of a megapixel
RETRY_SECONDS = 5.0


class UnsentPictures:
    """unsent_bytes_max: once so much is there, no request is begun. Those that are made go beyond it."""

    def __init__(self, unsent_bytes_max: int = UNSENT_BYTES_MAX) -> None:
        self.byte_count = 0
        self._unsent_bytes_max = unsent_bytes_max

    @contextmanager
    def share(self) -> Iterator[UnsentShare]:
        """Of one response, until it is sent. Raises Overloaded."""
        if self.byte_count >= self._unsent_bytes_max:
            raise Overloaded(
                f"pictures of {self.byte_count} bytes wait for their clients to take them, and no more are made "
                f"beyond {self._unsent_bytes_max}: try again shortly",
                reason="unsent_pictures",
                retry_after_seconds=RETRY_SECONDS,
            )
        share = UnsentShare(self)
        try:
            yield share
        finally:
            share.hold(0)


class UnsentShare:
    def __init__(self, unsent: UnsentPictures) -> None:
        self._unsent = unsent
        self.byte_count = 0

    def hold(self, byte_count: int) -> None:
        """So many bytes of the response wait, from now on."""
        self._unsent.byte_count += byte_count - self.byte_count
        self.byte_count = byte_count
