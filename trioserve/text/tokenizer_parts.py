"""Defines the contents of a model's tokenizer files, independent of the file format. A Tokenizer is built from them."""

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
    """Contents of a model's tokenizer files.

    Attributes:
        backend: The library's tokenizer.
        bos_token: Text of the token that begins a sequence, or None.
        eos_token: Text of the token that ends a sequence, or None.
        chat_template: Chat template, or None.
        tool_chat_template: Chat template for requests with tools. None if such requests use `chat_template`.
        pad_token: Text of the token that fills batches, or None.
    """

    backend: tokenizers.Tokenizer
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    tool_chat_template: str | None
    pad_token: str | None = None


def add_sequence_ends(
    backend: tokenizers.Tokenizer, *, bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> None:
    """Make the tokenizer add a begin token and an end token around each text that it encodes.

    Args:
        backend: The tokenizer to change.
        bos: Text and id of the begin token, or None to add none.
        eos: Text and id of the end token, or None to add none.
    """
    # The pattern uses placeholder names, since a token's text may contain spaces, colons or dollar signs.
    pattern = [*(["bos:0"] if bos else []), "$A:0", *(["eos:0"] if eos else [])]
    tokens = [
        {"id": name, "ids": [end[1]], "tokens": [end[0]]}
        for name, end in (("bos", bos), ("eos", eos))
        if end is not None
    ]
    backend.post_processor = TemplateProcessing(single=pattern, pair=None, special_tokens=tokens)


@contextmanager
def panics_become_load_errors(what: str) -> Iterator[None]:
    """Turn panics of the tokenizer library into ModelLoadError while a tokenizer is built.

    Args:
        what: Source of the tokenizer. The error message begins with this text.

    Raises:
        ModelLoadError: The library panicked.
    """
    try:
        yield
    except BaseException as error:
        if not is_library_panic(error):
            raise
        raise ModelLoadError(f"{what} cannot be read as a tokenizer ({str(error)[:200]}): download it again") from error
