"""From the streams of one request to its response: reading several as one, collecting whole choices, counting
tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec
import trio
from msgspec import UNSET, UnsetType

from trioserve.api.error_responses import foreign_end
from trioserve.contracts.errors import TrioserveError
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.output import Delta
from trioserve.contracts.weights import add_versions
from trioserve.http.limits import KEEP_ALIVE_SECONDS

if TYPE_CHECKING:
    from trioserve.api.whole_response import ResponseBound
    from trioserve.engine.request_stream import RequestStream
    from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = [
    "CUT_OFF",
    "Choice",
    "IsPartial",
    "KeepAlive",
    "Usage",
    "collect",
    "is_cut_off",
    "never_partial",
    "read_streams",
    "transfer_fields",
    "usage_of",
    "wait_until_begun",
    "wait_until_released",
]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """completion_tokens_details: where thoughts are told apart from the rest."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_of(streams: Sequence[RequestStream], *, reasoning_token_count: int | None = None) -> Usage:
    """The tokens of a request so far; a prompt counts once, however many choices it has. reasoning_token_count: None
    where thoughts are not told apart."""
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


CUT_OFF: Final = "abort"
"""The finish_reason of a choice that was cut off, as clients know it that ask for what there is."""


def is_cut_off(reason: FinishReason | None) -> bool:
    """Whether another's hand has ended a choice that could have gone on."""
    return reason is FinishReason.ABORT or reason is FinishReason.DEADLINE


IsPartial = Callable[[Delta], bool]


def never_partial(_: Delta) -> bool:
    """Half a response must not look like a whole one."""
    return False


class Choice:
    """One whole choice, put together from its deltas."""

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
        self.texts.append(delta.text)
        add_versions(self.weight_versions, len(self.token_ids), delta.weight_versions, len(delta.token_ids))
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.kv_transfer = delta.kv_transfer


async def wait_until_begun(stream: RequestStream) -> None:
    """Returns when the request runs, and so its response may begin with status 200. Raises what ended it in the
    queue."""
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
    """Every choice of every stream, complete, with what was known of it. bound: counts it. is_partial, and what is
    raised: see read_streams. Raises Overloaded if all responses hold too much."""
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


KNOWN_IN_A_ROW_MAX = 1000  # deltas that a client had before, taken in about a millisecond

Take = Callable[[int, Delta], Awaitable[None]]
T = TypeVar("T")


class KeepAlive(NamedTuple):
    """How a reader of streams fills their silences.

    Args:
        send: says that the response goes on.
        call_at: has a function called at a time of Trio's clock, as Engine does.
        seconds: of silence before `send`.
    """

    send: Callable[[], Awaitable[None]]
    call_at: Callable[[float, Callable[[], None]], Alarm]
    seconds: float = KEEP_ALIVE_SECONDS


async def read_streams(
    streams: Sequence[RequestStream],
    take: Take,
    *,
    keep_alive: KeepAlive | None = None,
    is_partial: IsPartial = never_partial,
) -> None:
    """Give every delta of every stream to `take(stream_index, delta)`, one at a time, until all streams have ended.

    keep_alive is sent when its seconds have passed without a delta, and again after as many. is_partial:
    whether the last delta of a choice that another's hand has ended is given like any other.

    While `take` waits, at most one delta of each stream is held here; the streams merge what comes meanwhile.
    Raises what a stream or `take` raises, and what `foreign_end` says of a choice that another's hand ended (after its
    last text). The first of these ends the reading of all: the caller leaves the streams' scopes, and so cancels them.
    """
    if len(streams) > 1:
        await _read_merged(streams, take, keep_alive, is_partial)
    elif keep_alive is None:
        await _read(0, streams[0], take, is_partial)
    else:
        await _read_patiently(streams[0], take, keep_alive, is_partial)


def transfer_fields(transfers: Iterable[KVTransferParams | None]) -> dict[str, object]:
    """`kv_transfer_params` of a whole response, where one of its choices has some."""
    params = next((transfer for transfer in transfers if transfer is not None), None)
    return {} if params is None else {"kv_transfer_params": params}


async def wait_until_released(stream: RequestStream, keep_alive: KeepAlive) -> None:
    """Returns when nothing of the stream is held for another engine; keep_alive is sent meanwhile. So the client's
    leaving ends the hold like everything else."""
    while stream.is_held:
        with trio.move_on_after(keep_alive.seconds):
            await stream.wait_until_released()
            return
        await keep_alive.send()


async def _read(index: int, stream: RequestStream, take: Take, is_partial: IsPartial) -> None:
    async for delta in stream:
        await _take(index, delta, take, is_partial)


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
                            break  # by the same moment that brought the delta
                        await _take(0, delta, take, is_partial)
                        delta = None
                except StopAsyncIteration:
                    return
            patience.waiting_since = None
            if delta is not None:
                await _take(0, delta, take, is_partial)
            else:
                await keep_alive.send()
    finally:
        patience.end()


class _Patience:
    """Cancels a wait that has lasted keep_alive.seconds. A deadline of the scope itself, set for each delta, would cost
    as much as the delta; this is one alarm, which looks every so many seconds whether it is needed.

    waiting_since: None while nothing is waited for, and nothing may be cancelled.
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


async def _take(index: int, delta: Delta, take: Take, is_partial: IsPartial) -> None:
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
            # Kept, and raised outside: the nursery would wrap it in a group.
            failure = error
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _patiently(receive: Callable[[], Awaitable[T]], keep_alive: KeepAlive | None) -> T:
    """What `receive` brings. Giving up and asking again loses nothing: neither a stream nor a channel hands anything to
    a reader that was cancelled."""
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
