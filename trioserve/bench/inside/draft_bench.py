"""Measures tokens per second with and without draft tokens, in turns, with the real default model.

Draft tokens come from a request's own text or, with --draft-model, from a small model. Two engines in one process,
which differ only in draft tokens, answer the same prompts one after another, round by round, so that other work on the
machine affects both. A speed is that of all streams together, after their first tokens. The workloads have texts that
repeat the prompt and chats that do not, with one stream and with several.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import trio

from trioserve.bench.inside.command import print_figures
from trioserve.bench.settings import at_least_one
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine
from trioserve.trio_tools.progress import with_progress

__all__ = ["DraftFigure", "add_arguments", "run", "run_draft_bench"]

OpenEngine = Callable[..., AbstractAsyncContextManager[Engine]]

DRAFT_TOKENS = 8
ROUNDS = 3
TOKENS = 128
# An engine takes half a minute to allocate a larger cache, which would disturb the measurement of the other engine.
KV_CACHE_GIB = 0.25

_STORY = (
    "The harbour of Lindholm lies in a bay that opens to the west. In the year 1871 a ship with the name "
    "Amalia came in from Bergen, loaded with timber and dried fish. Her captain, Jonas Vik, had lost two men "
    "in the storm off Skagen, and he swore that he would never sail in March again. The people of the town "
    "gave him a room above the bakery, a coat of grey wool, and a place at the long table of the innkeeper "
    "Marta Holm. He stayed for eleven years. When he left, he took nothing but the coat and a small brass "
    "compass, and on the quay he left a letter for the baker."
)
_CODE = (
    "class Basket:\n    def __init__(self, owner, capacity=20):\n        self.owner = owner\n"
    "        self.capacity = capacity\n        self.items = {}\n\n    def add(self, name, price, count=1):\n"
    "        if self.total_count() + count > self.capacity:\n            raise ValueError('the basket is full')\n"
    "        old_price, old_count = self.items.get(name, (price, 0))\n"
    "        self.items[name] = (price, old_count + count)\n\n    def remove(self, name):\n"
    "        if name not in self.items:\n            raise KeyError(name)\n        del self.items[name]\n\n"
    "    def total_count(self):\n        return sum(count for price, count in self.items.values())\n\n"
    "    def total_price(self):\n        return sum(price * count for price, count in self.items.values())\n"
)
_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain to a child why the sky is blue.",
    "Give me five tips for a job interview.",
)


class Workload(msgspec.Struct, frozen=True):
    """Some prompts that run at the same time, each as one stream."""

    name: str
    prompts: tuple[Prompt, ...]
    temperature: float = 0.0


def _chat(text: str) -> ChatPrompt:
    return ChatPrompt(messages=[{"role": "user", "content": text}])


def _copy(text: str, number: int = 0) -> str:
    """Return a prompt that the model continues with a second copy of a text, as in an editor's assistant.

    Each number gives a different text.
    """
    return f"Version {number}:\n{text}\n\nVersion {number}, once more:\n{text[:40]}"


WORKLOADS = (
    Workload("copies a text", (_copy(_STORY),)),
    Workload("copies code", (_copy(_CODE),)),
    Workload("the same, sampled", (_copy(_CODE),), 0.7),
    Workload("chat, a story", (_chat(_QUESTIONS[1]),)),
    Workload("chat, tips", (_chat(_QUESTIONS[3]),)),
    Workload("the same, sampled", (_chat(_QUESTIONS[3]),), 0.7),
    Workload("4 copies at a time", tuple(_copy(_STORY, number) for number in range(4))),
    Workload("8 copies at a time", tuple(_copy(_STORY, number) for number in range(8))),
    Workload("4 chats at a time", tuple(map(_chat, _QUESTIONS))),
)


class DraftFigure(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one workload.

    Attributes:
        what: name of the workload.
        streams: number of streams.
        plain_speed: tokens per second of all streams without drafts, in the best round. Other work on the machine can
            only slow a round down.
        draft_speed: tokens per second of all streams with drafts, in the best round.
        plain_cpu_speed: tokens per second of this process's CPU time without drafts, over all rounds. It shows the
            gain also on a busy machine.
        draft_cpu_speed: tokens per second of this process's CPU time with drafts, over all rounds.
        drafted: draft tokens of one round.
        accepted: accepted draft tokens of that round.
        steps: steps of that round. Without drafts, there would be one step per token of a stream.
        tokens: tokens of that round.
    """

    what: str
    streams: int
    plain_speed: float
    draft_speed: float
    plain_cpu_speed: float
    draft_cpu_speed: float
    drafted: int
    accepted: int
    steps: int
    tokens: int

    @property
    def cpu_ratio(self) -> float:
        return self.draft_cpu_speed / self.plain_cpu_speed

    @property
    def ratio(self) -> float:
        return self.draft_speed / self.plain_speed


async def _measure(engines: tuple[Engine, Engine], workload: Workload, rounds: int, tokens: int) -> DraftFigure:
    speeds: tuple[list[float], list[float]] = ([], [])
    cpu_seconds, token_counts = [0.0, 0.0], [0, 0]
    counts = (0, 0, 0, 0)
    # The first round fills the prefix cache.
    for number in with_progress(range(rounds + 1), f"measuring {workload.name}", unit="rounds"):
        for index, engine in enumerate(engines):
            before = engine.stats()
            cpu_before = time.process_time()
            speed, count = await _run(engine, workload, tokens)
            after = engine.stats()
            if number > 0:
                speeds[index].append(speed)
                cpu_seconds[index] += time.process_time() - cpu_before
                token_counts[index] += count
            counts = (
                after.draft_tokens_total - before.draft_tokens_total,
                after.accepted_tokens_total - before.accepted_tokens_total,
                after.steps_total - before.steps_total,
                count,
            )
    return DraftFigure(
        what=workload.name,
        streams=len(workload.prompts),
        plain_speed=max(speeds[0]),
        draft_speed=max(speeds[1]),
        plain_cpu_speed=token_counts[0] / cpu_seconds[0],
        draft_cpu_speed=token_counts[1] / cpu_seconds[1],
        drafted=counts[0],
        accepted=counts[1],
        steps=counts[2],
        tokens=counts[3],
    )


