"""Decisions of a connector that moves KV between two processes, and the state of all transfers.

An engine may be both holder and reader. `Sends` tracks blocks that other engines may read here. `Loads` tracks blocks
that this engine reads from other engines. `Reports` queues events for the core. This code never waits or reads a clock.
The transport (transport.py) moves the bytes. Before each piece, the transport checks with this code that the blocks may
be used. After each transfer, the transport reports the result to this code.

    request_finished ──► held ──► the reader has finished, or needs no blocks ──► Released
                              ──► aborted in this engine ───────────────────────► Released
                              ──► its deadline in the core passed ──────────────► (no event)

    start_load ──► alive ──► all chunks arrived, and the hold lasted to the end ──► Loaded
                         ──► refused, or failed too often or for too long ────────► LoadFailed
                         ──► abandoned ───────────────────────────────────────────► LoadFailed
                         ──► its deadline in the core passed ─────────────────────► (no event)

A hold or load that has ended never becomes alive again. The call that ends it also stops its running transfers. A
transfer checks `is_alive` each time before it reads or writes the blocks. When the last load of a hold ends, the holder
gets a release.
"""

from __future__ import annotations

import enum
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import msgspec

from trioserve.connectors.settings import StreamOptions
from trioserve.connectors.stream.frames import NOTICE_IDS_MAX, Notice
from trioserve.connectors.stream.signature import Origin, Source, origin_of, signed
from trioserve.connectors.windowed_tables import first_place, first_position
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId, root_hash
from trioserve.contracts.kv_transfer import (
    ConnectorSetup,
    HoldKind,
    Loaded,
    LoadFailed,
    Released,
    StillRead,
    TransferEvent,
)
from trioserve.contracts.request import EngineRequest, KVTransferParams

__all__ = ["Load", "LoadEnd", "Loads", "Reports", "Send", "SendEnd", "Sends", "StreamPolicy", "proof_of"]


