"""How much memory all request bodies together may take. Each exchange holds a share and gives it back as a whole."""

from __future__ import annotations

from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.http.exchange import BodyTooLarge
from trioserve.http.headers import Headers
from trioserve.http.limits import FrontendLimits
from trioserve.trio_tools.fair_places import FairPlaces

__all__ = ["BodyBudget", "BodyShare"]


UNFOLDING_MAX = 2  # compressed bodies at a time, each in a thread: a flood of them is to leave processors for the model


class BodyBudget:
    """The server's sum of held body bytes, and of all that ever came. unfolding: for those that came compressed."""

    def __init__(self, limits: FrontendLimits) -> None:
        self.limits = limits
        self.bytes_held = 0
        self.bytes_total = 0
        self.unfolding = FairPlaces(UNFOLDING_MAX, what="compressed bodies")


class BodyShare:
    """One exchange's body in the making, and its part of the budget. is_plain: it came compressed, and is no more."""

    __slots__ = ("_budget", "_byte_count", "_pieces", "_unfolded_bytes", "is_plain")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._pieces: list[bytes] = []
        self._byte_count = self._unfolded_bytes = 0
        self.is_plain = False

    @property
    def unfolding(self) -> FairPlaces:
        return self._budget.unfolding

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
        self._count(piece)
        self._pieces.append(piece)
        self._byte_count += len(piece)
        self._budget.bytes_total += len(piece)

    def add_unfolded(self, piece: bytes) -> None:
        """Count a piece of what the compressed body becomes. Raises as `add` does."""
        self.check_size(self._unfolded_bytes + len(piece))
        self._count(piece)
        self._unfolded_bytes += len(piece)

    def become_plain(self, whole: bytes) -> bytes:
        """Hold this, all of whose pieces were counted, in place of what came compressed. Returns it."""
        assert len(whole) == self._unfolded_bytes
        self._budget.bytes_held -= self._byte_count
        self._pieces, self._byte_count, self._unfolded_bytes = [whole], len(whole), 0
        self.is_plain = True
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
        """Everything added so far, joined; the share stays held."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def release(self) -> None:
        """Give everything back. Harmless when repeated."""
        self._budget.bytes_held -= self._byte_count + self._unfolded_bytes
        self._byte_count = self._unfolded_bytes = 0
        self._pieces = []
