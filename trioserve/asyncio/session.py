"""A conversation of an asyncio program."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from trioserve.asyncio.streams import RequestStream
from trioserve.asyncio.threaded_engine import OnTrio, awaited, called, made
from trioserve.engine.session import Session as TrioSession

__all__ = ["Session"]


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
