"""What of an engine of pictures goes with a fault, and is there anew when it is opened anew: everything else stays."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeAlias

from trioserve.contracts.iterative import IterativePlan, IterativeResult
from trioserve.contracts.step import IsAbandoned
from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.iterative.settings import IterativeSettings
from trioserve.engine.engine_parts import Nap
from trioserve.engine.shell.engine_life import Guard
from trioserve.engine.shell.stepped_core import StepRunnerOf

__all__ = ["ImageParts", "ImageSteps", "no_image_parts"]

ImageSteps: TypeAlias = StepRunnerOf[IterativePlan, IterativeResult]


class ImageParts(NamedTuple):
    """core: has no request yet. steps: see StepRunnerOf; such as a ThreadedExecutor around an IterativeExecutor. guard
    and nap: see EngineParts."""

    core: IterativeCore
    steps: ImageSteps
    guard: Guard | None = None
    nap: Nap[ImageParts] | str = "this engine cannot give its latents back alone"


class _NoSteps:
    def run_step(self, plan: IterativePlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, IterativeResult | None]:
        raise AssertionError(f"step {plan.step_index} of an engine that is being opened")


def no_image_parts(settings: IterativeSettings) -> ImageParts:
    """Those of an engine that is being opened anew: nobody is there, and nothing is computed."""
    return ImageParts(IterativeCore(settings), _NoSteps())
