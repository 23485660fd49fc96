"""Image generation: request parameters, model descriptions, and results step by step.

A request for n images runs as n requests in the core. Image i has the seed of the request plus i. IterativeRequest
carries an ImageTask to the executor. The executor returns partial and final images as RGBImage.

An `IterativeRequest` has a known number of steps. It is encoded once, denoised step_count times, and decoded once, in
this order. Its latent slot keeps its state between the phases: the encoded prompt, the latent, and the model's caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from trioserve.contracts.arguments import refuse, to_float, to_int, to_str
from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.events import FinishReason, IterativePhase, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.contracts.sampling import SAMPLING_RANGES
from trioserve.contracts.step import IsAbandoned, never_abandoned

__all__ = [
    "GUIDANCE_MAX",
    "ImageDelta",
    "ImageModelDescription",
    "ImageParams",
    "ImageRequestLimits",
    "ImageTask",
    "IterativeEvent",
    "IterativeExecutor",
    "IterativePlan",
    "IterativeRequest",
    "IterativeResult",
    "IterativeStats",
    "LatentMove",
    "LatentWork",
    "OutputReady",
    "PARTIAL_IMAGES_MAX",
    "PNDM",
    "PROMPT_CHARACTERS_MAX",
    "RGBImage",
    "StepDone",
    "network_steps",
]

GUIDANCE_MAX = 100.0  # Images are saturated far below this guidance.
PARTIAL_IMAGES_MAX = 16  # The limit exists because decoding a partial image costs as much as decoding a finished image.
PNDM = "pndm"
# OpenAI's API has the same limit. The text encoder truncates longer prompts to its own limit.
PROMPT_CHARACTERS_MAX = 32_000


def network_steps(sampler: str, steps: int) -> int:
    """Return the number of times that a sampler calls the network for one image.

    The sampler PNDM calls the network twice in the first step if there are several steps.

    Args:
        sampler: Name of the sampler.
        steps: Denoising steps.
    """
    return steps + 1 if sampler == PNDM and steps > 1 else steps


class RGBImage(msgspec.Struct, frozen=True):
    """An RGB image. The constructor checks the values, because programs construct pictures and the executor relies on
    the values.

    Attributes:
        width: In pixels, 1 or more.
        height: In pixels, 1 or more.
        rgb: Three bytes for each pixel, row by row from the top left: width * height * 3 bytes.

    Raises:
        InvalidRequest: a value has a wrong type, is out of range, or the byte count does not fit the size.
    """

    width: int
    height: int
    rgb: bytes

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            side = to_int(name, getattr(self, name))
            if side < 1:
                refuse(name, side, "1 or more")
            msgspec.structs.force_setattr(self, name, side)
        if not isinstance(self.rgb, bytes):
            # Only bytes are accepted, because other buffers may change while another thread reads them.
            refuse("rgb", self.rgb, "bytes")
        if len(self.rgb) != 3 * self.width * self.height:
            raise InvalidRequest(
                f"rgb has {len(self.rgb)} bytes, and {self.width} x {self.height} pixels have "
                f"{3 * self.width * self.height}, three each",
                param="rgb",
            )


class ImageParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of an image generation request. A parameter that is None has the model's default.

    Values that no model supports are refused here. Values that the loaded model does not support are refused when the
    request enters the engine.

    Attributes:
        width: In pixels. If it is None and `image` is set, the image's own width is used, rounded to a size that the
            model supports.
        height: In pixels. If it is None and `image` is set, the image's own height is used in the same way.
        steps: Denoising steps.
        guidance: Weight of the prompt against the negative or empty prompt. At 1 or less, only the prompt is used.
        negative_prompt: Content to avoid. Has an effect only with guidance above 1.
        n: Number of images.
        seed: Seed of the first image. Image i has the seed plus i. None: the engine draws a seed.
        sampler: Name of one of the model's samplers.
        partial_images: Number of partial images to return for each image, after equal numbers of steps. A request with
            fewer steps gets fewer partial images.
        image: Image to change.
        mask: Mask of the same size as `image`. The model changes only pixels where the mean of the mask's colors is 128
            or more. None: all pixels may change.
        strength: Fraction of the image that is replaced by noise first, above 0 to 1. Only that fraction of the steps
            is computed. None: 0.8 without a mask, 1 with a mask.

    Raises:
        InvalidRequest: a value has a wrong type or is out of range. The message names the field.
    """

    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    negative_prompt: str | None = None
    n: int = 1
    seed: int | None = None
    sampler: str | None = None
    partial_images: int = 0
    image: RGBImage | None = None
    mask: RGBImage | None = None
    strength: float | None = None

    def __post_init__(self) -> None:
        for name in ("width", "height", "steps", "n", "partial_images", "seed"):
            self._keep(name, to_int)
        for name in ("guidance", "strength"):
            self._keep(name, to_float)
        for name in ("width", "height", "steps", "n"):
            value = getattr(self, name)
            if value is not None and value < 1:
                refuse(name, value, "1 or more")
        if not 0 <= self.partial_images <= PARTIAL_IMAGES_MAX:
            refuse("partial_images", self.partial_images, f"0 to {PARTIAL_IMAGES_MAX}")
        if self.seed is not None and not SAMPLING_RANGES["seed"].holds(self.seed):
            refuse("seed", self.seed, str(SAMPLING_RANGES["seed"]))
        if self.guidance is not None and not 0 <= self.guidance <= GUIDANCE_MAX:
            refuse("guidance", self.guidance, f"0 to {GUIDANCE_MAX:g}")
        if self.strength is not None and not 0 < self.strength <= 1:
            refuse("strength", self.strength, "above 0, up to 1")
        for name in ("negative_prompt", "sampler"):
            value = getattr(self, name)
            if value is not None:
                to_str(name, value)
        for name in ("image", "mask"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, RGBImage):
                refuse(name, value, "an RGBImage")
        if self.image is None:
            for name in ("mask", "strength"):
                if getattr(self, name) is not None:
                    refuse(name, getattr(self, name), "None without an image to change")
        elif self.mask is not None and (self.mask.width, self.mask.height) != (self.image.width, self.image.height):
            refuse(
                "mask",
                f"{self.mask.width}x{self.mask.height}",
                f"the size of the image, {self.image.width}x{self.image.height}",
            )

    def _keep(self, name: str, to_number: Callable[[str, object], int | float]) -> None:
        """Replace another library's number by Python's own int or float. None is kept if the field may be None."""
        value = getattr(self, name)
        if value is not None or name in ("n", "partial_images"):
            number = to_number(name, value)
            if number is not value:
                msgspec.structs.force_setattr(self, name, number)


