"""Context of one request to a server that generates images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from trioserve.api.caller import AccessRules
from trioserve.api.engine_context import EngineContext
from trioserve.http.clock_and_ids import ClockAndIds

if TYPE_CHECKING:
    from trioserve.admission.image_decoder import ImageDecoder
    from trioserve.api.images.edit_slots import EditSlots
    from trioserve.api.images.encoding_threads import EncodingThreads
    from trioserve.api.images.unsent_images import UnsentImages
    from trioserve.api.operations.routers_heard import RoutersHeard
    from trioserve.contracts.deadlines import Deadlines
    from trioserve.contracts.image_generation import ImageParams
    from trioserve.engine.images.image_engine import ImageEngine, ImageStream
    from trioserve.http.exchange import Exchange

__all__ = ["ImageContext"]

T = TypeVar("T")


class ImageRequest(Protocol):
    """Fields of a body that the engine needs in addition to ImageParams."""

    @property
    def prompt(self) -> str: ...
    @property
    def priority(self) -> int | None: ...


class ImageContext(EngineContext):
    """Context of one request. The handler answers it once.

    Args:
        exchange: See EngineContext.
        engine: The image engine.
        clock_and_ids: See EngineContext.
        threads: Threads that encode images.
        decoder: Decodes images that clients send.
        edits: Limits the edits that run at a time.
        unsent: Limits the memory of images that clients have not received.
        rules: See EngineContext.
        routers_heard: See EngineContext.
        tenant_header: See EngineContext.

    Attributes:
        streams: Streams of the engine that the request began.
        steps_done: Finished denoising steps, by index of the image.
    """

    engine: ImageEngine

    def __init__(
        self,
        exchange: Exchange,
        engine: ImageEngine,
        clock_and_ids: ClockAndIds,
        *,
        threads: EncodingThreads,
        decoder: ImageDecoder,
        edits: EditSlots,
        unsent: UnsentImages,
        rules: AccessRules,
        routers_heard: RoutersHeard,
        tenant_header: str,
    ) -> None:
        super().__init__(exchange, clock_and_ids, rules=rules, routers_heard=routers_heard, tenant_header=tenant_header)
        self.engine = engine
        self.threads = threads
        self.decoder = decoder
        self.edits = edits
        self.unsent = unsent
        self.streams: list[ImageStream] = []
        self.steps_done: dict[int, int] = {}

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.engine.model.served_names

    @property
    def tenant(self) -> str:
        """Tenant of the request. Requests of one tenant share one turn in queues."""
        return self.caller.tenant(self.named_tenant)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in a thread. Tenants take turns.

        Args:
            function: Function that uses only its own values, no shared state.

        Raises:
            Overloaded: Too many images of this tenant wait.
        """
        return await self.threads.run(function, tenant=self.tenant)

    def generate_image(self, body: ImageRequest, params: ImageParams, deadlines: Deadlines) -> ImageStream:
        """Create a request to the engine in this caller's name. Enter it with `async with`.

        Args:
            body: The body.
            params: Parameters for the engine.
            deadlines: Deadlines of the request.

        Raises:
            InvalidRequest: The caller may not use an option, or an option is out of range.
        """
        self.caller.check_priority(body.priority)
        stream = self.engine.generate_image(
            body.prompt,
            params,
            request_id=self.request_id,
            priority=body.priority or 0,
            deadlines=deadlines,
            owner=self.owner,
            tenant=self.tenant,
            part_of=self.span,
        )
        self.streams.append(stream)
        return stream
