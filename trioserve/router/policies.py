"""Policies that choose between the endpoints that have a free slot. A policy is a class with one method, see Policy.

The policies here look at only a few endpoints for each request. If there are up to LOOKS_MAX endpoints, the policies
compare all of them. Otherwise, they compare LOOKS_OF_MANY random endpoints. They also compare the endpoints that a
session, a prefix or resident blocks point to.
"""

from __future__ import annotations

import abc
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trioserve.contracts.endpoint import PREFIX_BLOCK_TOKENS, EndpointId, RoutedRequest
from trioserve.contracts.ids import BlockHash
from trioserve.router.candidates import Candidate, Candidates, Rng, looked_at
from trioserve.router.residency import PrefixIndex, ResidencyIndex

__all__ = ["LOOKS_MAX", "POLICIES", "Candidate", "Candidates", "Policy", "PolicyFactory", "Rng", "looked_at"]

LOOKS_MAX = 12
LOOKS_OF_MANY = 6  # The least loaded of six random endpoints is hardly busier than the least loaded of all endpoints.
NAMED_MAX = 8  # A policy compares at most this many endpoints with the longest matching prefix.


class Policy(abc.ABC):
    """Chooses the endpoint of a request. The choice is synchronous and made for every request, so it has to be fast.

    To add a policy, subclass this class and register it as an entry point in the group "trioserve.policies".

    Attributes:
        wants_prefix: True if the policy reads `RoutedRequest.prefix`. Computing it costs time proportional to the
            prompt.
        wants_residency: True if the policy reads `RoutedRequest.blocks`. The router then asks the endpoints which
            blocks they have.
    """

    wants_prefix = True
    wants_residency = False

    @abc.abstractmethod
    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        """Choose one of the candidates that have a free slot.

        The router passes `Candidates`. Iterating over the sequence looks at each endpoint, which takes milliseconds for
        thousands of endpoints. The methods of `Candidates` find a few endpoints without looking at all of them.

        Args:
            request: request that gets a lease, with the names of its blocks if the policy needs them.
            candidates: all healthy endpoints that serve its model, in the order in which they were added. At least one
                has a free slot.

        Returns:
            The id of a candidate that has a free slot.
        """

    def note_sent(self, request: RoutedRequest, endpoint: EndpointId) -> None:  # noqa: B027 - optional
        """Record that a request is sent to an endpoint.

        Args:
            endpoint: its endpoint.
        """

    def block_sizes(self) -> frozenset[int]:
        """Return the block sizes in tokens for which requests need block hashes."""
        return frozenset()

    def resident_count(self, endpoint: EndpointId) -> int | None:
        """Return how many blocks the endpoint is known to have, or None if unknown.

        Args:
            endpoint: name of the endpoint.
        """
        return None

    def note_resident(  # noqa: B027
        self,
        endpoint: EndpointId,
        block_size: int,
        hashes: Sequence[BlockHash],
        window_tokens: int | None = None,
    ) -> None:
        """Record the complete list of blocks that an endpoint reports.

        Args:
            endpoint: name of the endpoint.
            block_size: tokens of a block.
            hashes: hashes of all its blocks. They replace the list that was known before.
            window_tokens: attention window of the model in tokens, see contracts.kv_events. None: the model has no
                window.
        """

    def note_stored(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:  # noqa: B027
        """Record blocks that an endpoint reports as added.

        Args:
            endpoint: name of the endpoint.
            hashes: hashes of the blocks.
        """

    def note_unknown(self, endpoint: EndpointId) -> None:  # noqa: B027
        """Record that the blocks of an endpoint are no longer known, because the endpoint stopped reporting.

        Args:
            endpoint: name of the endpoint.
        """

    def note_removed(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:  # noqa: B027
        """Record blocks that an endpoint reports as removed.

        Args:
            endpoint: name of the endpoint.
            hashes: hashes of the blocks.
        """

    def forget(self, endpoint: EndpointId) -> None:  # noqa: B027
        """Forget an endpoint that was removed, or that lost its blocks.

        Args:
            endpoint: name of the endpoint.
        """


PolicyFactory = Callable[[Rng], Policy]


class _LeastBusy:
    """Finds the least loaded endpoint. Two rules prevent all routers from choosing the same endpoint at the same time:

    - Each router has its own order of equally loaded endpoints: a hash of its salt and the endpoint's id.
    - The work of other routers is known only from the endpoint's last report. The larger the share of other routers is,
      the fewer endpoints are compared, down to two random endpoints (Mitzenmacher, "How Useful Is Old Information?",
      2000). Otherwise all routers would send their requests to the endpoint that looked least loaded in the same
      report.
    """

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._salt = rng.randrange(1 << 64).to_bytes(8, "big")
        self._orders: dict[EndpointId, bytes] = {}

    def of(self, candidates: Candidates) -> Candidate:
        return self.among(candidates.sample(choices_for(candidates.others_share, len(candidates))))

    def among(self, candidates: Iterable[Candidate]) -> Candidate:
        return min(candidates, key=lambda candidate: (candidate.load, self._order(candidate.id)))

    def forget(self, endpoint: EndpointId) -> None:
        self._orders.pop(endpoint, None)

    def _order(self, id: EndpointId) -> bytes:
        order = self._orders.get(id)
        if order is None:
            text = id.encode("utf-8", "surrogatepass")
            order = self._orders[id] = hashlib.blake2b(text, digest_size=8, key=self._salt).digest()
        return order


def choices_for(others_share: float, count: int) -> int:
    """Return how many endpoints to compare.

    Args:
        others_share: share of the work that belongs to other routers, 0 to 1.
        count: number of endpoints.
    """
    return max(2, round((count if count <= LOOKS_MAX else LOOKS_OF_MANY) * (1 - min(1.0, others_share))))


class RoundRobin(Policy):
    """Chooses the endpoints in turn, skipping those without a free slot."""

    wants_prefix = False

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._last: dict[str, EndpointId] = {}

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        chosen = looked_at(candidates, self._rng).next_after(self._last.get(request.model)).id
        self._last[request.model] = chosen
        return chosen


class LeastLoaded(Policy):
    """Chooses the least loaded of all endpoints, or of a random sample.

    The sample is smaller if other routers also use the endpoints.
    """

    wants_prefix = False

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._least_busy = _LeastBusy(rng)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        return self._least_busy.of(looked_at(candidates, self._rng)).id

    def forget(self, endpoint: EndpointId) -> None:
        self._least_busy.forget(endpoint)


class PowerOfTwo(Policy):
    """Chooses the less loaded of two random endpoints.

    The load is nearly as even as with a look at all endpoints, and independent routers do not all choose the same
    endpoint. (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001)
    """

    wants_prefix = False

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._least_busy = _LeastBusy(rng)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        return self._least_busy.among(looked_at(candidates, self._rng).sample(2)).id

    def forget(self, endpoint: EndpointId) -> None:
        self._least_busy.forget(endpoint)


class Session(Policy):
    """Keeps a session at its endpoint, by consistent hashing (see Ring) with bounded load.

    An endpoint with more than LOAD_FACTOR times the average load is skipped, unless its load is below LOAD_FREE. A
    request goes to the least loaded endpoint if it has no session, or if the first LOOKS_MAX endpoints of its session
    are too busy. (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018)
    """

    wants_prefix = False
    LOAD_FACTOR = 1.25
    # An endpoint below this fraction of its limit is never skipped. If there are few requests, one request exceeds the
    # average load but is no burden.
    LOAD_FREE = 0.25

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._least_busy = _LeastBusy(rng)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        view = looked_at(candidates, self._rng)
        if request.session is None:
            return self._least_busy.of(view).id
        bound = max(self.LOAD_FREE, self.LOAD_FACTOR * view.average_load)
        nearest: EndpointId | None = None
        for candidate in itertools.islice(view.around(f"session {request.session}"), LOOKS_MAX):
            if candidate.load <= bound:
                return candidate.id
            nearest = nearest or candidate.id
        # If all endpoints were tried, use the nearest endpoint. If only the first endpoints were tried, another
        # endpoint may be less busy.
        return nearest if nearest is not None and len(view) <= LOOKS_MAX else self._least_busy.of(view).id

    def forget(self, endpoint: EndpointId) -> None:
        self._least_busy.forget(endpoint)


class PrefixAware(Policy):
    """Chooses the endpoint that was sent the longest matching prefix of the prompt, unless it is much busier than the
    others. A request with an unknown prefix goes to the less loaded of two endpoints that the hash of the prefix points
    to. These two endpoints are the same on every router and after a restart.
    """

    LOAD_MARGIN = 0.25  # A prefix hit is worth this much additional load, as a fraction of the limit.

    def __init__(self, rng: Rng) -> None:
        self._index = PrefixIndex()
        self._rng = rng
        self._least_busy = _LeastBusy(rng)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        view = looked_at(candidates, self._rng)
        matched = {id: (count,) for id, count in self._index.match(request.prefix).items()}
        return _longest_match(self._least_busy, request, view, matched, self.LOAD_MARGIN)

    def note_sent(self, request: RoutedRequest, endpoint: EndpointId) -> None:
        self._index.add(endpoint, request.prefix)

    def forget(self, endpoint: EndpointId) -> None:
        self._index.forget(endpoint)
        self._least_busy.forget(endpoint)


class KvAware(Policy):
    """Chooses the endpoint that reports most of the prompt's leading blocks, unless it is much busier than the others.

    For an endpoint that does not report its blocks, the policy guesses from earlier requests, as prefix_aware does. The
    guess also decides between endpoints with equally many blocks, because an endpoint that was just sent the same
    prefix will soon have its blocks.
    """

    LOAD_MARGIN = 0.25
    wants_residency = True

    def __init__(self, rng: Rng) -> None:
        self._sent = PrefixIndex()
        self._resident = ResidencyIndex()
        self._rng = rng
        self._least_busy = _LeastBusy(rng)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        sent = self._sent.match(request.prefix)
        matched = {}
        likely = self._resident.likely_holders(request.blocks, NAMED_MAX)
        for id in dict.fromkeys((*_most(sent), *likely)):
            guessed_tokens = sent.get(id, 0) * PREFIX_BLOCK_TOKENS
            known_tokens = self._resident.matched_tokens(id, request.blocks)
            tokens = guessed_tokens if known_tokens is None else known_tokens
            if tokens or guessed_tokens:
                matched[id] = (tokens, guessed_tokens)
        view = looked_at(candidates, self._rng)
        return _longest_match(self._least_busy, request, view, matched, self.LOAD_MARGIN)

    def block_sizes(self) -> frozenset[int]:
        return self._resident.block_sizes()

    def resident_count(self, endpoint: EndpointId) -> int | None:
        return self._resident.block_count(endpoint)

    def note_sent(self, request: RoutedRequest, endpoint: EndpointId) -> None:
        self._sent.add(endpoint, request.prefix)

    def note_resident(
        self,
        endpoint: EndpointId,
        block_size: int,
        hashes: Sequence[BlockHash],
        window_tokens: int | None = None,
    ) -> None:
        self._resident.replace(endpoint, block_size, hashes, window_tokens)

    def note_stored(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:
        self._resident.add(endpoint, hashes)

    def note_removed(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:
        self._resident.remove(endpoint, hashes)

    def note_unknown(self, endpoint: EndpointId) -> None:
        self._resident.forget(endpoint)

    def forget(self, endpoint: EndpointId) -> None:
        self._sent.forget(endpoint)
        self._resident.forget(endpoint)
        self._least_busy.forget(endpoint)


def _most(matched: Mapping[EndpointId, Any]) -> list[EndpointId]:
    """Return the NAMED_MAX endpoints with the highest values."""
    return heapq.nlargest(NAMED_MAX, matched, key=matched.__getitem__) if len(matched) > NAMED_MAX else list(matched)


def _longest_match(
    least_busy: _LeastBusy,
    request: RoutedRequest,
    candidates: Candidates,
    matched: Mapping[EndpointId, tuple[int, ...]],
    margin: float,
) -> EndpointId:
    """Choose the endpoint with the best match whose load is acceptable.

    Args:
        least_busy: finds the least loaded endpoint.
        request: request with block hashes.
        candidates: endpoints with a free slot, at least one.
        matched: for each endpoint the length of its match, then tie breakers. Endpoints without a match are missing.
        margin: accepted load above that of the least loaded endpoint.
    """
    least = least_busy.of(candidates)
    fitting = [candidate for candidate in candidates.named(_most(matched)) if candidate.load <= least.load + margin]
    if fitting:
        most = max(matched[candidate.id] for candidate in fitting)
        return least_busy.among(candidate for candidate in fitting if matched[candidate.id] == most).id
    if matched or not request.prefix:
        return least.id  # The endpoints with a match are too busy, so the prefix spreads to another endpoint.
    homes = list(itertools.islice(candidates.around(f"prefix {request.prefix[0].hex()}"), 2))
    home = least_busy.among(homes or [least])
    return home.id if home.load <= least.load + margin else least.id


POLICIES: dict[str, PolicyFactory] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "session": Session,
    "prefix_aware": PrefixAware,
    "kv_aware": KvAware,
}
