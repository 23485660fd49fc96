"""Builds a tokenizer from the metadata of a GGUF file.

The file contains the vocabulary, but only the name of the rule that splits a text before merging (tokenizer.ggml.pre).
A table in this module maps each name to its rule. The table comes from the models' own tokenizer files and from
llama.cpp's src/llama-vocab.cpp. The keys are those of the GGUF specification (ggml/docs/gguf.md).
"""

from __future__ import annotations

import enum
import reprlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from trioserve.contracts.errors import ModelLoadError
from trioserve.text.tokenizer_parts import TokenizerParts, add_sequence_ends

__all__ = ["KNOWN_SPLITS", "vocabulary_from_gguf"]

_T = TypeVar("_T")

TOKENS_MAX = 2**22  # The largest known vocabularies have 262,144 tokens.
# Longest SentencePiece token that is built by merges. Tokens of real vocabularies have at most 48 characters.
MERGED_CHARACTERS_MAX = 256
# Limit for the average over all tokens. A SentencePiece token can be built from two others in about two ways.
MERGES_PER_TOKEN_MAX = 16


def vocabulary_from_gguf(metadata: Mapping[str, object]) -> TokenizerParts:
    """Build the contents of a tokenizer from the metadata of a GGUF file.

    Args:
        metadata: Key-value pairs of the file.

    Raises:
        ModelLoadError: A key is missing, contradicts another key, or names a tokenizer that is not supported.
    """
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    if not 1 <= len(tokens) <= TOKENS_MAX:
        raise ModelLoadError(f"the GGUF file has {len(tokens)} tokens, allowed are 1 to {TOKENS_MAX}: it is damaged")
    kinds = _kinds(metadata, len(tokens))
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pre_tokenizer = _pre_tokenizer(metadata)
        backend = _byte_level_bpe(metadata, tokens, pre_tokenizer)
        adds_bos = pre_tokenizer.adds_bos
    elif model == "llama":
        backend = _sentence_piece_bpe(metadata, tokens, kinds)
        adds_bos = True
    else:
        raise ModelLoadError(
            f"the GGUF file's tokenizer is of kind {reprlib.repr(model)}; supported are 'gpt2' and 'llama'"
        )
    _add_whole_tokens(backend, tokens, kinds)
    bos = _named_token(metadata, "bos", tokens, default_id=1 if model == "llama" else None)
    eos = _named_token(metadata, "eos", tokens, default_id=2 if model == "llama" else None)
    add_sequence_ends(
        backend,
        bos=bos if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        eos=eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return TokenizerParts(
        backend=backend,
        bos_token=None if bos is None else bos[0],
        eos_token=None if eos is None else eos[0],
        chat_template=_template(metadata, "tokenizer.chat_template"),
        tool_chat_template=_template(metadata, "tokenizer.chat_template.tool_use"),
        pad_token=_pad_token(metadata, tokens),
    )


class _Kind(enum.IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# --- byte-level BPE -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PreTokenizer:
    """Rule that splits a text before merging.

    Attributes:
        splits: Regular expressions, applied one after another. Each match becomes a separate piece, and so does each
            text between two matches.
        splits_like_gpt2: True to apply GPT-2's expression after `splits`.
        normalizes: True to convert the text to NFC first.
        takes_whole_words: True if a piece that equals a token becomes this token without merges.
        adds_bos: True if a text begins with a BOS token by default. The file can override this.
    """

    splits: tuple[str, ...] = ()
    splits_like_gpt2: bool = False
    normalizes: bool = False
    takes_whole_words: bool = False
    adds_bos: bool = False


_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTIONS
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SEED_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM_SPLITS = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"(?<!\s)\s+$",  # The model's own expression is \s+$, which takes quadratic time in a run of spaces.
    _DEEPSEEK_CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER_SPLITS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
# This expression is like GPT-4o's, but Chinese characters are not letters of words, and a slash does not belong to the
# preceding punctuation.
_KIMI_SPLIT = r"\p{Han}+|" + _GPT_4O_SPLIT.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")

# This expression splits numbers into groups of three digits, counted from the end. The original expression is the empty
# match (?=(\d{3})+(?!\d)), which takes quadratic time in a number's length. This expression matches whole pieces
# instead: the digits before a number's first full group, and each group. Each match includes the text up to the next
# group.
_UP_TO_GROUPS = r"\d{0,2}(?=(?:\d{3})*(?!\d))"
_GROUPS_OF_THREE = (
    rf"(?<!\d){_UP_TO_GROUPS.replace('0,2', '1,2')}(?:\D++{_UP_TO_GROUPS})*+|\d{{3}}(?:\D++{_UP_TO_GROUPS})*+"
    rf"|(?:\D++{_UP_TO_GROUPS})++"
)

_GPT2 = _PreTokenizer(splits_like_gpt2=True)
_GPT2_COMPOSED = _PreTokenizer(splits_like_gpt2=True, normalizes=True)
_DIGITS = _PreTokenizer(splits=(r"\p{N}",), splits_like_gpt2=True)
_GPT4 = _PreTokenizer(splits=(_LLAMA3_SPLIT,))
_GPT_4O = _PreTokenizer(splits=(_GPT_4O_SPLIT,))
_LLAMA3 = _PreTokenizer(splits=(_LLAMA3_SPLIT,), takes_whole_words=True, adds_bos=True)
_QWEN2 = _PreTokenizer(splits=(_QWEN2_SPLIT,), normalizes=True)
_DEEPSEEK_V3 = _PreTokenizer(splits=_DEEPSEEK_V3_SPLITS)
# The keys are the names that llama.cpp's converter writes. Some names belong to models that combine the architecture of
# a supported family with the tokenizer of another family.
_PRE_TOKENIZERS = {
    "default": _PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "a.x-4.0": _GPT2,
    "chatglm-bpe": _GPT4,
    "codeshell": _DIGITS,
    "command-r": _PreTokenizer(splits=(r"\p{N}",), splits_like_gpt2=True, normalizes=True),
    "dbrx": _GPT4,
    "deepseek-coder": _PreTokenizer(splits=_DEEPSEEK_CODER_SPLITS),
    "deepseek-llm": _PreTokenizer(splits=_DEEPSEEK_LLM_SPLITS),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _DEEPSEEK_V3,
    "exaone": _DIGITS,
    "exaone4": _GPT2,
    "f2llmv2": _QWEN2,
    "falcon-h1": _LLAMA3,
    "falcon3": _LLAMA3,
    "gigachat": _GPT2,
    "glm4": _GPT4,
    "gpt-2": _GPT2,
    "gpt-4o": _GPT_4O,
    "granite-docling": _GPT2,
    "hunyuan": _PreTokenizer(splits=(_QWEN2_SPLIT,)),
    "hunyuan-dense": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    "kimi-k2": _PreTokenizer(splits=(_KIMI_SPLIT,)),
    "kormo": _PreTokenizer(splits=(_QWEN2_SPLIT,)),
    "lfm2": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": _GPT_4O,
    "megrez": _PreTokenizer(splits=(_QWEN2_SPLIT,)),
    "mellum": _GPT2,
    "midm-2.0": _LLAMA3,
    "minerva-7b": _DIGITS,
    "minimax-m2": _GPT_4O,
    "mpt": _GPT2_COMPOSED,
    "olmo": _GPT2_COMPOSED,
    "phi-2": _GPT2,
    # The tokenizer.json of these models uses this rule, although Mistral's own files use the tekken rule.
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": _PreTokenizer(splits=(_QWEN35_SPLIT,), normalizes=True),
    "refact": _DIGITS,
    "seed-coder": _PreTokenizer(splits=(_SEED_SPLIT,)),
    "smaug-bpe": _GPT4,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "superbpe": _PreTokenizer(splits=(r"\p{N}+", _GROUPS_OF_THREE)),
    "tekken": _PreTokenizer(splits=(_TEKKEN_SPLIT,), takes_whole_words=True, adds_bos=True),
    "trillion": _GPT2,
    "viking": _PreTokenizer(splits=(r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
}


KNOWN_SPLITS = frozenset(split for pre_tokenizer in _PRE_TOKENIZERS.values() for split in pre_tokenizer.splits)
"""Expressions of known model families. They take linear time in practice."""


def _pre_tokenizer(metadata: Mapping[str, object]) -> _PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")  # Older GGUF files lack this key.
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"the GGUF file's pre-tokenizer is {reprlib.repr(name)}; supported are {', '.join(_PRE_TOKENIZERS)}: "
            "another rule would split texts in a way that this model was not trained with"
        )
    return _PRE_TOKENIZERS[name]


def _byte_level_bpe(
    metadata: Mapping[str, object], tokens: Sequence[str], pre_tokenizer: _PreTokenizer
) -> tokenizers.Tokenizer:
    merges = [_pair(merge) for merge in _list(metadata, "tokenizer.ggml.merges", str)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = _bpe(vocabulary, merges, ignore_merges=pre_tokenizer.takes_whole_words)
    if pre_tokenizer.normalizes:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre_tokenizer.splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer.splits_like_gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


# --- SentencePiece --------------------------------------------------------------------------------------------------

_SPACE = "▁"


def _sentence_piece_bpe(
    metadata: Mapping[str, object], tokens: Sequence[str], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
    scores = _list(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelLoadError(f"the GGUF file has {len(tokens)} tokens, but {len(scores)} scores: it is damaged")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges_from_scores(tokens, scores, kinds)
    unknown = _named_token(metadata, "unknown", tokens, default_id=0)
    backend = _bpe(
        vocabulary,
        merges,
        unk_token=None if unknown is None else unknown[0],
        fuse_unk=True,
        byte_fallback=_Kind.BYTE in kinds,
    )
    # As in SentencePiece, a space is added before each text between two special tokens, not only at the beginning.
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Return the merges that are implied by one score per token, the best merge first.

    There is one merge for each pair of tokens whose joined text is also a token. SentencePiece merges the neighbours
    whose joined token has the best score. Pairs that form the same token have equal scores. They are ordered by the
    length of their left token, the longest first.
    """
    ranked = []
    known = {token: token for token in tokens}  # All merges that contain a token share one string object.
    merges_max = MERGES_PER_TOKEN_MAX * (len(tokens) + 4096)
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind in (_Kind.UNKNOWN, _Kind.CONTROL, _Kind.BYTE):
            continue  # Text is never encoded as one of these tokens.
        if len(token) > MERGED_CHARACTERS_MAX:
            raise ModelLoadError(
                f"the GGUF file has a token of {len(token)} characters, allowed are {MERGED_CHARACTERS_MAX}: "
                "it is damaged"
            )
        for cut in range(len(token) - 1, 0, -1):
            left, right = known.get(token[:cut]), known.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-score, -len(left), -len(right), left, right))
        if len(ranked) > merges_max:
            raise ModelLoadError(
                f"the GGUF file's {len(tokens)} tokens can be built from each other in more than {merges_max} ways: "
                "it is damaged"
            )
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for _, _, _, left, right in ranked]


# --- both -----------------------------------------------------------------------------------------------------------


def _bpe(vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # The library raises plain Exception for a merge of unknown tokens.
        raise ModelLoadError(f"the GGUF file's tokens and merges do not fit together ({error})") from error


def _add_whole_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Add the tokens that are searched in the whole text before the text is split."""
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_Kind.CONTROL, _Kind.UNKNOWN) and token
    ]
    user_defined = [
        AddedToken(token, special=False, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == _Kind.USER_DEFINED and token
    ]
    backend.add_special_tokens(special)
    backend.add_tokens(user_defined)


def _kinds(metadata: Mapping[str, object], token_count: int) -> Sequence[int]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [_Kind.NORMAL] * token_count
    kinds = _list(metadata, "tokenizer.ggml.token_type", int)
    if len(kinds) != token_count:
        raise ModelLoadError(f"the GGUF file has {token_count} tokens, but {len(kinds)} token types: it is damaged")
    return kinds


def _named_token(
    metadata: Mapping[str, object], name: str, tokens: Sequence[str], *, default_id: int | None
) -> tuple[str, int] | None:
    """Return the text and id of the token that the key tokenizer.ggml.<name>_token_id names, or None."""
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key, default_id)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ModelLoadError(
            f"the GGUF file's {key} is {reprlib.repr(token_id)}, but it has {len(tokens)} tokens: it is damaged"
        )
    return tokens[token_id], token_id


def _pad_token(metadata: Mapping[str, object], tokens: Sequence[str]) -> str | None:
    """Return the text of the padding token, or None if the file names no padding token or has a wrong id.

    The server pads nothing and only reports the token to clients, so a wrong id is not an error.
    """
    token_id = metadata.get("tokenizer.ggml.padding_token_id")
    return tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(tokens) else None


def _list(metadata: Mapping[str, object], key: str, kind: type[_T]) -> Sequence[_T]:
    values: Any = metadata.get(key)
    if values is None:
        raise ModelLoadError(f"the GGUF file has no {key}: it has no usable tokenizer, use a complete file")
    if not isinstance(values, list | tuple | array) or not all(isinstance(value, kind) for value in values):
        raise ModelLoadError(f"the GGUF file's {key} is not a list of {kind.__name__}: it is damaged")
    checked: Sequence[_T] = values
    return checked


def _template(metadata: Mapping[str, object], key: str) -> str | None:
    template = metadata.get(key)
    return template if isinstance(template, str) else None
