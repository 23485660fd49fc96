"""The engines for asyncio programs, for text and for images, and conversations with an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self

from trioserve.asyncio.streams import ImageStream, PoolingStream, RequestStream
from trioserve.asyncio.threaded_engine import OnTrio, ThreadedEngine, awaited, called, made, opened_in_a_thread
from trioserve.contracts.image_generation import ImageModelDescription, ImageRequestLimits
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.engine import Engine as TrioEngine
from trioserve.engine.images.image_engine import ImageEngine as TrioImageEngine
from trioserve.engine.model_description import ModelDescription
from trioserve.engine.request_stream import PartStream
from trioserve.engine.session import Session as TrioSession

__all__ = ["Engine", "ImageEngine", "Session", "in_a_thread"]


class Session(OnTrio[TrioSession]):
    """One conversation: `async with engine.session() as session: reply = await session.respond(messages)`.

    See trioserve.Session. A turn is complete when the engine's thread has its last delta, even if the asyncio task has
    not read this delta.
    """

    generate = made(TrioSession.generate, RequestStream)
    respond = awaited(TrioSession.respond)
    expect_turn = called(TrioSession.expect_turn)

    async def __aenter__(self) -> Self:
        self.thread.call(self.on_trio.enter)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.thread.call(self.on_trio.leave)

    @property
    def id(self) -> str:
        """Name of the session, for status pages and logs."""
        return self.on_trio.id

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """Messages of all complete turns, in OpenAI's format. Empty if the turns are texts or tokens."""
        return self.on_trio.messages

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of all complete turns: the prompt and the response of the last one."""
        return self.on_trio.token_ids


class Engine(ThreadedEngine[TrioEngine]):
    """A text engine, created by trioserve.asyncio.open_engine. See ThreadedEngine."""

    generate = made(TrioEngine.generate, RequestStream)
    embed = made(TrioEngine.embed, PoolingStream)
    session = made(TrioEngine.session, Session)
    abort = called(TrioEngine.abort)
    abort_with_partial = called(TrioEngine.abort_with_partial)
    abort_all = called(TrioEngine.abort_all)
    hand_over = called(TrioEngine.hand_over)
    end_reasoning = called(TrioEngine.end_reasoning)
    live_requests = called(TrioEngine.live_requests)
    stats = called(TrioEngine.stats)
    load = called(TrioEngine.load)
    sleep = awaited(TrioEngine.sleep)
    wake_up = awaited(TrioEngine.wake_up)
    drain = called(TrioEngine.drain)
    pause_generation = awaited(TrioEngine.pause_generation)
    reset_prefix_cache = called(TrioEngine.reset_prefix_cache)
    limit_kv_cache = awaited(TrioEngine.limit_kv_cache)
    resume_generation = called(TrioEngine.resume_generation)
    update_weights = awaited(TrioEngine.update_weights)
    init_weights_update_group = awaited(TrioEngine.init_weights_update_group)
    destroy_weights_update_group = awaited(TrioEngine.destroy_weights_update_group)
    wait_until_idle = awaited(TrioEngine.wait_until_idle)
    wait_all_free = awaited(TrioEngine.wait_all_free)
    load_adapter = awaited(TrioEngine.load_adapter)
    unload_adapter = awaited(TrioEngine.unload_adapter)
    encode = awaited(TrioEngine.encode)
    decode = awaited(TrioEngine.decode)

    def read_parts(self, stream: RequestStream, *, tools: Sequence[Mapping[str, Any]] | None = None) -> PartStream:
        """Parse a chat response into content, reasoning and tool calls, in the format of the model's family.

        Args:
            stream: a stream that was entered and that no other task reads.
            tools: the tools that the prompt contains. If None, nothing is parsed as a tool call.

        Raises:
            InvalidRequest: a tool does not have OpenAI's format.
        """
        return PartStream(stream, self.on_trio.families, tools)

    @property
    def model(self) -> ModelDescription:
        """The model that is served."""
        return self.on_trio.model

    @property
    def default_sampling(self) -> SamplingParams:
        """Sampling parameters of requests that set none."""
        return self.on_trio.default_sampling

    @property
    def weight_version(self) -> str:
        """Version of the weights that the engine computes with. It is "default" until the weights are replaced."""
        return self.thread.call(lambda: self.on_trio.weight_version)


def in_a_thread(
    open_engine: Callable[[], AbstractAsyncContextManager[TrioEngine]],
) -> AbstractAsyncContextManager[Engine]:
    """Open an engine in a thread of its own. See opened_in_a_thread.

    Args:
        open_engine: opens the engine on Trio.
    """
    return opened_in_a_thread(open_engine, Engine)


class ImageEngine(ThreadedEngine[TrioImageEngine]):
    """An image engine, created by trioserve.asyncio.open_image_engine. See ThreadedEngine."""

    generate_image = made(TrioImageEngine.generate_image, ImageStream)
    abort = called(TrioImageEngine.abort)
    abort_all = called(TrioImageEngine.abort_all)
    live_requests = called(TrioImageEngine.live_requests)
    stats = called(TrioImageEngine.stats)
    load = called(TrioImageEngine.load)
    sleep = awaited(TrioImageEngine.sleep)
    wake_up = awaited(TrioImageEngine.wake_up)
    drain = called(TrioImageEngine.drain)
    pause_generation = awaited(TrioImageEngine.pause_generation)
    resume_generation = called(TrioImageEngine.resume_generation)
    wait_until_idle = awaited(TrioImageEngine.wait_until_idle)
    wait_all_free = awaited(TrioImageEngine.wait_all_free)

    @property
    def model(self) -> ImageModelDescription:
        """The model that is served."""
        return self.on_trio.model

    @property
    def limits(self) -> ImageRequestLimits:
        """Limits on requests, in addition to the limits of the model."""
        return self.on_trio.limits