async def _run(engine: Engine, workload: Workload, tokens: int) -> tuple[float, int]:
    """Return tokens per second after the first ones, and the number of all tokens."""
    sampling = SamplingParams(temperature=workload.temperature, max_tokens=tokens, ignore_eos=True, seed=1)
    begun: list[float] = []
    counts: list[int] = []
    first_counts: list[int] = []

    async def ask(prompt: Prompt) -> None:
        count = 0
        async with engine.generate(prompt, sampling) as stream:
            async for delta in stream:
                if count == 0:
                    begun.append(trio.current_time())
                    first_counts.append(len(delta.token_ids))
                count += len(delta.token_ids)
        counts.append(count)

    async with trio.open_nursery() as nursery:
        for prompt in workload.prompts:
            nursery.start_soon(ask, prompt)
    seconds = trio.current_time() - min(begun)
    return (sum(counts) - sum(first_counts)) / seconds, sum(counts)


async def _main(
    open_engine: OpenEngine,
    model: str,
    options: dict[str, Any],
    drafts: dict[str, Any],
    workloads: Sequence[Workload],
    rounds: int,
    tokens: int,
) -> list[DraftFigure]:
    figures = []
    async with (
        open_engine(model, kv_cache_memory=KV_CACHE_GIB, **options) as plain,
        open_engine(model, kv_cache_memory=KV_CACHE_GIB, **options, **drafts) as drafting,
    ):
        for workload in workloads:
            figures.append(await _measure((plain, drafting), workload, rounds, tokens))
            _print_row(figures[-1])
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="model, as for serve")
    parser.add_argument(
        "--quantization", default="auto", metavar="NAME", help="number format of the model's weights, as for serve"
    )
    parser.add_argument(
        "--draft-model",
        metavar="NAME",
        help="drafts come from this model, or from the model's own further layer (mtp); default: from a request's "
        "own text",
    )
    parser.add_argument(
        "--draft-quantization", default="auto", metavar="NAME", help="number format of the draft model's weights"
    )
    parser.add_argument(
        "--draft-tokens", type=at_least_one, default=DRAFT_TOKENS, metavar="N", help="maximum draft tokens per step"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only workloads with this text in their name; default: all"
    )
    parser.add_argument(
        "--rounds", type=at_least_one, default=ROUNDS, metavar="N", help="rounds of each workload, in turns"
    )
    parser.add_argument("--tokens", type=at_least_one, default=TOKENS, metavar="N", help="tokens of each response")


def run(arguments: argparse.Namespace) -> int:
    return run_draft_bench(
        arguments.open_engine,
        arguments.model,
        quantization=arguments.quantization,
        draft_model=arguments.draft_model,
        draft_quantization=arguments.draft_quantization,
        draft_tokens=arguments.draft_tokens,
        only=arguments.only,
        rounds=arguments.rounds,
        tokens=arguments.tokens,
    )


def run_draft_bench(
    open_engine: OpenEngine,
    model: str = "smollm2",
    *,
    quantization: str = "auto",
    draft_model: str | None = None,
    draft_quantization: str = "auto",
    draft_tokens: int = DRAFT_TOKENS,
    only: str = "",
    rounds: int = ROUNDS,
    tokens: int = TOKENS,
) -> int:
    """Measure, print a table row by row, and then all figures as one line of JSON. The defaults take a few minutes.

    Args:
        open_engine: trioserve.open_engine.
        model: name of the model.
        quantization: number format of the model's weights.
        draft_model: draft model. None: draft tokens come from the request's own text.
        draft_quantization: number format of the draft model's weights.
        draft_tokens: maximum draft tokens per step.
        only: text that the name of a workload must contain.
        rounds: number of rounds.
        tokens: tokens of each response.

    Returns:
        Exit code.
    """
    load = os.getloadavg()[0]
    drafts: dict[str, Any] = {"speculative_ngram": draft_tokens}
    source = "from the text"
    if draft_model is not None:
        drafts = {
            "speculative_model": draft_model,
            "speculative_tokens": draft_tokens,
            "speculative_quantization": draft_quantization,
        }
        source = f"by {draft_model} ({draft_quantization})"
    print(
        f"{model} ({quantization}), {draft_tokens} draft tokens at most {source}, load average {load:.1f}; tokens a "
        f"second, the best of {rounds}"
    )
    print(
        f"{'':<22}{'streams':>8}{'without':>9}{'with':>9}{'ratio':>7}{'of CPU':>8}{'drafted':>9}{'right':>8}"
        f"{'tokens':>8}{'steps':>7}"
    )
    workloads = [workload for workload in WORKLOADS if only in workload.name]
    options = {"quantization": quantization}
    figures = trio.run(_main, open_engine, model, options, drafts, workloads, rounds, tokens)
    print_figures(figures=figures)
    return 0


def _print_row(figure: DraftFigure) -> None:
    print(
        f"{figure.what:<22}{figure.streams:>8}{figure.plain_speed:>9.1f}{figure.draft_speed:>9.1f}{figure.ratio:>7.2f}"
        f"{figure.cpu_ratio:>8.2f}{figure.drafted:>9}{figure.accepted:>8}{figure.tokens:>8}{figure.steps:>7}",
        flush=True,
    )
