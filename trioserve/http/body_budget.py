"""How much memory all request bodies together may take. Each exchange holds a share and gives it back as a whole."""

from __future__ import annotations

from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.http.exchange import BodyTooLarge
from trioserve.http.headers import Headers
from trioserve.http.limits import FrontendLimits

__all__ = ["BodyBudget", "BodyShare"]


class BodyBudget:
    """The server's sum of held body bytes, and of all that ever came."""

    def __init__(self, limits: FrontendLimits) -> None:
        self.limits = limits
        self.bytes_held = 0
        self.bytes_total = 0


class BodyShare:
    """One exchange's body in the making, and its part of the budget."""

    __slots__ = ("_budget", "_byte_count", "_pieces")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._pieces: list[bytes] = []
        self._byte_count = 0

    def check_announced(self, headers: Headers) -> None:
        """Raises BodyTooLarge, or InvalidRequest, by what content-length says."""
        announced = headers.get("content-length")
        if announced is None:
            return
        if not (announced.isascii() and announced.isdigit()):
            raise InvalidRequest(f"content-length is {announced!r}, allowed is a number of bytes")
        self.check_size(int(announced))

    def check_size(self, byte_count: int) -> None:
        """Raises BodyTooLarge if a body of so many bytes would be."""
        allowed = self._budget.limits.body_bytes_max
        if byte_count > allowed:
            raise BodyTooLarge(f"the request body has {byte_count} bytes or more, at most {allowed} are allowed")

    def add(self, piece: bytes) -> None:
        """Raises BodyTooLarge or Overloaded when the piece does not fit; it is then not held."""
        self.check_size(self._byte_count + len(piece))
        if self._budget.bytes_held + len(piece) > self._budget.limits.bodies_bytes_max:
            raise Overloaded(
                f"request bodies of all clients hold {self._budget.bytes_held} bytes, "
                f"at most {self._budget.limits.bodies_bytes_max} are allowed: try again shortly",
                reason="request_bodies",
                retry_after_seconds=1.0,
            )
        self._pieces.append(piece)
        self._byte_count += len(piece)
        self._budget.bytes_held += len(piece)
        self._budget.bytes_total += len(piece)

    def whole(self) -> bytes:
        """Everything added so far, joined; the share stays held."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def release(self) -> None:
        """Give everything back. Harmless when repeated."""
        self._budget.bytes_held -= self._byte_count
        self._byte_count = 0
        self._pieces = []
