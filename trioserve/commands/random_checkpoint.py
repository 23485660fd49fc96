"""`python -m trioserve random-checkpoint`: a directory to be served, of a real model's shape, that says nothing.

Its tokenizer has a token for each byte, so that any text is a prompt, and names the rest of the vocabulary by numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from trioserve.contracts.errors import StartupError
from trioserve.model.model_config import ModelConfig
from trioserve.model.random_checkpoint import checkpoint_bytes, write_config, write_weights
from trioserve.model.real_shapes import SHAPES
from trioserve.testing.byte_tokenizer import CHAT_TEMPLATE, END_TOKEN, byte_backend
from trioserve.trio_tools.progress import ProgressBar

__all__ = ["run_random_checkpoint"]

SPARE_BYTES = 2**26  # for the tokenizer, whose vocabulary is written out, and the headers


def run_random_checkpoint(shape: str, directory: Path, *, seed: int) -> int:
    """The directory is there whole, or not at all. Raises StartupError if something else is there, or no room."""
    config = SHAPES[shape]
    if seed < 0:
        raise StartupError(f"--seed is {seed}; it must be at least 0")
    directory = directory.absolute()
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}"
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise StartupError(f"{directory} is there already and not empty: name a new directory, or remove it")
        directory.parent.mkdir(parents=True, exist_ok=True)
        _check_room(config, directory.parent)
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


def _check_room(config: ModelConfig, parent: Path) -> None:
    needed, free = checkpoint_bytes(config) + SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise StartupError(
            f"the checkpoint takes {needed / 1e9:.1f} GB, and {parent} has {free / 1e9:.1f} GB left: "
            "make room, or name a directory on another disk"
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
