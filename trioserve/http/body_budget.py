"""The memory budget of all request bodies. Each exchange has a share of the budget, and releases the share when the
exchange ends.
"""

from __future__ import annotations

from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.http.exchange import BodyTooLarge
from trioserve.http.headers import Headers
from trioserve.http.limits import FrontendLimits
from trioserve.trio_tools.fair_slots import FairSlots

__all__ = ["BodyBudget", "BodyShare"]

# Decompressions that may run at the same time, each in a thread. The bound leaves processors for the model if many
# compressed bodies arrive.
DECOMPRESSIONS_MAX = 2


class BodyBudget:
    """The body bytes that a server holds.

    Args:
        limits: limits on the size of a body, and on the sum of all bodies.

    Attributes:
        bytes_held: bytes of bodies whose exchange is open.
        bytes_total: bytes of all bodies that ever arrived, compressed if they were sent compressed.
        decompressions: limits how many bodies are decompressed at the same time.
    """

    def __init__(self, limits: FrontendLimits) -> None:
        self.limits = limits
        self.bytes_held = 0
        self.bytes_total = 0
        self.decompressions = FairSlots(DECOMPRESSIONS_MAX, what="compressed bodies")


class BodyShare:
    """The body of one exchange while it arrives, and its share of the budget.

    Args:
        budget: the budget of the server.

    Attributes:
        is_decompressed: True if the body was sent compressed, and is now held decompressed.
    """

    __slots__ = ("_budget", "_byte_count", "_decompressed_bytes", "_pieces", "is_decompressed")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._pieces: list[bytes] = []
        self._byte_count = self._decompressed_bytes = 0
        self.is_decompressed = False

    @property
    def decompressions(self) -> FairSlots:
        return self._budget.decompressions

    def check_announced(self, headers: Headers) -> None:
        """Check the field content-length before any byte of the body is read.

        Args:
            headers: header fields of the request.

        Raises:
            BodyTooLarge: content-length is larger than allowed.
            InvalidRequest: content-length is not a number.
        """
        announced = headers.get("content-length")
        if announced is None:
            return
        if not (announced.isascii() and announced.isdigit()):
            raise InvalidRequest(f"content-length is {announced!r}, allowed is a number of bytes")
        self.check_size(int(announced))

    def check_size(self, byte_count: int) -> None:
        """Raise an error if a body of this size is not allowed.

        Args:
            byte_count: size of the body, or of the part that is known.

        Raises:
            BodyTooLarge: `byte_count` is larger than allowed.
        """
        allowed = self._budget.limits.body_bytes_max
        if byte_count > allowed:
            raise BodyTooLarge(f"the request body has {byte_count} bytes or more, at most {allowed} are allowed")

    def add(self, piece: bytes) -> None:
        """Append the next bytes of the body, as the client sent them.

        Args:
            piece: the next bytes.

        Raises:
            BodyTooLarge: the body becomes too large. The piece is not kept.
            Overloaded: the bodies of all clients together become too large. The piece is not kept.
        """
        self.check_size(self._byte_count + len(piece))
        self._count(piece)
        self._pieces.append(piece)
        self._byte_count += len(piece)
        self._budget.bytes_total += len(piece)

    def count_decompressed(self, piece: bytes) -> None:
        """Count a piece of the decompressed body. The caller keeps the piece.

        Args:
            piece: the next bytes.

        Raises:
            BodyTooLarge, Overloaded: as for `add`.
        """
        self.check_size(self._decompressed_bytes + len(piece))
        self._count(piece)
        self._decompressed_bytes += len(piece)

    def replace_compressed(self, whole: bytes) -> bytes:
        """Replace the compressed body by the decompressed body.

        Args:
            whole: the decompressed body. `count_decompressed` must have counted all of its pieces.

        Returns:
            `whole`.
        """
        assert len(whole) == self._decompressed_bytes
        self._budget.bytes_held -= self._byte_count
        self._pieces, self._byte_count, self._decompressed_bytes = [whole], len(whole), 0
        self.is_decompressed = True
        return whole

    def _count(self, piece: bytes) -> None:
        if self._budget.bytes_held + len(piece) > self._budget.limits.bodies_bytes_max:
            raise Overloaded(
                f"request bodies of all clients hold {self._budget.bytes_held} bytes, "
                f"at most {self._budget.limits.bodies_bytes_max} are allowed: try again shortly",
                reason="request_bodies",
                retry_after_seconds=1.0,
            )
        self._budget.bytes_held += len(piece)

    def whole(self) -> bytes:
        """Return all bytes of the body so far. The bytes stay counted."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def release(self) -> None:
        """Return all bytes of the share to the budget. Further calls do nothing."""
        self._budget.bytes_held -= self._byte_count + self._decompressed_bytes
        self._byte_count = self._decompressed_bytes = 0
        self._pieces = []
