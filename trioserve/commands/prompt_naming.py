"""Loads the tokenizer that a router needs to hash the blocks of prompts. No numpy and no weights are needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trioserve.contracts.errors import ModelLoadError

if TYPE_CHECKING:
    from trioserve.proxy.routed_body import PromptBlocks
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["load_tokenizer", "open_prompt_naming"]


@asynccontextmanager
async def open_prompt_naming(model: str, *, parses_chat_texts: bool = False) -> AsyncIterator[PromptBlocks]:
    """Open the object that hashes the blocks of prompts. Its tokenizer threads run until the scope ends.

    Args:
        model: model directory or name, as in an engine's --model.
        parses_chat_texts: True if the engines run with --control-tokens-in-text parse.

    Raises:
        ModelLoadError: the tokenizer cannot be read.
    """
    # These imports are late, because they take 0.1 s and most routers need no tokenizer.
    from trioserve.admission.text_threads import TextThreads
    from trioserve.model.loading.default_model import DOWNLOAD_THREAD, resolve_model
    from trioserve.proxy.routed_body import PromptBlocks
    from trioserve.trio_tools.worker_thread import call_abandonable

    def resolved() -> Path:
        return resolve_model(model, with_weights=False)

    path = await call_abandonable(resolved, thread_name=DOWNLOAD_THREAD)
    async with TextThreads() as text_threads:
        tokenizer = await text_threads.run_cancellable(load_tokenizer, path)
        if parses_chat_texts:
            tokenizer.parse_control_tokens_in_chats()
        yield PromptBlocks(tokenizer, text_threads)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model, as an engine does. The weights of the model may be missing.

    Args:
        path: model directory or GGUF file.

    Raises:
        ModelLoadError: the tokenizer cannot be read.
    """
    from trioserve.model.loading.gguf import read_gguf
    from trioserve.text.tokenizer import Tokenizer

    try:
        if path.is_dir() and not any(path.glob("*.safetensors")):
            files = sorted(path.glob("*.gguf"))
            path = files[0] if len(files) == 1 else path
        if path.is_dir():
            return Tokenizer.from_directory(path)
        return Tokenizer.from_gguf(read_gguf(path).metadata)
    except OSError as error:
        raise ModelLoadError(f"cannot read the tokenizer in {path}: {error.strerror or error}") from error
