"""Rules for the order in which a simulated router serves waiting requests, and a simulated stream of responses.

Within a model and a priority, three groups are served before newcomers: streams that broke off, requests that lost an
endpoint, and requests whose prompt is already computed. While newcomers wait, only a limited number of them in a row
are served. Requests whose prompt is computed separately have a queue, and whole requests have another one. Each queue
is served by priority. Within a priority, tenants take turns. Within a tenant, requests are served in order of arrival.

Turns are fair as in start-time fair queueing (Goyal, Vin and Cheng, 1996). Consider any time in which tenant A has a
request in the queue. Another tenant B then gets at most as much service as A, plus the largest cost of one request of A
and the largest cost of one request of B.

The number of a request's sequences does not matter. A request gets its lease in its turn if one of its sequences finds
a slot. So no request blocks others because it does not fit, and no request must be overtaken.

Streams have a separate rule. A simulated endpoint is a function: the next token depends only on the seed and on the
tokens before, and the visible text depends only on the tokens so far. So the undisturbed stream can be computed.
Wherever an endpoint breaks off, the client must have received a beginning of the undisturbed stream, without repeated
or missing events. Streams are resumed with the real code of the proxy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from trioserve.contracts.endpoint import PairOutcome, RoutedRequest, Stage
from trioserve.proxy.streams.continued_stream import ContinuedStream
from trioserve.router.queues import SEQUENCE_COST_TOKENS
from trioserve.router.ticket import Break, Ticket

__all__ = ["ExpectedRequest", "Fairness", "SimulatedStream", "check_turn"]

IDS_BYTES_MAX = 1 << 20
TOKENS_IN_A_GROUP_MAX = 3


def _token(seed: int, choice: int, before: Sequence[int]) -> int:
    last = before[-1] if before else 0
    return (last * 31 + len(before) * 17 + seed * 7 + choice * 5) % 997


def _length(seed: int, choice: int) -> int:
    return 4 + (seed * 13 + choice * 7) % 40


def _shown(tokens: Sequence[int], *, is_finished: bool) -> str:
    """Return the text that an endpoint shows for some tokens.

    Some text is held back until the next token arrives, as a server holds back text that may begin a stop string.
    """
    is_held = bool(tokens) and tokens[-1] % 3 == 0 and not is_finished
    return "".join(f" {token}" for token in (tokens[:-1] if is_held else tokens))


class _Endpoint:
    """One response at one endpoint. It yields groups of events after the known tokens."""

    def __init__(self, seed: int, choice_count: int, resume: Mapping[str, object] | None) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(choice_count)]
        self.finished = [False] * choice_count
        self._seed = seed
        self._number = 0
        self._is_over = False
        if resume is not None:
            self._resume_from(resume)

    def _resume_from(self, resume: Mapping[str, object]) -> None:
        tokens, finished, seed, state = (resume[key] for key in ("token_ids", "finished", "seed", "state"))
        assert isinstance(tokens, list)
        assert isinstance(finished, list)
        assert isinstance(seed, int)
        assert isinstance(state, str)
        assert len(tokens) == len(finished) == len(self.tokens), (
            f"{len(tokens)} choices are known, but the request has {len(self.tokens)}"
        )
        assert resume["prompt_digest"] == "d", "the endpoint gets another prompt"
        self.tokens, self.finished, self._seed, self._number = tokens, finished, seed, int(state)

    def resume_header(self) -> str:
        return json.dumps({"prompt_digest": "d", "seed": self._seed})

    def next_group(self) -> tuple[bytes, int]:
        """Return the bytes of the next group of events and the number of its tokens.

        After the last group, the bytes are empty.
        """
        open_choices = [choice for choice, is_finished in enumerate(self.finished) if not is_finished]
        if self._is_over:
            return b"", 0
        if not open_choices:
            self._is_over = True
            usage = json.dumps({"usage": sum(map(len, self.tokens))})
            return f"data: {usage}\n\nid: .\ndata: [DONE]\n\n".encode(), 0
        choice = open_choices[sum(map(len, self.tokens)) % len(open_choices)]
        tokens = self.tokens[choice]
        before = _shown(tokens, is_finished=False)
        new: list[int] = []
        while len(new) < 1 + self._number % TOKENS_IN_A_GROUP_MAX and len(tokens) < _length(self._seed, choice):
            tokens.append(_token(self._seed, choice, tokens))
            new.append(tokens[-1])
        is_finished = self.finished[choice] = len(tokens) >= _length(self._seed, choice)
        text = _shown(tokens, is_finished=is_finished)[len(before) :]
        begin = ""
        if self._number % 4 == 0:
            begin = ": keep-alive\n\n"
        elif self._number % 4 == 1:
            begin, text = self._event(choice, text[:2]), text[2:]
        event = self._event(choice, text)
        id = f"{choice}:{','.join(map(str, new))}{'!' if is_finished else ''} {self._number}"
        return f"{begin}id: {id}\n{event}".encode(), len(new)

    def _event(self, choice: int, text: str) -> str:
        self._number += 1
        return f"data: {json.dumps({'index': choice, 'text': text, 'number': self._number})}\n\n"


class SimulatedStream:
    """One stream of a client, which one or several endpoints produce.

    Args:
        seed: seed that determines all tokens and texts of the stream.
        choice_count: number of choices.
        count: counts occurrences.

    Attributes:
        token_count: number of tokens in the complete groups that the client has received.
    """

    def __init__(self, seed: int, choice_count: int, *, count: Callable[[str], None]) -> None:
        self.token_count = 0
        self._seed = seed
        self._choice_count = choice_count
        self._count = count
        self._kept = ContinuedStream(choice_count=choice_count, bytes_max=IDS_BYTES_MAX)
        self._endpoint: _Endpoint | None = None
        self._group, self._group_tokens = b"", 0  # rest of a group of which only a part has arrived
        self._resume: Mapping[str, object] | None = None
        self._texts = [""] * choice_count
        self._number = 0
        self._usages: list[int] = []
        self._delivered: tuple[list[list[int]], list[bool]] = (
            [[] for _ in range(choice_count)],
            [False] * choice_count,
        )

    @property
    def is_over(self) -> bool:
        return self._kept.is_over

    def begin(self) -> None:
        """Begin the response at an endpoint."""
        self._endpoint = _Endpoint(self._seed, self._choice_count, self._resume)
        self._group, self._group_tokens = b"", 0
        self._kept.begin(self._endpoint.resume_header())

    def come(self, token_count: int, part: float) -> None:
        """Let complete groups of events arrive, and then a part of the next group.

        Args:
            token_count: minimum number of tokens in the complete groups.
            part: fraction of the bytes of the next group, 0 to 1.
        """
        endpoint = self._endpoint
        assert endpoint is not None
        came = 0
        while came < token_count or not self._kept.is_answered:
            if not self._group:
                self._group, self._group_tokens = endpoint.next_group()
            if not self._group:
                break
            self._pass_on(self._group)
            came += self._group_tokens
            self.token_count += self._group_tokens
            self._group, self._group_tokens = b"", 0
            self._delivered = ([list(tokens) for tokens in endpoint.tokens], list(endpoint.finished))
            self._check()
        if part and not self._group:
            self._group, self._group_tokens = endpoint.next_group()
        byte_count = min(int(len(self._group) * part), max(0, len(self._group) - 1))
        self._pass_on(self._group[:byte_count])
        self._group = self._group[byte_count:]

    def hand_over(self) -> None:
        """Let the endpoint hand over the stream after the last complete group."""
        if not self._group or self._group_tokens == 0:
            self._pass_on(b'data: {"object":"hand_over","kv_transfer_params":null}\nid: >\n\n')

    def break_off(self) -> None:
        """Lose the group of which only a part has arrived.

        Assert that the next endpoint gets exactly the tokens that the client has received.
        """
        if not self.token_count and not self._kept.is_answered and self._resume is None:
            return
        field = self._kept.resume_field()
        assert field is not None, f"the stream cannot be resumed: {self._kept.why_not}"
        tokens, finished = self._delivered
        assert field["token_ids"] == tokens, f"the next endpoint gets {field['token_ids']}, but the client has {tokens}"
        assert field["finished"] == finished, f"the next endpoint gets {field['finished']}, not {finished}"
        reported = self._kept.token_count()
        assert reported == self.token_count, f"the client has {self.token_count} tokens, but {reported} are reported"
        self._resume = json.loads(json.dumps(field, default=lambda raw: json.loads(bytes(raw))))
        self._count("streams resumed from their event ids")

    def _pass_on(self, piece: bytes) -> None:
        """Pass an endpoint's bytes through the proxy. Assert that the client gets complete events without event ids."""
        passed = self._kept.feed(piece) if piece else b""
        assert not passed or passed.endswith(b"\n\n"), f"the client gets half an event: {passed!r}"
        for event in passed.split(b"\n\n"):
            if not event or event.startswith(b":"):
                continue
            assert event.startswith(b"data: "), f"the client gets {event!r}"
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                continue
            self._read(json.loads(data))

    def _read(self, event: dict[str, object]) -> None:
        if "usage" in event:
            assert isinstance(event["usage"], int)
            self._usages.append(event["usage"])
            return
        choice, text, number = event["index"], event["text"], event["number"]
        assert isinstance(choice, int)
        assert number == self._number + 1, f"event {number} follows event {self._number}"
        self._number += 1
        self._texts[choice] += str(text)

    def _check(self) -> None:
        """Assert that the client has received a beginning of the undisturbed stream."""
        for choice, (tokens, is_finished) in enumerate(zip(*self._delivered, strict=True)):
            expected: list[int] = []
            while len(expected) < len(tokens):
                expected.append(_token(self._seed, choice, expected))
            assert tokens == expected, (
                f"choice {choice} has the tokens {tokens}, but the undisturbed stream has {expected}"
            )
            text = _shown(tokens, is_finished=is_finished)
            assert self._texts[choice] == text, f"choice {choice} reads {self._texts[choice]!r}, expected {text!r}"
        if self.is_over:
            count = sum(map(len, self._delivered[0]))
            assert self._usages == [count], f"usage is {self._usages}, but the stream has {count} tokens"
            assert all(self._delivered[1]), "a stream is complete, but a choice is not"
            self._count("streams that were completed")
        else:
            assert not self._usages, f"usage {self._usages} came before the end"


