"""`python -m trioserve random-checkpoint`: writes a model with the shape of a real model and with random weights.

The model is a directory or a GGUF file. The tokenizer has one token for each byte, so that any text can be a prompt.
The texts of all other tokens are numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from trioserve.contracts.errors import StartupError
from trioserve.model.model_config import ModelConfig
from trioserve.model.random_checkpoint import SPACE, GgufType, checkpoint_bytes, write_config, write_gguf, write_weights
from trioserve.model.real_shapes import SHAPES
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, CHAT_TEMPLATE, END_TOKEN, byte_backend
from trioserve.trio_tools.progress import ProgressBar

__all__ = ["run_random_checkpoint"]

SPARE_BYTES = 2**26  # additional disk space for the tokenizer and the headers


def run_random_checkpoint(shape: str, path: Path, *, seed: int, gguf_type: GgufType | None = None) -> int:
    """Write a random checkpoint. If this fails, no incomplete checkpoint remains.

    Args:
        shape: name of a shape in SHAPES.
        path: new or empty directory, or new file whose name ends in .gguf.
        seed: seed of the weights, at least 0.
        gguf_type: type of the matrices in a GGUF file. None for bfloat16.

    Returns:
        0.

    Raises:
        StartupError: an option is wrong, `path` exists, or the disk has not enough space.
    """
    config = SHAPES[shape]
    if seed < 0:
        raise StartupError(f"--seed is {seed}; it must be at least 0")
    if path.suffix == ".gguf":
        return _run_gguf(shape, config, path.absolute(), gguf_type or "bf16", seed=seed)
    if gguf_type is not None:
        raise StartupError(f"--type is {gguf_type}, and {path} is a directory: name a file that ends in .gguf")
    directory = path.absolute()
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}"
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise StartupError(f"{directory} is there already and not empty: name a new directory, or remove it")
        directory.parent.mkdir(parents=True, exist_ok=True)
        _check_disk_space(config, directory.parent)
        unfinished.mkdir()
        try:
            _write(config, unfinished, seed=seed)
            unfinished.rename(directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise StartupError(f"cannot write {directory}: {error.strerror or error}") from error
    print(f"{directory}: {shape}, {checkpoint_bytes(config) / 1e6:,.0f} MB of random weights, seed {seed}")
    print(f"serve it with: trioserve serve {directory}")
    return 0


def _run_gguf(shape: str, config: ModelConfig, path: Path, gguf_type: GgufType, *, seed: int) -> int:
    unfinished = path.parent / f".{path.name}.{os.getpid()}"
    ids = byte_backend(config.vocab_size).get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    tokens[BYTE_VOCAB_SIZE - 1] = 2 * SPACE
    try:
        if path.exists():
            raise StartupError(f"{path} is there already: name a new file, or remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_disk_space(config, path.parent)
        try:
            with ProgressBar("writing random weights") as bar:
                write_gguf(config, unfinished, gguf_type, tokens, seed=seed, progress=bar.show_share)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"{path}: {shape}, {path.stat().st_size / 1e6:,.0f} MB of random weights, {gguf_type}, seed {seed}")
    print(f"serve it with: trioserve serve {path}")
    return 0


def _check_disk_space(config: ModelConfig, parent: Path) -> None:
    needed, free = checkpoint_bytes(config) + SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise StartupError(
            f"the checkpoint takes {needed / 1e9:.1f} GB, and {parent} has {free / 1e9:.1f} GB left: "
            "free some space, or use a directory on another disk"
        )


def _write(config: ModelConfig, directory: Path, *, seed: int) -> None:
    write_config(config, directory, eos_token_id=config.vocab_size - 1)
    byte_backend(config.vocab_size).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": config.context_tokens_max,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    with ProgressBar("writing random weights") as bar:
        write_weights(config, directory, seed=seed, progress=bar.show_share)
