"""Sessions of tool-calling agents and other clients, drawn from a seed: turns, tokens, pauses and the working set.

The default shape of an agent follows public figures of coding agents: a median session of 43 turns, and a median turn
of 142,000 prompt tokens and 444 output tokens, of which more than 96 % are in a prefix cache that keeps everything.
TraceLab (arXiv 2606.30560) measured means of 154,000, 523 and 95.8 % in 350,000 turns. Inter-turn times are log-normal,
as in SAECache (arXiv 2605.18825).

A `Conversation` sends a session to a server: as chat completions with the whole history, or as stored responses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Protocol

import msgspec
import trio

from trioserve.bench.client import Client
from trioserve.bench.load import WORDS, EventParser, EventTooLong, excerpt

__all__ = [
    "SMALL_SHAPE",
    "TRAFFICS",
    "ChatConversation",
    "Conversation",
    "LogNormal",
    "Reply",
    "ResponsesConversation",
    "Session",
    "Shape",
    "Traffic",
    "Turn",
    "draw_traffic",
    "session_texts",
]


NORMAL_P99 = 2.326  # 99th percentile of the standard normal distribution


class LogNormal(msgspec.Struct, frozen=True):
    """A log-normal distribution, whose samples are limited to a range.

    Attributes:
        median: median of the samples.
        sigma: standard deviation of the samples' logarithm.
        low: smallest sample.
        high: largest sample.
    """

    median: float
    sigma: float
    low: float = 1.0
    high: float = math.inf

    @classmethod
    def between(cls, low: float, high: float) -> LogNormal:
        """Return the distribution whose 1st and 99th percentiles are `low` and `high`, which also limit its samples.

        Args:
            low: the 1st percentile, above 0.
            high: the 99th percentile.
        """
        return cls(math.sqrt(low * high), math.log(high / low) / 2 / NORMAL_P99, low, high)

    def sample(self, draw: Random) -> float:
        return min(self.high, max(self.low, self.median * math.exp(draw.gauss(0.0, self.sigma))))

    def count(self, draw: Random) -> int:
        return round(self.sample(draw))

    def scaled(self, factor: float) -> LogNormal:
        """Return the distribution of samples that are multiplied by a factor, and are at least 1.

        Args:
            factor: the factor, above 0.
        """
        return LogNormal(max(1.0, self.median * factor), self.sigma, max(1.0, self.low * factor), self.high * factor)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of an agent's sessions.

    Attributes:
        turns: turns of a session.
        prefix_tokens: system prompt and tools, which all sessions of one application share.
        applications: number of different prefixes.
        task_tokens: tokens of the first input.
        result_tokens: tokens of a tool's result, which is the input of each later turn.
        output_tokens: tokens of a response.
        pause_seconds: time from a response to the next turn, while a tool runs.
        context_tokens_max: a session ends before its context is longer.
    """

    turns: LogNormal = LogNormal(43, 0.6, 2, 200)
    prefix_tokens: int = 16_000
    applications: int = 2
    task_tokens: LogNormal = LogNormal(4_000, 0.8, 16, 60_000)
    result_tokens: LogNormal = LogNormal(2_400, 1.2, 8, 60_000)
    output_tokens: LogNormal = LogNormal(444, 0.9, 8, 8_000)
    pause_seconds: LogNormal = LogNormal.between(0.2, 60.0)
    context_tokens_max: int = 400_000

    def scaled(self, factor: float) -> Shape:
        """Return a shape with fewer tokens. The number of turns and the pauses stay equal.

        Args:
            factor: factor of all token counts, above 0 and at most 1.
        """
        return msgspec.structs.replace(
            self,
            prefix_tokens=max(1, round(self.prefix_tokens * factor)),
            task_tokens=self.task_tokens.scaled(factor),
            result_tokens=self.result_tokens.scaled(factor),
            output_tokens=self.output_tokens.scaled(factor),
            context_tokens_max=max(2, round(self.context_tokens_max * factor)),
        )


SMALL_SHAPE = Shape(
    turns=LogNormal(8, 0.3, 4, 12),
    prefix_tokens=160,
    applications=1,
    task_tokens=LogNormal(48, 0.5, 16, 96),
    result_tokens=LogNormal(64, 0.6, 16, 160),
    output_tokens=LogNormal(12, 0.4, 4, 24),
    context_tokens_max=1_600,
)
"""A shape for a small model on a CPU, which computes some hundred prompt tokens per second."""


