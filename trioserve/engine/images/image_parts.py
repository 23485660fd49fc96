"""The parts of an image engine that are lost with a fault. They are built again when the engine is reopened."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeAlias

from trioserve.contracts.iterative import IterativePlan, IterativeResult
from trioserve.contracts.step import IsAbandoned
from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.settings import IterativeSettings
from trioserve.engine.engine_parts import CacheRelease
from trioserve.engine.lifecycle.stepped_core import StepRunnerOf
from trioserve.engine.lifecycle.work import Guard

__all__ = ["ImageParts", "ImageSteps", "no_image_parts"]

ImageSteps: TypeAlias = StepRunnerOf[IterativePlan, IterativeResult]


class ImageParts(NamedTuple):
    """Parts of one opening of an image engine. The fields from `connector` on are those that only texts use.

    Attributes:
        core: a core without requests.
        steps: computes its plans, such as a `ThreadedExecutor` around an `IterativeExecutor`.
        guard: see `EngineParts`.
        cache_release: see `EngineParts`. Releases the latents.
    """

    core: IterativeCore
    steps: ImageSteps
    guard: Guard | None = None
    cache_release: CacheRelease[ImageParts] | str = "this engine cannot release its latents alone"
    connector: None = None
    readers_first: bool = False
    when_idle: None = None
    weights: str = "this engine has no weights"


class _NoSteps:
    def run_step(self, plan: IterativePlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, IterativeResult | None]:
        raise AssertionError(f"step {plan.step_index} of an engine that is being opened")


def no_image_parts(settings: IterativeSettings) -> ImageParts:
    """Return the parts of an engine that is being reopened: an empty core, and no computation.

    Args:
        settings: settings of the empty core.
    """
    return ImageParts(IterativeCore(settings), _NoSteps())
