"""Readers of request streams: merge several streams, collect whole choices, and count tokens for `usage`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec
import trio
from msgspec import UNSET, UnsetType

from trioserve.api.error_responses import foreign_end
from trioserve.contracts.errors import TrioserveError
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.weights import add_versions
from trioserve.http.limits import KEEP_ALIVE_SECONDS

if TYPE_CHECKING:
    from trioserve.api.whole_response import ResponseBound
    from trioserve.engine.request_stream import RequestStream
    from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = [
    "PARTIAL_FINISH",
    "Choice",
    "IsPartial",
    "KeepAlive",
    "Usage",
    "collect",
    "first_transfer",
    "is_partial",
    "never_partial",
    "read_streams",
    "usage_of",
    "wait_until_begun",
    "wait_until_released",
]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a response.

    Attributes:
        completion_tokens_details: count of reasoning tokens. Unset if the response does not separate reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_of(streams: Sequence[RequestStream], *, reasoning_token_count: int | None = None) -> Usage:
    """Count the tokens of a request so far. A prompt counts once for all of its choices.

    Args:
        streams: engine requests of the request.
        reasoning_token_count: tokens of the reasoning. None: the response does not separate reasoning.
    """
    prompt_tokens = sum(stream.prompt_token_count for stream in streams)
    completion_tokens = sum(stream.completion_token_count for stream in streams)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(stream.cached_token_count for stream in streams)),
        completion_tokens_details=(
            UNSET if reasoning_token_count is None else CompletionTokensDetails(reasoning_token_count)
        ),
    )


PARTIAL_FINISH: Final = "abort"
"""The finish_reason of a partial choice. Only clients that ask for partial results see it."""


def is_partial(reason: FinishReason | None) -> bool:
    """Return True if an abort or a deadline ended the choice.

    Args:
        reason: finish reason of the choice. None: the choice has not ended.
    """
    return reason is FinishReason.ABORT or reason is FinishReason.DEADLINE


IsPartial = Callable[[Delta], bool]


def never_partial(_: Delta) -> bool:
    """Return False: no choice may end with a partial result, so an aborted choice raises an error.

    Args:
        _: ignored.
    """
    return False


class Choice:
    """One whole choice, assembled from its deltas."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.weight_versions: list[tuple[str, int]] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.kv_transfer: KVTransferParams | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, delta: Delta) -> None:
        """Append a delta.

        Args:
            delta: next delta of this choice.
        """
        self.texts.append(delta.text)
        add_versions(self.weight_versions, len(self.token_ids), delta.weight_versions, len(delta.token_ids))
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.kv_transfer = delta.kv_transfer


async def wait_until_begun(stream: RequestStream) -> None:
    """Wait until the request has left the queue, so that its response may begin with status 200.

    Args:
        stream: the engine request.

    Raises:
        TrioserveError: the request ended in the queue.
    """
    end = await stream.wait_until_begun()
    error = None if end is None else foreign_end(end)
    if error is not None:
        raise error


async def collect(
    streams: Sequence[RequestStream],
    choice_count: int,
    *,
    bound: ResponseBound,
    is_partial: IsPartial = never_partial,
) -> list[list[Choice]]:
    """Read all choices of all streams to their end.

    Args:
        streams: engine requests, each with `choice_count` choices. The known output of a resumed response is included.
        choice_count: choices of each stream.
        bound: counts the bytes that the response holds.
        is_partial: see read_streams.

    Returns:
        For each stream, its choices by index.

    Raises:
        Overloaded: the whole responses of all clients together hold too many bytes.
        TrioserveError: see read_streams.
    """
    choices = [[Choice() for _ in range(choice_count)] for _ in streams]

    for stream_index, stream in enumerate(streams):
        for place, delta in enumerate(stream.known, start=1):
            bound.take(delta)
            choices[stream_index][delta.index].take(delta)
            if place % KNOWN_IN_A_ROW_MAX == 0:
                await trio.lowlevel.checkpoint()
        stream.forget_known()

    async def take(stream_index: int, delta: Delta) -> None:
        bound.take(delta)
        choices[stream_index][delta.index].take(delta)

    await read_streams(streams, take, is_partial=is_partial)
    return choices


KNOWN_IN_A_ROW_MAX = 1000  # After this number of known deltas, which takes about a millisecond, other tasks run.

Take = Callable[[int, Delta], Awaitable[None]]
T = TypeVar("T")


class KeepAlive(NamedTuple):
    """Rules of a reader for silent streams.

    Attributes:
        send: sends a keep-alive to the client.
        call_at: calls a function at a time of Trio's clock, as the engine does.
        seconds: silence before each `send`.
    """

    send: Callable[[], Awaitable[None]]
    call_at: Callable[[float, Callable[[], None]], Alarm]
    seconds: float = KEEP_ALIVE_SECONDS


def read_streams(
    streams: Sequence[RequestStream],
    take: Take,
    *,
    keep_alive: KeepAlive | None = None,
    is_partial: IsPartial = never_partial,
) -> Awaitable[None]:
    """Pass the deltas of all streams to `take`, one at a time, until all streams have ended.

    While `take` waits, this function holds at most one delta of each stream. The streams merge later deltas.

    Args:
        streams: engine requests whose scopes the caller has entered.
        take: receives the index of the stream and the delta.
        keep_alive: called after each period of silence. None: silence is allowed.
        is_partial: receives the last delta of a choice that was aborted or reached its deadline. True: the delta is
            passed to `take`. False: the end is an error.

    Raises:
        TrioserveError: raised by a stream, by `take`, or by `foreign_end` after the last text of a choice. The first
            error ends the reading of all streams. The caller then leaves the scopes of the streams, and so cancels the
            streams.
    """
    # This function is not async, because Python resumes each awaiting frame for every delta.
    if len(streams) > 1:
        return _read_merged(streams, take, keep_alive, is_partial)
    if keep_alive is None:
        return _read(0, streams[0], take, is_partial)
    return _read_patiently(streams[0], take, keep_alive, is_partial)


