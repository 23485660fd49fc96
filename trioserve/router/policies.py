"""Which of the endpoints that have room a request goes to. A policy is a class with one method; see Policy.

None of those here looks at more than a few endpoints, however many there are: all of LOOKS_MAX, of more LOOKS_OF_MANY
drawn at random, and those that a session, a prefix or resident blocks point to.
"""

from __future__ import annotations

import abc
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.endpoint import PREFIX_BLOCK_TOKENS, EndpointId, RoutedRequest
from trioserve.router.candidates import Candidate, Candidates, Rng, looked_at
from trioserve.router.prefix_index import PrefixIndex
from trioserve.router.residency import ResidencyIndex

__all__ = ["LOOKS_MAX", "POLICIES", "Candidate", "Candidates", "Policy", "PolicyFactory", "Rng", "looked_at"]

LOOKS_MAX = 12
LOOKS_OF_MANY = 6  # the least loaded of six drawn at random has hardly more to do than the least loaded of all
NAMED_MAX = 8  # endpoints that have a beginning of the prompt, those with most of it


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
        request's model and are healthy, in the order in which they were added.

        The router's are Candidates: to go through the sequence looks at each endpoint, which with thousands of them
        takes milliseconds, and the methods of Candidates find a few of them without that."""

    def note_sent(self, request: RoutedRequest, endpoint: EndpointId) -> None:  # noqa: B027 - most need not know
        """The request goes there."""

    def block_sizes(self) -> frozenset[int]:
        """In which sizes of blocks, in tokens, requests are to be named: of those endpoints that say what they have."""
        return frozenset()

    def resident_count(self, endpoint: EndpointId) -> int | None:
        """How many blocks the endpoint is known to have; None if that is unknown."""
        return None

    def note_resident(  # noqa: B027
        self,
        endpoint: EndpointId,
        block_size: int,
        hashes: Sequence[BlockHash],
        window_tokens: int | None = None,
    ) -> None:
        """The endpoint says that it holds these blocks, of so many tokens each, and no others. window_tokens: none of
        its model's layers sees any further back (contracts.kv_events)."""

    def note_stored(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:  # noqa: B027
        """The endpoint says that it holds these blocks now, too."""

    def note_unknown(self, endpoint: EndpointId) -> None:  # noqa: B027
        """What the endpoint holds is not known any more: it has stopped telling."""

    def note_removed(self, endpoint: EndpointId, hashes: Sequence[BlockHash]) -> None:  # noqa: B027
        """The endpoint says that it holds these blocks no longer."""

    def forget(self, endpoint: EndpointId) -> None:  # noqa: B027
        """The endpoint is gone, or lost what it had."""


PolicyFactory = Callable[[Rng], Policy]


class _Calmest:
    """Whoever has least to do. Several routers that ask themselves that at a time must not all find the same one:

    - Among equals each has an order of its own, a hash of its salt and the endpoint's name.
    - What others have at an endpoint is seen only in its next report. The more of the work is theirs, the fewer are
      compared, down to two drawn at random (Mitzenmacher, "How Useful Is Old Information?", 2000): to go to the least
      of all by a count that others read, too, is to go where everybody goes.
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
    """How many of `count` endpoints are compared by one of several routers."""
    return max(2, round((count if count <= LOOKS_MAX else LOOKS_OF_MANY) * (1 - min(1.0, others_share))))


class RoundRobin(Policy):
    """Each in its turn, those without room left out."""

    wants_prefix = False

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._last: dict[str, EndpointId] = {}

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        chosen = looked_at(candidates, self._rng).next_after(self._last.get(request.model)).id
        self._last[request.model] = chosen
        return chosen


class LeastLoaded(Policy):
    """The one with the least to do, of all or of many; beside other routers, the less loaded of few."""

    wants_prefix = False

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._calmest = _Calmest(rng)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        return self._calmest.of(looked_at(candidates, self._rng)).id

    def forget(self, endpoint: EndpointId) -> None:
        self._calmest.forget(endpoint)


class PowerOfTwo(Policy):
    """The less loaded of two drawn at random (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing",
    2001): nearly as even as asking all, and routers that know nothing of each other do not all choose the same."""

    wants_prefix = False

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._calmest = _Calmest(rng)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        return self._calmest.among(looked_at(candidates, self._rng).sample(2)).id

    def forget(self, endpoint: EndpointId) -> None:
        self._calmest.forget(endpoint)


class Session(Policy):
    """A session stays where it was, by consistent hashing (see ring) with bounded load (Mirrokni, Thorup and
    Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018): who is busier than LOAD_FACTOR times the average is
    passed over, unless it is hardly busy at all. Requests without a session go to the least loaded, and so does one for
    which the first LOOKS_MAX that it may go to are all too busy."""

    wants_prefix = False
    LOAD_FACTOR = 1.25
    LOAD_FREE = 0.25  # of its limit: with few requests one more is far beyond the average, and no burden

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._calmest = _Calmest(rng)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        view = looked_at(candidates, self._rng)
        if request.session is None:
            return self._calmest.of(view).id
        bound = max(self.LOAD_FREE, self.LOAD_FACTOR * view.average_load)
        nearest: EndpointId | None = None
        for candidate in itertools.islice(view.around(f"session {request.session}"), LOOKS_MAX):
            if candidate.load <= bound:
                return candidate.id
            nearest = nearest or candidate.id
        # Where all are too busy, the next best has to do; where the first few are, there may be others.
        return nearest if nearest is not None and len(view) <= LOOKS_MAX else self._calmest.of(view).id

    def forget(self, endpoint: EndpointId) -> None:
        self._calmest.forget(endpoint)


class PrefixAware(Policy):
    """Where the longest beginning of the prompt was sent before, unless that endpoint is far busier than the rest. A
    beginning that was sent nowhere goes to the calmer of two endpoints that its name points to: on every router, and
    after a restart, to the same two."""

    LOAD_MARGIN = 0.25  # of its limit: what a prefix hit may cost in evenness

    def __init__(self, rng: Rng) -> None:
        self._index = PrefixIndex()
        self._rng = rng
        self._calmest = _Calmest(rng)

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> EndpointId:
        view = looked_at(candidates, self._rng)
        matched = {id: (count,) for id, count in self._index.match(request.prefix).items()}
        return _longest_match(self._calmest, request, view, matched, self.LOAD_MARGIN)

    def note_sent(self, request: RoutedRequest, endpoint: EndpointId) -> None:
        self._index.add(endpoint, request.prefix)

    def forget(self, endpoint: EndpointId) -> None:
        self._index.forget(endpoint)
        self._calmest.forget(endpoint)


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
        self._rng = rng
        self._calmest = _Calmest(rng)

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
        return _longest_match(self._calmest, request, view, matched, self.LOAD_MARGIN)

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
        self._calmest.forget(endpoint)


def _most(matched: Mapping[EndpointId, Any]) -> list[EndpointId]:
    """The NAMED_MAX endpoints with most."""
    return heapq.nlargest(NAMED_MAX, matched, key=matched.__getitem__) if len(matched) > NAMED_MAX else list(matched)


def _longest_match(
    calmest: _Calmest,
    request: RoutedRequest,
    candidates: Candidates,
    matched: Mapping[EndpointId, tuple[int, ...]],
    margin: float,
) -> EndpointId:
    """matched: what counts first, and what decides among equals; who is left out has nothing."""
    calm = calmest.of(candidates)
    fitting = [candidate for candidate in candidates.named(_most(matched)) if candidate.load <= calm.load + margin]
    if fitting:
        most = max(matched[candidate.id] for candidate in fitting)
        return calmest.among(candidate for candidate in fitting if matched[candidate.id] == most).id
    if matched or not request.prefix:
        return calm.id  # whoever has it is far busier: it may spread
    homes = list(itertools.islice(candidates.around(f"prefix {request.prefix[0].hex()}"), 2))
    home = calmest.among(homes or [calm])
    return home.id if home.load <= calm.load + margin else calm.id


POLICIES: dict[str, PolicyFactory] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "session": Session,
    "prefix_aware": PrefixAware,
    "kv_aware": KvAware,
}
