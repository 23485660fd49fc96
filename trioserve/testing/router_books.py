"""The books of a simulated router: who is in line, who has a lease where, and what follows from that for the next.

Kept from what was asked and told alone, never from what the router keeps. Lines, bounds and retries are settled here;
what one endpoint may be given in router_endpoint_book, whose turn it is in router_line_rules.
"""

from __future__ import annotations

from collections import Counter

from trioserve.router.retry_budget import BURST_SECONDS
from trioserve.testing.router_endpoint_book import EndpointBook
from trioserve.testing.router_history import RouterWorld
from trioserve.testing.router_line_rules import Fairness, RoutedStory, check_turn, heads_of

__all__ = ["RouterBooks"]


class RouterBooks:
    """live: requests that have not ended, in order of arrival. endpoints: those that are not gone. gone: those that
    went since this was emptied. live_peak: the most that ever lived."""

    def __init__(self, world: RouterWorld, now: float) -> None:
        self.world = world
        self.now = now
        self.live: dict[str, RoutedStory] = {}
        self.live_peak = 0
        self.endpoints: dict[str, EndpointBook] = {}
        self.gone: list[str] = []
        self.is_draining = False
        self.entering: RoutedStory | None = None  # while the router is asked to take it
        self._fairness: dict[tuple[str, int], Fairness] = {}
        self._failure_count = 0
        self._tries = world.retries_per_second_min * BURST_SECONDS
        if world.retry_share_max or world.retries_per_second_min:
            self._tries = max(1.0, self._tries)
        self._tries_max = self._tries
        self._tries_at: float | None = None

    # --- looking up ---

    @property
    def waiting(self) -> list[RoutedStory]:
        return [story for story in self.live.values() if story.state == "waiting"]

    def serving(self, story: RoutedStory) -> list[EndpointBook]:
        """Endpoints that it may ever get, wherever it failed."""
        pinned, model = story.request.pinned, story.request.model
        return [book for book in self.endpoints.values() if book.serves(model) and pinned in (None, book.id)]

    def taking(self, story: RoutedStory, now: float) -> list[str]:
        """Endpoints that have to take it."""
        return [
            book.id
            for book in self.serving(story)
            if book.id not in story.tried and book.must_take(story.request.sequences, now)
        ]

    def is_line_full(self, story: RoutedStory) -> bool:
        """Whether there is no place in line for one that is new."""
        beside = [other for other in self.waiting if other.is_beside(story)]
        tokens = sum(other.request.prompt_tokens for other in beside) + story.request.prompt_tokens
        is_large = tokens > self.world.queue_prompt_tokens_max
        return len(beside) >= self.world.queue_requests_max or (bool(beside) and is_large)

    def is_most_in_line(self, story: RoutedStory, entering: RoutedStory) -> bool:
        """Whether it is the newest of a tenant that has most in a line, and still more than that of one that comes, if
        it left for it."""
        if not (story.is_in_line and story.is_beside(entering) and story.request.priority == entering.request.priority):
            return False
        line = [other for other in self.waiting if other.is_in_line and other.is_beside(entering)]
        line = [other for other in line if other.request.priority == story.request.priority]
        counts = Counter(other.request.tenant for other in line)
        if counts[story.request.tenant] < max(*counts.values(), counts[entering.request.tenant] + 2):
            return False
        return all(other.request.tenant != story.request.tenant or other.index <= story.index for other in line)

    def makes_room(self, story: RoutedStory, entering: RoutedStory) -> bool:
        """Whether one that comes has a place in line without it."""
        beside = [other for other in self.waiting if other.is_beside(entering) and other is not story]
        tokens = sum(other.request.prompt_tokens for other in beside) + entering.request.prompt_tokens
        return len(beside) < self.world.queue_requests_max and tokens <= self.world.queue_prompt_tokens_max

    def is_anybody_before(self, story: RoutedStory) -> bool:
        """Whether somebody in line comes before one that is new, or may, as it is another tenant's turn."""
        return any(
            other.is_in_line and other.is_beside(story) and other.request.priority <= story.request.priority
            for other in self.live.values()
        )

    # --- what happens ---

    def enter(self, story: RoutedStory) -> None:
        """The router has taken it, into its line or beyond."""
        assert not self.is_draining, f"{story.name} is taken by a router that leaves"
        self._tries = min(self._tries_max, self._tries + self.world.retry_share_max)
        self.live[story.name] = story
        self.live_peak = max(self.live_peak, len(self.live))

    def join(self, story: RoutedStory) -> None:
        """It stands in line for the first time."""
        self._fairness_of(story).join(story)

    def serve(self, story: RoutedStory) -> None:
        """It gets a lease out of the line. Asserts that it is its turn."""
        assert story.state == "waiting", f"{story.name} is {story.state}, and gets a lease"
        if story.failed_index is None:
            check_turn(story, self.live.values())
            self._fairness_of(story).serve(story)
            self._fairness_of(story).leave(story)

    def give(self, story: RoutedStory, id: str) -> None:
        """It gets a lease there. Asserts that it may."""
        name, request = story.name, story.request
        assert id in self.endpoints, f"{name} has a lease at {id}, which is gone"
        book = self.endpoints[id]
        assert not self.is_draining, f"{name} gets a lease of a router that leaves"
        assert book.serves(request.model), f"{name} asks for {request.model}, and gets {id}, {sorted(book.models)}"
        assert request.pinned in (None, id), f"{name} asks for {request.pinned}, and gets {id}"
        assert id not in story.tried, f"{name} failed at {id}, and gets it again"
        objection = book.objection(request.sequences, self.now)
        assert objection is None, f"{name} gets a lease: {objection}"
        if request.pinned is None:
            self._check_nobody_failed_before(story, book)
        if self.world.policy == "least_loaded":
            calmer = [other for other in self.taking(story, self.now) if self.endpoints[other].load < book.load]
            assert not calmer, f"{name} gets {id}, and {calmer} have less to do"
        book.give(name, request.sequences)
        story.state, story.endpoint, story.failed_index = "leased", id, None

    def fail(self, story: RoutedStory) -> bool:
        """Its endpoint, which has been told of it, failed it. Returns whether it has to wait again."""
        assert story.endpoint is not None
        story.tried = (*story.tried, story.endpoint)
        if not self._is_tried_again(story):
            self.end(story)
            return False
        self._failure_count += 1
        story.state, story.is_sent, story.endpoint = "waiting", False, None
        story.failed_index = self._failure_count
        return True

    def release(self, story: RoutedStory) -> None:
        """What it has is back."""
        if story.is_in_line:
            self._fairness_of(story).leave(story)
        elif story.state in ("leased", "running_free"):
            assert story.endpoint is not None
            book = self.endpoints[story.endpoint]
            book.let_go(story.name)
            self.note_drained(book)

    def end(self, story: RoutedStory) -> None:
        story.state = "ended"
        self.live.pop(story.name, None)

    def note_drained(self, book: EndpointBook) -> None:
        if book.health == "draining" and not book.in_flight:
            del self.endpoints[book.id]
            self.gone.append(book.id)

    # --- what has to hold ---

    def check_nobody_waits_in_vain(self, now: float) -> None:
        """Whoever is next in a line, or waits again, waits because every endpoint that it may have is full."""
        for story in self.waiting:
            if story.failed_index is not None:
                taking = self.taking(story, now)
                assert not taking, f"{story.name} waits again, and {taking} could take it"
        for model in {story.request.model for story in self.live.values() if story.is_in_line}:
            # Whose turn it is among tenants is not known here: one of them has to be next, and all of them could go.
            heads = heads_of(model, self.live.values())
            taking_each = [self.taking(story, now) for story in heads]
            assert not all(taking_each), f"{heads[0].name} waits, and {taking_each[0]} could take it"

    def check_nobody_is_hopeless(self) -> None:
        for story in self.waiting:
            left = [book for book in self.serving(story) if book.id not in story.tried]
            assert left, f"{story.name} waits, and no endpoint may ever take it"

    def _check_nobody_failed_before(self, story: RoutedStory, book: EndpointBook) -> None:
        """It is about to get the endpoint: nobody who waits again before it could have had it."""
        for other in self.waiting:
            if other.failed_index is None or not other.is_beside(story):
                continue
            if story.failed_index is not None and story.failed_index <= other.failed_index:
                continue
            is_fitting = book.id not in other.tried and book.must_take(other.request.sequences, self.now)
            assert not is_fitting, f"{other.name} waits again, and {story.name} gets {book.id} before it"

    def _is_tried_again(self, story: RoutedStory) -> bool:
        if self.is_draining or story.request.pinned is not None or self.now >= story.deadline:
            return False
        if len(story.tried) >= self.world.attempts_max:
            return False
        if not any(book.health != "ejected" and book.id not in story.tried for book in self.serving(story)):
            return False
        if self._tries_at is not None:
            more = (self.now - self._tries_at) * self.world.retries_per_second_min
            self._tries = min(self._tries_max, self._tries + more)
        self._tries_at = self.now
        if self._tries < 1:
            return False
        self._tries -= 1
        return True

    def _fairness_of(self, story: RoutedStory) -> Fairness:
        return self._fairness.setdefault((story.request.model, story.request.priority), Fairness())
