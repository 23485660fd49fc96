"""A real tokenizer with a tiny vocabulary: one token a byte, and one that ends the text."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_parts import TokenizerParts

__all__ = [
    "BYTE_VOCAB_SIZE",
    "CHAT_TEMPLATE",
    "END_TOKEN",
    "END_TOKEN_ID",
    "IMAGE_CHAT_TEMPLATE",
    "IMAGE_TOKEN_ID",
    "byte_backend",
    "byte_tokenizer",
]

END_TOKEN = "<|end|>"
END_TOKEN_ID = 256
BYTE_VOCAB_SIZE = 257
IMAGE_TOKEN_ID = 257
"""Of a tokenizer for a model that sees images, whose vocabulary has one token more."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


IMAGE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The same, with a place for images."""


def byte_tokenizer(
    chat_template: str = CHAT_TEMPLATE, *, has_images: bool = False, signs: Sequence[str] = ()
) -> Tokenizer:
    """Token i is byte i. The chat template is one line a message, where none is given. has_images: there is a token
    for a row of an image. signs: texts that are one token each, behind all others."""
    backend = byte_backend(BYTE_VOCAB_SIZE)
    if has_images:
        backend.add_special_tokens([tokenizers.AddedToken("<image>", special=True)])
    backend.add_special_tokens([tokenizers.AddedToken(sign, special=True) for sign in signs])
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            bos_token=None,
            eos_token=END_TOKEN,
            chat_template=chat_template,
            tool_chat_template=None,
        )
    )


def byte_backend(vocab_size: int) -> tokenizers.Tokenizer:
    """Token i is byte i; the last one ends the text. Whatever is between, no text leads to, and it reads " t" and its
    number."""
    assert vocab_size >= BYTE_VOCAB_SIZE
    characters = _characters_of_bytes()
    vocab = {characters[byte]: byte for byte in range(256)}
    vocab |= {f"{characters[ord(' ')]}t{token_id}": token_id for token_id in range(256, vocab_size - 1)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(END_TOKEN, special=True)])
    return backend


def _characters_of_bytes() -> list[str]:
    """The printable stand-ins of byte-level BPE (GPT-2): a byte that prints stands for itself, the others follow from
    U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
