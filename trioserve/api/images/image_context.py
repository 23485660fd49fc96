"""One request of the API of pictures: what came in, and the engine that it asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from trioserve.api.caller import AccessRules
from trioserve.api.engine_context import EngineContext
from trioserve.http.clock_and_ids import ClockAndIds

if TYPE_CHECKING:
    from trioserve.admission.image_decoder import ImageDecoder
    from trioserve.api.images.edit_places import EditPlaces
    from trioserve.api.images.picture_threads import PictureThreads
    from trioserve.api.images.unsent_pictures import UnsentPictures
    from trioserve.api.operations.routers_heard import RoutersHeard
    from trioserve.contracts.deadlines import Deadlines
    from trioserve.contracts.image_generation import ImageParams
    from trioserve.engine.images.image_engine import ImageEngine
    from trioserve.engine.images.image_stream import ImageStream
    from trioserve.http.exchange import Exchange

__all__ = ["ImageContext"]

T = TypeVar("T")


class AsksPictures(Protocol):
    """What a body asks of the engine besides a prompt and ImageParams."""

    @property
    def prompt(self) -> str: ...
    @property
    def priority(self) -> int | None: ...


class ImageContext(EngineContext):
    """Handlers get one of these, and answer it once.

    threads: where pictures are written. decoder: of images that are to be changed, edits: how many at a time. unsent:
    what clients have not taken.
    streams: those that it has made. steps_done: of each picture, as its client was told.
    """

    engine: ImageEngine

    def __init__(
        self,
        exchange: Exchange,
        engine: ImageEngine,
        clock_and_ids: ClockAndIds,
        *,
        threads: PictureThreads,
        decoder: ImageDecoder,
        edits: EditPlaces,
        unsent: UnsentPictures,
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
        """With whom it shares one turn."""
        return self.caller.tenant(self.named_tenant)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function of values in a thread, in turn with other tenants.

        Raises:
            Overloaded: too many images of this tenant wait.
        """
        return await self.threads.run(function, tenant=self.tenant)

    def generate_image(self, body: AsksPictures, params: ImageParams, deadlines: Deadlines) -> ImageStream:
        """A request to the engine in this caller's name, to be entered with `async with`. Raises InvalidRequest for
        what the caller may not ask for."""
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
