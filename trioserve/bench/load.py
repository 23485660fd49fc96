"""Requests of a measurement, which are drawn from a seed, and the parser of their streamed responses.

This file contains all code that depends on the OpenAI-compatible API. It neither sends nor waits.
"""

from __future__ import annotations

import array
import random
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from trioserve.bench.client import Failure, FailureKind
from trioserve.bench.report import Measurement, Outcome
from trioserve.bench.settings import BenchSettings

__all__ = ["EventParser", "EventTooLong", "Load", "PlannedRequest", "PromptMode", "ResponseReader", "Tally", "excerpt"]

PromptMode = Literal["ids", "text"]

# Most tokenizers have their special tokens and byte tokens first. Prompts must not contain such tokens.
SPECIAL_TOKENS_MAX = 512

EVENT_BYTES_MAX = 1 << 24  # A longer event cannot be part of a stream of tokens.
REFUSAL_BYTES_MAX = 4096  # maximum bytes of an error's body that are kept
EXCERPT_CHARACTERS_MAX = 200
# A response with such a finish reason was ended by the server, not by the model.
PARTIAL_REASONS = frozenset({"abort", "cancelled", "deadline", "error"})

# Short and common words: nearly every tokenizer has each of them, with the space before it, as one token.
_TEXT = (
    "the of and to in is was he for it with as his on be at by had not are but from or have an they which one you were "
    "all her she there would their we him been has when who will no more if out so what up said about than into them "
    "can only other time new some could these two may first then do any like my now over such our man me even most "
    "made after also well years many must before back through where much your way down should because long each just "
    "state people good water small world day house place part found right still hand high last school work night life"
)
WORDS = _TEXT.split()


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is ready to be sent.

    Attributes:
        index: number of the request.
        arrival_seconds: seconds after the start of the load. None in a closed loop.
        body: the body.
        prompt_token_count: exact number for token ids, number of words for text.
        abort_after_tokens: tokens after which the client leaves. None: it stays.
    """

    index: int
    arrival_seconds: float | None
    body: bytes
    prompt_token_count: int
    abort_after_tokens: int | None


class Load:
    """The requests of one measurement. Equal settings give equal requests, whatever the server does.

    Requests are made one by one when they are needed, so that a long load does not fill the memory.

    Args:
        settings: settings of the measurement.
        model: name of the model.
        prompt_mode: "ids" or "text".
    """

    def __init__(self, settings: BenchSettings, *, model: str, prompt_mode: PromptMode) -> None:
        self._settings = settings
        self._model = model
        self._prompt_mode: PromptMode = prompt_mode
        self._prefix = self._tokens("prefix", settings.prefix_tokens)
        leaver_count = round(settings.abort_fraction * settings.requests)
        picks = random.Random(f"{settings.seed}/leavers").sample(range(settings.requests), leaver_count)
        self._leavers = frozenset(picks)

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield the measured requests in order of arrival."""
        settings = self._settings
        gaps = random.Random(f"{settings.seed}/arrivals")
        arrival_seconds = None if settings.rate_per_second is None else 0.0
        for index in range(settings.requests):
            yield PlannedRequest(
                index=index,
                arrival_seconds=arrival_seconds,
                body=self._body(f"request/{index}", stream=True),
                prompt_token_count=settings.prompt_tokens,
                abort_after_tokens=settings.abort_after_tokens if index in self._leavers else None,
            )
            if arrival_seconds is not None and settings.rate_per_second is not None:
                arrival_seconds += gaps.expovariate(settings.rate_per_second)

    def warmups(self) -> Iterator[PlannedRequest]:
        """Yield requests for the warm-up. Their prompts share only the common prefix with the measured requests."""
        for index in range(self._settings.warmup_requests):
            yield PlannedRequest(
                index=index,
                arrival_seconds=None,
                body=self._body(f"warmup/{index}", stream=True),
                prompt_token_count=self._settings.prompt_tokens,
                abort_after_tokens=None,
            )

    def probe_body(self) -> bytes:
        """Return a small request with one token of output, to find out if the server accepts this kind of prompt."""
        return self._body("probe", stream=False)

    def _body(self, name: str, *, stream: bool) -> bytes:
        settings = self._settings
        if stream:
            tokens = self._prefix + self._tokens(name, settings.prompt_tokens - settings.prefix_tokens)
        else:
            tokens = self._tokens(name, 4)
        body: dict[str, Any] = {"model": self._model}
        prompt = tokens if self._prompt_mode == "ids" else " ".join(WORDS[token] for token in tokens)
        if settings.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        body["max_tokens"] = settings.output_tokens if stream else 1
        body["temperature"] = settings.temperature
        # The body has no seed. Some servers sample requests with a seed one by one, which would change the result.
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)

    def _tokens(self, name: str, count: int) -> list[int]:
        """Return token ids, or in text mode indexes of WORDS. They depend only on the seed and the name."""
        if self._prompt_mode == "text":
            low, high = 0, len(WORDS)
        else:
            low, high = min(SPECIAL_TOKENS_MAX, self._settings.vocab_size // 2), self._settings.vocab_size
        span = high - low
        # One draw for all tokens is about ten times faster than one draw per token. The load generator must be fast,
        # since it runs during the measurement.
        drawn = random.Random(f"{self._settings.seed}/{name}").randbytes(4 * count)
        return [low + value % span for value in memoryview(drawn).cast("I")]


# --- responses --------------------------------------------------------------------------------------------------------


class EventTooLong(Exception):
    """An event of the stream is longer than EVENT_BYTES_MAX."""


class EventParser:
    """Parser of server-sent events (WHATWG HTML, section 9.2.6). The stream may be divided at any byte."""

    __slots__ = ("_rest", "_skip_line_feed")

    def __init__(self) -> None:
        self._rest = b""
        # The last piece ended with CR. An LF at the start of the next piece belongs to it.
        self._skip_line_feed = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that a piece completes.

        Args:
            piece: bytes of the stream.

        Raises:
            EventTooLong: an event is too long.
        """
        if self._skip_line_feed and piece:
            self._skip_line_feed = False
            if piece[:1] == b"\n":
                piece = piece[1:]
        if b"\r" in piece:
            self._skip_line_feed = piece[-1:] == b"\r"
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        blocks = (self._rest + piece).split(b"\n\n")
        self._rest = blocks.pop()
        if len(self._rest) > EVENT_BYTES_MAX:
            raise EventTooLong(f"an event of the stream is longer than {EVENT_BYTES_MAX} bytes")
        return [data for block in blocks if (data := _event_data(block)) is not None]


def _event_data(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:  # Nearly all events consist of a single line.
        return block[6:]
    fields = (line.partition(b":") for line in block.split(b"\n"))
    lines = [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]
    return b"\n".join(lines) if lines else None


class _ChatDelta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _ChunkChoice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _ChatDelta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def token_count(self) -> int:
        """Return the known number of tokens in this chunk: its number of ids, or 1 if it has only text, or else 0."""
        if self.token_ids:
            return len(self.token_ids)
        if self.text:
            return 1
        delta = self.delta
        if delta is None:
            return 0
        return 1 if delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls else 0


class _PromptTokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptTokenDetails | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_ChunkChoice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Tally:
    """Output tokens that all readers have received so far, for the progress line."""

    def __init__(self) -> None:
        self.output_tokens = 0


class ResponseReader:
    """Listener of one streamed response. It measures times, and ends the response of a client that disconnects early.

    A gap is the time between two chunks that carry tokens. Without token ids, a chunk counts as one token for
    abort_after_tokens.

    Args:
        planned: the request.
        started_at: time at which the request started.
        tally: counts the tokens of all readers.
    """

    def __init__(self, planned: PlannedRequest, *, started_at: float, tally: Tally) -> None:
        self._planned = planned
        self._started_at = started_at
        self._tally = tally
        self._parser = EventParser()
        self._status = 0
        self._refusal = b""
        self._failure: Failure | None = None
        self._first_at: float | None = None
        self._last_at = started_at  # time at which the last chunk with tokens arrived
        self._received_at = started_at  # time at which the last byte arrived
        self._gaps_seconds = array.array("d")
        self._token_count = 0
        self._usage: _Usage | None = None
        self._finish_reason: str | None = None
        self._is_done = False
        self._has_left = False

    def head(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes, now_seconds: float) -> bool:
        self._received_at = now_seconds
        if self._status != 200:
            self._refusal += data[: REFUSAL_BYTES_MAX - len(self._refusal)]
            return True
        try:
            for event in self._parser.feed(data):
                if event == b"[DONE]":
                    self._is_done = True
                else:
                    self._note_chunk(_decode_chunk(event), now_seconds)
        except (msgspec.MsgspecError, UnicodeDecodeError, EventTooLong) as error:
            self._failure = Failure(
                FailureKind.RESPONSE, f"a chunk of the stream cannot be read: {error}", "unreadable"
            )
        leaves_after = self._planned.abort_after_tokens
        self._has_left = leaves_after is not None and self._token_count >= leaves_after
        return self._failure is None and not self._has_left

    def _note_chunk(self, chunk: _Chunk, now_seconds: float) -> None:
        if chunk.error is not None:
            message = excerpt(msgspec.json.encode(chunk.error))
            self._failure = self._failure or Failure(FailureKind.RESPONSE, f"error in the stream: {message}", "error")
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            count = choice.token_count()
            if count:
                self._token_count += count
                self._tally.output_tokens += count
                if self._first_at is None:
                    self._first_at = now_seconds
                else:
                    self._gaps_seconds.append(now_seconds - self._last_at)
                self._last_at = now_seconds

    def measurement(self, failure: Failure | None, *, is_over: bool) -> Measurement:
        """Return the measured request.

        Args:
            failure: reason why the transport failed, or None.
            is_over: False if the measurement was interrupted while the request ran.
        """
        failure = failure or self._failure
        if not is_over:
            outcome = Outcome.INTERRUPTED
        elif failure is None and self._has_left:
            outcome = Outcome.ABORTED
        else:
            failure = failure or self._shortcoming()
            outcome = Outcome.COMPLETED if failure is None else Outcome.FAILED
        usage = self._usage
        details = usage.prompt_tokens_details if usage is not None else None
        first_at = self._first_at
        prompt_tokens = self._planned.prompt_token_count if first_at is not None else 0
        return Measurement(
            outcome=outcome,
            failure=failure if outcome is Outcome.FAILED else None,
            ttft_seconds=None if first_at is None else first_at - self._started_at,
            gaps_seconds=self._gaps_seconds,
            e2e_seconds=self._received_at - self._started_at if outcome is Outcome.COMPLETED else None,
            prompt_tokens=prompt_tokens if usage is None else usage.prompt_tokens,
            output_tokens=self._token_count if usage is None else usage.completion_tokens,
            cached_prompt_tokens=None if details is None else details.cached_tokens,
            counted_by_usage=usage is not None,
        )

    def _shortcoming(self) -> Failure | None:
        """Return the reason why a complete response is not the requested stream of tokens, or None."""
        if self._status != 200:
            message = f"status {self._status}: {excerpt(self._refusal)}"
            return Failure(FailureKind.STATUS, message, str(self._status))
        if self._finish_reason in PARTIAL_REASONS:
            message = f"the server ended the response with finish_reason {self._finish_reason}"
            return Failure(FailureKind.RESPONSE, message, str(self._finish_reason))
        if not self._is_done and self._finish_reason is None:
            return Failure(FailureKind.RESPONSE, "the stream ended without [DONE] or a finish_reason", "incomplete")
        return None


def excerpt(body: bytes) -> str:
    """Return the beginning of a body on one line, or the message of an error of OpenAI's API."""
    text = body.decode("utf-8", "replace")
    try:
        content: Any = msgspec.json.decode(body)
        while isinstance(content, dict) and ("error" in content or "message" in content):
            content = content.get("error", content.get("message"))
        text = content if isinstance(content, str) else text
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # The body is not JSON, so its text is used unchanged.
    line = " ".join(text.split()) or "an empty body"
    return line if len(line) <= EXCERPT_CHARACTERS_MAX else line[:EXCERPT_CHARACTERS_MAX] + " ..."
