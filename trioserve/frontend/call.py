"""One call of the API: what came in, and the ways to answer it with the headers that every answer carries."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from trioserve.contracts.errors import InvalidRequest, UnknownModel
from trioserve.frontend.error_responses import REASON_HEADER, ErrorAnswer
from trioserve.frontend.generation import KeepAlive
from trioserve.frontend.openai_types import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    decode_body,
)
from trioserve.frontend.request_end import Outcome
from trioserve.frontend.sse import KEEP_ALIVE, encode, error_event
from trioserve.frontend.surroundings import Surroundings

if TYPE_CHECKING:
    from trioserve.contracts.deadlines import Deadlines
    from trioserve.contracts.prompt import Prompt
    from trioserve.contracts.sampling import SamplingParams
    from trioserve.frontend.exchange import Exchange
    from trioserve.runtime.engine import Engine
    from trioserve.runtime.request_stream import RequestStream

__all__ = ["Call", "request_id_from"]

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_CHARACTERS_MAX = 128  # it is repeated in headers, log lines and every event

Body = TypeVar("Body", ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, AbortBody)


class Call:
    """Handlers get one of these and answer it once: with `answer`, or `start_events`, `exchange.send` and `finish`.

    request_id: the client's, or ours; the client has it in the head of every answer.
    trust_chat_template: the request may bring its own chat template. It runs sandboxed, but may still take long.
    status: of the answer; None as long as there is none.
    owner: whose requests this caller may see and abort, and to whom a new one belongs; None: all, and nobody's.
    streams: those that it has made. outcome, reason: how it ended so far, and why if not as asked.
    """

    def __init__(
        self, exchange: Exchange, engine: Engine, surroundings: Surroundings, *, trust_chat_template: bool
    ) -> None:
        self.exchange = exchange
        self.engine = engine
        self.trust_chat_template = trust_chat_template
        self.request_id = surroundings.new_request_id()
        self.surroundings = surroundings
        self.status: int | None = None
        self.owner: str | None = None
        self.streams: list[RequestStream] = []
        self.outcome = Outcome.LEFT
        self.reason: str | None = None
        self._streaming = False

    async def body(self, kind: type[Body]) -> Body:
        """The request's JSON, checked. Raises InvalidRequest, BodyTooLarge, BodyTimeout."""
        return decode_body(await self.exchange.body(), kind)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with: the one asked for, or else the first that is served. Raises UnknownModel."""
        served = self.engine.model.served_names
        if asked is None:
            return served[0]
        if asked not in served:
            raise UnknownModel(
                f'the model "{asked}" is not served here; served are: {", ".join(served)}', param="model"
            )
        return asked

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        body: GenerationBody,
        deadlines: Deadlines,
        *,
        add_special_tokens: bool = True,
    ) -> RequestStream:
        """A request to the engine in this caller's name, to be entered with `async with`."""
        stream = self.engine.generate(
            prompt,
            sampling,
            request_id=self.request_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            add_special_tokens=add_special_tokens,
            deadlines=deadlines,
            owner=self.owner,
        )
        self.streams.append(stream)
        return stream

    async def answer(self, value: object, *, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Send `value` as JSON."""
        await self.answer_bytes(encode(value), "application/json", status=status, headers=headers)

    async def answer_bytes(
        self, body: bytes, content_type: str, *, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.status = status
        await self.exchange.respond(status, self._head(content_type, headers), body)

    async def start_events(self) -> None:
        """Send the head of a streamed answer, whose events go to the exchange; the client has the request's id now."""
        self.status = 200
        self._streaming = True
        # Buffering proxies (nginx) would hold tokens back.
        headers = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
        await self.exchange.start(200, self._head("text/event-stream; charset=utf-8", headers))

    @property
    def keep_alive(self) -> KeepAlive:
        """A comment, which clients skip: proxies see that the connection lives, and a client that has vanished is
        noticed by what it does not take."""
        return KeepAlive(lambda: self.exchange.send(KEEP_ALIVE), self.engine.call_at)

    async def finish(self) -> None:
        await self.exchange.finish()

    async def fail(self, error: ErrorAnswer) -> bool:
        """Tell the client of an error: as a response, or, in a stream, as its last event. False if it is too late."""
        self.reason = dict(error.headers).get(REASON_HEADER) or error.code or error.type
        self.outcome = Outcome.FAILED if self.exchange.started else Outcome.REFUSED
        if not self.exchange.started:
            await self.answer(error.body(), status=error.status, headers=error.headers)
            return True
        if self._streaming:
            await self.exchange.send(error_event(error))
            await self.exchange.finish()
            return True
        return False

    def _head(self, content_type: str, headers: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
        return [("content-type", content_type), (REQUEST_ID_HEADER, self.request_id), *headers]


def request_id_from(value: str | None) -> str | None:
    """The client's id for this request, checked; None if it sent none. Raises InvalidRequest."""
    if value is None:
        return None
    if not 1 <= len(value) <= REQUEST_ID_CHARACTERS_MAX or not all(" " <= character <= "~" for character in value):
        raise InvalidRequest(
            f"X-Request-Id has {len(value)} characters; allowed are 1 to {REQUEST_ID_CHARACTERS_MAX}, printable ASCII",
            param="X-Request-Id",
        )
    return value
