"""Tiny random checkpoints of Whisper, as transformers saves them, with special tokens and a feature extractor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LANGUAGES", "MEL_BINS", "ROWS", "VOCAB_SIZE", "features", "write_checkpoint"]

MEL_BINS = 20
ROWS = 50  # One second of sound. It is no multiple of a usual block size.
LANGUAGES = ("en", "de", "fr")
_SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
TIMESTAMP_COUNT = ROWS + 1
BYTE_COUNT = 256
VOCAB_SIZE = BYTE_COUNT + len(_SPECIAL) + TIMESTAMP_COUNT + 5  # A few rows belong to no token.


def token_id(sign: str) -> int:
    """Return the id of a special token, such as "<|en|>"."""
    return BYTE_COUNT + _SPECIAL.index(sign)


def features(seed: int = 0) -> npt.NDArray[np.float32]:
    """Return spectra of one window, float32 [MEL_BINS, 2 * ROWS]."""
    return np.random.default_rng(seed).normal(0.0, 1.0, (MEL_BINS, 2 * ROWS)).astype(np.float32)


def write_checkpoint(directory: Path, *, dtype: str = "float32", is_english: bool = False, **fields: Any) -> None:
    """Save a checkpoint.

    Args:
        is_english: the model knows no other language, so its configs name neither languages nor tasks.
        fields: fields of config.json.
    """
    import torch
    import transformers

    config = transformers.WhisperConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "num_mel_bins": MEL_BINS,
            "d_model": 64,
            "encoder_layers": 3,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 96,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 128,
            "max_source_positions": ROWS,
            "max_target_positions": 40,
            "pad_token_id": token_id("<|endoftext|>"),
            "bos_token_id": token_id("<|endoftext|>"),
            "eos_token_id": token_id("<|endoftext|>"),
            "decoder_start_token_id": token_id("<|startoftranscript|>"),
            "begin_suppress_tokens": None,
            **fields,
        }
    )
    model = transformers.WhisperForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(20_260_401)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Cross attention has large weights, so that forgotten rows of the encoder show up. Embeddings are small, so
            # that the tied head does not only repeat the last token.
            size = 0.4 if "encoder" in name else 0.02 if "embed_tokens" in name else 0.2
            parameter.normal_(0.0, size, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    model.to(getattr(torch, dtype))
    several = {
        "lang_to_id": {f"<|{code}|>": token_id(f"<|{code}|>") for code in LANGUAGES},
        "task_to_id": {task: token_id(f"<|{task}|>") for task in ("transcribe", "translate")},
        "is_multilingual": True,
    }
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=token_id("<|endoftext|>"),
        eos_token_id=token_id("<|endoftext|>"),
        pad_token_id=token_id("<|endoftext|>"),
        decoder_start_token_id=token_id("<|startoftranscript|>"),
        no_timestamps_token_id=token_id("<|notimestamps|>"),
        max_initial_timestamp_index=10,
        suppress_tokens=[1, 2, 7, token_id("<|nospeech|>"), token_id("<|startofprev|>")],
        begin_suppress_tokens=[32, token_id("<|endoftext|>")],
        **({"is_multilingual": False} if is_english else several),
    )
    model.save_pretrained(directory)
    extractor = {
        "chunk_length": 1,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config.num_mel_bins,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 16_000,
        "nb_max_frames": 100,
        "sampling_rate": 16_000,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(extractor))
    _tokenizer().save(str(directory / "tokenizer.json"))
    named = {"eos_token": "<|endoftext|>", "tokenizer_class": "WhisperTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    times = (f"<|{0.02 * index:.2f}|>" for index in range(TIMESTAMP_COUNT))
    tokenizer.add_special_tokens([AddedToken(sign, special=True, normalized=False) for sign in _SPECIAL])
    tokenizer.add_tokens([AddedToken(sign, special=False, normalized=False) for sign in times])
    return tokenizer
