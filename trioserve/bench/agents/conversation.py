"""Conversations of an agent with a server: chat completions with the whole history, or stored responses."""

from __future__ import annotations

from random import Random
from typing import Any, Protocol

import msgspec
import trio

from trioserve.bench.agents.traces import Session
from trioserve.bench.client import Client
from trioserve.bench.load import WORDS, EventParser, EventTooLong, excerpt

__all__ = ["ChatConversation", "Conversation", "Reply", "ResponsesConversation", "session_texts"]

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
        session: the session.
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
