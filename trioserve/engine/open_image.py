"""The engine's state of a request for images: its options, and the progress that its reader has received.

`ImagePreparation` checks whether the model supports a request for images, and creates the tasks for the core and the
executor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from trioserve.admission.local_endpoint import local_request
from trioserve.contracts.arguments import closest_name, shown
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import FinishReason, IterativePhase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import (
    PROMPT_CHARACTERS_MAX,
    ImageDelta,
    ImageModelDescription,
    ImageParams,
    ImageRequestLimits,
    ImageTask,
    IterativeRequest,
    RGBImage,
    network_steps,
)
from trioserve.contracts.page import LiveImageView
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.tracing import NO_SPAN, Attributes, Span
from trioserve.core.iterative_core import LiveIteration
from trioserve.core.request_state import RequestStatus
from trioserve.engine.lifecycle.request_scope import RequestPart, RequestScope
from trioserve.engine.lifecycle.request_trace import SpannedRequest

__all__ = [
    "ImageChoice",
    "ImagePreparation",
    "OPERATION",
    "OpenImage",
    "SpannedImage",
    "ImageSpec",
    "image_attributes",
    "merge",
    "view_of",
]

STRENGTH = 0.8  # Default strength for an image that is changed, as in diffusers' pipelines.
MASKED_STRENGTH = 1.0  # Default strength with a mask: the masked area is generated from noise.
NAMED_MAX = 5  # An error message lists at most this many classes.
INDEX_DIGITS_MAX = 18  # Python refuses to parse a number with thousands of digits.


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of each image of a request, without its seed.

    Attributes:
        task: options for the executor. Its step count is the length of the whole schedule.
        step_count: denoising steps of an image. When an image is changed, fewer steps than in the schedule.
        is_guided: True if each image needs a second row in the batch, for classifier-free guidance.
        partial_every: steps between two partial results. None: no partial results.
        work: cost of one row in a denoising step. Decoding has the same cost.
        encode_work: cost of encoding.
    """

    task: ImageTask
    step_count: int
    is_guided: bool
    partial_every: int | None
    work: int
    encode_work: int

    def core_request(self, id: RequestId, *, seed: int, priority: int) -> IterativeRequest:
        """Return the core's request for one image.

        Args:
            id: id of the image in the core.
            seed: seed of the image.
            priority: a lower number runs sooner.
        """
        return IterativeRequest(
            id=id,
            step_count=self.step_count,
            seed=seed,
            priority=priority,
            is_guided=self.is_guided,
            encode_work=self.encode_work,
            denoise_work=self.work,
            decode_work=self.work,
            partial_every=self.partial_every,
            task=self.task,
        )


