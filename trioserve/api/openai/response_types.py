"""Types of chat completions and text completions, whole and streamed. Streams are assembled from bytes.

Log probabilities are written in three formats: OpenAI's for chats, OpenAI's for text, and vLLM's for prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import UNSET, UnsetType

from trioserve.api.generation import Usage
from trioserve.api.response import Response
from trioserve.api.streams.cursors import LOGPROB_MIN, ResumeBody
from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.request import KVTransferParams

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["LogprobsWriter", "chat_logprobs", "chat_tokens", "prompt_logprobs"]


# --- chat ---

# "abort" occurs only if the request has return_partial.
TextFinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort"]


class PromptToken(Response):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each token of the prompt, an object by token id. null for the first token."""


class TopLogprob(Response):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TopLogprob):
    """An output token with its log probability and the most probable tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Response):
    content: list[ChatToken]
    refusal: None


class CalledFunction(Response):
    """Function in a tool call.

    Attributes:
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


class ToolCall(Response, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class ChatMessage(Response):
    """The assistant's message.

    Attributes:
        content: text. null: there are tool calls and no text.
        reasoning_content: reasoning, under vLLM's older name.
        reasoning: the same reasoning, under vLLM's newer name.
        function_call: call in place of tool_calls, for requests with `functions`.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(Response):
    """One choice of a chat completion.

    Attributes:
        token_ids: output tokens, if the request has return_token_ids.
        weight_versions: pairs of a weight version and the number of tokens that it sampled. Unset until weights are
            replaced.
    """

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET


class ChatCompletion(Response, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


class FunctionDelta(Response):
    """New part of a called function.

    Attributes:
        arguments: next part of the arguments. Empty in the first delta.
        name: name of the function, in the first delta only.
    """

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Response):
    """New part of a tool call.

    Attributes:
        index: index of the call within its choice.
        id: id of the call, in its first delta only.
        type: type of the call, in its first delta only.
    """

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Response):
    """New part of the assistant's message.

    Attributes:
        content: new text. null: in the first delta of a response that begins with a tool call.
    """

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Response):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET


class ChatChunkHead(Response, tag_field="object", tag="chat.completion.chunk"):
    """Fields that all events of a streamed chat completion share."""

    id: str
    created: int
    model: str


class ChatCompletionChunk(ChatChunkHead):
    """Data of one event of a streamed chat completion.

    Attributes:
        choices: at most one choice. Empty in the last event, which has the usage.
        kv_transfer_params: present with finish_reason if the KV is held for another engine.
    """

    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


# --- text ---


class CompletionLogprobs(Response):
    """Log probabilities of a text completion, as four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Response):
    """One choice of a text completion.

    Attributes:
        finish_reason: null in events of a stream until the choice ends.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: TextFinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionHead(Response, tag_field="object", tag="text_completion"):
    """Fields that all events of a streamed text completion share."""

    id: str
    created: int
    model: str


class Completion(CompletionHead):
    """A whole text completion, or the data of one event of a streamed one.

    Attributes:
        usage: token counts. In a stream without continuous_usage_stats, null or unset until the last event.
        kv_transfer_params: present with finish_reason if the KV is held for another engine.
    """

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


def chat_tokens(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[ChatToken]:
    """Write the tokens of a chat completion, each with its alternatives.

    Args:
        tokenizer: tokenizer of the model.
        logprobs: log probabilities of the tokens.
    """
    return [
        ChatToken(
            token=tokenizer.token_text(logprob.token_id),
            logprob=max(logprob.logprob, LOGPROB_MIN),
            bytes=list(tokenizer.token_bytes(logprob.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=tokenizer.token_text(token_id),
                    logprob=max(value, LOGPROB_MIN),
                    bytes=list(tokenizer.token_bytes(token_id)),
                )
                for token_id, value in logprob.top
            ],
        )
        for logprob in logprobs
    ]


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Write the field `logprobs` of a chat completion.

    Args:
        tokenizer: tokenizer of the model.
        logprobs: log probabilities of the tokens.
    """
    return ChatLogprobs(content=chat_tokens(tokenizer, logprobs), refusal=None)


