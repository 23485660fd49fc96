"""Tests that damaged tokenizer files give a working tokenizer or one of our own errors, never another exception."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from trioserve.contracts.errors import InvalidRequest, ModelLoadError, RequestFailed, is_library_panic
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.gguf_vocabulary import vocabulary_from_gguf
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_parts import panics_become_load_errors

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, 10**400, 1.5, 1e308, "", "x", "\ud800", "▁", "a" * 5000,
    [], [[]], {}, {"a": []}, [1, "a"], {"content": "\ud800"}, {"type": "Sequence"}, "../../etc/passwd",
]  # fmt: skip
ODD_KEYS = ["x", "added_tokens", "model", "vocab", "merges", "type", "decoder", "continuing_subword_prefix", "\ud800"]
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def use(tokenizer: Tokenizer) -> None:
    try:
        ids = tokenizer.encode("Hello, <|user|> wörld\n")
    except RequestFailed:
        return
    tokenizer.decode(ids)
    tokenizer.token_count_min("some text")
    if tokenizer.chat_template is not None:
        with suppress(InvalidRequest):
            tokenizer.chat_template.render(ChatPrompt(messages=[{"role": "user", "content": "hi"}]))


def mutated(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON value in which one randomly chosen inner value was replaced by an unexpected value."""
    if depth and rng.random() < 0.3:
        return rng.choice(ODD_VALUES)
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.15:
            return {name: inner for name, inner in value.items() if name != key}
        if kind < 0.3:
            return {**value, rng.choice(ODD_KEYS): rng.choice(ODD_VALUES)}
        return {**value, key: mutated(value[key], rng, depth + 1)}
    if isinstance(value, list) and value:
        index = rng.randrange(len(value))
        return [*value[:index], mutated(value[index], rng, depth + 1), *value[index + 1 :]]
    return rng.choice(ODD_VALUES)


@pytest.fixture(scope="module")
def directory_files(byte_level_library: tokenizers.Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer.json": json.loads(byte_level_library.to_str()),
        "tokenizer_config.json": {
            "bos_token": "<|begin|>",
            "eos_token": {"content": "<|end|>", "special": True},
            "add_bos_token": True,
            "added_tokens_decoder": {"0": {"content": "<|end|>", "special": True}},
            "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
        },
        "special_tokens_map.json": {"bos_token": "<|begin|>"},
        "added_tokens.json": {"<|end|>": 0},
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_changed_values_in_tokenizer_files_raise_only_our_own_errors(
    directory_files: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        changed = {name: directory_files[name] for name in FILES}
        for _ in range(rng.choice((1, 1, 2, 3))):
            name = rng.choice(FILES)
            changed[name] = mutated(changed[name], rng)
        for name, content in changed.items():
            (tmp_path / name).write_text(json.dumps(content))
        with suppress(ModelLoadError):
            use(Tokenizer.from_directory(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_changed_bytes_in_tokenizer_files_raise_only_our_own_errors(
    directory_files: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    whole = {name: json.dumps(content).encode() for name, content in directory_files.items()}
    for _ in range(60):
        changed = dict(whole)
        name = rng.choice(FILES)
        content = bytearray(whole[name])
        for _ in range(rng.choice((1, 2, 4))):
            position = rng.randrange(min(len(content), rng.choice((100, 1000, len(content)))))
            content[position] = rng.choice((0, 0x22, 0x5B, 0x7B, 0x7D, 0x80, 0xFF, rng.randrange(256)))
        changed[name] = bytes(content) if rng.random() < 0.7 else bytes(content[: rng.randrange(len(content))])
        for file_name, file_content in changed.items():
            (tmp_path / file_name).write_bytes(file_content)
        with suppress(ModelLoadError):
            use(Tokenizer.from_directory(tmp_path))


@pytest.mark.parametrize("seed", range(4))
def test_changed_gguf_metadata_raises_only_our_own_errors(
    byte_level_metadata: dict[str, Any], sentence_piece_metadata: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    # A GGUF file contains no lone surrogates, no null, and only 64-bit numbers.
    for _ in range(60):
        metadata = rng.choice((byte_level_metadata, sentence_piece_metadata))
        for _ in range(rng.choice((1, 1, 2, 3))):
            metadata = mutated(metadata, rng)
        if rng.random() < 0.2:
            metadata = {**metadata, "tokenizer.ggml.token_type": array("i", [rng.randrange(-2, 9)] * 600)}
        if "\\ud800" in json.dumps(metadata, default=list):
            continue
        with suppress(ModelLoadError):
            use(Tokenizer.from_gguf(metadata))


def check_refused(directory: Path, name: str, content: object, said: str) -> None:
    (directory / name).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=said):
        Tokenizer.from_directory(directory)


@pytest.fixture
def directory(directory_files: dict[str, Any], tmp_path: Path) -> Path:
    for name, content in directory_files.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def test_a_panic_of_the_library_becomes_a_load_error(directory: Path, directory_files: dict[str, Any]) -> None:
    whole = directory_files["tokenizer.json"]
    broken = {**whole, "model": {**whole["model"], "continuing_subword_prefix": "a" * 1000}}
    check_refused(directory, "tokenizer.json", broken, "cannot be read as a tokenizer")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_only_a_panic_becomes_a_load_error(kind: type[BaseException]) -> None:
    with pytest.raises(kind), panics_become_load_errors("it"):
        raise kind
    assert not is_library_panic(kind())


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_lone_surrogate_in_a_file_raises_a_load_error(directory: Path, name: str) -> None:
    check_refused(directory, name, {"bos_token": "\ud800"}, f"{name} cannot be read as JSON")


def test_too_deep_or_too_large_json_raises_a_load_error(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    for content, said in (
        ("[" * 100_000 + "]" * 100_000, "cannot be read as JSON"),
        ('{"a":[' + "0," * 2**20 + "0]}", "commas and opening brackets, at most"),
        (" " * (33 * 2**20), "bytes, at most"),
    ):
        path.write_text(content)
        with pytest.raises(ModelLoadError, match=said):
            Tokenizer.from_directory(directory)


def sentence_pieces(tokens: list[str]) -> Mapping[str, object]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *tokens],
        "tokenizer.ggml.scores": array("f", [0.0] * (len(tokens) + 3)),
    }


@pytest.mark.parametrize(("tokens", "said"), [
    (["a" * 100_000], "a token of 100000 characters"),
    (["abcdefgh"[index] * length for index in range(8) for length in range(1, 257)], "in more than"),
])  # fmt: skip
def test_tokens_that_imply_too_many_merges_are_refused(tokens: list[str], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        vocabulary_from_gguf(sentence_pieces(tokens))


def test_a_vocabulary_without_tokens_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="0 tokens"):
        vocabulary_from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [], "tokenizer.ggml.merges": []})
