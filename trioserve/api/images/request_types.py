"""Request bodies for image generation.

The fields are those of OpenAI's API, and sampler options under the names of vLLM-Omni, SGLang and diffusers. `None`
means "not given". Fields that are not listed here are ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from trioserve.api.openai.request_types import Int32
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.image_generation import GUIDANCE_MAX, PARTIAL_IMAGES_MAX, ImageParams, RGBImage
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range
from trioserve.vision.image_file import IMAGE_FORMATS, ImageFormat, ImageKind

__all__ = ["RANGES", "REFUSED", "ImageBody", "ImageEditBody", "ImageGenerationBody", "ImageStreamOptions"]

SIZE = re.compile(r"(\d{1,6})[x×](\d{1,6})")
AUTO = "auto"
QUALITIES = (AUTO, "standard")
BACKGROUNDS = (AUTO, "opaque")
MODERATIONS = (AUTO, "low")  # These values are accepted and ignored, because this server has no moderation.

RANGES = {
    "n": Range(1, None),
    "width": Range(1, None),
    "height": Range(1, None),
    "steps": Range(1, None),
    "num_inference_steps": Range(1, None),
    "guidance": Range(0.0, GUIDANCE_MAX),
    "guidance_scale": Range(0.0, GUIDANCE_MAX),
    "seed": SAMPLING_RANGES["seed"],
    "partial_images": Range(0, PARTIAL_IMAGES_MAX),
    "output_compression": Range(0, 100),
    "strength": Range(0.0, 1.0, is_low_excluded=True),
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
}
REFUSED = {
    "style": "describe the style in the prompt",
    "true_cfg_scale": "send guidance",
    "num_images_per_prompt": "send n",
    "negative_prompt_embeds": "send negative_prompt",
    "prompt_embeds": "send prompt",
    "svg": "this server generates pixel images only",
    "frame_count": "this server generates single images only",
    "markup": "send image and mask",
}
"""Refused fields, and what to do instead. Ignoring them would change the images."""


class ImageStreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a stream.

    Attributes:
        include_progress: True if each denoising step gets an event, even without an image.
    """

    include_progress: bool | None = None


class ImageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields for generating and editing images.

    Attributes:
        size: WIDTHxHEIGHT in pixels, or "auto". An alternative to width and height.
        seed: Seed of the first image. The next image has the seed plus one, and so on.
        steps: Denoising steps. Same as num_inference_steps.
        guidance: Strength of the prompt. Same as guidance_scale.
    """

    prompt: str
    model: str | None = None
    n: Int32 | None = None
    size: str | None = None
    width: Int32 | None = None
    height: Int32 | None = None
    seed: int | None = None
    steps: Int32 | None = None
    num_inference_steps: Int32 | None = None
    guidance: float | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    sampler: str | None = None
    stream: bool | None = None
    stream_options: ImageStreamOptions | None = None
    partial_images: Int32 | None = None
    output_format: str | None = None
    output_compression: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    response_format: str | None = None
    quality: str | None = None
    background: str | None = None
    moderation: str | None = None
    user: str | None = None
    priority: Int32 | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None
    # These are fields of other servers. A value is refused unless it is null or empty (see REFUSED).
    style: Any = None
    true_cfg_scale: Any = None
    num_images_per_prompt: Any = None
    negative_prompt_embeds: Any = None
    prompt_embeds: Any = None
    svg: Any = None
    frame_count: Any = None
    markup: Any = None

    def check(self) -> None:
        """Check rules that the types of the fields cannot express.

        Raises:
            InvalidRequest: A rule is broken.
        """
        for field, reason in REFUSED.items():
            if getattr(self, field) not in (None, False, "", [], {}):
                raise InvalidRequest(f"{field} is not supported: {reason}", param=field)
        _check_one_of(
            "response_format", self.response_format, ("b64_json",), ": the server stores no images, so it has no URLs"
        )
        _check_one_of("quality", self.quality, QUALITIES, ": send steps and size to change the quality")
        _check_one_of("background", self.background, BACKGROUNDS, ": the models cannot generate transparency")
        _check_one_of("moderation", self.moderation, MODERATIONS, "")
        if not self.stream:
            for field in ("partial_images", "stream_options"):
                if getattr(self, field):
                    raise InvalidRequest(f"{field} is only allowed when stream is true", param=field)

    @property
    def wants_progress(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_progress)

    def image_format(self) -> ImageFormat:
        """Return the file format for the images.

        Raises:
            InvalidRequest: The format is not supported.
        """
        kind: ImageKind = "png"
        if self.output_format is not None:
            found = next((name for name in IMAGE_FORMATS if name == self.output_format), None)
            if found is None:
                raise InvalidRequest(
                    f"output_format is {self.output_format[:40]!r}, allowed are {', '.join(IMAGE_FORMATS)}",
                    param="output_format",
                )
            kind = found
        quality = 100 if self.output_compression is None else self.output_compression
        if kind == "png" and quality != 100:
            raise InvalidRequest(
                f"output_compression is {quality}, but PNG is lossless: leave it out, or send output_format jpeg or "
                "webp",
                param="output_compression",
            )
        return ImageFormat(kind, quality)

    def params(self, **more: Any) -> ImageParams:
        """Return the parameters for the engine.

        Args:
            more: Further fields of ImageParams.

        Raises:
            InvalidRequest: A parameter is out of range. The error names the field that the client sent.
        """
        width, height = self._size()
        try:
            return ImageParams(
                width=width,
                height=height,
                steps=self._either("steps", "num_inference_steps"),
                guidance=self._either("guidance", "guidance_scale"),
                negative_prompt=self.negative_prompt or None,
                n=1 if self.n is None else self.n,
                seed=self.seed,
                sampler=self.sampler,
                partial_images=self.partial_images or 0,
                **more,
            )
        except InvalidRequest as error:
            raise self.as_sent(error) from None

    def as_sent(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error with its field renamed to the name that the client sent.

        Args:
            error: Error that names a field of ImageParams. It is changed in place.
        """
        names = {"steps": "num_inference_steps", "guidance": "guidance_scale"}
        param = error.param
        if param in ("width", "height") and self.size is not None:
            error.param = "size"
        elif param in names and getattr(self, param) is None:
            error.param = names[param]
        return error

    def _either(self, name: str, other: str) -> Any:
        value, other_value = getattr(self, name), getattr(self, other)
        if None not in (value, other_value) and value != other_value:
            raise InvalidRequest(f"{name} is {value} and {other} {other_value}: send one of them", param=other)
        return other_value if value is None else value

    def _size(self) -> tuple[int | None, int | None]:
        if self.size is None or self.size == AUTO:
            if (self.width is None) != (self.height is None):
                missing = "width" if self.width is None else "height"
                raise InvalidRequest(f"{missing} is missing: send both width and height, or size", param=missing)
            return self.width, self.height
        if self.width is not None or self.height is not None:
            raise InvalidRequest(
                "size is set together with width or height: send size, or width and height", param="size"
            )
        found = SIZE.fullmatch(self.size)
        if found is None:
            raise InvalidRequest(
                f"size is {self.size[:40]!r}, allowed is auto, or a width and a height in pixels such as 512x512",
                param="size",
            )
        return int(found[1]), int(found[2])


class ImageGenerationBody(ImageBody, frozen=True, kw_only=True):
    """Body of a request for images from a prompt: a text, or the name or index of a class."""

    # These are fields of /v1/images/edits.
    image: Any = None
    mask: Any = None
    strength: Any = None

    def check(self) -> None:
        for field in ("image", "mask", "strength"):
            if getattr(self, field) not in (None, "", [], {}):
                raise InvalidRequest(f"{field} is for editing an image: send a form to /v1/images/edits", param=field)
        super().check()


class ImageEditBody(ImageBody, frozen=True, kw_only=True):
    """Text fields of a form that edits an image. The image and the mask are files of the form.

    Attributes:
        strength: How much the result may differ from the image: above 0, up to 1.
        stream_options: In the form, each option is one part: stream_options[include_progress].
    """

    strength: float | None = None
    input_fidelity: str | None = None

    def edit_params(self, image: RGBImage, mask: RGBImage | None) -> ImageParams:
        """Return the parameters for the engine.

        Args:
            image: Decoded image.
            mask: Decoded mask. None: the whole image may change.

        Raises:
            InvalidRequest: A parameter is out of range. The error names the field that the client sent.
        """
        _check_one_of(
            "input_fidelity", self.input_fidelity, ("low",), ": send strength to choose how much of the image is kept"
        )
        return self.params(image=image, mask=mask, strength=self.strength)


def _check_one_of(name: str, value: str | None, allowed: tuple[str, ...], why: str) -> None:
    if value is not None and value not in allowed:
        raise InvalidRequest(f"{name} is {value[:40]!r}, allowed is {' or '.join(allowed)}{why}", param=name)