class LogprobsWriter:
    """Writes the log probabilities of one text completion piece by piece, as four lists of equal length.

    `text_offset` is the position in the choice's text where a token begins, in characters. A token that begins inside a
    character has the offset of that character. A token of the prompt that the echoed text does not contain, such as a
    token for the beginning, has the offset of the next text.

    Args:
        tokenizer: tokenizer of the model.
        echo: the prompt as the text of the choice repeats it.
        echo_tokens: number of tokens of the prompt, which come first. 0: their log probabilities are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, *, echo: str = "", echo_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._echo = echo.encode("utf-8", "surrogatepass")
        self._echo_characters = len(echo)
        self._echo_tokens = echo_tokens
        self._echo_place = 0  # The position of the next token in the echoed text, in bytes.
        self._begun = 0  # The number of characters whose first byte has been read.

    def skip(self, token_ids: Sequence[int]) -> None:
        """Process tokens that the client already has, without writing them.

        Args:
            token_ids: next tokens.
        """
        for token_id in token_ids:
            self._offset_of(self._tokenizer.token_bytes(token_id))

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """Write the next tokens, as slices of the four lists.

        Args:
            token_ids: next tokens.
            logprobs: log probability of each token. None for the first token of a prompt.
        """
        pieces = [self._tokenizer.token_bytes(token_id) for token_id in token_ids]
        return CompletionLogprobs(
            tokens=[_token_name(piece) for piece in pieces],
            token_logprobs=[None if logprob is None else max(logprob.logprob, LOGPROB_MIN) for logprob in logprobs],
            top_logprobs=[None if logprob is None else self._top(logprob) for logprob in logprobs],
            text_offset=[self._offset_of(piece) for piece in pieces],
        )

    def take_pairs(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> CompletionLogprobs:
        """Write the next tokens, as slices of the four lists.

        Args:
            tokens: next tokens, each with its log probability. None for the first token of a prompt.
        """
        return self.take([token_id for token_id, _ in tokens], [logprob for _, logprob in tokens])

    def _offset_of(self, piece: bytes) -> int:
        """Return the offset of the next token, and advance by its text."""
        if self._echo_tokens:
            piece = self._in_echo(piece)
        offset = self._begun - 1 if self._begun and _continues(piece[:1]) else self._begun
        self._begun += sum(not _continues(piece[place : place + 1]) for place in range(len(piece)))
        if self._echo_tokens:
            self._echo_tokens -= 1
            if not self._echo_tokens:
                self._begun = self._echo_characters
        return offset

    def _in_echo(self, piece: bytes) -> bytes:
        """Return the part of a token's text that the echoed prompt contains. A tokenizer may add a space, or tokens
        without text.
        """
        for shown in (piece, piece.removeprefix(b" ")):
            if self._echo.startswith(shown, self._echo_place):
                self._echo_place += len(shown)
                return shown
        return b""

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return the best tokens by their text, and the chosen token if it is not among them.

        If two tokens have the same text, the more probable token is shown.
        """
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(_token_name(self._tokenizer.token_bytes(token_id)), max(value, LOGPROB_MIN))
        return top


def _token_name(piece: bytes) -> str:
    r"""Return the text of a token. A part of a character is written as in OpenAI's API, such as `bytes:\\xf0\\x9f`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + piece.decode("utf-8", "backslashreplace")


def _continues(byte: bytes) -> bool:
    """Return True for a byte of UTF-8 inside a character."""
    return b"\x80" <= byte < b"\xc0"


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """Write, for each token of a prompt, the token itself and the best tokens, by token id.

    Args:
        tokenizer: tokenizer of the model.
        logprobs: log probability of each token. None for the first token.

    Returns:
        One object for each token, or None. The rank of the token itself is null unless it is among the best.
    """
    return [None if logprob is None else _prompt_token(tokenizer, logprob) for logprob in logprobs]


def _prompt_token(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, PromptToken]:
    ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(logprob.top, start=1)}
    here: dict[int, tuple[float, int | None]] = {
        logprob.token_id: ranked.get(logprob.token_id, (logprob.logprob, None))
    }
    return {
        str(token_id): PromptToken(
            logprob=max(value, LOGPROB_MIN), rank=rank, decoded_token=tokenizer.token_text(token_id)
        )
        for token_id, (value, rank) in (here | ranked).items()
    }
