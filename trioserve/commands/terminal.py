"""Terminal output and input for `generate` and `chat`: the loading bar, a streamed response, and reading of lines."""

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

from trioserve.assemble import Loaded, open_configured_engine
from trioserve.assemble_model import LoadProgress, LoadReport
from trioserve.commands.doctor import processor_name
from trioserve.commands.log_lines import announce, status_stream
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
    "SamplingOptions",
    "opened_engine",
    "run_generate",
    "run_interruptible",
    "say",
]


class LoadingBar:
    """Shows the progress of loading on stderr, then a summary of the loaded model.

    Args:
        model: name or path of the model, as shown to the user.
        report: also receives all progress.
    """

    def __init__(self, model: str, report: LoadReport = lambda progress: None) -> None:
        self._model = model
        self._report = report
        self._bar = ProgressBar(f"loading {model}", status_stream())

    def progress(self, progress: LoadProgress) -> None:
        """Show the progress of loading. Any thread may call this method.

        Args:
            progress: current phase, and how much of this phase is done.
        """
        self._report(progress)
        self._bar.turn_to(progress.what)
        if progress.total is None:
            self._bar.show_seconds(progress.done)
        else:
            self._bar.show_share(progress.done, progress.total)

    def close(self) -> None:
        """Remove the bar from the terminal."""
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
            kept = "an encoder: it returns vectors or scores, and has no KV cache"
        announce(f"kernels: {loaded.computed_by}, {loaded.dtype} on {loaded.device}")
        context = f"{loaded.context_tokens_max} tokens of context{cut}"
        announce(f"loaded {self._model} in {loaded.load_seconds:.1f} s, {context}")
        announce(kept)


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options of the command line. An option that is None keeps the model's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> SamplingOptions:
        return cls(**{name: getattr(arguments, name) for name in cls.__struct_fields__})

    def applied_to(self, default: SamplingParams) -> SamplingParams:
        return msgspec.structs.replace(default, **self.given())

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def run_generate(config: Config, prompt: str, sampling: SamplingOptions, *, raw: bool) -> int:
    """Stream one response to stdout. Status messages go to stderr. Ctrl-C ends the program.

    Args:
        config: options of the engine.
        prompt: text of the user.
        sampling: sampling options of the command line.
        raw: True sends the prompt without the model's chat template.

    Returns:
        Exit code of the program.
    """

    async def main(_interrupts: Interrupts) -> None:
        async with opened_engine(config) as engine:
            is_chat = not raw and engine.tokenizer.chat_template is not None
            asked: Prompt = ChatPrompt(messages=[{"role": "user", "content": prompt}]) if is_chat else prompt
            await _write_response(engine, asked, sampling.applied_to(engine.default_sampling))

    return run_interruptible(main)


class Interrupts:
    """Turns Ctrl-C and SIGTERM into a cancel of a response or of the program.

    Attributes:
        response_scope: scope of the response that is being written. Ctrl-C cancels this scope. If it is None, Ctrl-C
            ends the program. SIGTERM always ends the program.
        have_ended_all: True once a signal has ended the program.
    """

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
    """Reads lines of standard input without a thread, because a thread that reads cannot be cancelled."""

    def __init__(self) -> None:
        self._received = b""

    async def read(self) -> str | None:
        """Return the next line without surrounding white space, or None at the end of input."""
        while b"\n" not in self._received:
            try:
                await trio.lowlevel.wait_readable(0)
            except PermissionError:  # epoll refuses regular files, which are always readable.
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
