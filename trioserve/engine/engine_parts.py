"""What of an engine goes with a fault, and is there anew when the engine is opened anew: everything else stays."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from trioserve.contracts.images import ImageEncoder
from trioserve.contracts.kv_transfer import RunningConnector
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.shell.engine_life import Guard
from trioserve.engine.shell.engine_loop import StepRunner, WhenIdle
from trioserve.engine.weight_updates import WeightPlace

__all__ = ["EngineParts", "Guard", "Nap", "OpenParts", "no_parts"]


PartsOut = TypeVar("PartsOut", covariant=True)


class Nap(Protocol[PartsOut]):
    """How the KV cache is given back, and made anew, while the weights stay where they are."""

    async def let_go(self) -> None:
        """Nobody has the parts any more: give back all memory that is not the weights'."""
        ...

    async def make_anew(self) -> PartsOut:
        """Take it again, empty. Raises what opening raises."""
        ...


class EngineParts(NamedTuple):
    """For their meanings see Engine and EngineLoop. guard: None: what computes is not gone before a step says so. nap:
    or why the KV cache cannot be given back alone, in a sentence. weights: where they are replaced, or why they cannot
    be, in a sentence; the same object as long as they are there."""

    core: EngineCore
    steps: StepRunner
    connector: RunningConnector | None = None
    readers_first: bool = False
    when_idle: WhenIdle | None = None
    image_encoder: ImageEncoder | None = None
    guard: Guard | None = None
    nap: Nap[EngineParts] | str = "this engine cannot give its KV cache back alone"
    weights: WeightPlace | str = "this engine has none"


OpenParts = Callable[[], AbstractAsyncContextManager[EngineParts]]
"""Opens them, model, threads and memory included. Leaving gives all of that back, also after a fault."""


class _NoSteps:
    def run_step(self, plan: StepPlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, StepResult | None]:
        raise AssertionError(f"step {plan.step_index} of an engine that is being opened")


def no_parts(settings: CoreSettings) -> EngineParts:
    """Those of an engine that is being opened anew: nobody is there, and nothing is computed."""
    return EngineParts(EngineCore(settings), _NoSteps())