class ImageTask(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one image that the executor needs in addition to seed and steps. See ImageParams.

    Attributes:
        prompt: Text of the prompt. For a model with classes instead of prompts, the index of a class.
        negative_prompt: Content to avoid. None if there is none.
        width: In pixels.
        height: In pixels.
        step_count: Steps of the whole schedule, counted by network_steps. With an image and a strength below 1, the
            request skips the first steps.
        guidance: Weight of the prompt.
        sampler: Name of the sampler.
        image: Image to change. None to start from noise.
        mask: Mask of the image. None if all pixels may change.
    """

    prompt: str | int
    negative_prompt: str | None
    width: int
    height: int
    step_count: int
    guidance: float
    sampler: str
    image: RGBImage | None = None
    mask: RGBImage | None = None


class ImageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one image of a request.

    Attributes:
        index: Image 0 .. n - 1.
        steps_done: Denoising steps that are done.
        step_count: Number of all denoising steps.
        picture: The image, if finish_reason is STOP. Before that, a partial image if requested. None if there is no new
            image.
        finish_reason: Set on the last delta of the image.
        message: Explanation of an early end.
        stop_reason: Machine-readable reason of an early end. None without an early end.
    """

    index: int
    steps_done: int
    step_count: int
    image: RGBImage | None = None
    finish_reason: FinishReason | None = None
    message: str | None = None
    stop_reason: str | None = None

    @property
    def unread_size(self) -> int:
        """Return 0, because joining two image deltas copies no pixels. So unread deltas are joined at once."""
        return 0

    @property
    def alternative_count(self) -> int:
        """Return 0: an image has no log probabilities."""
        return 0


class ImageModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Properties, defaults and limits of an image model.

    Attributes:
        served_names: Names of the model in the API. The first name is the main name.
        source: Path or name that the model was loaded from.
        family: For example "dit", "stable-diffusion" or "flux".
        width: Default width in pixels.
        height: Default height in pixels.
        steps: Default number of denoising steps.
        guidance: Default guidance.
        samplers: Supported samplers. The first is the default.
        side_multiple: Width and height must be multiples of this number of pixels.
        side_min: Smallest width and height.
        side_max: Largest width and height.
        steps_max: Number of noise levels in training.
        classes: Names of the classes that the model can draw. None: the model takes text prompts.
        takes_guidance: True if guidance has an effect.
        has_guided_rows: True if guidance computes a second row in each step. False if the network takes the guidance
            weight as an input.
        takes_negative: True if the model takes a negative prompt.
        takes_images: True if the model can change an image.
        created_at: Seconds since 1970.
        fingerprint: Identifies weights and arithmetic. None if not computed.
        pixels_per_work: Pixels for each unit of an IterativeRequest's work.
        encode_work: Work of encoding a prompt.
    """

    served_names: tuple[str, ...]
    source: str
    family: str
    width: int
    height: int
    steps: int
    guidance: float
    samplers: tuple[str, ...]
    side_multiple: int
    side_min: int
    side_max: int
    steps_max: int = 1000
    classes: tuple[str, ...] | None = None
    takes_guidance: bool = True
    has_guided_rows: bool = True
    takes_negative: bool = True
    takes_images: bool = False
    created_at: int = 0
    fingerprint: str | None = None
    pixels_per_work: int = 1024
    encode_work: int = 1

    @property
    def name(self) -> str:
        return self.served_names[0]

    def image_work(self, width: int, height: int) -> int:
        """Return the work of one row in a denoising step, which is also the work of decoding.

        Args:
            width: In pixels.
            height: In pixels.
        """
        return math.ceil(width * height / self.pixels_per_work)


class ImageRequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The server's limits for image requests, in addition to the model's limits.

    Attributes:
        pixels_max: Width times height of one image.
        steps_max: Denoising steps of one request.
        n_max: Images of one request.

    Raises:
        StartupError: a limit is below 1.
    """

    # The default is 2048 x 2048 pixels, four times the size for which most models were trained.
    pixels_max: int = 4 * 2**20
    steps_max: int = 250
    n_max: int = 10  # OpenAI's API has the same limit of images per request.

    def __post_init__(self) -> None:
        for name in ("pixels_max", "steps_max", "n_max"):
            if getattr(self, name) < 1:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be at least 1")


class IterativeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One object to generate, such as an image.

    Attributes:
        id: Id that the engine gave to the request.
        step_count: Denoising steps, at least 1.
        seed: 0 <= seed < 2**64. Seed and step determine all randomness, regardless of other requests.
        priority: PRIORITY_MIN to PRIORITY_MAX. A lower number runs sooner.
        is_guided: True if a denoising step computes two rows in one forward pass: with the prompt and without.
        encode_work: Work of encoding, at least 1, in the unit of IterativeSettings.step_work_max.
        denoise_work: Work of each row in a denoising step, at least 1.
        decode_work: Work of decoding, at least 1.
        partial_every: Denoising steps between two partial results. None for no partial results.
        task: Parameters for the executor. The core does not read them.
    """

    id: RequestId
    step_count: int
    seed: int
    priority: int = 0
    is_guided: bool = False
    encode_work: int = 1
    denoise_work: int = 1
    decode_work: int = 1
    partial_every: int | None = None
    task: object = None

    def work(self, phase: IterativePhase) -> int:
        """Return the work that the request adds to a forward pass.

        Args:
            phase: Phase of the forward pass. Not QUEUED.
        """
        if phase is IterativePhase.ENCODE:
            return self.encode_work
        if phase is IterativePhase.DECODE:
            return self.decode_work
        assert phase is IterativePhase.DENOISE, phase
        return self.denoise_work * (2 if self.is_guided else 1)


class LatentWork(msgspec.Struct, frozen=True):
    """The computation of one request in one forward pass.

    Attributes:
        request: The request.
        slot: Latent slot of the request.
        step: Denoising step, 0 to step_count - 1. 0 in the other phases.
        wants_partial: True if a partial result is needed after this step.
    """

    request: IterativeRequest
    slot: int
    step: int
    wants_partial: bool = False


class LatentMove(msgspec.Struct, frozen=True):
    """Move the whole content of one latent slot to another.

    Attributes:
        source: Slot to read.
        target: Slot to overwrite.
    """

    source: int
    target: int


class IterativePlan(msgspec.Struct, frozen=True):
    """One forward pass of one phase.

    Slots of running requests have the lowest numbers. Slots for the latents of preempted requests have higher numbers.

    Attributes:
        step_index: Number of the step, counted from 0.
        phase: Phase of all works.
        works: Requests to compute.
        work_count: Sum of their work.
        moves: Moves to do in this order before the computation, even if the step is abandoned.
        admitted: Requests that got a slot when this plan was made.
        preempted: Requests that lost their slot when this plan was made.
        freed: Slots that were freed since the previous plan. The executor drops their content before the moves.
    """

    step_index: int
    phase: IterativePhase
    works: tuple[LatentWork, ...]
    work_count: int
    moves: tuple[LatentMove, ...] = ()
    admitted: tuple[RequestId, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    freed: tuple[int, ...] = ()


class IterativeResult(msgspec.Struct, frozen=True):
    """The results of a plan.

    Attributes:
        outputs: Output of each request that was decoded.
        partials: Partial result of each work with wants_partial.
        errors: Requests that cannot continue, each with a sentence for the client. Other requests are not affected.
    """

    outputs: dict[RequestId, object] = {}
    partials: dict[RequestId, object] = {}
    errors: dict[RequestId, str] = {}


class IterativeExecutor(Protocol):
    """Computes plans, one at a time, in the thread that calls it.

    All state of a request is in its latent slot. A request that is missing in the next plan may have ended.
    """

    def execute(self, plan: IterativePlan, is_abandoned: IsAbandoned = never_abandoned) -> IterativeResult | None:
        """Drop the freed slots, do the moves, and compute the works.

        The result of one work does not depend on the other works of the plan. In float32, the bytes are equal.

        Args:
            plan: The forward pass.
            is_abandoned: True once no request waits for the result. The writes of an abandoned plan are never read.

        Returns:
            The results. For an abandoned plan, the executor may return None after it did the moves.

        Raises:
            Exception: a fault of the engine itself. A fault of one request goes into `errors`.
        """
        ...


class StepDone(msgspec.Struct, frozen=True):
    """Event: a denoising step of a request is complete.

    Attributes:
        request_id: The request.
        steps_done: Denoising steps done so far.
        partial: Partial result. None if not requested.
    """

    request_id: RequestId
    steps_done: int
    partial: object | None = None


class OutputReady(msgspec.Struct, frozen=True):
    """The output of a request. The core sends it once, before RequestFinished."""

    request_id: RequestId
    output: object


IterativeEvent = StepDone | OutputReady | RequestFinished


class IterativeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an iterative engine. Values ending in _total, except the two slot totals, only grow.

    Attributes:
        running_count: Requests with a slot.
        waiting_count: Requests that wait for a slot.
        slots_total: Slots for running requests.
        slots_used: Slots of running requests in use.
        kept_total: Slots for the latents of preempted requests.
        kept_used: Used slots among kept_total.
        steps_total: Number of steps.
        denoised_total: Denoising steps, summed over requests.
        preemptions_total: Number of preemptions.
    """

    running_count: int
    waiting_count: int
    slots_total: int
    slots_used: int
    kept_total: int
    kept_used: int
    steps_total: int
    denoised_total: int
    preemptions_total: int
