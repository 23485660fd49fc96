"""Context of one request to a server that generates images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from trioserve.api.request_context import EngineContext, EngineServices
from trioserve.contracts.errors import Overloaded
from trioserve.trio_tools.fair_slots import FairSlots

if TYPE_CHECKING:
    from trioserve.admission.file_decoders import ImageDecoder
    from trioserve.contracts.deadlines import Deadlines
    from trioserve.contracts.image_generation import ImageParams
    from trioserve.engine.image_engine import ImageEngine, ImageStream
    from trioserve.http.exchange import Exchange

__all__ = ["EditSlots", "EncodingThreads", "ImageContext", "UnsentImages", "UnsentShare"]

T = TypeVar("T")

THREADS_MAX = 2  # The engine needs the other cores to compute images.


class EncodingThreads:
    """Threads that encode images. Tenants take turns.

    A cancelled caller leaves at once. Its thread stays occupied until the function returns.

    Args:
        threads_max: Threads at a time.
    """

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        self._places = FairSlots(threads_max, what="images")

    async def run(self, function: Callable[[], T], *, tenant: str) -> T:
        """Call a function in a thread.

        Args:
            function: Function that uses only its own values, no shared state.
            tenant: Tenant of the request.

        Raises:
            Overloaded: Too many images of this tenant wait.
        """
        return await self._places.call(function, key=tenant)


EDITS_MAX = 32  # With masks and images of the largest size, this number of edits takes less than a gigabyte.
RETRY_SECONDS = 5.0


class EditSlots:
    """Counts the image edits that run at a time.

    A named tenant gets at most three quarters of the slots, so that some slots stay free for other tenants. Callers
    without a tenant name cannot be distinguished, so together they may use all slots.

    Args:
        edits_max: Number of slots.
    """

    def __init__(self, edits_max: int = EDITS_MAX) -> None:
        self._taken: Counter[str] = Counter()  # by tenant
        self._edits_max = edits_max
        self._own_max = edits_max - edits_max // 4

    @property
    def taken_count(self) -> int:
        return self._taken.total()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Take a slot until the context is left.

        Args:
            tenant: Tenant of the request. "" if the tenant has no name.

        Raises:
            Overloaded: All slots, or all slots of the tenant, are in use.
        """
        own_max = self._own_max if tenant else self._edits_max
        for count, count_max in ((self.taken_count, self._edits_max), (self._taken[tenant], own_max)):
            if count >= count_max:
                raise Overloaded(
                    f"{count} image edits run already (allowed: {count_max}): try again in {RETRY_SECONDS:.0f} s",
                    reason="too_many_edits",
                    retry_after_seconds=RETRY_SECONDS,
                )
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # Adding an empty Counter removes the tenants whose count is zero.


UNSENT_BYTES_MAX = 2**30  # This number of bytes is enough for some hundred images of a megapixel.


class UnsentImages:
    """Counts the bytes of images that clients have not received.

    Args:
        unsent_bytes_max: At this number of bytes, new requests are refused. Running requests may exceed the number.
    """

    def __init__(self, unsent_bytes_max: int = UNSENT_BYTES_MAX) -> None:
        self.byte_count = 0
        self._unsent_bytes_max = unsent_bytes_max

    @contextmanager
    def share(self) -> Iterator[UnsentShare]:
        """Yield the counter of one response. The bytes of the response count until the response is sent.

        Raises:
            Overloaded: The limit is reached.
        """
        if self.byte_count >= self._unsent_bytes_max:
            raise Overloaded(
                f"clients have not received {self.byte_count} bytes of images (allowed: {self._unsent_bytes_max}): "
                "try again shortly",
                reason="unsent_pictures",
                retry_after_seconds=RETRY_SECONDS,
            )
        share = UnsentShare(self)
        try:
            yield share
        finally:
            share.hold(0)


class UnsentShare:
    """Counts the unsent bytes of one response."""

    def __init__(self, unsent: UnsentImages) -> None:
        self._unsent = unsent
        self.byte_count = 0

    def hold(self, byte_count: int) -> None:
        """Set the number of unsent bytes of the response.

        Args:
            byte_count: Number of bytes. Replaces the earlier number.
        """
        self._unsent.byte_count += byte_count - self.byte_count
        self.byte_count = byte_count


class ImageRequest(Protocol):
    """Fields of a body that the engine needs in addition to ImageParams."""

    @property
    def prompt(self) -> str: ...
    @property
    def priority(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageServices(EngineServices):
    """Parts of a server that a request for images needs.

    Attributes:
        engine: The image engine.
        threads: Threads that encode images.
        decoder: Decodes images that clients send.
        edits: Limits the edits that run at a time.
        unsent: Limits the memory of images that clients have not received.
    """

    engine: ImageEngine
    threads: EncodingThreads
    decoder: ImageDecoder
    edits: EditSlots
    unsent: UnsentImages


class ImageContext(EngineContext):
    """Context of one request to a server that generates images.

    Args:
        exchange: The request.
        services: Parts of the server, shared by all requests.

    Attributes:
        streams: Streams of the engine that the request began.
        steps_done: Finished denoising steps, by index of the image.
    """

    services: ImageServices
    engine: ImageEngine

    def __init__(self, exchange: Exchange, services: ImageServices) -> None:
        super().__init__(exchange, services)
        self.engine = services.engine
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
        return await self.services.threads.run(function, tenant=self.tenant)

    def generate_image(self, body: ImageRequest, params: ImageParams, deadlines: Deadlines) -> ImageStream:
        """Create an engine request in this caller's name. The caller of this method must enter the request with `async
        with`.

        Args:
            body: Request that has the prompt and the priority.
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