class ExpectedRequest:
    """Expected state of one request of a simulated router, from the request and the reports about it.

    The attributes stage, is_disaggregated, prefilled_by, is_held, outcome, stage_fault, is_answered, broken,
    is_on_trial, continuations, fingerprint, can_resume and is_moving have the meaning that they have in Ticket.

    Args:
        name: name of the request.
        index: number of the arrival.
        wait_ends_at: time at which the router ends the request's wait.

    Attributes:
        own_deadline: time of the request's own deadline for its wait.
        leased_at: time at which the request got its last lease.
        queue_index: number of the request in the order of joining a queue.
        state: name of the request's TicketState.
        failed_index: number of the event after which the request waits again: a failure or the end of its prefill.
            None:
            the request waits for the first time.
        endpoint: endpoint of the request's lease, or None.
        left: last endpoint of a request that waits again.
        tried: endpoints at which the request failed, each with its number of successful health checks before the
            failure.
        failed_by: endpoints that answered the request with an error before its first token.
        refused_by: endpoints of `failed_by` whose refusal another endpoint must confirm.
        is_lost: True if the request lost an endpoint before its first token.
        is_sent: True if the request was sent to its endpoint.
        has_token: True after the request's first token.
        is_behind: True if the queue was not empty when the request arrived.
        tokens: number of tokens that the client has received.
        stream: stream of the request, or None.
        tokens_at_break: value of `tokens` when the stream last broke off.
        is_condemned: True if the trial is over and the router must end the request.
        moving_index: number of the stream in the order of streams that must move.
        next: endpoint of the request's second lease, or None.
    """

    def __init__(self, name: str, request: RoutedRequest, index: int, *, wait_ends_at: float) -> None:
        self.name = name
        self.request = request
        self.index = index
        self.wait_ends_at = wait_ends_at
        self.own_deadline = request.queue_deadline
        self.leased_at = 0.0
        self.queue_index = 0
        self.ticket: Ticket | None = None
        self.state = "waiting"
        self.failed_index: int | None = None
        self.endpoint: str | None = None
        self.left: str | None = None
        self.tried: dict[str, int] = {}
        self.failed_by: set[str] = set()
        self.refused_by: set[str] = set()
        self.is_lost = False
        self.is_sent = False
        self.has_token = False
        self.is_answered = False
        self.is_behind = False
        self.tokens = 0
        self.stream: SimulatedStream | None = None
        self.tokens_at_break = 0
        self.broken: list[Break] = []
        self.is_on_trial = False
        self.is_condemned = False
        self.continuations = 0
        self.fingerprint: str | None = None
        self.can_resume = False
        self.is_moving = False
        self.moving_index = 0
        self.next: str | None = None
        self.stage: Stage | None = None
        self.is_disaggregated = False
        self.prefilled_by: str | None = None
        self.is_held = False
        self.outcome: PairOutcome | None = None
        self.stage_fault: PairOutcome | None = None

    @property
    def deadline(self) -> float:
        return min(self.wait_ends_at, self.own_deadline)

    @property
    def cost(self) -> int:
        return self.request.prompt_tokens + self.request.sequences * SEQUENCE_COST_TOKENS

    @property
    def is_queued(self) -> bool:
        return self.state == "waiting" and self.failed_index is None

    @property
    def is_continuing(self) -> bool:
        """True if the request's stream broke off and waits to be resumed."""
        return self.state == "waiting" and self.has_token

    @property
    def is_again(self) -> bool:
        """True if the request lost an endpoint before its first token. It is served before newcomers."""
        return self.state == "waiting" and self.failed_index is not None and not self.has_token

    @property
    def moment(self) -> str:
        """Name of the request's progress, for the counts."""
        if self.stage is not None and self.state != "ended":
            where = "in the queue for" if self.state == "waiting" else "leased for" if not self.is_sent else "at"
            return f"{where} {self.stage.value}{', with a token' if self.has_token else ''}"
        if self.state == "waiting":
            if self.has_token:
                return "on trial" if self.is_on_trial else "in the queue to resume"
            return "in the queue" if self.failed_index is None else "in the queue again"
        if self.state == "ended":
            return "ended"
        if not self.is_sent:
            return "leased to resume, not sent" if self.has_token else "leased, not sent"
        if self.has_token and not self.is_answered:
            return "before it resumes"
        if self.is_moving or self.next is not None:
            return (
                "at an endpoint that it must leave"
                if self.next is None
                else "at an endpoint that it must leave, with a next lease"
            )
        return "after the first token" if self.has_token else "before the first token"

    def is_beside(self, other: ExpectedRequest) -> bool:
        return self.request.model == other.request.model and self.stage is other.stage and self is not other


