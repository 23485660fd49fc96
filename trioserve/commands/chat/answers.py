"""Gets the answers of a chat from an engine in this process or from a server. A cancel also cancels the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import trio

from trioserve.bench.client import Failure, Http1Client, stream_opener
from trioserve.bench.settings import Target
from trioserve.commands.remote import ServerFailed
from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER
from trioserve.contracts.events import FinishReason
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine

__all__ = ["Answer", "Answerer", "EngineAnswers", "ServerAnswers"]

BODY_BYTES_MAX = 2**20  # maximum size of a response that is not a stream, such as an error
EVENT_BYTES_MAX = 2**20
CUT_OFF = "cut off at the limit of tokens"


class Answer:
    """Answer of the model, which grows while text arrives.

    Args:
        show: Called with each new piece of text.

    Attributes:
        text: Text so far.
        tokens: Number of tokens so far.
        note: Reason for an early end. None for a complete answer.
        started_at: Time of the first text, by Trio's clock. None until the first text arrives.
        ended_at: Time of the latest text, by Trio's clock.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.text = ""
        self.tokens = 0
        self.note: str | None = None
        self.started_at: float | None = None
        self.ended_at = 0.0
        self._show = show

    def add(self, text: str, tokens: int = 1) -> None:
        """Add a piece of text.

        Args:
            text: New text.
            tokens: Number of its tokens.
        """
        self.ended_at = trio.current_time()
        if self.started_at is None:
            self.started_at = self.ended_at
        self.tokens += tokens
        self.text += text
        self._show(text)

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first piece of text. None if the speed is unknown."""
        seconds = 0.0 if self.started_at is None else self.ended_at - self.started_at
        return (self.tokens - 1) / seconds if seconds > 0.0 and self.tokens > 1 else None


class Answerer(Protocol):
    """Source of answers."""

    async def answer(self, messages: list[dict[str, Any]], into: Answer) -> None:
        """Get the answer to the last message of the conversation.

        Args:
            messages: Conversation so far.
                into: Answer that receives the text.

        Raises:
            RequestFailed: The engine refused the request.
            ServerFailed: The server refused the request, or did not answer.
        """
        ...


class EngineAnswers:
    """Answers of an engine in this process.

    Args:
        engine: Open engine.
        sampling: Sampling parameters of all answers.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine = engine
        self._sampling = sampling

    async def answer(self, messages: list[dict[str, Any]], into: Answer) -> None:
        async with self._engine.generate(ChatPrompt(messages=messages), self._sampling) as stream:
            async for delta in stream:
                into.add(delta.text, len(delta.token_ids))
                if delta.finish_reason is FinishReason.LENGTH:
                    into.note = CUT_OFF
                elif delta.finish_reason is FinishReason.ERROR:
                    into.note = delta.message


class ServerAnswers:
    """Answers of a server with OpenAI's chat completions.

    Args:
        url: Address of the server.
        api_key: Key for the server. None sends no key.
        model: Name of the model. None selects the first model that the server lists.
        fields: Sampling fields that the user has set.

    Raises:
        StartupError: The URL is invalid.
    """

    def __init__(self, url: str, *, api_key: str | None, model: str | None, fields: Mapping[str, Any]) -> None:
        self._target = Target.from_url(url)
        headers = [("host", self._target.authority), ("content-type", "application/json")]
        headers.append((NOT_A_PAGE_HEADER, "trioserve"))
        if api_key:
            headers.append(("authorization", f"Bearer {api_key}"))
        self._client = Http1Client(stream_opener(self._target, 1), headers)
        self._model = model
        self._fields = dict(fields)

    async def find_model(self) -> str:
        """Return the name of the model. If the user gave no name, get the name from the server.

        Raises:
            ServerFailed: The server lists no models, or did not answer.
        """
        if self._model is None:
            listener = _Stream(Answer(lambda text: None))
            await self._request("GET", "/v1/models", b"", listener)
            try:
                self._model = str(msgspec.json.decode(listener.rest)["data"][0]["id"])
            except (msgspec.DecodeError, KeyError, IndexError, TypeError):
                raise ServerFailed(f"{self._target.authority} lists no model: name one with --model NAME") from None
        return self._model

    async def answer(self, messages: list[dict[str, Any]], into: Answer) -> None:
        body = {
            "model": await self.find_model(),
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        await self._request("POST", "/v1/chat/completions", msgspec.json.encode(body), _Stream(into))

    async def _request(self, method: str, path: str, body: bytes, listener: _Stream) -> None:
        failure = await self._client.request(method, self._target.path_prefix + path, body, listener)
        if isinstance(failure, Failure):
            raise ServerFailed(
                f"no answer from {self._target.authority} ({failure.message}): start a server, or name another"
            )
        if listener.status != 200:
            raise ServerFailed(f"{self._target.authority} answered with status {listener.status}: {listener.refusal()}")
        if listener.error is not None:
            into = listener.into
            into.note = listener.error

    async def aclose(self) -> None:
        await self._client.aclose()


class _Stream:
    """Parser of a response body. It parses the events of a stream. If the body is not a stream, `rest` contains it."""

    def __init__(self, into: Answer) -> None:
        self.into = into
        self.status = 0
        self.rest = b""
        self.error: str | None = None

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, _now_seconds: float) -> bool:
        self.rest += data
        *lines, rest = self.rest.split(b"\n")
        if any(line.startswith((b"data:", b":")) for line in lines):
            for line in lines:
                if line.startswith(b"data:"):
                    self._take(line[5:].strip())
            self.rest = rest
        return len(self.rest) <= max(BODY_BYTES_MAX, EVENT_BYTES_MAX)

    def refusal(self) -> str:
        try:
            error = msgspec.json.decode(self.rest)["error"]
            return str(error["message"] if isinstance(error, dict) else error)
        except (msgspec.DecodeError, KeyError, TypeError):
            return "no reason given"

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
            error, usage = event.get("error"), event.get("usage")
            if error is not None:
                self.error = str(error.get("message", error))
            for choice in event.get("choices") or ():
                text = (choice.get("delta") or {}).get("content")
                if text:
                    self.into.add(text)
                if choice.get("finish_reason") == "length":
                    self.into.note = CUT_OFF
            if usage:
                self.into.tokens = int(usage.get("completion_tokens", self.into.tokens))
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError):
            self.error = "the server sent an event that is not a chunk of a chat"