class Reports:
    """Ordered queue with at most one event per load or hold, so the active transfers bound its size.

    A newer event of a load or hold replaces the older event and is added at the end.

    Args:
        wake: Called after an event is added.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: dict[tuple[HoldKind, RequestId], TransferEvent] = {}

    def add(self, event: Released | StillRead | Loaded | LoadFailed) -> None:
        kind = HoldKind.SEND if isinstance(event, Released | StillRead) else HoldKind.LOAD
        self._waiting.pop((kind, event.request_id), None)
        self._waiting[kind, event.request_id] = event
        self._wake()

    def forget(self, kind: HoldKind, request_id: RequestId) -> None:
        """Drop the event of a hold that has expired, because the core does not expect it any more.

        Args:
            kind: Direction of the hold.
            request_id: Request of the hold.
        """
        self._waiting.pop((kind, request_id), None)

    def take(self) -> tuple[TransferEvent, ...]:
        taken = tuple(self._waiting.values())
        self._waiting.clear()
        return taken


def proof_of(cache_salt: str | None, tokens: Sequence[int]) -> bytes:
    """Hash tokens under a cache salt.

    A reader sends the hash when it requests KV. So a client cannot get the KV of a prompt that it does not know. A
    reader also cannot load KV of other tokens into its prefix cache.

    Args:
        cache_salt: Cache salt of the request.
        tokens: Token ids, each 0 <= id < 2**32.

    Returns:
        32 bytes.

    Cost: about 20 us for 1,000 tokens.
    """
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return blake2b(root_hash(cache_salt) + packed, digest_size=32).digest()


SIGN_OF_LIFE_SECONDS = 1.0  # A hold lasts ten seconds, so more frequent reports would be useless.


class SendEnd(enum.Enum):
    COMPLETED = "completed"  # A reader received all positions that it requested.
    UNWANTED = "unwanted"  # The reader released the hold before it had received all positions.
    ABORTED = "aborted"  # The request was aborted in this engine.
    EXPIRED = "expired"


class Send(msgspec.Struct, eq=False):
    """Hold on the blocks of one finished request.

    Attributes:
        request_id: Request that has finished.
        block_table: Blocks of the request.
        tokens: Tokens of the request. The blocks contain their KV from position `held_from` on.
        cache_salt: Cache salt of the request.
        held_from: First position that a reader may request. Earlier positions are behind a sliding window.
        is_alive: False once the hold has ended.
        was_read: True once a reader has received all positions that it requested.
        reported_alive_at: Time of the last StillRead event, in seconds.
        stops: Functions that stop the transfers that read this hold, by transfer.
    """

    request_id: RequestId
    block_table: Sequence[BlockIndex]
    tokens: Sequence[int]
    cache_salt: str | None
    held_from: int
    is_alive: bool = True
    was_read: bool = False
    reported_alive_at: float | None = None
    stops: dict[object, Callable[[], None]] = msgspec.field(default_factory=dict)

    @property
    def token_count(self) -> int:
        return len(self.tokens)


class Sends:
    """All holds of this engine.

    Cost: O(1) per call and hold, plus the readers of the hold, unless a method says more.

    Args:
        reports: Receives the events for the core.
    """

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._held: dict[RequestId, Send] = {}
        self.ends: Counter[SendEnd] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self,
        request_id: RequestId,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        cache_salt: str | None,
        held_from: int = 0,
    ) -> None:
        self._held[request_id] = Send(request_id, block_table, tokens, cache_salt, held_from)

    def get(self, request_id: str) -> Send | None:
        return self._held.get(RequestId(request_id))

    def asked(self, request_id: str, token_start: int, token_count: int, proof: bytes, now: float) -> Send | str:
        """Check that a reader may read positions of a hold, and report the hold as still read.

        Args:
            request_id: Request whose blocks the reader wants to read.
            token_start: First position.
            token_count: Number of positions.
            proof: Hash of the reader's tokens up to the last position (see proof_of).
            now: Current time in seconds.

        Returns:
            The hold, or a sentence that says why the reader may not read it.

        Cost: O(tokens).
        """
        send = self.get(request_id)
        if send is None:
            return f'no block of "{request_id[:200]}" is held: it never was, or it ended before this'
        if token_start < 0 or token_count < 1 or token_start + token_count > send.token_count:
            return f"{token_count} tokens from {token_start} on are asked for, and {send.token_count} are held"
        if token_start < send.held_from:
            return (
                f"tokens from {token_start} on are asked for, and they are held from {send.held_from} on: behind a "
                "sliding window the reader's blocks may be no longer than those here"
            )
        if proof != proof_of(send.cache_salt, send.tokens[: token_start + token_count]):
            return "what is held are the blocks of another prompt, or under another cache_salt"
        self.sign_of_life(send, now)
        return send

    def sign_of_life(self, send: Send, now: float) -> None:
        """Report that a reader reads the blocks or waits for them, at most once per SIGN_OF_LIFE_SECONDS.

        Args:
            send: Hold that the reader uses.
            now: Current time in seconds.
        """
        last = send.reported_alive_at
        if send.is_alive and (last is None or now - last >= SIGN_OF_LIFE_SECONDS):
            send.reported_alive_at = now
            self._reports.add(StillRead(send.request_id))

    def note_still_read(self, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Report requests as still read, because a reader says that it still needs them.

        Args:
            request_ids: Requests that the reader needs.
            now: Current time in seconds.

        Returns:
            Ids of requests that are not held, or no longer held.
        """
        gone = []
        for request_id in request_ids:
            send = self.get(request_id)
            if send is None:
                gone.append(request_id)
            else:
                self.sign_of_life(send, now)
        return tuple(gone)

    def released(self, request_ids: Iterable[str]) -> None:
        """End holds that their reader does not need any more.

        Args:
            request_ids: Requests to release. Unknown ids are ignored, because a release may arrive twice.
        """
        for request_id in request_ids:
            send = self.get(request_id)
            if send is not None:
                self._end(send.request_id, SendEnd.COMPLETED if send.was_read else SendEnd.UNWANTED)

    def aborted(self, request_id: RequestId) -> None:
        self._end(request_id, SendEnd.ABORTED)

    def expired(self, request_id: RequestId) -> None:
        self._end(request_id, SendEnd.EXPIRED)
        self._reports.forget(HoldKind.SEND, request_id)

    def stop(self) -> None:
        """Release all holds, because the transport has ended."""
        for request_id in tuple(self._held):
            self._end(request_id, SendEnd.ABORTED)

    def _end(self, request_id: RequestId, end: SendEnd) -> None:
        send = self._held.pop(request_id, None)
        if send is None:
            return
        send.is_alive = False
        self.ends[end] += 1
        for stop in tuple(send.stops.values()):
            stop()
        if end is not SendEnd.EXPIRED:
            self._reports.add(Released(request_id))


