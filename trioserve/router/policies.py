"""Which of the endpoints that have room a request goes to. A policy is a class with one method; see Policy."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.endpoint import PREFIX_BLOCK_TOKENS, EndpointId, RoutedRequest
from trioserve.router.prefix_index import PrefixIndex
from trioserve.router.residency import ResidencyIndex

__all__ = ["POLICIES", "Candidate", "Rng", "Policy", "PolicyFactory"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint as a policy sees it. load: what it has, relative to its limit: 0 idle, 1 at the limit."""

    id: EndpointId
    load: float
    has_room: bool


class Policy(abc.ABC):
    """Chooses where a request goes. Synchronous, and called for every request: it has to be quick.

    To add one, subclass it and name the class as an entry point in the group "trioserve.policies".

    wants_prefix: it looks at the prefix of requests; naming that costs by the length of the prompt.
    wants_residency: the endpoints are asked which blocks they have, and each request's blocks are named.
    """

    wants_prefix = True
    wants_residency = False

    @abc.abstractmethod
    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        """One of the candidates that have room; at least one has. The candidates are all endpoints that serve the
        request's model and are healthy, in the order in which they were added."""

    def note_sent(self, request: RoutedRequest, endpoint: EndpointId) -> None:  # noqa: B027 - most need not know
        """The request goes there."""

    def block_sizes(self) -> frozenset[int]:
        """In which sizes of blocks, in tokens, requests are to be named: of those endpoints that say what they have."""
        return frozenset()

    def resident_count(self, endpoint: EndpointId) -> int | None:
        """How many blocks the endpoint is known to have; None if that is unknown."""
        return None

    def note_resident(self, endpoint: EndpointId, block_size: int, hashes: Sequence[BlockHash]) -> None:  # noqa: B027
        """The endpoint says that it holds these blocks, of so many tokens each, and no others."""

    def note_stored(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:  # noqa: B027
        """The endpoint says that it holds these blocks now, too."""

    def note_unknown(self, endpoint: EndpointId) -> None:  # noqa: B027
        """What the endpoint holds is not known any more: it has stopped telling."""

    def note_removed(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:  # noqa: B027
        """The endpoint says that it holds these blocks no longer."""

    def forget(self, endpoint: EndpointId) -> None:  # noqa: B027
        """The endpoint is gone, or lost what it had."""


class Rng(Protocol):
    """Where a policy takes chance from, and the only place: a run can be repeated from its seed. See random.Random."""

    def randrange(self, stop: int, /) -> int:
        """0 <= number < stop."""


PolicyFactory = Callable[[Rng], Policy]


def _least_loaded(candidates: Sequence[Candidate]) -> Candidate:
    return min((candidate for candidate in candidates if candidate.has_room), key=lambda candidate: candidate.load)


class RoundRobin(Policy):
    """Each in its turn, those without room left out."""

    wants_prefix = False

    def __init__(self, rng: Rng) -> None:
        self._last: dict[str, EndpointId] = {}

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        ids = [candidate.id for candidate in candidates]
        last = self._last.get(request.model)
        begin = ids.index(last) + 1 if last in ids else 0
        turn = [*candidates[begin:], *candidates[:begin]]
        chosen = next(candidate.id for candidate in turn if candidate.has_room)
        self._last[request.model] = chosen
        return chosen


class LeastLoaded(Policy):
    """The one with the least to do."""

    wants_prefix = False

    def __init__(self, rng: Rng) -> None:
        pass

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        return _least_loaded(candidates).id


class PowerOfTwo(Policy):
    """The less loaded of two drawn at random (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing",
    2001): nearly as even as asking all, and routers that know nothing of each other do not all choose the same."""

    wants_prefix = False

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        open_ones = [candidate for candidate in candidates if candidate.has_room]
        first = self._rng.randrange(len(open_ones))
        second = (first + 1 + self._rng.randrange(max(1, len(open_ones) - 1))) % len(open_ones)
        return _least_loaded([open_ones[first], open_ones[second]]).id


class Session(Policy):
    """A session stays where it was, by rendezvous hashing (Thaler and Ravishankar, 1998), with bounded load (Mirrokni,
    Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018): who is busier than LOAD_FACTOR times the
    average is passed over, unless it is hardly busy at all. Requests without a session go to the least loaded."""

    wants_prefix = False
    LOAD_FACTOR = 1.25
    LOAD_FREE = 0.25  # of its limit: with few requests one more is far beyond the average, and no burden

    def __init__(self, rng: Rng) -> None:
        pass

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        if request.session is None:
            return _least_loaded(candidates).id
        average = sum(candidate.load for candidate in candidates) / len(candidates)
        bound = max(self.LOAD_FREE, self.LOAD_FACTOR * average)
        open_ones = [candidate for candidate in candidates if candidate.has_room]
        fitting = [candidate for candidate in open_ones if candidate.load <= bound] or open_ones
        session = request.session
        return max(fitting, key=lambda candidate: _rank(session, candidate.id)).id


def _rank(session: str, endpoint: EndpointId) -> bytes:
    key = f"{len(session)}:{session}{endpoint}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(key, digest_size=8).digest()


class PrefixAware(Policy):
    """Where the longest beginning of the prompt was sent before, unless that endpoint is far busier than the rest."""

    LOAD_MARGIN = 0.25  # of its limit: what a prefix hit may cost in evenness

    def __init__(self, rng: Rng) -> None:
        self._index = PrefixIndex()

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        matched = self._index.match(request.prefix)
        return _longest_match(candidates, {id: (count,) for id, count in matched.items()}, self.LOAD_MARGIN)

    def note_sent(self, request: RoutedRequest, endpoint: EndpointId) -> None:
        self._index.add(endpoint, request.prefix)

    def forget(self, endpoint: EndpointId) -> None:
        self._index.forget(endpoint)


class KvAware(Policy):
    """Where most of the prompt's leading blocks are, as endpoints tell, unless that one is far busier than the rest.

    Of an endpoint that does not tell, it is guessed from what was sent there, as prefix_aware does. Among equals, that
    decides, too: who has just been sent the same beginning will soon have it.
    """

    LOAD_MARGIN = 0.25
    wants_residency = True

    def __init__(self, rng: Rng) -> None:
        self._sent = PrefixIndex()
        self._resident = ResidencyIndex()

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        sent = self._sent.match(request.prefix)
        matched = {}
        for candidate in candidates:
            if not candidate.has_room:
                continue
            guessed_tokens = sent.get(candidate.id, 0) * PREFIX_BLOCK_TOKENS
            known_tokens = self._resident.matched_tokens(candidate.id, request.blocks)
            matched[candidate.id] = (guessed_tokens if known_tokens is None else known_tokens, guessed_tokens)
        return _longest_match(candidates, matched, self.LOAD_MARGIN)

    def block_sizes(self) -> frozenset[int]:
        return self._resident.block_sizes()

    def resident_count(self, endpoint: EndpointId) -> int | None:
        return self._resident.block_count(endpoint)

    def note_sent(self, request: RoutedRequest, endpoint: EndpointId) -> None:
        self._sent.add(endpoint, request.prefix)

    def note_resident(self, endpoint: EndpointId, block_size: int, hashes: Sequence[BlockHash]) -> None:
        self._resident.replace(endpoint, block_size, hashes)

    def note_stored(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:
        self._resident.add(endpoint, hashes)

    def note_removed(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:
        self._resident.remove(endpoint, hashes)

    def note_unknown(self, endpoint: EndpointId) -> None:
        self._resident.forget(endpoint)

    def forget(self, endpoint: EndpointId) -> None:
        self._sent.forget(endpoint)
        self._resident.forget(endpoint)


def _longest_match(
    candidates: Sequence[Candidate], matched: Mapping[EndpointId, tuple[int, ...]], margin: float
) -> EndpointId:
    """matched: what counts first, and what decides among equals; who is left out has nothing."""
    open_ones = [candidate for candidate in candidates if candidate.has_room]
    calmest = _least_loaded(open_ones)
    fitting = [candidate for candidate in open_ones if candidate.load <= calmest.load + margin]
    return max(fitting, key=lambda candidate: (matched.get(candidate.id, ()), -candidate.load)).id


POLICIES: dict[str, PolicyFactory] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "session": Session,
    "prefix_aware": PrefixAware,
    "kv_aware": KvAware,
}