class ImagePreparation:
    """Checks and prepares requests for one image model.

    Args:
        model: description of the model.
        limits: limits of requests.
        step_work_max: highest cost of one step of the core.
    """

    def __init__(self, model: ImageModelDescription, limits: ImageRequestLimits, *, step_work_max: int) -> None:
        self._model = model
        self._limits = limits
        self._step_work_max = step_work_max
        self._classes: dict[str, int] = {}
        for index, name in enumerate(model.classes or ()):
            self._classes.setdefault(_plain(name), index)
        for index, name in enumerate(model.classes or ()):
            # ImageNet's class names are lists of synonyms, such as "goldfish, Carassius auratus".
            for synonym in name.split(","):
                self._classes.setdefault(_plain(synonym), index)

    def spec(self, prompt: str, params: ImageParams, *, priority: int) -> ImageSpec:
        """Describe the images of a request.

        Args:
            prompt: description of the images, or the name of a class.
            params: options of the request.
            priority: priority of the request.

        Returns:
            The description.

        Raises:
            InvalidRequest: this model cannot generate such an image. `param` names the option.
        """
        model, limits = self._model, self._limits
        _check_most("n", params.n, limits.n_max, "images of one request")
        if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
            raise InvalidRequest(
                f"priority is {priority}, allowed is {PRIORITY_MIN} to {PRIORITY_MAX}", param="priority"
            )
        steps = min(model.steps, limits.steps_max) if params.steps is None else params.steps
        _check_most("steps", steps, limits.steps_max, "denoising steps")
        guidance = self._guidance(params)
        is_guided = model.takes_guidance and model.has_guided_rows and guidance > 1
        self._check_image(params)
        width, height = self._side("width", params), self._side("height", params)
        work = self._work(width, height, is_guided=is_guided)
        sampler = self._sampler(params)
        step_count = network_steps(sampler, steps) - steps + _step_count(params, steps)
        task = ImageTask(
            prompt=self._prompt(prompt),
            negative_prompt=self._negative(params, guidance),
            width=width,
            height=height,
            step_count=network_steps(sampler, steps),
            guidance=guidance,
            sampler=sampler,
            image=params.image,
            mask=params.mask,
        )
        return ImageSpec(
            task=task,
            step_count=step_count,
            is_guided=is_guided,
            # Partial images have equal distances, so there may be fewer than requested.
            # The last step gives the complete image.
            partial_every=math.ceil(step_count / (params.partial_images + 1)) if params.partial_images else None,
            work=work,
            # The network that decodes also encodes an image that is changed.
            # A step can always compute at least one row.
            encode_work=model.encode_work if params.image is None else max(model.encode_work, work),
        )

    def _prompt(self, prompt: str) -> str | int:
        if len(prompt) > PROMPT_CHARACTERS_MAX:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} characters, at most {PROMPT_CHARACTERS_MAX} are allowed", param="prompt"
            )
        classes = self._model.classes
        if classes is None:
            _check_whole("prompt", prompt)
            return prompt
        index = self._classes.get(_plain(prompt))
        if index is not None:
            return index
        number = prompt.strip()
        if number.isdecimal() and len(number) <= INDEX_DIGITS_MAX and int(number) < len(classes):
            return int(number)
        names = ", ".join(classes[:NAMED_MAX]) + (", ..." if len(classes) > NAMED_MAX else "")
        nearest = closest_name(prompt.strip(), classes)
        hint = f"one of {names}" if nearest is None else f'did you mean "{nearest}"?'
        raise InvalidRequest(
            f"{self._model.name} generates images of {len(classes)} classes, and {shown(prompt)} is none of them: "
            f"give the name of a class, or its index, 0 to {len(classes) - 1}; {hint}",
            param="prompt",
        )

    def _guidance(self, params: ImageParams) -> float:
        if params.guidance is None:
            return self._model.guidance
        if not self._model.takes_guidance:
            raise InvalidRequest(
                f"guidance is {params.guidance:g}, and {self._model.name} does not support guidance: leave it out",
                param="guidance",
            )
        return params.guidance

    def _negative(self, params: ImageParams, guidance: float) -> str | None:
        negative = params.negative_prompt
        if negative is None:
            return None
        if self._model.classes is not None or not self._model.takes_negative:
            raise InvalidRequest(
                f"{self._model.name} does not support negative prompts: leave negative_prompt out",
                param="negative_prompt",
            )
        if guidance <= 1:
            raise InvalidRequest(
                f"negative_prompt has an effect only with a guidance above 1, and guidance is {guidance:g}: raise it, "
                "or leave negative_prompt out",
                param="negative_prompt",
            )
        if len(negative) > PROMPT_CHARACTERS_MAX:
            raise InvalidRequest(
                f"negative_prompt has {len(negative)} characters, at most {PROMPT_CHARACTERS_MAX} are allowed",
                param="negative_prompt",
            )
        _check_whole("negative_prompt", negative)
        return negative

    def _sampler(self, params: ImageParams) -> str:
        samplers = self._model.samplers
        if params.sampler is None:
            return samplers[0]
        if params.sampler not in samplers:
            raise InvalidRequest(
                f"sampler is {shown(params.sampler)}, {self._model.name} has {', '.join(samplers)}", param="sampler"
            )
        return params.sampler

    def _check_image(self, params: ImageParams) -> None:
        if params.image is not None and not self._model.takes_images:
            name = "mask" if params.mask is not None else "image"
            raise InvalidRequest(f"{self._model.name} cannot change images: leave {name} out", param=name)

    def _side(self, name: str, params: ImageParams) -> int:
        """Return the width or height of the image. An image that is changed keeps its own size by default, rounded to a
        size that the model allows.
        """
        model = self._model
        multiple = model.side_multiple
        asked: int | None = getattr(params, name)
        if asked is None and params.image is None:
            default: int = getattr(model, name)
            return default
        if asked is None:
            own: int = getattr(params.image, name)
            low, high = -(-model.side_min // multiple), model.side_max // multiple
            return min(max(own // multiple, low), high) * multiple
        if not model.side_min <= asked <= model.side_max or asked % multiple:
            allowed = (
                f"{model.side_min} alone"
                if model.side_min == model.side_max
                else f"multiples of {multiple} from {model.side_min} to {model.side_max}"
            )
            raise InvalidRequest(f"{name} is {asked}, {model.name} takes {allowed}", param=name)
        return asked

    def _work(self, width: int, height: int, *, is_guided: bool) -> int:
        if width * height > self._limits.pixels_max:
            raise InvalidRequest(
                f"width times height is {width} * {height} = {width * height}, at most {self._limits.pixels_max} "
                "pixels are allowed here",
                param="width",
            )
        work = self._model.image_work(width, height)
        rows = 2 if is_guided else 1
        if work * rows > self._step_work_max:
            raise InvalidRequest(
                f"an image of {width} x {height}{' with guidance' if is_guided else ''} costs {work * rows} per step, "
                f"and a step may cost {self._step_work_max}: ask for a smaller image",
                param="width",
            )
        return work


def _check_most(name: str, value: int, most: int, what: str) -> None:
    if value > most:
        raise InvalidRequest(f"{name} is {value}, at most {most} {what} are allowed here", param=name)


def _check_whole(name: str, text: str) -> None:
    """Refuse half a surrogate pair in a text. No tokenizer accepts it, so it would fail the step of all requests."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} holds U+{ord(text[error.start]):04X} at character {error.start}, half of a surrogate pair: send "
            "both halves of characters beyond U+FFFF",
            param=name,
        ) from None


def _step_count(params: ImageParams, steps: int) -> int:
    """Return the number of denoising steps. A changed image skips the first steps, depending on `strength`, as in
    diffusers.
    """
    if params.image is None:
        return steps
    default = STRENGTH if params.mask is None else MASKED_STRENGTH
    strength = default if params.strength is None else params.strength
    return max(1, min(int(steps * strength), steps))


def _plain(name: str) -> str:
    return " ".join(name.lower().split())


PHASES = tuple(IterativePhase)


class ImageChoice(RequestPart["OpenImage"]):
    """One of a request's n images.

    Args:
        index: index of the image.
        sequence_id: id of the image in the core.

    Attributes:
        core_request: the core's request for the image. None until the request is prepared.
        steps_done: denoising steps whose progress was delivered.
        image: the complete image. It is set shortly before the image ends.
        first_shown_at: time at which the first partial or complete image was delivered. None: none was delivered yet.
    """

    __slots__ = ("core_request", "first_shown_at", "image", "steps_done")

    def __init__(self, request: OpenImage, index: int, sequence_id: RequestId) -> None:
        super().__init__(request, index, sequence_id)
        self.core_request: IterativeRequest | None = None
        self.steps_done = 0
        self.image: RGBImage | None = None
        self.first_shown_at: float | None = None

    @property
    def progress(self) -> int:
        return self.steps_done


class OpenImage(RequestScope[ImageChoice, ImageDelta, IterativeRequest]):
    """A request for images. `ImageEngine.generate_image` documents the options.

    Args:
        prompt: description of the images.
        params: options of the images.
        seed: seed of the first image.
        request_id: the caller's id.
        priority: a lower number runs sooner.
        deadlines: deadlines of the request.
        owner: user who may see and abort the request. None: not restricted.
        tenant: the queue is fair between tenants.
        part_of: parent span of the request's trace.

    Attributes:
        spec: description of the images. It is derived from `prompt` and `params` when the request is entered.
    """

    spec: ImageSpec

    def __init__(
        self,
        prompt: str,
        params: ImageParams,
        *,
        seed: int,
        request_id: str,
        priority: int,
        deadlines: Deadlines,
        owner: str | None,
        tenant: str,
        part_of: Span = NO_SPAN,
    ) -> None:
        super().__init__(
            request_id=request_id,
            priority=priority,
            deadlines=deadlines,
            owner=owner,
            tenant=tenant,
            sequence_count=params.n,
            merge=merge,
            part_of=part_of,
        )
        # Another server can resume the request, because the same prompt and seed give the same images.
        self.is_resumable = True
        self.prompt = prompt
        self.params = params
        self.seeds = tuple((seed + index) % 2**64 for index in range(params.n))

    def routed(self) -> RoutedRequest:
        return local_request((self.prompt,), tenant=self.tenant, priority=self.priority, sequences=self.sequence_count)

    def delta(self, choice: ImageChoice, image: RGBImage | None) -> ImageDelta:
        """Make a delta with the progress of an image.

        Args:
            choice: the image.
            image: a partial result. None: the delta has no image.
        """
        return ImageDelta(
            index=choice.index, steps_done=choice.steps_done, step_count=self.spec.step_count, image=image
        )

    def push_whole(self, choice: ImageChoice) -> None:
        """Push the last delta of an image, with the complete image.

        Args:
            choice: the image.
        """
        assert choice.image is not None, f"{choice.sequence_id} ended without an image"
        choice.is_ended = True
        self.push(
            ImageDelta(
                index=choice.index,
                steps_done=choice.steps_done,
                step_count=self.spec.step_count,
                image=choice.image,
                finish_reason=FinishReason.STOP,
            )
        )
        choice.image = None  # Free the memory here, because only the reader needs the image now.

    def push_end(
        self, choice: ImageChoice, reason: FinishReason, message: str | None = None, *, stop_reason: str | None = None
    ) -> None:
        choice.is_ended = True
        choice.image = None
        self.push(
            ImageDelta(
                index=choice.index,
                steps_done=choice.steps_done,
                step_count=self.spec.step_count,
                finish_reason=reason,
                message=message,
                stop_reason=stop_reason,
            )
        )


def merge(pending: ImageDelta, delta: ImageDelta) -> ImageDelta:
    """Merge two consecutive unread deltas of one image.

    The result has the progress of the newer delta. An unread image is kept, unless the newer delta has an image or
    is the last one.

    Args:
        pending: the older delta.
        delta: the newer delta.
    """
    if delta.image is not None or delta.finish_reason is not None or pending.image is None:
        return delta
    return msgspec.structs.replace(delta, image=pending.image)


def view_of(request: OpenImage, lives: Sequence[LiveIteration | None], now: float) -> LiveImageView:
    """Describe a request for images for status pages, from the state in the engine and in the core.

    Args:
        lives: the core's state per image. None: the image has ended, or has not reached the core.
        now: seconds of Trio's clock.
    """
    living = [live for live in lives if live is not None]
    if request.is_finished:
        state = "finished"
    elif not living:
        state = "preparing"
    else:
        state = "running" if any(live.status is RequestStatus.RUNNING for live in living) else "waiting"
    if any(choice.is_ended and choice.has_run for choice in request.choices):
        phase = IterativePhase.DECODE
    else:
        phase = max((live.phase for live in living), key=PHASES.index, default=IterativePhase.QUEUED)
    return LiveImageView(
        id=request.id,
        state=state,
        phase=phase,
        priority=request.priority,
        age_seconds=now - request.entered_at,
        image_count=request.sequence_count,
        steps_done=sum(choice.steps_done for choice in request.choices),
        step_count=request.spec.step_count * request.sequence_count,
        slot_count=sum((live.slot is not None) + (live.kept_slot is not None) for live in living),
    )


OPERATION = "generate_content"


class SpannedImage(SpannedRequest):
    """Records the events of a request for images in a span. Images have no tokens, so the first image begins no new
    stage.
    """

    __slots__ = ()

    def leased(self) -> None:
        self._begin("wait")

    def runs(self) -> None:
        if not self._has_run:
            self._has_run = True
            self._begin("denoise")

    def first_token(self) -> None:
        if not self._has_token:
            self._has_token = True
            self._span.event("first_picture")

    def left(self, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        self._is_left = True
        self._span.note({"gen_ai.response.finish_reasons": self._reasons})
        self._end_if_over()


def image_attributes(request: OpenImage) -> Attributes:
    """Return the options of a request as trace attributes. The prompt is never included, because it is the caller's
    text.
    """
    task = request.spec.task
    return {
        "gen_ai.output.type": "image",
        "gen_ai.request.choice.count": request.sequence_count,
        "trioserve.image.width": task.width,
        "trioserve.image.height": task.height,
        "trioserve.image.steps": request.spec.step_count,
        "trioserve.image.guidance": task.guidance,
        "trioserve.image.sampler": task.sampler,
    }
