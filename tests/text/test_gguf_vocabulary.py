"""Tests that tokenizers from GGUF files equal the tokenizers that transformers makes from the same files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from trioserve.contracts.errors import ModelLoadError
from trioserve.text.gguf_vocabulary import vocabulary_from_gguf
from trioserve.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

WriteGguf = Callable[[dict[str, Any]], Path]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "def f(x):\n    return x+1\n\n\n\tif y: pass  # comment\n",
    "     \t\t\n\r\n  x   \n",
    "🎉👩‍👩‍👧🏽 e\u0301 n\u0303o \u1112\u1161\u11ab",
    "日本語のテキスト、漢字。中文 한국어",
    "שלום עולם مرحبا بالعالم \u202bmixed\u202c",
    "I'm sure you'LL say we've DON'T it's",
    "\x00\x01\x7f\u00a0\u200b\ufeff\ufffd\U0010ffff",
    'https://a.example/b?c=d&e=%20#f [link](x) {json: "y"}',
    "𝓗𝓮𝓵𝓵𝓸 ﬁ ß İ ǅ CamelCaseHTTPServer snake_case",
    "a" * 300 + " " * 50 + "\n" * 20,
]
DIGIT_TEXTS = ["12345", "x2y3 1,000,000 3.14", "2024-01-31T23:59"]
# Digits after several spaces, and numbers in other digits than ASCII, whose tokens show whether digits are split off
# first.
DIGIT_CUT_TEXTS = ["a  1   2    3\n\n 4", "２３ ½ ⅷ ٣", "  42"]


def _transformers_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path: Path) -> Any:
    return _transformers_tokenizer(smollm2_path)


def check_same(tokenizer: Tokenizer, reference: Any, texts: list[str], *, add_special_tokens: bool = True) -> None:
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert token_ids == reference.encode(text, add_special_tokens=add_special_tokens), text
        for skip in (True, False):
            assert tokenizer.decode(token_ids, skip_special_tokens=skip) == reference.decode(
                token_ids, skip_special_tokens=skip
            ), text


def test_the_packaged_model_tokenizes_like_transformers(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    special = ["<|im_start|>user\nhi<|im_end|>\n<|endoftext|> x<repo_name>y", "<|im_start|>", "<|im_end"]
    check_same(smollm2, smollm2_reference, TEXTS + DIGIT_TEXTS + special)
    assert smollm2.vocab_size == len(smollm2_reference)
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.eos_token_id == smollm2_reference.eos_token_id


def test_smollm_tokenizer_makes_each_digit_a_separate_piece(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    # The library transformers does not know the name of this pre-tokenizer and splits like GPT-2, so the test sets the
    # pre-tokenizer.
    backend = smollm2_reference.backend_tokenizer
    as_converted = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        check_same(smollm2, smollm2_reference, TEXTS + DIGIT_TEXTS + DIGIT_CUT_TEXTS)
    finally:
        backend.pre_tokenizer = as_converted
    assert smollm2.encode("a  1") != smollm2_reference.encode("a  1")


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "tekken"])
def test_each_byte_level_pre_tokenizer_splits_like_transformers(
    name: str, byte_level_metadata: dict[str, Any], write_gguf: WriteGguf
) -> None:
    metadata = byte_level_metadata | {"tokenizer.ggml.pre": name}
    # The test leaves out decomposed characters. Qwen's own tokenizer composes them, but the conversion in transformers
    # does not.
    texts = [text for text in TEXTS if name != "qwen2" or "\u0301" not in text]
    special = ["<|user|>hi<|end|>", " <think>x</think>"]
    reference = _transformers_tokenizer(write_gguf(metadata))
    check_same(Tokenizer.from_gguf(metadata), reference, texts + DIGIT_TEXTS + DIGIT_CUT_TEXTS + special)


# These are the values of tokenizer.ggml.pre that llama.cpp's converter writes for the supported families.
PRE_TOKENIZERS_OF_FAMILIES = {
    "Llama 3": "llama-bpe", "SmolLM2": "smollm", "Falcon 3": "falcon3", "DeepSeek-R1-Distill-Llama": "llama-bpe",
    "Mistral Nemo": "tekken", "Mistral Small 3": "tekken", "Pixtral": "pixtral", "Ministral 3": "tekken",
    "Qwen2": "qwen2", "DeepSeek-R1-Distill-Qwen": "deepseek-r1-qwen", "Qwen3": "qwen2", "Megrez": "megrez",
    "Phi-4": "dbrx", "Phi-4-mini": "gpt-4o", "OLMo 2": "dbrx", "OLMo 3": "dbrx", "SmolLM3": "smaug-bpe",
    "Granite 3": "refact", "Granite 4": "dbrx", "GLM-4 of 0414": "glm4", "GLM-4.5": "glm4",
    "GLM-4 before 0414": "chatglm-bpe", "Command R": "command-r", "Command R7B": "command-r", "EXAONE 3": "exaone",
    "EXAONE 4": "exaone4", "Seed-OSS": "seed-coder", "OLMoE": "olmo", "MiniMax-M2": "minimax-m2", "dots.llm1": "qwen2",
    "gpt-oss": "gpt-4o", "Llama 4": "llama4", "DeepSeek-V2": "deepseek-llm", "DeepSeek-Coder": "deepseek-coder",
    "DeepSeek-V3": "deepseek-v3", "Kimi K2": "kimi-k2", "Falcon-H1": "falcon-h1", "Mamba-2": "olmo",
    "Qwen3-Next": "qwen2", "Qwen3.5": "qwen35", "LFM2": "lfm2", "StarCoder": "starcoder", "GigaChat": "gigachat",
    "F2LLM-v2, a Qwen3": "f2llmv2", "SuperBPE, an OLMo 2": "superbpe", "Viking, a Llama": "viking",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(PRE_TOKENIZERS_OF_FAMILIES.values())))
def test_the_pre_tokenizer_of_every_supported_family_is_known(name: str, byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": name})
    for text in TEXTS + DIGIT_TEXTS + DIGIT_CUT_TEXTS:
        composed = normalizers.NFC().normalize_str(text)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) in (text, composed)


def _from_class(name: str) -> tuple[Any, Any]:
    import transformers

    backend = getattr(transformers, name)().backend_tokenizer
    return backend.normalizer, backend.pre_tokenizer


def _in_turn(*steps: Any, byte_level: bool = False) -> tuple[Any, Any]:
    """Return the normalizer and pre-tokenizer of a tokenizer.json that applies the given steps, then splits into bytes.

    Args:
        byte_level: True if the split into bytes also splits words like GPT-2.
    """
    parts = [pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step for step in steps]
    return None, pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=byte_level)])


_DIGITS = pre_tokenizers.Digits(individual_digits=True)
# These are the expressions of cl100k_base and o200k_base in tiktoken.
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORTENED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OWN_RULES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "command-r": lambda: _from_class("CohereTokenizer"),
    "deepseek-coder": lambda: _in_turn(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGITS),
    "deepseek-r1-qwen": lambda: _from_class("Qwen2Tokenizer"),
    "deepseek-v3": lambda: _in_turn(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3),
    "dbrx": lambda: _in_turn(_CL100K),
    "f2llmv2": lambda: _from_class("Qwen2Tokenizer"),
    "glm4": lambda: _in_turn(_CL100K),
    "gpt-4o": lambda: _in_turn(_O200K),
    "minimax-m2": lambda: _in_turn(_O200K),
    "olmo": lambda: _from_class("GPTNeoXTokenizer"),
    "qwen2": lambda: _from_class("Qwen2Tokenizer"),
    "qwen35": lambda: _from_class("Qwen3_5Tokenizer"),
    "refact": lambda: _in_turn(_DIGITS, byte_level=True),
    "smaug-bpe": lambda: _in_turn(_CL100K),
    "starcoder": lambda: _in_turn(_DIGITS, byte_level=True),
    "superbpe": lambda: _in_turn(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "viking": lambda: _in_turn(" ?[^(\\s|[.,!?…。，、।۔،])]+", _DIGITS),
}


@pytest.mark.parametrize("name", OWN_RULES)
def test_texts_are_split_as_by_the_own_tokenizer_of_the_family(name: str, byte_level_metadata: dict[str, Any]) -> None:
    normalizer, pre_tokenizer = OWN_RULES[name]()
    ours = vocabulary_from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": name}).backend
    for text in (
        TEXTS
        + DIGIT_TEXTS
        + DIGIT_CUT_TEXTS
        + ["12345678 3.14 1234567", "don't WE'LL 'tis a'b", "a  b\n\n  c \t"]
        + ["1½2345½12½123 ½1234567 12³ 日1234、56。[7|8)", "१२३४ 12 123 1234٣٤"]
    ):
        theirs = text if normalizer is None else normalizer.normalize_str(text)
        assert (text if ours.normalizer is None else ours.normalizer.normalize_str(text)) == theirs
        assert ours.pre_tokenizer.pre_tokenize_str(theirs) == pre_tokenizer.pre_tokenize_str(theirs), text


@pytest.mark.parametrize(("name", "text", "pieces"), [
    ("kimi-k2", "用Kimi处理1234个a/\nIt's", ["用", "Kimi", "处理", "123", "4", "个", "a", "/\n", "It's"]),
    ("deepseek-llm", "x 12 日本a,  é b  ", ["x", " ", "1", "2", " ", "日本", "a", ",", " ", " é", " b", "  "]),
    ("deepseek-coder", "x_1 12 日本a ", ["x", "_", "1", " ", "1", "2", " ", "日本", "a", " "]),
    ("deepseek-v3", "It's 12345 日本a -x\n", ["It", "'s", " ", "123", "45", " ", "日本", "a", " -", "x", "\n"]),
    ("superbpe", "don't 1234567 日 12", ["don't ", "1", "234", "567", " 日 ", "12"]),
    ("viking", "It's 12, (日)", ["It's", " ", "1", "2", ", (", "日", ")"]),
    ("seed-coder", "a12!\n\nb", ["a", "1", "2", "!", "\n\n", "b"]),
    ("qwen35", "เก่า12", ["เก่า", "1", "2"]),
])  # fmt: skip
def test_pre_tokenizer_splits_a_text_into_pieces(
    name: str, text: str, pieces: list[str], byte_level_metadata: dict[str, Any]
) -> None:
    pre_tokenizer = vocabulary_from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": name}).backend.pre_tokenizer
    assert pre_tokenizer is not None
    assert [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("letter", [" ", "1"], ids=["spaces", "digits"])
@pytest.mark.parametrize(
    "name", ["deepseek-llm", "deepseek-v3", "qwen35", "kimi-k2", "seed-coder", "superbpe", "viking"]
)
def test_time_for_a_run_of_spaces_or_digits_is_linear(
    name: str, letter: str, byte_level_metadata: dict[str, Any]
) -> None:
    pre_tokenizer = vocabulary_from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": name}).backend.pre_tokenizer
    assert pre_tokenizer is not None

    def seconds(count: int) -> float:
        begun = time.process_time()
        pre_tokenizer.pre_tokenize_str("x" + letter * count + "x")
        return time.process_time() - begun

    short, long = (min(seconds(count) for _ in range(3)) for count in (10_000, 80_000))
    assert long < 30 * short  # A quadratic algorithm would take 64 times as long.


def test_qwen2_tokenizer_composes_characters(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("café")


@pytest.mark.parametrize(("name", "text", "pieces"), [
    ("default", "a1234, b", ["a", "123", "4", ",", " b"]),
    ("smollm", "a1234, b", ["a", "1", "2", "3", "4", ",", " b"]),
    ("gpt-2", "a1234, b", ["a", "1234", ",", " b"]),
    ("llama-bpe", "a1234, b", ["a", "123", "4", ",", " b"]),
    ("qwen2", "a1234, b", ["a", "1", "2", "3", "4", ",", " b"]),
    ("tekken", "aB1234, b/\n", ["a", "B", "1", "2", "3", "4", ",", " b", "/\n"]),
    ("gpt-4o", "aB1234, b/\nIt's", ["a", "B", "123", "4", ",", " b", "/\n", "It's"]),
    ("llama4", "xYz'LL 12", ["x", "Yz'LL", " ", "12"]),
    ("default", "it's $5+x", ["it", "'", "s", " ", "$", "5", "+", "x"]),
])  # fmt: skip
def test_texts_are_split_by_the_named_pre_tokenizer(
    name: str, text: str, pieces: list[str], byte_level_metadata: dict[str, Any]
) -> None:
    # Every piece has a token, and all joins of pieces have merges. So the tokens depend only on the pre-tokenizer's
    # splits.
    letters = sorted({character.replace(" ", "Ġ").replace("\n", "Ċ") for character in text})
    spelled = [piece.replace(" ", "Ġ").replace("\n", "Ċ") for piece in pieces]
    joined = "".join(spelled)
    spans = sorted({joined[i:j] for i in range(len(joined)) for j in range(i + 2, len(joined) + 1)}, key=len)
    metadata = byte_level_metadata | {
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": letters + spans,
        "tokenizer.ggml.token_type": [1] * (len(letters) + len(spans)),
        "tokenizer.ggml.merges": [f"{span[:cut]} {span[cut:]}" for span in spans for cut in range(1, len(span))],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in token_ids] == pieces


def test_sentence_piece_tokenizes_like_transformers(
    sentence_piece: Tokenizer, sentence_piece_metadata: dict[str, Any], write_gguf: WriteGguf
) -> None:
    reference = _transformers_tokenizer(write_gguf(sentence_piece_metadata))
    # The library transformers drops one of several leading spaces, and writes the space prefix only once, not after
    # each special token. SentencePiece and llama.cpp agree with our tokenizer in both cases. All other texts are
    # tokenized alike.
    texts = [text for text in TEXTS + DIGIT_TEXTS if text and not text.startswith(" ")]
    check_same(sentence_piece, reference, texts)


def test_sentence_piece_adds_a_space_before_each_text_between_special_tokens(sentence_piece: Tokenizer) -> None:
    token_ids = sentence_piece.encode("the</s>the <extra>x")
    texts = [sentence_piece.token_text(token_id) for token_id in token_ids]
    assert texts[:4] == ["<s>", " the", "</s>", " the"]
    assert sentence_piece.decode(token_ids) == "the the <extra> x"
    assert sentence_piece.decode(sentence_piece.encode("  two spaces")) == "  two spaces"


def test_without_a_space_prefix_no_space_is_added_or_removed(sentence_piece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentence_piece_metadata | {"tokenizer.ggml.add_space_prefix": False})
    for text in ("the", " the", "  the"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_text(tokenizer.encode("the", add_special_tokens=False)[0])[0] == "t"


def test_sentence_pieces_with_better_scores_are_merged_first() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert Tokenizer.from_gguf(metadata).encode("abc") == [3, 7]
    metadata["tokenizer.ggml.scores"] = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0]
    assert Tokenizer.from_gguf(metadata).encode("abc") == [6, 5]


@pytest.mark.parametrize(("pre", "said", "begins"), [
    ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False),
    ("tekken", None, True), ("qwen2", None, False),
])  # fmt: skip
def test_bos_is_added_if_the_file_or_the_default_of_its_tokenizer_kind_requires_it(
    pre: str, said: bool | None, begins: bool, byte_level_metadata: dict[str, Any]
) -> None:
    metadata = byte_level_metadata | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": said}
    if said is None:
        del metadata["tokenizer.ggml.add_bos_token"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (tokenizer.encode("the")[0] == 1) is begins
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 1


def test_eos_is_added_if_the_file_requires_it(sentence_piece_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(sentence_piece_metadata | {"tokenizer.ggml.add_eos_token": True})
    token_ids = tokenizer.encode("the")
    assert (token_ids[0], token_ids[-1]) == (1, 2)


def test_a_piece_that_is_a_token_is_not_built_from_merges_in_some_families(byte_level_metadata: dict[str, Any]) -> None:
    metadata = byte_level_metadata | {
        "tokenizer.ggml.tokens": ["x", "y", "z", "xyz"],
        "tokenizer.ggml.token_type": [1] * 4,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
    }
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("xyz") == [3]
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("xyz") == [0, 1, 2]


def test_chat_templates_are_read_from_the_metadata(byte_level_metadata: dict[str, Any]) -> None:
    assert Tokenizer.from_gguf(byte_level_metadata).chat_template is None
    assert Tokenizer.from_gguf(byte_level_metadata | {"tokenizer.chat_template": "x"}).chat_template is not None


@pytest.mark.parametrize(("change", "said"), [
    ({"tokenizer.ggml.pre": "elvish"}, "'elvish'.*gpt-2.*llama-bpe.*qwen2.*smollm.*tekken"),
    ({"tokenizer.ggml.pre": None}, "pre-tokenizer is None"),
    ({"tokenizer.ggml.model": "bert"}, "'bert'; supported are 'gpt2' and 'llama'"),
    ({"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.scores"),
    ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens is not a list"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of str"),
    ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
    ({"tokenizer.ggml.merges": ["ab"]}, "do not fit together"),
    ({"tokenizer.ggml.merges": ["nosuch token"]}, "do not fit together"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
    ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000"),
    ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x'"),
    ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0]}, "1 scores"),
])  # fmt: skip
def test_an_unusable_vocabulary_is_refused_and_the_error_names_the_reason(
    change: dict[str, Any], said: str, byte_level_metadata: dict[str, Any]
) -> None:
    with pytest.raises(ModelLoadError, match=said):
        Tokenizer.from_gguf(byte_level_metadata | change)


def test_a_token_outside_the_byte_alphabet_keeps_its_id_and_text(byte_level: Tokenizer) -> None:
    assert byte_level.encode("a<|a b|>b")[1] == 4
    assert byte_level.token_text(4) == "<|a b|>"
