"""Request bodies and responses of Ollama's API. A response is one object, or lines of which the last has counts.

`None` means "not given". api/unread_fields.py decides what happens to fields that are not listed here. Options for
loading a model are ignored, because the model is loaded already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import trio
from msgspec import UNSET, UnsetType

from trioserve.api.openai.request_types import Int32
from trioserve.api.openai.response_types import ChatToken, chat_tokens
from trioserve.api.response import Response, encoded_value
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.turn.chat_turn import CollectedChoice, OpenCalls, ToolCall
from trioserve.api.unread_fields import RefusedField, generation_fields
from trioserve.contracts.pooling import DIMENSIONS_MAX
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range
from trioserve.text.response_parts import ContentText, ReasoningText, ResponsePart

if TYPE_CHECKING:
    from trioserve.api.turn.chat_turn import ChatTurn
    from trioserve.contracts.events import TokenLogprob
    from trioserve.contracts.output import Delta
    from trioserve.text.tokenizer import Tokenizer

__all__ = [
    "Answer",
    "Head",
    "OLLAMA_RANGES",
    "OllamaAnswerBody",
    "OllamaChatBody",
    "OllamaEmbedBody",
    "OllamaEmbeddingsBody",
    "OllamaGenerateBody",
    "OllamaMessage",
    "OllamaOptions",
    "OllamaShowBody",
    "Piece",
    "SAMPLING_OPTIONS",
    "chat_piece",
    "iso_time",
    "loaded",
    "nanoseconds",
    "text_piece",
]


NUM_PREDICT_MIN = -2  # The values -2, -1 and 0 mean as many tokens as fit into the context.

NO_IMAGES = "a language model cannot generate images, see /v1/images/generations"
Priority = Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
Effort = Literal["low", "medium", "high", "max"]


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options.

    `repeat_last_n` and the fields after it are refused if they ask for a feature that this server does not have.
    """

    REFUSED_FIELDS: ClassVar[Mapping[str, RefusedField]] = generation_fields()

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: Int32 | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Int32 | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: Int32 | None = None


SAMPLING_OPTIONS = tuple(name for name in OllamaOptions.__struct_fields__ if name in SAMPLING_RANGES)
"""Numbers that have the same name in SamplingParams."""

OLLAMA_RANGES = {
    **{f"OllamaOptions.{name}": SAMPLING_RANGES[name] for name in SAMPLING_OPTIONS},
    "OllamaOptions.repeat_penalty": SAMPLING_RANGES["repetition_penalty"],
    "OllamaOptions.num_predict": Range(NUM_PREDICT_MIN, None),
    "top_logprobs": SAMPLING_RANGES["logprobs"],
}
"""Allowed ranges of numbers, by field, or by type and field."""


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all bodies.

    `priority` and the fields after it are this server's own, with the same meaning as in chat completions.

    Attributes:
        model: Name of the model, with or without ":latest". Default: the first model that is served.
        keep_alive: Read by a router that loads models on demand. Otherwise ignored: the model stays loaded.
    """

    model: str | None = None
    keep_alive: float | str | None = None
    options: OllamaOptions | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None


class OllamaAnswerBody(_Body, frozen=True, kw_only=True):
    """Fields of chat and text requests.

    Attributes:
        stream: True if the response is streamed. Default: true.
        format: "json", or a JSON schema.
        think: Reasoning on or off, or an effort level.
    """

    REFUSED_FIELDS: ClassVar[Mapping[str, RefusedField]] = generation_fields(
        structured="send format",
        width=NO_IMAGES,
        height=NO_IMAGES,
        steps=NO_IMAGES,
    )
    NESTED_FIELDS: ClassVar[Mapping[str, type[msgspec.Struct]]] = {"options": OllamaOptions}

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Effort | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    resume: ResumeBody | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class OllamaGenerateBody(OllamaAnswerBody, frozen=True, kw_only=True):
    """Body of a request for text.

    Attributes:
        raw: True if the prompt goes to the model without a template.
        context: Refused.
        template: Refused.
        images: Images as base64.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[Int32] | None = None
    raw: bool | None = None
    images: list[str] | None = None


class OllamaCalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct, frozen=True, kw_only=True):
    function: OllamaCalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A chat message.

    Attributes:
        tool_name: For a tool result: name of the function.
        tool_call_id: For a tool result: id of the call. Without name and id, the result belongs to the first call
            without a result.
        images: Images as base64.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaAnswerBody, frozen=True, kw_only=True):
    """Body of a chat request.

    Without messages, the model computes nothing, and the response says that the model is loaded.
    """

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class _PoolingBody(_Body, frozen=True, kw_only=True):
    """Fields of embedding requests.

    Attributes:
        truncate: True if the end of a long input is removed. Default: true.
    """

    truncate: bool | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return None if self.truncate is False else -1  # The value -1 truncates the input to the model's limit.

    @property
    def truncation_side(self) -> Literal["left", "right"] | None:
        return "right"


class OllamaEmbedBody(_PoolingBody, frozen=True, kw_only=True):
    input: str | list[str]
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)] | None = None


class OllamaEmbeddingsBody(_PoolingBody, frozen=True, kw_only=True):
    """Body of the older kind of embedding request, with one text."""

    prompt: str


class OllamaShowBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a request for a model's properties. `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None


Capability = Literal["completion", "tools", "thinking", "insert", "embedding"]


class OllamaLine(Response):
    """One line of a stream, or a whole response.

    Counts and durations (in nanoseconds) are in the last line only, where `done` is true. `load_duration` is always 0.
    The done_reasons "load" and "unload" mean that the request had no prompt.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatToken] | UnsetType = UNSET


class OllamaFunctionCall(Response):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Response):
    id: str
    function: OllamaFunctionCall


class OllamaReply(Response):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaChatLine(OllamaLine, kw_only=True):
    """A piece of a message, or the whole message."""

    message: OllamaReply


class OllamaTextLine(OllamaLine, kw_only=True):
    """A piece of a text, or the whole text."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaDetails(Response):
    """Properties of a model. Unknown ones are empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelCard(Response):
    """Description of a model. `size` is the size of the weights in bytes, or 0 if it is not known."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(OllamaModelCard):
    modified_at: str


class OllamaModels(Response):
    models: list[OllamaModel]


class OllamaRunningModel(OllamaModelCard):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(Response):
    models: list[OllamaRunningModel]


class OllamaShown(Response):
    """Properties of a model. `template` is a Jinja template."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: str


class OllamaVersion(Response):
    version: str


class OllamaEmbeddings(Response):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Response):
    embedding: list[float]


NANOSECONDS = 1_000_000_000


class Head(NamedTuple):
    """First fields of each line.

    Attributes:
        model: Name of the model as the client wrote it.
        created_at: Time at which the response began, in ISO 8601 format.
    """

    model: str
    created_at: str


Piece = Callable[[Head, str, str, Sequence[ToolCall], int], OllamaLine]
"""Function that returns a line with content, reasoning and tool calls, which is not the last one.