RETRIES_MAX = 8  # maximum number of retries per load, even if chunks arrived between the failures
QUIET_SECONDS_MAX = 8.0  # A hold ends after ten seconds without a reader, so later retries would fail.
RETRY_SECONDS = (0.0, 0.05, 0.2, 0.5, 1.0)  # waits before a retry, by the number of failures since the last chunk
DEAF_MAX = 3  # maximum number of refused connections in a row; an engine that holds blocks would accept connections
NEWS_MAX = 1_000  # maximum number of unsent releases per holder; further holds end by their deadlines


class LoadEnd(enum.Enum):
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"


def _nobody() -> None:
    pass


class Load(msgspec.Struct, eq=False):
    """Load of KV from another engine into blocks of this engine.

    Attributes:
        request_id: Request that needs the KV.
        origin: Engine and request that hold the KV.
        block_table: Blocks of the request. Position p is in block_table[p // block_size].
        start: First position to read.
        token_count: Number of positions to read.
        proof: Hash of all tokens up to the last position (see proof_of).
        asked_count: Number of positions that the core requested, including positions behind a sliding window, which
            have no block and are not read.
        is_alive: False once the load has ended.
        next_chunk: Index of the first chunk that has not arrived.
        retries: Number of failures since the start of the load.
        retries_in_a_row: Number of failures since the last chunk arrived.
        begun_at: Time in seconds when the transfer began. A load above the limit `reads_max` waits before its transfer.
        quiet_since: Time in seconds when the last chunk arrived, or when the transfer began. None before the transfer.
        stop: Stops the task that transfers the chunks.
    """

    request_id: RequestId
    origin: Origin
    block_table: Sequence[BlockIndex]
    start: int
    token_count: int
    proof: bytes
    asked_count: int
    is_alive: bool = True
    next_chunk: int = 0
    retries: int = 0
    retries_in_a_row: int = 0
    begun_at: float = 0.0
    quiet_since: float | None = None
    stop: Callable[[], None] = _nobody


