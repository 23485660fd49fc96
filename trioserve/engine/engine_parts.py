"""The parts of an engine that are lost with a fault. They are built again when the engine is reopened."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from trioserve.contracts.images import ImageEncoder
from trioserve.contracts.kv_transfer import RunningConnector
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.lifecycle.engine_loop import StepRunner, WhenIdle
from trioserve.engine.lifecycle.work import Guard
from trioserve.engine.weight_updates import WeightTarget

__all__ = ["EngineParts", "Guard", "CacheRelease", "OpenParts", "no_parts"]


PartsOut = TypeVar("PartsOut", covariant=True)


class CacheRelease(Protocol[PartsOut]):
    """Releases the memory of the KV cache and allocates it again, while the weights stay loaded."""

    async def release_cache(self) -> None:
        """Free all memory except the weights. The caller guarantees that no other code uses the parts."""
        ...

    async def rebuild_parts(self) -> PartsOut:
        """Allocate the memory again, with an empty KV cache.

        Returns:
            New parts for the engine.

        Raises:
            Exception: the same errors as when the engine is opened.
        """
        ...


class EngineParts(NamedTuple):
    """Parts of one opening of an engine. `Engine` and `EngineLoop` document the fields that have no description here.

    Attributes:
        core: the scheduler and owner of the KV blocks.
        steps: computes the plans of the core.
        connector: moves KV blocks to and from other engines. None: no connector.
        readers_first: see `EngineLoop`.
        when_idle: see `EngineLoop`.
        image_encoder: computes the embeddings of images in prompts. None: the model reads text only.
        guard: waits until the processes that compute are lost. None: only a failed step can report a loss.
        cache_release: releases the KV cache alone. A string instead is a sentence that says why this is impossible.
        weights: replaces the weights. A string instead is a sentence that says why this is impossible. The object stays
            the same as long as the weights are loaded.
    """

    core: EngineCore
    steps: StepRunner
    connector: RunningConnector | None = None
    readers_first: bool = False
    when_idle: WhenIdle | None = None
    image_encoder: ImageEncoder | None = None
    guard: Guard | None = None
    cache_release: CacheRelease[EngineParts] | str = "this engine cannot release its KV cache alone"
    weights: WeightTarget | str = "this engine has no weights"


OpenParts = Callable[[], AbstractAsyncContextManager[EngineParts]]
"""Opens the parts, with model, threads and memory. Leaving the context frees all of them, also after a fault."""


class _NoSteps:
    def run_step(self, plan: StepPlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, StepResult | None]:
        raise AssertionError(f"step {plan.step_index} of an engine that is being opened")


def no_parts(settings: CoreSettings) -> EngineParts:
    """Return the parts of an engine that is being reopened: an empty core, and no computation.

    Args:
        settings: settings of the empty core.
    """
    return EngineParts(EngineCore(settings), _NoSteps())
