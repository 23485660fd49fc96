"""A real tokenizer with a tiny vocabulary: one token per byte, and an end token."""

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
"""Id of the image token. Only a tokenizer with images has it, as one more token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


IMAGE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Like CHAT_TEMPLATE, with images in messages."""


def byte_tokenizer(
    chat_template: str = CHAT_TEMPLATE, *, has_images: bool = False, signs: Sequence[str] = ()
) -> Tokenizer:
    """Return a tokenizer whose token i is byte i.

    Args:
        chat_template: chat template. The default writes one line per message.
        has_images: if True, the vocabulary has a token for rows of images.
        signs: texts that become one token each. Their ids follow all other ids.
    """
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
    """Return a backend whose token i is byte i, and whose last token ends the text.

    Args:
        vocab_size: size of the vocabulary, at least 257. No text contains the tokens between the bytes and the end
            token. Such a token decodes to " t" and its id.
    """
    assert vocab_size >= BYTE_VOCAB_SIZE
    characters = _byte_characters()
    vocab = {characters[byte]: byte for byte in range(256)}
    vocab |= {f"{characters[ord(' ')]}t{token_id}": token_id for token_id in range(256, vocab_size - 1)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(END_TOKEN, special=True)])
    return backend


def _byte_characters() -> list[str]:
    """Return the characters that stand for bytes in byte-level BPE (GPT-2).

    A printable byte becomes the same character. All other bytes become the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
