"""The engine of a model that generates images, as a Trio program uses it.

`EngineLifecycle` has the code that this engine shares with the engine for text: queue, leases, deadlines, aborts by id,
drain, pauses and faults. `ImageWork` prepares requests for images, and passes them to the core.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterable, Callable, Generator
from random import Random
from typing import Any

import msgspec
import trio
from msgspec import UNSET

from trioserve.admission.router_metrics import show_router
from trioserve.contracts.arguments import to_str
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.image_generation import (
    ImageDelta,
    ImageModelDescription,
    ImageParams,
    ImageRequestLimits,
    RGBImage,
)
from trioserve.contracts.iterative import IterativeStats
from trioserve.contracts.page import LiveImageView
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.core.iterative.engine import IterativeCore
from trioserve.engine.images.image_work import ImageParts, ImageSteps, ImageWork
from trioserve.engine.images.open_image import OpenImage, view_of
from trioserve.engine.lifecycle.engine_lifecycle import EngineLifecycle
from trioserve.engine.lifecycle.request_admission import new_request_id
from trioserve.engine.lifecycle.scope_stream import ScopeStream, error_of
from trioserve.engine.lifecycle.work import CacheRelease, Guard
from trioserve.engine.request_preparation import instance_of
from trioserve.engine.settings import EngineSettings
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["ImageStream", "images_of", "ImageEngine"]


@uninterrupted
class ImageStream(ScopeStream[OpenImage, ImageDelta]):
    """The images of a request: `pictures = await engine.generate_image("a cat")`.

    To see partial results: `async with engine.generate_image("a cat") as stream: async for delta in stream: ...`.
    `ScopeStream` documents entering, iterating and leaving.

    A slow reader gets the newest delta of each image. The last delta of an image is always delivered.
    """

    def __await__(self) -> Generator[Any, Any, tuple[RGBImage, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[RGBImage, ...]:
        async with self:
            return await self.pictures()

    async def pictures(self) -> tuple[RGBImage, ...]:
        """Wait for all images.

        Returns:
            The images, in the order of their indexes.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: an image was not generated. The first failed image decides
                which error is raised.
            EngineFault: the engine broke.
        """
        return await images_of(self)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image of the request."""
        return self._request.seeds

    @property
    def step_count(self) -> int:
        """Number of denoising steps of each image. Available after entering."""
        return self._request.wanted.step_count

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of each image. Available after entering."""
        task = self._request.wanted.task
        return task.width, task.height


async def images_of(deltas: AsyncIterable[ImageDelta]) -> tuple[RGBImage, ...]:
    """Wait for all images of a stream and return them. See `ImageStream.pictures`.

    Args:
        deltas: an entered stream.
    """
    made: dict[int, RGBImage] = {}
    async for delta in deltas:
        if (error := error_of(delta)) is not None:
            raise error
        if delta.finish_reason is not None:
            assert delta.image is not None, "a finished image is missing"
            made[delta.index] = delta.image
    return tuple(made[index] for index in sorted(made))


DRAWN_SEED_BITS = 53  # Clients may send this seed back to the server. JavaScript's numbers are exact up to 53 bits.


@uninterrupted
class ImageEngine(EngineLifecycle[OpenImage, ImageParts]):
    """An engine that serves one image model. `open_image_engine` creates it.

    Args:
        model: description of the model.
        core: scheduler and owner of the slots.
        steps: computes the plans of the core.
        metrics: registry that contains the image metrics.
        settings: limits of the engine.
        limits: limits of requests, in addition to those of the model. None: default limits.
        new_request_id: makes the id of a request whose caller gives none.
        guard: see `EngineParts`.
        cache_release: see `EngineParts`.
    """

    _core: IterativeCore

    def __init__(
        self,
        *,
        model: ImageModelDescription,
        core: IterativeCore,
        steps: ImageSteps,
        metrics: Metrics,
        settings: EngineSettings,
        limits: ImageRequestLimits | None = None,
        new_request_id: Callable[[], str] = new_request_id,
        guard: Guard | None = None,
        cache_release: CacheRelease[ImageParts] | str = ImageParts._field_defaults["cache_release"],
    ) -> None:
        limits = limits or ImageRequestLimits()
        self.model = model
        self.limits = msgspec.structs.replace(limits, steps_max=min(limits.steps_max, model.steps_max))
        self._draw_bits = secrets.randbits if settings.seed is None else Random(settings.seed).getrandbits
        work = ImageWork(model, core.settings, self.limits, metrics)
        self.step_times = work.step_times
        super().__init__(
            work,
            ImageParts(core, steps, guard, cache_release),
            metrics=metrics,
            settings=settings,
            sequences_max=core.settings.slot_count,
            lent_max=core.settings.kept_slot_count,
            new_request_id=new_request_id,
        )
        show_router(metrics, self.dispatch)

    # --- requests ---

    def generate_image(
        self,
        prompt: str,
        params: ImageParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadlines: Deadlines | None = None,
        owner: str | None = None,
        tenant: str | None = None,
        part_of: Span = NO_SPAN,
    ) -> ImageStream:
        """Create a request for images. Await it for all images, or enter it with `async with`. It uses no resources
        before.

        All images of a request are one request: they wait in the queue once, and use one lease.

        Args:
            prompt: description of the image. For a model of classes: the name of a class, or its index as text.
            params: size, steps and other options. Default: the model's defaults.
            request_id: the caller's id. It need not be unique: an abort by id ends all requests with this id. Default:
                a new id.
            priority: PRIORITY_MIN to PRIORITY_MAX (-100 to 100). A lower number runs sooner. A running image can lose
                its slot to a request with a lower number. It later continues from the step where it stopped.
            deadlines: limits in seconds, counted from entering. A request that passes a deadline ends with finish
                reason DEADLINE. For `ttft_timeout`, the first partial or complete image counts as the first token.
            owner: user who may see and abort the request by its id, besides users who may see all requests.
            tenant: the queue is fair between tenants. Default: the owner.
            part_of: parent span of the request's trace.

        Returns:
            The stream, to be awaited or entered.

        Raises:
            InvalidRequest: an argument has a wrong type. `param` names it. Options that this model does not support are
                reported on entering.
        """
        params = instance_of(ImageParams, "params", params, ImageParams())
        request = OpenImage(
            to_str("prompt", prompt),
            params,
            seed=self._draw_bits(DRAWN_SEED_BITS) if params.seed is None else params.seed,
            **self._admission.arguments(
                request_id=request_id,
                priority=priority,
                deadlines=deadlines,
                owner=owner,
                tenant=tenant,
                part_of=part_of,
            ),
        )
        return ImageStream(request, submit=self._submit, leave=self._leave, own_run=self._own_run)

    def live_requests(self, *, owner: str | None = None) -> list[LiveImageView]:
        """Describe every request whose scope is entered. The oldest request comes first.

        Args:
            owner: only requests of this user. None: all requests.
        """
        self._own_run.check("engine.live_requests")
        lives = {live.request.id: live for live in self._core.live_requests()}
        now = trio.current_time()
        requests = [request for request in self.requests if owner in (None, request.owner)]
        return [
            view_of(request, [lives.get(choice.sequence_id) for choice in request.choices], now)
            for request in sorted(requests, key=lambda request: request.entered_at)
        ]

    def stats(self) -> IterativeStats:
        """Return the numbers of images and slots in each state, as a frozen snapshot."""
        self._own_run.check_process("engine.stats")
        return self._core.stats()

    def load(self) -> EndpointLoad:
        """Return the load of this engine, for a router."""
        self._own_run.check_process("engine.load")
        stats = self._core.stats()
        return EndpointLoad(
            running=stats.running_count,
            waiting=stats.waiting_count + self.preparing_count,
            max_num_seqs=self._core.settings.slot_count,
            kv_usage=stats.slots_used / stats.slots_total,
            fingerprint=UNSET if self.model.fingerprint is None else self.model.fingerprint,
        )
