"""What every file format boils down to before it becomes a Tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tokenizers
from tokenizers.processors import TemplateProcessing

from trioserve.contracts.errors import ModelLoadError, is_library_panic

__all__ = ["TokenizerParts", "add_sequence_ends", "panics_become_load_errors"]


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """tool_chat_template: used instead of chat_template when a request has tools; None: the same one."""

    backend: tokenizers.Tokenizer
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    tool_chat_template: str | None
    pad_token: str | None = None


def add_sequence_ends(
    backend: tokenizers.Tokenizer, *, bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> None:
    """Let encode put these tokens (text and id) around a text; None adds none."""
    # The names in the pattern are ours: a token's text may hold spaces, colons or dollar signs.
    pattern = [*(["bos:0"] if bos else []), "$A:0", *(["eos:0"] if eos else [])]
    tokens = [
        {"id": name, "ids": [end[1]], "tokens": [end[0]]}
        for name, end in (("bos", bos), ("eos", eos))
        if end is not None
    ]
    backend.post_processor = TemplateProcessing(single=pattern, pair=None, special_tokens=tokens)


@contextmanager
def panics_become_load_errors(what: str) -> Iterator[None]:
    """Around all that builds a tokenizer. what: where the tokenizer comes from, begins the error's message."""
    try:
        yield
    except BaseException as error:
        if not is_library_panic(error):
            raise
        raise ModelLoadError(f"{what} cannot be read as a tokenizer ({str(error)[:200]}): download it again") from error
