"""Streams of other servers that report token ids (vLLM's `return_token_ids`), and how these streams resume. This module
performs no I/O.

Such a stream resumes with a request to /v1/completions. The prompt of that request consists of all token ids so far.
This works for plain text only. The new endpoint counts the known output as prompt. So penalties and seeds restart, and
the tokens may differ from the tokens of an uninterrupted stream. Requests that need more than text do not resume.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from trioserve.api.openai.request_types import CompletionBody
from trioserve.api.sse import DONE
from trioserve.contracts.sampling import SamplingParams
from trioserve.proxy.streams.client_events import EventSplitter, is_comment
from trioserve.proxy.streams.continued_stream import WhyNot

__all__ = ["COMPLETIONS_PATH", "TOKEN_IDS", "ForeignStream", "foreign_body"]

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
TOKEN_IDS = "return_token_ids"

# A request with one of these fields does not resume. Either the request's state is not in its tokens, or the field
# holds back text, or its values have another format in a completion.
_HINDRANCES = frozenset(
    [
        "stop",
        "tools",
        "functions",
        "function_call",
        "tool_choice",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structural_tag",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "echo",
        "suffix",
        "best_of",
        "use_beam_search",
        "logits_processors",
        "min_tokens",
        "prompt_embeds",
        "thinking_token_budget",
    ]
)
# The completion gets these fields of the original request, and its own max_tokens.
_TAKEN_OVER = frozenset(
    {
        *("model", "stream", "stream_options", "user", "priority", "cache_salt", "spaces_between_special_tokens"),
        *(name for name in SamplingParams.__struct_fields__ if name in CompletionBody.__struct_fields__),
    }
    - {"n", "max_tokens"}
    - _HINDRANCES
)
_NOTHING = frozenset({b"null", b"false", b"[]", b'"none"'})
# logprobs is missing in this set, because logprobs=0 requests the log probabilities of the sampled tokens.
_ZERO_IS_NOTHING = frozenset({"min_tokens", "top_logprobs"})


def foreign_body(path: str, raw: bytes, *, choice_count: int) -> dict[str, msgspec.Raw] | None:
    """Return the fields of a request that can resume as a completion, or None if the request cannot resume.

    Args:
        path: Path of the request.
        raw: Body of the request, a JSON object.
        choice_count: Number of choices, over all prompts.
    """
    if path not in (CHAT_PATH, COMPLETIONS_PATH) or choice_count != 1:
        return None
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return None if any(_is_set(fields, name) for name in _HINDRANCES) else fields


def _is_set(fields: dict[str, msgspec.Raw], name: str) -> bool:
    value = bytes(fields.get(name, b"null"))
    return value not in _NOTHING and not (value == b"0" and name in _ZERO_IS_NOTHING)


class ForeignStream:
    """Parser of a stream that reports token ids. It has the interface of ContinuedStream.

    Args:
        path: Path of the request.
        fields: Fields of the request, from foreign_body.
        bytes_max: Limit of kept token ids, including those of the prompt, in bytes.
    """

    failure = b""
    failure_code: str | None = None
    handed_over: bytes | None = None

    def __init__(self, path: str, fields: dict[str, msgspec.Raw], *, bytes_max: int) -> None:
        self.is_answered = False
        self.is_over = False
        self._why_not: str | None = None
        self._path = path
        self._fields = fields
        self._bytes_max = bytes_max
        self._shows_ids = bytes(fields.get(TOKEN_IDS, b"")) == b"true"
        self._splitter = EventSplitter()
        self._prompt_ids: array[int] | None = None
        self._ids = array("I")
        self._shown_count = 0  # The number of ids whose text the client has.
        self._head: dict[str, object] = {}
        self._known_count = 0  # The number of ids that the current endpoint counts as prompt.
        self._is_done = False
        self._was_answered = False  # The value before the last `feed` or `end`.

    def begin(self) -> None:
        """Prepare for the stream of the next endpoint."""
        del self._ids[self._shown_count :]
        self._known_count = self._shown_count
        self._splitter = EventSplitter()
        self.is_answered = False
        self.failure, self.failure_code = b"", None

    def feed(self, piece: bytes) -> bytes:
        """Add bytes and return the complete events for the client.

        Args:
            piece: Bytes that follow the previous piece.
        """
        self._was_answered = self.is_answered
        events = self._splitter.feed(piece)
        if not events:
            return b""
        return b"".join(self._taken(event) for event in events.replace(b"\r\n", b"\n").split(b"\n\n") if event)

    def undo_feed(self) -> None:
        """Undo the last call of `feed`, because the router does not forward the result. The next `begin` drops the
        tokens of that call.
        """
        self.is_over, self.is_answered = False, self._was_answered

    def end(self) -> bytes:
        """Finish the response.

        Returns:
            Final event if the endpoint did not send it. Otherwise empty.
        """
        self._was_answered = self.is_answered
        if not self.is_over or self._is_done:
            return b""
        self._is_done = True
        return DONE

    @property
    def is_complete(self) -> bool:
        return self.is_over

    @property
    def kept_bytes(self) -> int:
        return self._ids.itemsize * (len(self._ids) + len(self._prompt_ids or ()))

    def token_count(self) -> int:
        return self._shown_count

    def resume_field(self) -> dict[str, object] | None:
        """Return the body for /v1/completions that resumes the stream, or None if the stream cannot resume (see
        `why_not`)."""
        if self._prompt_ids is None or self._why_not is not None:
            return None
        body: dict[str, object] = {name: value for name, value in self._fields.items() if name in _TAKEN_OVER}
        body["prompt"] = [*self._prompt_ids, *self._ids[: self._shown_count]]
        body["add_special_tokens"] = False
        body[TOKEN_IDS] = True
        tokens_max = self._tokens_max()
        # The value None requests as many tokens as fit. Without the field, a completion would have 16 tokens.
        body["max_tokens"] = None if tokens_max is None else max(1, tokens_max - self._shown_count)
        return body

    @property
    def why_not(self) -> str | None:
        """Reason why the stream cannot resume, in one word. None if the stream can resume."""
        return self._why_not or (WhyNot.NOT_RESUMABLE if self._prompt_ids is None else None)

    # --- private methods ---

    def _tokens_max(self) -> int | None:
        for name in ("max_completion_tokens", "max_tokens"):
            value = bytes(self._fields.get(name, b"null"))
            if value.isdigit():
                return int(value)
        return 16 if self._path == COMPLETIONS_PATH and "max_tokens" not in self._fields else None

    def _taken(self, event: bytes) -> bytes:
        """Record an event, and return the event for the client."""
        whole = event + b"\n\n"
        if self.failure or is_comment(whole):
            return b"" if self.failure else whole
        self.is_answered = True
        data = b"\n".join(line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if data == b"[DONE]":
            self.is_over = self._is_done = True
            return whole
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.DecodeError:
            return whole  # EventCheck refuses this event, so the client does not get it.
        if chunk.error is not None:
            self.is_answered = bool(self._ids)
            self.failure, self.failure_code = whole, str(chunk.error.get("type") or chunk.error.get("code"))
            return b""
        prompt_ids = self._note(chunk)
        if self._known_count:
            return self._rewritten(data)
        if prompt_ids and not self._shows_ids:
            return _without(data, "prompt_token_ids")
        return whole

    def _note(self, chunk: _Chunk) -> list[int]:
        """Record the token ids of a chunk.

        Returns:
            Token ids of the prompt if the chunk has them. Otherwise empty.
        """
        if not self._head:
            self._head = {"id": chunk.id, "created": chunk.created, "model": chunk.model}
        prompt_ids = chunk.prompt_token_ids or []
        for choice in chunk.choices:
            prompt_ids = prompt_ids or choice.prompt_token_ids or []
            delta = choice.delta
            has_text = bool(choice.text or (delta is not None and delta.content))
            if delta is not None and (delta.reasoning_content or delta.reasoning or delta.tool_calls):
                self._why_not = WhyNot.NOT_RESUMABLE  # The tokens of reasoning and tool calls do not become plain text.
            if has_text and not choice.token_ids:
                self._why_not = WhyNot.NOT_RESUMABLE  # The server does not report the token ids.
            self._ids.extend(choice.token_ids or [])
            if has_text or choice.finish_reason is not None:
                self._shown_count = len(self._ids)
            self.is_over = self.is_over or choice.finish_reason is not None
        if prompt_ids and self._prompt_ids is None:
            self._prompt_ids = array("I", prompt_ids)
        if self._why_not is None and self.kept_bytes > self._bytes_max:
            self._why_not = WhyNot.BYTES
        if self._why_not is not None:
            self._prompt_ids, self._ids, self._shown_count = None, array("I"), 0
        return prompt_ids

    def _rewritten(self, data: bytes) -> bytes:
        """Turn a chunk of a completion into a chunk of the response that the client began to read."""
        chunk = {**msgspec.json.decode(data), **self._head}
        chunk.pop("prompt_token_ids", None)
        for choice in chunk.get("choices", ()):
            for name in ("prompt_token_ids", *(() if self._shows_ids else ("token_ids",))):
                choice.pop(name, None)
            if self._path == CHAT_PATH:
                choice["delta"] = {"content": choice.pop("text", "")}
        if self._path == CHAT_PATH:
            chunk["object"] = "chat.completion.chunk"
        if isinstance(usage := chunk.get("usage"), dict):
            for name, more in (("prompt_tokens", -self._known_count), ("completion_tokens", self._known_count)):
                if isinstance(count := usage.get(name), int):
                    usage[name] = count + more
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    error: dict[str, Any] | None = None


def _without(data: bytes, name: str) -> bytes:
    chunk = msgspec.json.decode(data)
    chunk.pop(name, None)
    for choice in chunk.get("choices", ()):
        choice.pop(name, None)
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
