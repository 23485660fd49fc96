"""Pictures that a model makes: what may be asked, what a model takes, and what comes of it, step by step.

A request for n pictures is n things that are denoised, each with a seed of its own: that of the first, and one more for
each further one. What an IterativeRequest carries for the executor is an ImageTask; what the executor gives back, as a
partial result or as the output, is a Picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from trioserve.contracts.arguments import refuse, to_float, to_int, to_str
from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.sampling import SAMPLING_RANGES

__all__ = [
    "GUIDANCE_MAX",
    "PARTIAL_IMAGES_MAX",
    "PNDM",
    "PROMPT_CHARACTERS_MAX",
    "ImageDelta",
    "ImageModelDescription",
    "ImageParams",
    "ImageRequestLimits",
    "ImageTask",
    "Picture",
    "network_steps",
]

GUIDANCE_MAX = 100.0  # far beyond this every picture is saturated
PARTIAL_IMAGES_MAX = 16  # each is decoded as a finished picture is
PNDM = "pndm"
PROMPT_CHARACTERS_MAX = 32_000  # as in OpenAI's API; what the text encoder does not take of it is cut


def network_steps(sampler: str, steps: int) -> int:
    """How often a sampler asks the network for a picture of so many steps: PNDM does the first of several twice."""
    return steps + 1 if sampler == PNDM and steps > 1 else steps


class Picture(msgspec.Struct, frozen=True):
    """rgb: three bytes for each pixel, row by row from the top left, width * height * 3 in all. Raises InvalidRequest
    for what is none: programs make them, too, and what computes with one asks nothing any more."""

    width: int
    height: int
    rgb: bytes

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            side = to_int(name, getattr(self, name))
            if side < 1:
                refuse(name, side, "1 or more")
            msgspec.structs.force_setattr(self, name, side)
        if not isinstance(self.rgb, bytes):  # no buffer that may change while another thread reads it
            refuse("rgb", self.rgb, "bytes")
        if len(self.rgb) != 3 * self.width * self.height:
            raise InvalidRequest(
                f"rgb has {len(self.rgb)} bytes, and {self.width} x {self.height} pixels have "
                f"{3 * self.width * self.height}, three each",
                param="rgb",
            )


class ImageParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asks for; None leaves it to the model. Raises InvalidRequest for what no model could do; what the
    model at hand cannot do is refused on entering.

    width, height: in pixels; None of an image that is changed: its own size, as near as the model comes to it. steps:
    denoising steps. guidance: how much more the prompt counts than no prompt (or the
    negative one); 1 or less: the prompt alone. negative_prompt: what is not to be seen, with guidance above 1. n: how
    many pictures. seed: of the first; picture i has the seed + i. None: a random one. sampler: one of the model's
    samplers. partial_images: so many times, at even distances, what has become of each picture so far is wanted; fewer
    times where it has fewer steps.
    image: what is to be changed, with width and height of its own; mask: the same size, bright (128 and more, of the
    mean of its colours) where it may change; None: everywhere. strength: above 0 to 1, how much of the image is lost
    first; of the steps that part is done. None: 0.8, or all of what a mask lets change.
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
    image: Picture | None = None
    mask: Picture | None = None
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
            if value is not None and not isinstance(value, Picture):
                refuse(name, value, "a Picture")
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
        """As a number of Python's own: it travels far. None stays what it is where it may be left out."""
        value = getattr(self, name)
        if value is not None or name in ("n", "partial_images"):
            number = to_number(name, value)
            if number is not value:
                msgspec.structs.force_setattr(self, name, number)


class ImageTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor has to know of one picture beside its seed and its steps: ImageParams, each with its value.

    prompt: or the index of a class, for a model that knows classes and no texts. step_count: of the whole schedule,
    counted by network_steps; of an image that is changed with a strength below 1 the first of them are left out, so
    that its request has fewer.
    """

    prompt: str | int
    negative_prompt: str | None
    width: int
    height: int
    step_count: int
    guidance: float
    sampler: str
    image: Picture | None = None
    mask: Picture | None = None


class ImageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one of a request's pictures.

    index: which of the n. steps_done of step_count denoising steps. picture: with a finish_reason the picture (STOP);
    without one, what it is so far, if that was wanted; None: there is none, or nothing new of it. message and
    stop_reason: of an end that is not the picture's own.
    """

    index: int
    steps_done: int
    step_count: int
    picture: Picture | None = None
    finish_reason: FinishReason | None = None
    message: str | None = None
    stop_reason: str | None = None

    @property
    def unread_size(self) -> int:
        """Nothing is copied when two deltas are joined, so they are joined at once and one image is held."""
        return 0

    @property
    def alternative_count(self) -> int:
        """Log probabilities in the delta: none."""
        return 0


class ImageModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a model that makes pictures is, and takes.

    served_names: the first is its name. family: such as "dit", "stable-diffusion", "flux". width, height, steps,
    guidance, samplers: what it does by itself, the first of the samplers. side_multiple: width and height are
    multiples of it. side_min, side_max: of each. steps_max: so many noise levels it was trained with. classes: the
    names of what it can make; None: it takes texts. takes_guidance: whether the prompt can count more.
    has_guided_rows: whether that takes a second row in each step; otherwise the model is told the number.
    takes_negative: of texts. takes_images: it can change one. created_at: seconds since 1970. fingerprint: names
    weights and arithmetic; None: nobody compares. pixels_per_work: so many pixels cost one unit of an
    IterativeRequest's work. encode_work: what a prompt costs.
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

    def picture_work(self, width: int, height: int) -> int:
        """What a row of such a picture costs in a denoising step, and what decoding it costs."""
        return math.ceil(width * height / self.pixels_per_work)


class ImageRequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken of callers beside what the model takes. pixels_max: width times height of one picture. steps_max,
    n_max: of one request. Raises StartupError."""

    pixels_max: int = 4 * 2**20  # 2048 x 2048: four times what most models were made for
    steps_max: int = 250
    n_max: int = 10  # as in OpenAI's API

    def __post_init__(self) -> None:
        for name in ("pixels_max", "steps_max", "n_max"):
            if getattr(self, name) < 1:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be at least 1")