class Turn(msgspec.Struct, frozen=True):
    """One request of a session.

    Attributes:
        input_tokens: tokens that the request adds to the context.
        output_tokens: tokens of the response.
        pause_seconds: time from the response to the session's next request. Not used for the last turn.
    """

    input_tokens: int
    output_tokens: int
    pause_seconds: float


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one session. Each one repeats the whole context before it.

    Attributes:
        number: number of the session, which distinguishes its tokens from those of other sessions.
        tenant: name of the client's tenant.
        prefix: number of the prefix. Sessions with the same prefix begin with the same tokens.
        prefix_tokens: tokens of the prefix.
        turns: the turns.
        has_id: True if the client names the session in its requests.
        is_ended: True if the client ends the session after its last turn.
        wait_seconds: time from the end of the client's previous session to the first request.
    """

    number: int
    tenant: str
    prefix: int
    prefix_tokens: int
    turns: tuple[Turn, ...]
    has_id: bool = True
    is_ended: bool = True
    wait_seconds: float = 0.0

    @property
    def own_tokens(self) -> int:
        """Tokens after the prefix, with all responses."""
        return sum(turn.input_tokens + turn.output_tokens for turn in self.turns)

    def prompt_tokens(self) -> Iterator[int]:
        """Yield the length of each turn's prompt."""
        tokens = self.prefix_tokens
        for turn in self.turns:
            tokens += turn.input_tokens
            yield tokens
            tokens += turn.output_tokens


