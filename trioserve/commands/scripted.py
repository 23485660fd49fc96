"""`python -m trioserve scripted`: runs the real server with a fake model that gives the responses of a script.

Developers can test clients without weights. Each byte is one token, so prompts have many tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from trioserve.assemble import Loaded
from trioserve.assemble_model import LoadReport
from trioserve.commands.serve import OpenEngine, serve_configured
from trioserve.commands.serving import run_until_signal
from trioserve.config import Config
from trioserve.contracts.errors import StartupError
from trioserve.engine.engine import Engine
from trioserve.model.settings import MAX_NUM_SEQS_CPU
from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.scripted_model import (
    FAMILIES,
    PreferringModel,
    Rule,
    ScriptedChat,
    UncheckedExecutor,
    chat_template,
)

__all__ = ["run_scripted", "scripted_engine"]

CONTEXT_TOKENS = 1_000_000  # Instructions and tools of an agent have about 50,000 bytes, and each byte is a token.
BLOCK_SIZE = 256
BLOCK_COUNT = 4 * CONTEXT_TOKENS // BLOCK_SIZE
STEP_TOKENS = 262_144


def scripted_engine(chat: ScriptedChat, template: str, *, name: str = "scripted") -> OpenEngine:
    """Return a function that opens an engine with a scripted model.

    Args:
        chat: script with the responses.
        template: chat template of the model.
        name: served model name, if the options do not set a name.
    """

    @asynccontextmanager
    async def open_engine(
        config: Config, *, on_progress: LoadReport, on_loaded: Callable[[Loaded], None]
    ) -> AsyncIterator[Engine]:
        async with open_fake_engine(
            model=PreferringModel(chat.drafts),
            tokenizer=byte_tokenizer(template),
            served_model_name=config.served_model_name or (name,),
            new_executor=UncheckedExecutor,
            block_size=BLOCK_SIZE,
            block_count=BLOCK_COUNT,
            max_model_len=config.max_model_len or CONTEXT_TOKENS,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=config.max_num_seqs or MAX_NUM_SEQS_CPU,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=4 * CONTEXT_TOKENS,
            overlap_steps=True,
            tool_call_parser=config.tool_call_parser,
            tool_call_leniency=config.tool_call_leniency,
            reasoning_parser=config.reasoning_parser,
        ) as engine:
            yield engine

    return open_engine


def run_scripted(arguments: argparse.Namespace, config: Config) -> int:
    """Serve a script until Ctrl-C or SIGTERM, then drain.

    Args:
        arguments: arguments of `trioserve scripted`.
        config: options of the server.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: an option is wrong, or the script cannot be read.
    """
    if arguments.family not in FAMILIES:
        raise StartupError(f"--family is {arguments.family!r}, allowed are {', '.join(sorted(FAMILIES))}")
    chat = ScriptedChat(arguments.family, _rules(arguments.script), thinks=arguments.thinks)
    open_engine = scripted_engine(chat, chat_template(arguments.family))

    async def serve(orders: trio.MemoryReceiveChannel[object], announce: Callable[[list[str]], None]) -> None:
        await serve_configured(config, orders, on_serving=announce, open_engine=open_engine)

    return run_until_signal(config, serve, what="a script")


def _rules(path: str | None) -> list[Rule]:
    if path is None:
        return []
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[Rule])
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(f"--script {path} cannot be read as a list of rules: {error}") from error