The last argument is the index of the first call.
"""


def chat_piece(head: Head, content: str, reasoning: str, calls: Sequence[ToolCall], first_call: int) -> OllamaLine:
    message = OllamaReply(role="assistant", content=content, thinking=reasoning or UNSET)
    if calls:
        message.tool_calls = [
            OllamaCall(
                id=call.id,
                function=OllamaFunctionCall(
                    index=index,
                    name=call.name,
                    # The arguments are the text of the model. In a complete call, they are one JSON object.
                    arguments=encoded_value(call.arguments.encode() or b"{}"),
                ),
            )
            for index, call in enumerate(calls, first_call)
        ]
    return OllamaChatLine(model=head.model, created_at=head.created_at, done=False, message=message)


def text_piece(head: Head, content: str, reasoning: str, _calls: Sequence[ToolCall], _first_call: int) -> OllamaLine:
    return OllamaTextLine(
        model=head.model, created_at=head.created_at, done=False, response=content, thinking=reasoning or UNSET
    )


def iso_time(unix_seconds: int) -> str:
    """Return a time in ISO 8601 format.

    Args:
        unix_seconds: Unix time in seconds.
    """
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * NANOSECONDS))


def loaded(head: Head, piece: Piece) -> OllamaLine:
    """Return the response to a request without a prompt.

    Args:
        head: First fields of the response.
        piece: Makes the line.
    """
    line = piece(head, "", "", (), 0)
    line.done, line.done_reason = True, "load"
    return line


class Answer:
    """One response.

    Args:
        head: First fields of each line.
        piece: Makes a line with content, reasoning and calls.
        tokenizer: Tokenizer of the model.
        wants_logprobs: The client asked for log probabilities.
        earlier_seconds: For a resumed response: time since the response began at another server. Otherwise 0.
    """

    def __init__(
        self,
        head: Head,
        piece: Piece,
        tokenizer: Tokenizer,
        *,
        wants_logprobs: bool,
        earlier_seconds: float = 0,
    ) -> None:
        self._head = head
        self._piece = piece
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._earlier_seconds = earlier_seconds
        self._entered_at = self._begun_at = trio.current_time()
        self._first_at: float | None = None
        self._calls = OpenCalls()
        self._call_count = 0
        self._logprobs: list[TokenLogprob] = []  # The log probabilities of tokens that no line contains yet.

    def begin(self) -> None:
        """Record the time at which the request began to run."""
        self._begun_at = trio.current_time()

    def note(self, _delta: Delta) -> None:
        """Record the time of the first token.

        Args:
            _delta: Not used.
        """
        if self._first_at is None:
            self._first_at = trio.current_time()

    def skip(self, parts: Sequence[ResponsePart], _delta: Delta) -> None:
        """Count the tool calls in the known output of a resumed response.

        Args:
            parts: Parts that the client has.
        """
        self._call_count += len(self._complete(parts))

    def next(self, parts: Sequence[ResponsePart], delta: Delta) -> OllamaLine | None:
        """Return the line for a delta, or None if the delta has nothing to send yet.

        Args:
            parts: Parts that the turn made of the delta.
        """
        self.note(delta)
        self._logprobs += delta.logprobs or ()
        calls = self._complete(parts)
        content = "".join([part.text for part in parts if isinstance(part, ContentText)])
        reasoning = "".join([part.text for part in parts if isinstance(part, ReasoningText)])
        if not (content or reasoning or calls):
            return None
        first_call, self._call_count = self._call_count, self._call_count + len(calls)
        return self._with_logprobs(self._piece(self._head, content, reasoning, calls, first_call))

    def end(self, turn: ChatTurn) -> OllamaLine:
        """Return the last line.

        Args:
            turn: The turn, which has ended.
        """
        return self._last(turn, self._piece(self._head, "", "", (), 0))

    def whole(self, turn: ChatTurn, choice: CollectedChoice) -> OllamaLine:
        self._logprobs = choice.logprobs
        content = "".join(choice.contents)
        return self._last(turn, self._piece(self._head, content, choice.reasoning or "", choice.tool_calls, 0))

    def _complete(self, parts: Sequence[ResponsePart]) -> list[ToolCall]:
        """Return the tool calls that these parts complete."""
        return [call for part in parts if (call := self._calls.take(part)) is not None]

    def _with_logprobs(self, line: OllamaLine) -> OllamaLine:
        if self._wants_logprobs and self._logprobs:
            line.logprobs = chat_tokens(self._tokenizer, self._logprobs)
            self._logprobs = []
        return line

    def _last(self, turn: ChatTurn, line: OllamaLine) -> OllamaLine:
        """Add the counts and durations of the response to a line."""
        now = trio.current_time()
        first_at = now if self._first_at is None else self._first_at
        line.done = True
        line.done_reason = "length" if turn.choices[0].finish_reason == "length" else "stop"
        line.total_duration = nanoseconds(now - self._entered_at + self._earlier_seconds)
        line.load_duration = 0
        line.prompt_eval_count = turn.stream.prompt_token_count
        line.prompt_eval_duration = nanoseconds(first_at - self._begun_at)
        line.eval_count = turn.stream.completion_token_count
        line.eval_duration = nanoseconds(now - first_at + self._earlier_seconds)
        return self._with_logprobs(line)