def first_transfer(transfers: Iterable[KVTransferParams | None]) -> KVTransferParams | UnsetType:
    """Return the field `kv_transfer_params` of a whole response: the first parameters, or UNSET if there are none.

    Args:
        transfers: parameters of each choice.
    """
    return next((transfer for transfer in transfers if transfer is not None), UNSET)


async def wait_until_released(stream: RequestStream, keep_alive: KeepAlive) -> None:
    """Wait until no blocks of the stream are held for another engine, and send keep-alives meanwhile.

    If the client has left, sending a keep-alive fails, and then the blocks are released.

    Args:
        stream: an engine request that has ended.
        keep_alive: sends the keep-alives.
    """
    while stream.is_held:
        with trio.move_on_after(keep_alive.seconds):
            await stream.wait_until_released()
            return
        await keep_alive.send()


async def _read(index: int, stream: RequestStream, take: Take, is_partial: IsPartial) -> None:
    async for delta in stream:
        if delta.finish_reason is None:
            await take(index, delta)
        else:
            await _take_last(index, delta, take, is_partial)


async def _read_patiently(stream: RequestStream, take: Take, keep_alive: KeepAlive, is_partial: IsPartial) -> None:
    deltas = aiter(stream)
    patience = _Patience(keep_alive)
    try:
        while True:
            delta = None
            with patience.new_scope() as scope:
                try:
                    while True:
                        patience.waiting_since = trio.current_time()
                        delta = await deltas.__anext__()
                        patience.waiting_since = None
                        if scope.cancel_called:
                            break  # The delta arrived at the moment when the scope was cancelled.
                        if delta.finish_reason is None:
                            await take(0, delta)
                        else:
                            await _take_last(0, delta, take, is_partial)
                        delta = None
                except StopAsyncIteration:
                    return
            patience.waiting_since = None
            if delta is not None:
                await _take_last(0, delta, take, is_partial)
            else:
                await keep_alive.send()
    finally:
        patience.end()


class _Patience:
    """Cancels a wait that has lasted `keep_alive.seconds`.

    A deadline for each delta would cost as much CPU time as the delta itself. So one alarm checks every `seconds`
    whether the current wait has lasted too long.

    Attributes:
        waiting_since: start of the current wait, in Trio's time. None: nothing may be cancelled.
    """

    def __init__(self, keep_alive: KeepAlive) -> None:
        self.waiting_since: float | None = None
        self._call_at = keep_alive.call_at
        self._seconds = keep_alive.seconds
        self._scope = trio.CancelScope()
        self._alarm = self._call_at(trio.current_time() + self._seconds, self._look)

    def new_scope(self) -> trio.CancelScope:
        self._scope = trio.CancelScope()
        return self._scope

    def end(self) -> None:
        self._alarm.cancel()

    def _look(self) -> None:
        now = trio.current_time()
        due = (now if self.waiting_since is None else self.waiting_since) + self._seconds
        if due <= now:
            self._scope.cancel()
            due = now + self._seconds
        self._alarm = self._call_at(due, self._look)


async def _take_last(index: int, delta: Delta, take: Take, is_partial: IsPartial) -> None:
    """Pass a delta to `take`. If the delta ends its choice with an error, raise this error after the text is passed."""
    end = None if delta.finish_reason is None else foreign_end(delta)
    if end is None or is_partial(delta):
        await take(index, delta)
        return
    if delta.text:
        await take(index, msgspec.structs.replace(delta, finish_reason=None))
    raise end


async def _read_merged(
    streams: Sequence[RequestStream], take: Take, keep_alive: KeepAlive | None, is_partial: IsPartial
) -> None:
    failure: TrioserveError | None = None
    sender, receiver = trio.open_memory_channel[tuple[int, Delta] | TrioserveError](0)
    async with trio.open_nursery() as nursery:
        with sender:
            for index, stream in enumerate(streams):
                nursery.start_soon(_pump, index, stream, sender.clone(), is_partial)
        try:
            while True:
                item = await _patiently(receiver.receive, keep_alive)
                if isinstance(item, TrioserveError):
                    raise item
                await take(*item)
        except trio.EndOfChannel:
            pass
        except TrioserveError as error:
            # The error is raised after the nursery, because the nursery would wrap it in an exception group.
            failure = error
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _patiently(receive: Callable[[], Awaitable[T]], keep_alive: KeepAlive | None) -> T:
    """Return the result of `receive`, and send keep-alives meanwhile.

    A cancelled call of `receive` loses no item: neither a stream nor a channel passes an item to a cancelled reader.
    """
    if keep_alive is None:
        return await receive()
    while True:
        with trio.move_on_after(keep_alive.seconds):
            return await receive()
        await keep_alive.send()


async def _pump(
    index: int,
    stream: RequestStream,
    sender: trio.MemorySendChannel[tuple[int, Delta] | TrioserveError],
    is_partial: IsPartial,
) -> None:
    with sender:
        try:
            await _read(index, stream, lambda index, delta: sender.send((index, delta)), is_partial)
        except TrioserveError as error:
            await sender.send(error)