class Loads:
    """All loads of this engine.

    Cost: O(1) per call, unless a method says more.

    Args:
        reports: Receives the events for the core.
        on_work: Called when there is a new load, or a message for a holder.
    """

    def __init__(self, reports: Reports, on_work: Callable[[], None]) -> None:
        self._reports = reports
        self._on_work = on_work
        self._out: dict[RequestId, Load] = {}
        self._new: deque[Load] = deque()
        self._readers: dict[Source, Counter[str]] = {}  # for each holder, the number of loads of each hold
        self._news: dict[Source, dict[str, None]] = {}  # releases that the holder has not received yet
        self._urgent: set[Source] = set()
        self.ends: Counter[LoadEnd] = Counter()
        self.resumed_total = 0

    def __len__(self) -> int:
        return len(self._out)

    # --- methods for the core ---

    def start(
        self,
        request_id: RequestId,
        origin: Origin | str,
        block_table: Sequence[BlockIndex],
        start: int,
        token_count: int,
        proof: bytes,
        *,
        asked_count: int | None = None,
    ) -> None:
        """Start a load, or report its failure if its origin is invalid.

        Args:
            request_id: Request that needs the KV.
            origin: Engine and request that hold the KV, or a sentence that says why there is none.
            block_table: Blocks of the request. Position p is in block_table[p // block_size].
            start: First position to read.
            token_count: Number of positions to read.
            proof: Hash of all tokens up to the last position (see proof_of).
            asked_count: Number of positions that the core requested. None means `token_count`.
        """
        if isinstance(origin, str):
            self.ends[LoadEnd.FAILED] += 1
            self._reports.add(LoadFailed(request_id, origin))
            return
        asked_count = token_count if asked_count is None else asked_count
        load = Load(request_id, origin, block_table, start, token_count, proof, asked_count)
        self._out[request_id] = load
        self._readers.setdefault(origin.source, Counter())[origin.request_id] += 1
        self._new.append(load)
        self._urgent.add(origin.source)
        self._on_work()

    def abandoned(self, request_id: RequestId) -> None:
        load = self._out.get(request_id)
        if load is not None:
            self._end(load, LoadEnd.ABANDONED, LoadFailed(request_id, "the request does not need it any more"))

    def expired(self, request_id: RequestId) -> None:
        load = self._out.get(request_id)
        if load is not None:
            self._end(load, LoadEnd.ABANDONED, None)
        self._reports.forget(HoldKind.LOAD, request_id)

    def not_needed(self, origin: Origin) -> None:
        """Release the hold of a request that ended without a load, unless another load reads it.

        Args:
            origin: Hold that was made for the request.
        """
        readers = self._readers.get(origin.source)
        if readers is None or origin.request_id not in readers:
            self._release(origin)

    # --- methods for the transport ---

    def pop_new(self) -> tuple[Load, ...]:
        """Return the loads whose transfer has not been started, and remove them from the list of new loads."""
        taken = tuple(load for load in self._new if load.is_alive)
        self._new.clear()
        return taken

    def came(self, load: Load, now: float) -> None:
        """Record that the next chunk is in the blocks and its checksum is right.

        Args:
            load: Load of the chunk.
            now: Current time in seconds.
        """
        load.next_chunk += 1
        load.retries_in_a_row = 0
        load.quiet_since = now

    def complete(self, load: Load) -> None:
        """End a load whose chunks all arrived, after the holder confirmed that the hold was alive to the end.

        Args:
            load: Load to end. Nothing happens if it has ended.
        """
        if load.is_alive:
            self._end(load, LoadEnd.COMPLETED, Loaded(load.request_id, load.asked_count))

    def failed(self, load: Load, message: str) -> None:
        """End a load that cannot be retried.

        Args:
            load: Load to end. Nothing happens if it has ended.
            message: Reason for the failure.
        """
        if load.is_alive:
            self._end(load, LoadEnd.FAILED, LoadFailed(load.request_id, f"{load.origin.source}: {message}"))

    def begun(self, load: Load, now: float) -> None:
        """Record that the transfer of a load begins. The limit QUIET_SECONDS_MAX counts from this time.

        Args:
            load: Load that begins.
            now: Current time in seconds.
        """
        load.begun_at = now
        load.quiet_since = now

    def broken(self, load: Load, message: str, now: float, *, is_deaf: bool = False) -> float | None:
        """Record that the connection of a load failed, and decide when to retry.

        Args:
            load: Load whose connection failed.
            message: Reason, reported if the load fails.
            now: Current time in seconds.
            is_deaf: True if the holder refused the connection.

        Returns:
            Seconds to wait before the retry. None if the load has ended, in this call or earlier.
        """
        if not load.is_alive:
            return None
        load.retries += 1
        quiet_seconds = 0.0 if load.quiet_since is None else now - load.quiet_since
        seconds = RETRY_SECONDS[min(load.retries_in_a_row, len(RETRY_SECONDS) - 1)]
        load.retries_in_a_row += 1
        if (
            load.retries > RETRIES_MAX
            or load.retries_in_a_row > (DEAF_MAX if is_deaf else len(RETRY_SECONDS))
            or quiet_seconds + seconds >= QUIET_SECONDS_MAX
        ):
            self.failed(load, message)
            return None
        self.resumed_total += 1
        return seconds

    def notices(self, source: Source) -> list[Notice]:
        """Build the NOTICE messages that are due to a holder.

        Args:
            source: Holder that gets the messages.

        Returns:
            Messages with all holds that are still needed and all unsent releases. Empty if there are none.

        Cost: O(loads from the holder).
        """
        keep = list(self._readers.get(source, ()))
        release = list(self._news.get(source, ()))
        size = NOTICE_IDS_MAX // 2
        return [
            Notice(tuple(keep[at : at + size]), tuple(release[at : at + size]))
            for at in range(0, max(len(keep), len(release)), size)
        ]

    def pop_urgent(self) -> tuple[Source, ...]:
        """Return the holders that need a message now, and clear the list."""
        taken = tuple(self._urgent)
        self._urgent.clear()
        return taken

    def answered(self, source: Source, notice: Notice, gone: Iterable[str]) -> None:
        """Record that a holder answered a NOTICE, and fail the loads whose holds are gone.

        Args:
            source: Holder that answered.
            notice: Message that the holder answered.
            gone: Ids of needed requests that the holder does not hold.

        Cost: O(loads).
        """
        self._forget_releases(source, notice.release)
        lost = set(gone)
        if lost:
            for load in tuple(self._out.values()):
                if load.origin.source == source and load.origin.request_id in lost:
                    self.failed(load, "it does not hold the blocks any more")

    def cannot_notify(self, source: Source) -> None:
        """Drop the releases for a holder that cannot be reached. Its holds end by their deadlines.

        Args:
            source: Holder that cannot be reached.
        """
        self._news.pop(source, None)

    def stop(self) -> None:
        """Fail all loads, because the transport has ended."""
        for load in tuple(self._out.values()):
            self.failed(load, "this engine's connector has ended")
        self._new.clear()

    # --- private methods ---

    def _end(self, load: Load, end: LoadEnd, report: Loaded | LoadFailed | None) -> None:
        del self._out[load.request_id]
        load.is_alive = False
        self.ends[end] += 1
        source, held = load.origin.source, load.origin.request_id
        readers = self._readers[source]
        readers[held] -= 1
        if not readers[held]:
            del readers[held]
            if not readers:
                del self._readers[source]
            self._release(load.origin)
        if report is not None:
            self._reports.add(report)
        load.stop()

    def _release(self, origin: Origin) -> None:
        news = self._news.setdefault(origin.source, {})
        if len(news) < NEWS_MAX:
            news[origin.request_id] = None
        self._urgent.add(origin.source)
        self._on_work()

    def _forget_releases(self, source: Source, released: Iterable[str]) -> None:
        news = self._news.get(source)
        if news is None:
            return
        for request_id in released:
            news.pop(request_id, None)
        if not news:
            del self._news[source]