class Fairness:
    """Checks fairness among the tenants of one model and priority."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._cost_max: dict[str, int] = {}
        # For each tenant A with a request in the queue and each other tenant B: how much more service than A tenant B
        # has received since A began to wait, and the lowest value of this difference so far.
        self._ahead: dict[str, dict[str, tuple[int, int]]] = {}

    def join(self, entry: ExpectedRequest) -> None:
        tenant = entry.request.tenant
        self._cost_max[tenant] = max(self._cost_max.get(tenant, 0), entry.cost)
        if tenant not in self._waiting:
            self._waiting[tenant] = 0
            self._ahead[tenant] = {}
        self._waiting[tenant] += 1

    def serve(self, entry: ExpectedRequest) -> None:
        """Record that a request gets a lease. Call this method before the request leaves the queue.

        Args:
            entry: the request.
        """
        tenant, cost = entry.request.tenant, entry.cost
        for waiting, others in self._ahead.items():
            if waiting == tenant:
                continue
            ahead, least = others.get(tenant, (0, 0))
            others[tenant] = (ahead + cost, least)
            bound = self._cost_max[tenant] + self._cost_max[waiting]
            assert ahead + cost - least <= bound, (
                f"{tenant!r} was served {ahead + cost - least} more than {waiting!r}, which waits; allowed are {bound}"
            )
        mine = self._ahead[tenant]
        for other in self._cost_max:
            ahead, least = mine.get(other, (0, 0))
            mine[other] = (ahead - cost, min(least, ahead - cost))

    def leave(self, entry: ExpectedRequest) -> None:
        tenant = entry.request.tenant
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._ahead[tenant]


def check_turn(entry: ExpectedRequest, live: Iterable[ExpectedRequest]) -> None:
    """Assert that no other request of the queue must be served before a request that gets a lease.

    Args:
        entry: the request.
        live: all requests that have not ended.
    """
    for other in live:
        if other.is_queued and other.is_beside(entry):
            mine, theirs = entry.request, other.request
            assert theirs.priority >= mine.priority, f"{entry.name} overtakes {other.name}, whose priority is better"
            is_peer = (theirs.priority, theirs.tenant) == (mine.priority, mine.tenant)
            assert not is_peer or other.queue_index > entry.queue_index, (
                f"{entry.name} overtakes {other.name}, which came before"
            )