class Traffic(msgspec.Struct, frozen=True):
    """Clients, each with sessions that it runs one after another.

    Attributes:
        name: name of the traffic.
        clients: the sessions of each client.
    """

    name: str
    clients: tuple[tuple[Session, ...], ...]

    @property
    def sessions(self) -> list[Session]:
        return [session for sessions in self.clients for session in sessions]

    @property
    def context_tokens_max(self) -> int:
        """The longest context of a session, with its last response."""
        return max(session.prefix_tokens + session.own_tokens for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(tokens for session in self.sessions for tokens in session.prompt_tokens())

    def working_set_tokens(self) -> int:
        """Return the tokens whose KV is needed again, at the time when there are most of them.

        These are the prefixes that several sessions share, and the contexts of the sessions that wait for a tool. The
        times are those of a server that responds at once.
        """
        uses = Counter(session.prefix for session in self.sessions)
        shared = {session.prefix: session.prefix_tokens for session in self.sessions if uses[session.prefix] > 1}
        changes: list[tuple[float, int]] = []
        for sessions in self.clients:
            now = 0.0
            for session in sessions:
                now += session.wait_seconds
                tokens = 0 if session.prefix in shared else session.prefix_tokens
                for turn in session.turns[:-1]:
                    tokens += turn.input_tokens + turn.output_tokens
                    changes.append((now, tokens))
                    now += turn.pause_seconds
                    changes.append((now, -tokens))
        waiting = waiting_max = 0
        for _at, change in sorted(changes):  # At equal times, the sessions that return come first.
            waiting += change
            waiting_max = max(waiting_max, waiting)
        return sum(shared.values()) + waiting_max


class _Sessions:
    """Draws sessions.

    Args:
        draw: source of randomness.
        shape: shape of the agents' sessions.
    """

    def __init__(self, draw: Random, shape: Shape) -> None:
        self.draw = draw
        self.shape = shape
        self._count = 0

    def agent(self, *, has_id: bool = True) -> Session:
        draw, shape = self.draw, self.shape
        context = shape.prefix_tokens
        turns: list[Turn] = []
        for number in range(shape.turns.count(draw)):
            added = (shape.result_tokens if number else shape.task_tokens).count(draw)
            output = shape.output_tokens.count(draw)
            if turns and context + added + output > shape.context_tokens_max:
                break
            context += added + output
            turns.append(Turn(added, output, shape.pause_seconds.sample(draw)))
        wait = shape.pause_seconds.sample(draw)
        prefix = draw.randrange(shape.applications)
        return self._session("agents", prefix, shape.prefix_tokens, turns, has_id=has_id, wait_seconds=wait)

    def single(self, tenant: str, input_tokens: LogNormal, *, template: int | None, has_id: bool = False) -> Session:
        """Draw a session of one turn, which its client does not end.

        Args:
            tenant: name of the tenant.
            input_tokens: tokens of the prompt after the prefix.
            template: number of a prefix of half the length of an agent's prefix. None: the prompt shares nothing.
            has_id: True if the client names the session.
        """
        shape = self.shape
        turn = Turn(input_tokens.count(self.draw), shape.output_tokens.count(self.draw), 0.0)
        prefix = -1 - self._count if template is None else shape.applications + template
        tokens = 0 if template is None else max(1, shape.prefix_tokens // 2)
        wait = self.draw.expovariate(1.0)
        return self._session(tenant, prefix, tokens, [turn], has_id=has_id, is_ended=False, wait_seconds=wait)

    def _session(
        self,
        tenant: str,
        prefix: int,
        prefix_tokens: int,
        turns: list[Turn],
        *,
        has_id: bool,
        wait_seconds: float,
        is_ended: bool = True,
    ) -> Session:
        self._count += 1
        return Session(
            number=self._count,
            tenant=tenant,
            prefix=prefix,
            prefix_tokens=prefix_tokens,
            turns=tuple(turns),
            has_id=has_id,
            is_ended=is_ended,
            wait_seconds=wait_seconds,
        )


Clients = list[tuple[Session, ...]]

SINGLES_PER_SESSION = 30  # requests of a client that sends single turns, for each session of an agent
TEMPLATES = 40  # prefixes of single turns. The most popular one is used TEMPLATES times as often as the rarest one.


def _agents(sessions: _Sessions, clients: int, rounds: int) -> Clients:
    return [tuple(sessions.agent() for _ in range(rounds)) for _ in range(clients)]


def _anonymous_agents(sessions: _Sessions, clients: int, rounds: int) -> Clients:
    return [tuple(sessions.agent(has_id=False) for _ in range(rounds)) for _ in range(clients)]


def _lost_agents(sessions: _Sessions, clients: int, rounds: int) -> Clients:
    """Draw agents of which half abandon each session at a random turn, without ending it at the server."""

    def shortened(session: Session) -> Session:
        if sessions.draw.random() < 0.5:
            return session
        count = sessions.draw.randint(1, len(session.turns))
        return msgspec.structs.replace(session, turns=session.turns[:count], is_ended=False)

    return [tuple(map(shortened, one)) for one in _agents(sessions, clients, rounds)]


def _people(sessions: _Sessions, clients: int, rounds: int) -> Clients:
    """Draw clients of which half are agents and half are people. A person sends the next turn after 30 to 600 seconds,
    and never ends a session.
    """
    pauses, turns = LogNormal.between(30.0, 600.0), LogNormal(6, 0.5, 2, 20)

    def person() -> Session:
        one = sessions.agent()
        few = tuple(
            msgspec.structs.replace(turn, pause_seconds=pauses.sample(sessions.draw))
            for turn in one.turns[: turns.count(sessions.draw)]
        )
        return msgspec.structs.replace(one, tenant="people", turns=few, is_ended=False)

    people = [tuple(person() for _ in range(rounds)) for _ in range(clients // 2)]
    return _agents(sessions, clients - len(people), rounds) + people


def _scan(sessions: _Sessions, clients: int, rounds: int) -> Clients:
    """Draw agents, and a quarter as many clients that send long documents. Each document is sent only once."""
    documents = LogNormal(4.0 * sessions.shape.prefix_tokens, 0.5, 16, sessions.shape.context_tokens_max * 0.75)
    return _agents(sessions, clients, rounds) + _singles(
        sessions, max(1, clients // 4), rounds, lambda: sessions.single("documents", documents, template=None)
    )


def _single_turns(sessions: _Sessions, clients: int, rounds: int) -> Clients:
    """Draw clients that send single turns with popular prefixes. Half of the turns have a session of their own."""
    return _singles(sessions, clients, rounds, lambda: _templated(sessions, has_id=sessions.draw.random() < 0.5))


def _beside_singles(sessions: _Sessions, clients: int, rounds: int) -> Clients:
    """Draw agents, and half as many clients that send single turns without sessions."""
    return _agents(sessions, clients, rounds) + _singles(
        sessions, max(1, clients // 2), rounds, lambda: _templated(sessions)
    )


def _hoarder(sessions: _Sessions, clients: int, rounds: int) -> Clients:
    """Draw agents, clients with single turns, and a tenant with many sessions of one turn and a long prompt."""
    prompts = LogNormal(2.0 * sessions.shape.prefix_tokens, 0.5, 16, sessions.shape.context_tokens_max * 0.75)
    few = max(1, clients // 4)
    return [
        *_agents(sessions, max(1, clients // 2), rounds),
        *_singles(sessions, few, rounds, lambda: _templated(sessions)),
        *_singles(sessions, few, rounds, lambda: sessions.single("hoarder", prompts, template=None, has_id=True)),
    ]


def _templated(sessions: _Sessions, *, has_id: bool = False) -> Session:
    weights = [1 / rank for rank in range(1, TEMPLATES + 1)]
    template = sessions.draw.choices(range(TEMPLATES), weights)[0]
    return sessions.single("templates", sessions.shape.task_tokens.scaled(0.1), template=template, has_id=has_id)


def _singles(sessions: _Sessions, clients: int, rounds: int, one: Callable[[], Session]) -> Clients:
    return [tuple(one() for _ in range(rounds * SINGLES_PER_SESSION)) for _ in range(clients)]


TRAFFICS: dict[str, Callable[[_Sessions, int, int], Clients]] = {
    "agents": _agents,
    "lost": _lost_agents,
    "people": _people,
    "singles": _beside_singles,
    "scan": _scan,
    "hoarder": _hoarder,
    "single-turn": _single_turns,
    "anonymous": _anonymous_agents,
}


def draw_traffic(name: str, shape: Shape, *, clients: int, rounds: int, seed: int) -> Traffic:
    """Draw the sessions of one kind of traffic. Equal arguments give equal sessions.

    Args:
        name: a key of TRAFFICS.
        shape: shape of the agents' sessions, from which other lengths are derived.
        clients: number of agents. Some kinds of traffic add other clients.
        rounds: sessions of each agent, one after another.
        seed: seed of all random choices.
    """
    sessions = _Sessions(Random(f"{seed}/{name}"), shape)
    return Traffic(name, tuple(TRAFFICS[name](sessions, clients, rounds)))


CHAT_PATH = "/v1/chat/completions"
RESPONSES_PATH = "/v1/responses"
REFUSAL_BYTES_MAX = 4096


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    input_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _ResponseObject(msgspec.Struct):
    id: str = ""
    status: str = ""
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    """A chunk of a chat completion, or an event of a response."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    type: str = ""
    delta: str | None = None
    response: _ResponseObject | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Reply:
    """Listener of the streamed response to one turn.

    Args:
        asked_at: time of the request.

    Attributes:
        ttft_seconds: time to the first text. None: there was none.
        prompt_tokens: tokens of the whole prompt, as the server counts them.
        cached_tokens: prompt tokens from the prefix cache. None: the server does not report them.
        response_id: id of a stored response.
        failure: reason why there is no whole response. None: there is one.
    """

    def __init__(self, asked_at: float) -> None:
        self.ttft_seconds: float | None = None
        self.prompt_tokens = 0
        self.cached_tokens: int | None = None
        self.response_id = ""
        self.failure: str | None = None
        self._asked_at = asked_at
        self._status = 0
        self._refusal = b""
        self._parts: list[str] = []
        self._parser = EventParser()

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def head(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes, now_seconds: float) -> bool:
        if self._status != 200:
            self._refusal += data[: REFUSAL_BYTES_MAX - len(self._refusal)]
            return True
        try:
            for event in self._parser.feed(data):
                if event != b"[DONE]":
                    self.note(event, now_seconds)
        except (msgspec.MsgspecError, UnicodeDecodeError, EventTooLong) as error:
            self.failure = f"an event of the stream cannot be read: {error}"
        return self.failure is None

    def note(self, data: bytes | str, now_seconds: float) -> str:
        """Note one event, and return its type.

        Args:
            data: JSON of the event.
            now_seconds: time at which it was received.

        Raises:
            msgspec.MsgspecError: the event cannot be read.
        """
        event = _decode_event(data)
        if event.error is not None:
            self.failure = f"error in the stream: {excerpt(msgspec.json.encode(event.error))}"
        for choice in event.choices:
            if choice.delta is not None and choice.delta.content:
                self._note_text(choice.delta.content, now_seconds)
        if event.type == "response.output_text.delta" and event.delta:
            self._note_text(event.delta, now_seconds)
        if event.usage is not None:
            self._note_usage(event.usage)
        if event.response is not None:
            self.response_id = event.response.id
            if event.response.status in ("failed", "cancelled"):
                self.failure = f"the response is {event.response.status}"
            if event.response.usage is not None:
                self._note_usage(event.response.usage)
        return event.type

    def _note_text(self, text: str, now_seconds: float) -> None:
        if self.ttft_seconds is None:
            self.ttft_seconds = now_seconds - self._asked_at
        self._parts.append(text)

    def _note_usage(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens or usage.input_tokens
        details = usage.prompt_tokens_details or usage.input_tokens_details
        self.cached_tokens = None if details is None else details.cached_tokens

    def end(self, failure: str | None) -> None:
        """Note the end of the response.

        Args:
            failure: why the transport failed, or None.
        """
        self.failure = self.failure or failure
        if self.failure is None and self._status != 200:
            self.failure = f"status {self._status}: {excerpt(self._refusal)}"
        if self.failure is None and not self.prompt_tokens:
            self.failure = "the stream ended without usage"


class Conversation(Protocol):
    async def ask(self, text: str, output_tokens: int) -> Reply:
        """Send one turn and read its response.

        Args:
            text: new input of the turn.
            output_tokens: exact length of the response.
        """


def session_texts(session: Session, seed: int) -> list[str]:
    """Return the text of a session's prefix and of each turn's input. A word is about one token.

    Args:
        seed: seed of the words.
    """
    counts = [turn.input_tokens for turn in session.turns]
    names = [f"{seed}/prefix/{session.prefix}", *(f"{seed}/{session.number}/{turn}" for turn in range(len(counts)))]
    return [
        " ".join(Random(name).choices(WORDS, k=tokens))
        for name, tokens in zip(names, [session.prefix_tokens, *counts], strict=True)
    ]


class _HttpConversation:
    """Base of conversations over HTTP.

    Args:
        client: client of the server.
        path: path of the requests.
        model: name of the model.
        timeout_seconds: seconds after which a request has failed.
    """

    def __init__(self, client: Client, path: str, model: str, timeout_seconds: float) -> None:
        self._client = client
        self._path = path
        self._common = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
        self._timeout_seconds = timeout_seconds

    async def _post(self, body: dict[str, Any]) -> Reply:
        reply = Reply(trio.current_time())
        encoded = msgspec.json.encode({**self._common, **body})
        with trio.move_on_after(self._timeout_seconds) as scope:
            failure = await self._client.request("POST", self._path, encoded, reply)
            reply.end(None if failure is None else failure.message)
        if scope.cancelled_caught:
            reply.end(f"no whole response within {self._timeout_seconds:g} s")
        return reply


class ChatConversation(_HttpConversation):
    """Sends the whole history with each turn.

    Args:
        client: client of the server.
        prefix: path before /v1.
        model: name of the model.
        system: text of the system message. "": none.
        timeout_seconds: seconds after which a request has failed.
    """

    def __init__(self, client: Client, prefix: str, model: str, system: str, timeout_seconds: float) -> None:
        super().__init__(client, prefix + CHAT_PATH, model, timeout_seconds)
        self._messages = [{"role": "system", "content": system}] if system else []

    async def ask(self, text: str, output_tokens: int) -> Reply:
        self._messages.append({"role": "user", "content": text})
        reply = await self._post(
            {
                "messages": self._messages,
                "max_tokens": output_tokens,
                "stream_options": {"include_usage": True},
            }
        )
        self._messages.append({"role": "assistant", "content": reply.text})
        return reply


class ResponsesConversation(_HttpConversation):
    """Sends only the new input of each turn. The server stores the responses.

    Args:
        client: client of the server.
        prefix: path before /v1.
        model: name of the model.
        system: text of the system message. "": none.
        timeout_seconds: seconds after which a request has failed.
    """

    def __init__(self, client: Client, prefix: str, model: str, system: str, timeout_seconds: float) -> None:
        super().__init__(client, prefix + RESPONSES_PATH, model, timeout_seconds)
        self._input = [{"role": "system", "content": system}] if system else []
        self._previous: str | None = None

    async def ask(self, text: str, output_tokens: int) -> Reply:
        body: dict[str, Any] = {
            "input": [*self._input, {"role": "user", "content": text}],
            "max_output_tokens": output_tokens,
            "store": True,
        }
        if self._previous is not None:
            body["previous_response_id"] = self._previous
        reply = await self._post(body)
        self._input, self._previous = [], reply.response_id
        return reply
