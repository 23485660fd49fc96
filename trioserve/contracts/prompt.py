"""Types of prompts: text, token ids, chats, and sound. How a decoder with an encoder reads them."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from trioserve.contracts.media import AudioProcessing, AudioPrompt

__all__ = [
    "ChatPrompt",
    "Cut",
    "EncoderInput",
    "InputEncoder",
    "Processing",
    "Prompt",
    "TextProcessing",
    "row_positions",
]


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that the model's chat template turns into a prompt.

    Attributes:
        messages: Dicts as in OpenAI's API (role, content, ...). The content is a string or a list of parts.
        tools: Tool definitions for the template. None if there are none.
        add_generation_prompt: True to end the prompt with the start of an assistant message.
        continue_final_message: True if the last message is the beginning of the response. add_generation_prompt must be
            False.
        chat_template: Template to use instead of the model's own.
        template_arguments: Further variables for the template. None for no further variables.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_arguments: dict[str, Any] = {}


Prompt = str | Sequence[int] | ChatPrompt | AudioPrompt
"""For text and chats, the tokenizer or the template adds special tokens. Token ids are used unchanged."""


class Cut(NamedTuple):
    """How to truncate a text that is too long.

    Attributes:
        tokens_max: Tokens to keep.
        side: Side at which tokens are removed: "left" or "right".
    """

    tokens_max: int
    side: Literal["left", "right"] = "right"


class TextProcessing(msgspec.Struct, frozen=True, kw_only=True):
    """How a model with an encoder of texts reads a prompt, as read from the model's configuration files.

    Attributes:
        rows_max: Most tokens that the encoder reads. It computes one row for each token.
        tokens_max: Most tokens of the decoder, of its first tokens and the output together.
        embedding_size: Numbers in one row.
        start_ids: Tokens with which the decoder begins.
    """

    rows_max: int
    tokens_max: int
    embedding_size: int
    start_ids: tuple[int, ...]


class EncoderInput(NamedTuple):
    """Input of an encoder to whose rows a decoder attends.

    Attributes:
        content: Buffer of float32 spectra [mel_bins, frame_count], or of int64 token ids [row_count].
        digest: 16 bytes that identify the content. Equal digests mean equal contents, also across requests.
        row_count: Rows that the encoder computes.
        positions: Positions that the rows take in a sequence. The decoder's tokens follow.
    """

    content: object
    digest: bytes
    row_count: int
    positions: int


Processing = AudioProcessing | TextProcessing
"""How a model with an encoder reads its input. Both have embedding_size and tokens_max."""


class InputEncoder(Protocol):
    """Turns spectra or a text into the rows that a decoder attends to. Its methods are called from the event loop."""

    def encode(self, content: object) -> Coroutine[Any, Any, object]:
        """Compute the rows of one input, in pieces between which the engine runs steps.

        A cancelled caller returns at once.

        Args:
            content: See EncoderInput.

        Returns:
            Buffer of float32 [row_count, embedding_size].

        Raises:
            AlreadyEnded: the engine was closed or restarted.
        """
        ...


def row_positions(row_count: int, block_size: int) -> int:
    """Return the positions that the rows of an encoder take in a sequence: whole blocks.

    Args:
        row_count: Number of rows.
        block_size: Positions of a block.
    """
    return -(-row_count // block_size) * block_size
