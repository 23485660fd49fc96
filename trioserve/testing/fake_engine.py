"""An engine without weights: everything is real but the model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import trio

from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.metrics.registry import Metrics
from trioserve.runtime.engine import Engine, ModelDescription
from trioserve.runtime.errors_unwrapped import errors_unwrapped
from trioserve.runtime.settings import RuntimeSettings
from trioserve.runtime.worker_thread import WorkerThread
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.testing.controlled_steps import ControlledSteps
from trioserve.testing.fake_executor import FakeExecutor, FakeModel

__all__ = ["FakeEngine", "open_fake_engine"]


class FakeEngine(msgspec.Struct, frozen=True):
    """engine: what a program would use. core: to look at. steps: to hold a forward pass open. executor: to fail."""

    engine: Engine
    core: EngineCore
    steps: ControlledSteps
    executor: FakeExecutor


@asynccontextmanager
async def open_fake_engine(
    *,
    block_count: int = 64,
    block_size: int = 4,
    context_tokens_max: int = 128,
    running_requests_max: int = 8,
    step_tokens_max: int = 32,
    enable_prefix_caching: bool = True,
    waiting_requests_max: int = 16,
    step_seconds: float = 0.0,
    model: FakeModel | None = None,
) -> AsyncIterator[FakeEngine]:
    """Bytes are tokens; the answer follows from the prompt alone. See open_engine for what leaving does."""
    core = EngineCore(
        CoreSettings(
            block_count=block_count,
            block_size=block_size,
            context_tokens_max=context_tokens_max,
            running_requests_max=running_requests_max,
            step_tokens_max=step_tokens_max,
            enable_prefix_caching=enable_prefix_caching,
        )
    )
    executor = FakeExecutor(
        block_count=block_count, block_size=block_size, model=model or FakeModel(vocab_size=BYTE_VOCAB_SIZE - 1)
    )
    steps = ControlledSteps(executor, seconds=step_seconds)
    with errors_unwrapped():
        async with WorkerThread("text") as text_thread:
            engine = Engine(
                model=ModelDescription(
                    served_names=("fake",),
                    source="fake",
                    context_tokens_max=context_tokens_max,
                    vocab_size=BYTE_VOCAB_SIZE,
                    eos_token_ids=(END_TOKEN_ID,),
                    created_at=0,
                ),
                core=core,
                steps=steps,
                tokenizer=byte_tokenizer(),
                text_thread=text_thread,
                metrics=Metrics("fake"),
                settings=RuntimeSettings(waiting_requests_max=waiting_requests_max),
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.keep_deadlines)
                await nursery.start(engine.run)
                yield FakeEngine(engine, core, steps, executor)
                nursery.cancel_scope.cancel()
