"""What a person sees in a terminal: the loading bar, one streamed response; and what a chat shares with it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio

from trioserve.assemble import Loaded, LoadProgress, open_configured_engine
from trioserve.commands.log_lines import announce, status_stream
from trioserve.commands.processor import processor_name
from trioserve.commands.program_end import EXIT_INTERRUPTED
from trioserve.config import Config
from trioserve.contracts.events import FinishReason
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.progress import ProgressBar

__all__ = [
    "Interrupts",
    "LineReader",
    "LoadingBar",
    "SamplingWishes",
    "opened_engine",
    "run_generate",
    "run_interruptible",
    "say",
]


class LoadingBar:
    """Shows on stderr how far loading is, and then what was loaded."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._bar = ProgressBar(f"loading {model}", status_stream())

    def progress(self, progress: LoadProgress) -> None:
        """From any thread."""
        self._bar.turn_to(progress.what)
        if progress.total is None:
            self._bar.show_seconds(progress.done)
        else:
            self._bar.show_share(progress.done, progress.total)

    def close(self) -> None:
        """Nothing of the bar is left."""
        self._bar.close()

    def loaded(self, loaded: Loaded) -> None:
        self._bar.close()
        cut = ""
        announce(f"processor: {processor_name()}")
        if loaded.context_tokens_max < loaded.model_context_tokens_max:
            cut = f" (of the model's {loaded.model_context_tokens_max})"
        tokens = loaded.block_count * loaded.block_size
        kept = (
            f"KV cache: {loaded.block_count} blocks of {loaded.block_size} tokens fit, {tokens} tokens in all "
            f"({loaded.kv_cache_bytes / 2**30:.2f} GiB in {loaded.kv_dtype})"
        )
        if not loaded.block_count:
            kept = "an encoder: it makes vectors or scores, and keeps no KV"
        announce(f"kernels: {loaded.computed_by}, {loaded.dtype} on {loaded.device}")
        context = f"{loaded.context_tokens_max} tokens of context{cut}"
        announce(f"loaded {self._model} in {loaded.load_seconds:.1f} s, {context}")
        announce(kept)


class SamplingWishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says of sampling; the rest is the model's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> SamplingWishes:
        return cls(**{name: getattr(arguments, name) for name in cls.__struct_fields__})

    def applied_to(self, default: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(default, **self.given())

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def run_generate(config: Config, prompt: str, wishes: SamplingWishes, *, raw: bool) -> int:
    """Write the response to stdout as it is made; what else there is to say goes to stderr. Ctrl-C ends it."""

    async def main(_interrupts: Interrupts) -> None:
        async with opened_engine(config) as engine:
            is_chat = not raw and engine.tokenizer.chat_template is not None
            asked: Prompt = ChatPrompt(messages=[{"role": "user", "content": prompt}]) if is_chat else prompt
            await _write_response(engine, asked, wishes.applied_to(engine.default_sampling))

    return run_interruptible(main)


class Interrupts:
    """Ctrl-C and SIGTERM as cancellation: of the response under way if there is one, otherwise of everything."""

    def __init__(self) -> None:
        self.response_scope: trio.CancelScope | None = None
        self.have_ended_all = False

    async def watch(self, everything: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGINT and self.response_scope is not None:
                    self.response_scope.cancel()
                else:
                    self.have_ended_all = True
                    everything.cancel()


def run_interruptible(main: Callable[[Interrupts], Awaitable[None]]) -> int:
    async def run() -> int:
        interrupts = Interrupts()
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                await nursery.start(interrupts.watch, nursery.cancel_scope)
                await main(interrupts)
                nursery.cancel_scope.cancel()
        if interrupts.have_ended_all:
            say("\ninterrupted")
            return EXIT_INTERRUPTED
        return 0

    return trio.run(run)


@asynccontextmanager
async def opened_engine(config: Config) -> AsyncIterator[Engine]:
    with contextlib.closing(LoadingBar(config.model)) as bar:
        async with open_configured_engine(config, on_progress=bar.progress, on_loaded=bar.loaded) as engine:
            yield engine


async def _write_response(engine: Engine, prompt: Prompt, sampling: SamplingParams) -> str:
    text = ""
    try:
        async with engine.generate(prompt, sampling) as stream:
            async for delta in stream:
                text += delta.text
                print(delta.text, end="", flush=True)
                if delta.finish_reason is FinishReason.LENGTH:
                    say("\n(cut off: the limit of tokens is reached)", end="")
                elif delta.finish_reason is FinishReason.ERROR:
                    say(f"\n({delta.message})", end="")
    finally:
        print(flush=True)
    return text


class LineReader:
    """Lines of standard input without a thread that could not be ended while it reads."""

    def __init__(self) -> None:
        self._received = b""

    async def read(self) -> str | None:
        """The next line, stripped; None at the end of input."""
        while b"\n" not in self._received:
            try:
                await trio.lowlevel.wait_readable(0)
            except PermissionError:  # an ordinary file is always readable
                await trio.lowlevel.checkpoint()
            chunk = os.read(0, 65536)
            if not chunk:
                rest, self._received = self._received, b""
                return rest.decode(errors="replace").strip() if rest else None
            self._received += chunk
        line, _newline, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace").strip()


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
