"""Limit for the memory of images that are generated and not yet received by their clients.

A slow client may take hours to receive its images, because the minimum speed of responses is chosen for text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trioserve.contracts.errors import Overloaded

__all__ = ["UnsentImages", "UnsentShare"]

UNSENT_BYTES_MAX = 2**30  # some hundred images of a megapixel
RETRY_SECONDS = 5.0


class UnsentImages:
    """Counts the bytes of images that clients have not received.

    Args:
        unsent_bytes_max: At this number of bytes, new requests are refused. Running requests may exceed it.
    """

    def __init__(self, unsent_bytes_max: int = UNSENT_BYTES_MAX) -> None:
        self.byte_count = 0
        self._unsent_bytes_max = unsent_bytes_max

    @contextmanager
    def share(self) -> Iterator[UnsentShare]:
        """Yield the counter of one response. Its bytes count until the response is sent.

        Raises:
            Overloaded: The limit is reached.
        """
        if self.byte_count >= self._unsent_bytes_max:
            raise Overloaded(
                f"clients have not received {self.byte_count} bytes of images (allowed: {self._unsent_bytes_max}): "
                "try again shortly",
                reason="unsent_pictures",
                retry_after_seconds=RETRY_SECONDS,
            )
        share = UnsentShare(self)
        try:
            yield share
        finally:
            share.hold(0)


class UnsentShare:
    """Counts the unsent bytes of one response."""

    def __init__(self, unsent: UnsentImages) -> None:
        self._unsent = unsent
        self.byte_count = 0

    def hold(self, byte_count: int) -> None:
        """Set the number of unsent bytes of the response.

        Args:
            byte_count: Number of bytes. Replaces the earlier number.
        """
        self._unsent.byte_count += byte_count - self.byte_count
        self.byte_count = byte_count