NAMED_COUNTS = (
    "blocks_sent_total",
    "blocks_received_total",
    "bytes_sent_total",
    "bytes_received_total",
    "load_seconds_total",
    "heartbeats_sent_total",
    "heartbeats_received_total",
    "peers_refused_total",
    "transfers_refused_total",
)


class StreamPolicy:
    """KVConnector (see contracts.kv_transfer) that moves KV over TCP connections.

    Args:
        setup: Engine id, KV cache and wake function of the engine.
        options: Options of the connector.
        on_work: Called when the transport has something to do.
        key: Key with which the engines of this group sign their addresses.

    Attributes:
        address: Host and port where readers find this engine. None until the engine listens. Without an address, the
            engine holds no blocks for readers.
    """

    knows_windows = True

    def __init__(
        self, setup: ConnectorSetup, options: StreamOptions, on_work: Callable[[], None], *, key: bytes
    ) -> None:
        self.setup = setup
        self.options = options
        self.key = key
        self.reports = Reports(setup.wake)
        self.sends = Sends(self.reports)
        self.loads = Loads(self.reports, on_work)
        self.address: tuple[str, int] | None = None
        self.totals: dict[str, float] = dict.fromkeys(NAMED_COUNTS, 0)
        self._asked: set[RequestId] = set()  # running requests whose load has started; `Loads` releases their holds

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        """Return how many tokens after the computed tokens another engine holds, without the last known token.

        With invalid kv_transfer_params, the whole prompt matches. The core then starts a load, which fails and reports
        the reason.

        Args:
            request: Request whose prompt is looked up.
            computed_count: Number of tokens whose KV this engine already has.
        """
        params = request.kv_transfer
        if params is None or not params.do_remote_prefill:
            return 0
        count = len(request.known_token_ids) - 1
        origin = origin_of(params, self.options, self.key)
        if not isinstance(origin, str) and origin.token_count is not None:
            count = min(count, origin.token_count)
        return max(0, count - computed_count)

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        assert request.kv_transfer is not None, f"{request.id}: nothing was matched"
        self._asked.add(request.id)
        origin = origin_of(request.kv_transfer, self.options, self.key)
        end = computed_count + token_count
        proof = proof_of(request.cache_salt, request.known_token_ids[:end])
        start = first_position(block_table, self.setup.pages.layout.block_size, computed_count)
        self.loads.start(request.id, origin, tuple(block_table), start, end - start, proof, asked_count=token_count)

    def load_abandoned(self, request_id: RequestId) -> None:
        """Stop a load. After the return, nothing writes to its blocks.

        Args:
            request_id: Request whose load is stopped.
        """
        self.loads.abandoned(request_id)

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        params = request.kv_transfer
        was_asked = request.id in self._asked
        self._asked.discard(request.id)
        if params is None:
            return False
        if params.do_remote_prefill and not was_asked:
            origin = origin_of(params, self.options, self.key)
            if not isinstance(origin, str):
                self.loads.not_needed(origin)
        is_wanted = params.do_remote_decode and reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not is_wanted or not block_table or self.address is None:
            return False
        held_from = first_place(block_table) * self.setup.pages.layout.block_size
        self.sends.hold(request.id, tuple(block_table), tuple(tokens), request.cache_salt, held_from)
        return True

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        send = self.sends.get(request_id)
        if send is None or self.address is None:
            return None
        host, port = self.address
        params = KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.setup.engine_id,
            remote_request_id=request_id,
            remote_block_ids=tuple(send.block_table),
            remote_host=host,
            remote_port=port,
            remote_block_size=self.setup.pages.layout.block_size,
            remote_num_tokens=send.token_count,
        )
        return signed(params, self.key)

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        """End the hold of a request. After the return, nothing reads its blocks.

        Args:
            request_id: Request whose hold is ended.
        """
        self.sends.aborted(request_id)

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        if kind is HoldKind.SEND:
            self.sends.expired(request_id)
        else:
            self.loads.expired(request_id)

    def progress(self) -> Iterable[TransferEvent]:
        return self.reports.take()

    def counts(self) -> dict[str, float]:
        """Return totals since the start: NAMED_COUNTS, and the numbers of sends and loads by outcome."""
        sends, loads = self.sends.ends, self.loads.ends
        return {
            **self.totals,
            "transfers_resumed_total": self.loads.resumed_total,
            **{f"loads_{end.value}_total": loads[end] for end in LoadEnd},
            **{f"sends_{end.value}_total": sends[end] for end in SendEnd},
            "sends_failed_total": sends.total() - sends[SendEnd.COMPLETED],
        }

    def stop(self) -> None:
        """End all loads and holds, because the transport has ended."""
        self.address = None
        self.loads.stop()
        self.sends.stop()
