"""Streamed requests of a router that has peers. The endpoint keeps each stream, so that another router can resume it.

When a client leaves, the router sends a notice to the endpoint, so that no other router resumes the stream. A router
that dies sends no notice. An endpoint that gets no notice ends the stream by itself some seconds later.

If no endpoint has the stream any more, the router resumes it from its beginning. The client only knows the number and
the checksum of its tokens. So an endpoint computes the response from its beginning, and the router does not forward it
to the client. If the tokens match the checksum, the router requests the rest from the endpoint, as for any stream that
resumes (`resume`). At that time, the endpoint's prefix cache has the prompt and the tokens. The seed is the same as
before, because all routers derive it from the stream's name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from trioserve.api.streams.cursors import (
    GROUP_ID,
    KEEP_HEADER,
    KEPT_HEADER,
    RESUMABLE_HEADER,
    RESUME_HEADER,
    SEED_HEADER,
    Position,
    PositionKeeper,
)
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import Draining, EndpointLost, TrioserveError
from trioserve.proxy.remote_endpoint import KEY_HEADERS
from trioserve.proxy.routed_body import rewritten
from trioserve.proxy.streams.client_events import ClientEvents, EventSplitter, NumberedEvents, not_the_same

if TYPE_CHECKING:
    from trioserve.admission.admission_scope import AdmissionScope
    from trioserve.api.streams.cursors import Position
    from trioserve.http.exchange import HeaderFields, Headers
    from trioserve.proxy.remote_endpoint import RemoteEndpoint, RemoteRequest, RemoteResponse

__all__ = [
    "KEPT_STREAMS_PATH",
    "ClientLeftNotice",
    "ClientLeftNotices",
    "EndpointRequest",
    "Found",
    "KeptRequest",
    "KeptStream",
    "SessionEndNotice",
    "Stream",
    "StreamCall",
    "reader_in",
]


OnRecomputed = Callable[[NumberedEvents, bytes], None]

_ID = re.compile(rb"^id: " + GROUP_ID.pattern + rb"\r?$", re.MULTILINE)
_END = re.compile(rb"^id: \.\r?$", re.MULTILINE)


class RecomputedStart:
    """Request that recomputes the beginning of a stream. It has the interface of a RemoteRequest.

    Args:
        ask: Makes a request to the endpoint with a body.
        body: Body of the request as the client sent it.
        known: Position of the client.
        on_recomputed: Called with the events that the client gets from here on, and with the field `resume` as JSON.
    """

    def __init__(
        self, ask: Callable[[bytes], RemoteRequest], body: bytes, known: Position, on_recomputed: OnRecomputed
    ) -> None:
        self._ask = ask
        self._body = body
        self._known = known
        self._on_recomputed = on_recomputed
        self._request: RemoteRequest | None = None

    async def begin(self) -> RemoteResponse:
        """Recompute the beginning and request the rest.

        Returns:
            Response with the rest, or an error response of the endpoint.

        Raises:
            Refusal: The endpoint computed another response (409).
            EndpointLost: The connection broke.
        """
        request = self._request = self._ask(self._body)
        response = await request.begin()
        if response.status != 200:
            return response
        resume_values = response.header(RESUME_HEADER)
        if resume_values is None:
            raise not_the_same("the endpoint does not report its tokens")
        start = _Start(self._known)
        splitter = EventSplitter()
        while not start.is_there:
            piece = await response.next_piece()
            if piece is None:
                raise EndpointLost("the endpoint ended a response before the client's position")
            start.note(splitter.feed(piece))
        self.end()
        resume = {**msgspec.json.decode(resume_values, type=dict[str, object]), **start.resume(_begun(self._body))}
        self._on_recomputed(NumberedEvents(keeper=start.keeper()), msgspec.json.encode(resume))
        self._request = self._ask(rewritten(self._body, {"resume": resume}))
        return await self._request.begin()

    def end(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.end()


class _Begun(msgspec.Struct):
    token_ids: list[list[int]] = []
    finished: list[bool] = []


class _Body(msgspec.Struct):
    resume: _Begun | None = None


def _begun(body: bytes) -> _Begun:
    """Return the part of the response that the request itself contains, because it resumes an earlier response."""
    return msgspec.json.decode(body, type=_Body).resume or _Begun()


class _Start:
    """Tokens of a response that is computed again, up to the client's position."""

    def __init__(self, known: Position) -> None:
        self._known = known
        self._token_ids: list[list[bytes]] = [[] for _ in known.counts]
        self._finished = [False for _ in known.counts]
        self._state: bytes | None = None

    @property
    def is_there(self) -> bool:
        return all(
            len(tokens) >= count and (has_finished or not finishes)
            for tokens, count, has_finished, finishes in zip(
                self._token_ids, self._known.counts, self._finished, self._known.finished, strict=True
            )
        )

    def note(self, events: bytes) -> None:
        """Record events.

        Raises:
            Refusal: The response does not reach the client's position, or differs from the client's part.
        """
        for match in _ID.finditer(events):
            choice = int(match[1])
            if choice < len(self._token_ids) and not self.is_there:
                self._token_ids[choice] += match[2].split(b",") if match[2] else []
                self._finished[choice] = self._finished[choice] or bool(match[3])
                self._state = match[4] if match[4] is not None else self._state
        if not self.is_there and _END.search(events):
            raise not_the_same("it ends before the client's position")
        if self.is_there:
            self._check()

    def _check(self) -> None:
        exact = [len(tokens) for tokens in self._token_ids]
        for tokens, count in zip(self._token_ids, self._known.counts, strict=True):
            del tokens[count:]
        position = self.keeper().position
        if position.check != self._known.check:
            raise not_the_same("its tokens differ")
        ended = zip(exact, self._known.counts, self._known.finished, strict=True)
        if any(finishes and had != count for had, count, finishes in ended):
            raise not_the_same("a choice ends at another token")
        if self._state is not None and self._known.state is None and exact != list(self._known.counts):
            raise not_the_same("its events are grouped differently")

    def resume(self, begun: _Begun) -> dict[str, object]:
        """Return the field `resume` of a body.

        Args:
            begun: Part of the response that the request itself contains.
        """
        count = len(self._token_ids)
        before = [*begun.token_ids, *([] for _ in range(count))][:count]
        ended = [*begun.finished, *(False for _ in range(count))][:count]
        token_ids = [[*known, *map(int, tokens)] for known, tokens in zip(before, self._token_ids, strict=True)]
        fields: dict[str, object] = {
            "token_ids": token_ids,
            "finished": [was or now for was, now in zip(ended, self._known.finished, strict=True)],
        }
        state = self._known.state or (None if self._state is None else self._state.decode("latin-1"))
        return fields if state is None else {**fields, "state": state}

    def keeper(self) -> PositionKeeper:
        """Return a keeper at the client's position."""
        keeper = PositionKeeper()
        state = "" if self._known.state is None else f" {self._known.state}"
        for choice, (tokens, finishes) in enumerate(zip(self._token_ids, self._known.finished, strict=True)):
            keeper.note(b"%d:%b%b%b" % (choice, b",".join(tokens), b"!" if finishes else b"", state.encode()))
        return keeper


logger = logging.getLogger(__name__)

KEPT_STREAMS_PATH = "/v1/kept_streams/"
PENDING_MAX = 4096  # Further notices are dropped. The endpoints then notice by themselves that the client left.
AT_ONCE_MAX = 64  # The router sends at most this many notices at the same time.
SECONDS_MAX = 2.0  # A later notice is useless, because the endpoint ends the stream or the session by itself.
RESPONSE_BYTES_MAX = 4096


class ClientLeftNotice(msgspec.Struct, frozen=True):
    """Notice that the client of a stream has left.

    Attributes:
        endpoint: Client of the endpoint that keeps the stream.
        name: Name of the stream, see StreamCall.
        reader: Number of this router's reader. The notice counts only if this reader is the last reader of the stream.
        headers: Headers that identify the caller.
    """

    endpoint: RemoteEndpoint
    name: str
    reader: int
    headers: HeaderFields

    @property
    def path(self) -> str:
        """Path that the endpoint deletes."""
        return f"{KEPT_STREAMS_PATH}{self.name}?reader={self.reader}"


class SessionEndNotice(msgspec.Struct, frozen=True):
    """Notice that the client of a session has left.

    Attributes:
        endpoint: Client of an endpoint that has computed turns of the session.
        path: Path that the endpoint deletes.
        headers: Headers that identify the caller.
    """

    endpoint: RemoteEndpoint
    path: str
    headers: HeaderFields


class ClientLeftNotices:
    """Sender of client-left notices.

    Attributes:
        on_dropped: Called for each notice that is dropped, because too many are waiting.
    """

    def __init__(self) -> None:
        self.on_dropped: Callable[[], None] = lambda: None
        self._keepers: set[EndpointId] = set()
        self._pending_count = 0
        self._nursery: trio.Nursery | None = None
        self._at_once = trio.CapacityLimiter(AT_ONCE_MAX)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send notices until cancelled. Notices that are not sent by then are dropped.

        Args:
            task_status: Reports to the parent task that notices can be sent.
        """
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def has_kept(self, id: EndpointId) -> bool:
        """Return True if the endpoint has kept a stream before.

        Args:
            id: Endpoint of the fleet.
        """
        return id in self._keepers

    def note_keeper(self, id: EndpointId) -> None:
        self._keepers.add(id)

    def send(self, notice: ClientLeftNotice | SessionEndNotice) -> None:
        """Send a notice in the background. This never waits."""
        if self._nursery is None or self._pending_count >= PENDING_MAX:
            self.on_dropped()
            return
        self._pending_count += 1
        self._nursery.start_soon(self._send, notice)

    async def _send(self, notice: ClientLeftNotice | SessionEndNotice) -> None:
        try:
            async with self._at_once:
                with trio.move_on_after(SECONDS_MAX):
                    async with notice.endpoint.request("DELETE", notice.path, list(notice.headers), b"") as response:
                        await response.whole(RESPONSE_BYTES_MAX)
        except TrioserveError as error:
            logger.debug("client-left notice lost endpoint=%s reason=%s", notice.endpoint.id, error)
        finally:
            self._pending_count -= 1


_READER = re.compile(r"[\d.]+;reader=(\d{1,9})")


class Found(msgspec.Struct, frozen=True):
    """A stream that another router had requested.

    Attributes:
        endpoint: Endpoint that runs the stream.
        request: Request that reads the stream. It has begun.
        response: Response to that request.
    """

    endpoint: EndpointId
    request: RemoteRequest
    response: RemoteResponse


class EndpointRequest(Protocol):
    """Scope of a request at an endpoint, see RemoteRequest."""

    async def begin(self) -> RemoteResponse: ...
    def end(self) -> None: ...


class Stream:
    """Stream of a router without peers. No other router can resume it.

    Attributes:
        running_at: Endpoint that already runs the stream. None: the stream is new.
        client_events: Events that the client gets.
    """

    running_at: EndpointId | None = None
    client_events = ClientEvents()

    def note_admitted(self, admission: AdmissionScope, *, on_recomputed: OnRecomputed) -> None:
        """Record the admission, before the first request to an endpoint.

        Args:
            admission: Admission of the request.
            on_recomputed: Called when an endpoint has computed the client's part of the stream again.
        """

    def request(
        self, endpoint: RemoteEndpoint, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> EndpointRequest:
        """Make a request, like RemoteEndpoint.request.

        Args:
            endpoint: Endpoint that gets the request.
            method: HTTP method.
            target: Path and query.
            headers: Request headers.
            body: Bytes of the body.
        """
        return endpoint.request(method, target, headers, body, computes=True)

    def close(self) -> None:
        """Leave a found stream that was not used."""


class KeptStream(Stream):
    """Stream that another router can resume.

    Args:
        name: Name of the stream, see StreamCall.
        notices: Sender of client-left notices.
        known: Position of the client. None: the client has nothing.
        found: Running stream of an earlier request. None: there is none.
        choice_count: Number of choices, over all prompts.
    """

    def __init__(
        self,
        name: str,
        notices: ClientLeftNotices,
        *,
        known: Position | None,
        found: Found | None,
        choice_count: int,
    ) -> None:
        self.name = name
        self.running_at = None if found is None else found.endpoint
        # The client gets all events of a stream that is computed again, because that stream begins at the client's
        # position.
        is_whole = found is not None or known is None or known.is_empty
        self.client_events = NumberedEvents(known if is_whole else None)
        self._admission: AdmissionScope | None = None
        self._on_recomputed: OnRecomputed = lambda events, resume: None
        self._notices = notices
        self._known = None if known is None else known.of_choices(choice_count)
        self._found = found

    def note_admitted(self, admission: AdmissionScope, *, on_recomputed: OnRecomputed) -> None:
        self._admission, self._on_recomputed = admission, on_recomputed

    def request(
        self, endpoint: RemoteEndpoint, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> EndpointRequest:
        """Read the stream where it runs, or start or resume it at another endpoint.

        Args:
            endpoint: Endpoint that gets the request.
            method: HTTP method.
            target: Path and query.
            headers: Request headers.
            body: Bytes of the body.
        """
        found, self._found = self._found, None
        if found is not None:
            read = self._scope(found.request, endpoint, headers, begun=found.response)
            if found.endpoint == endpoint.id:
                return read
            read.end()  # The new attempt is at a different endpoint, so the found stream is not used.
        admission = self._admission
        assert admission is not None
        known = self._known
        if known is not None and not admission.has_token and not known.is_empty:
            return RecomputedStart(
                lambda sent: endpoint.request(
                    method, target, [*headers, *self._keep_headers(is_begun=True)], sent, computes=True
                ),
                body,
                known,
                self._on_recomputed,
            )
        keep_headers = self._keep_headers(is_begun=admission.has_token)
        return self._scope(
            endpoint.request(method, target, [*headers, *keep_headers], body, computes=True), endpoint, headers
        )

    def close(self) -> None:
        if self._found is not None:
            self._found.request.end()

    def _scope(
        self,
        request: RemoteRequest,
        endpoint: RemoteEndpoint,
        headers: list[tuple[str, str]],
        *,
        begun: RemoteResponse | None = None,
    ) -> KeptRequest:
        # The notice gets only the headers that identify the caller.
        own = [(name, value) for name, value in headers if name in KEY_HEADERS]
        reader = None if begun is None else reader_in(begun.header(KEPT_HEADER))
        notice = ClientLeftNotice(endpoint, self.name, reader or 1, own)
        assert self._admission is not None
        return KeptRequest(request, notice, self._notices, self._admission, begun=begun)

    def _keep_headers(self, *, is_begun: bool) -> list[tuple[str, str]]:
        """Return the headers that ask the endpoint to keep the stream.

        Args:
            is_begun: Whether the client has a part of the stream. Then the stream is not kept: the endpoint would only
                have the rest, in which no position of the client is known.
        """
        seed = int.from_bytes(blake2b(self.name.encode(), digest_size=8, person=b"seed").digest(), "big")
        return [(RESUMABLE_HEADER, "1"), (SEED_HEADER, str(seed)), *([] if is_begun else [(KEEP_HEADER, self.name)])]


class KeptRequest:
    """One attempt at one endpoint.

    Leaving the scope before the end of the response sends a client-left notice, because the client has left or another
    endpoint resumes the stream. A router that is shutting down sends no notice.

    Args:
        request: Request to the endpoint.
        notice: Notice for this endpoint and stream.
        notices: Sender of client-left notices.
        admission: Admission of the request.
        begun: Response, if it has begun.
    """

    def __init__(
        self,
        request: RemoteRequest,
        notice: ClientLeftNotice,
        notices: ClientLeftNotices,
        admission: AdmissionScope,
        *,
        begun: RemoteResponse | None = None,
    ) -> None:
        self._request = request
        self._notice: ClientLeftNotice | None = notice
        self._notices = notices
        self._admission = admission
        self._response = begun
        # Before the head of the response arrives, the router does not know whether the endpoint keeps the stream. An
        # endpoint that has kept other streams may have begun to keep this stream too.
        self._is_kept = notices.has_kept(notice.endpoint.id)

    async def begin(self) -> RemoteResponse:
        response = self._response = self._response or await self._request.begin()
        reader = reader_in(response.header(KEPT_HEADER))
        self._is_kept = reader is not None
        if reader is not None and self._notice is not None:
            self._notice = msgspec.structs.replace(self._notice, reader=reader)
            self._notices.note_keeper(self._notice.endpoint.id)
        return response

    def end(self) -> None:
        notice, self._notice = self._notice, None
        has_ended = self._response is not None and self._response.has_ended
        self._request.end()
        is_leaving = isinstance(self._admission.end_reason, Draining)
        if notice is not None and self._is_kept and not has_ended and not is_leaving:
            self._notices.send(notice)


class StreamCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a stream.

    Attributes:
        owner: Owner of the objects that the request creates. None if callers are not distinguished.
        tenant: Tenant that the request names. None if it names none.
        request_id: Id of the request.
        path: Path of the request.
        headers: Headers of the request.
        body: Body as the client sent it.
        model: Model name that endpoints use.
        choice_count: Number of choices, over all prompts.
        endpoint_headers: Makes the headers of the router's own requests for this caller.
    """

    owner: str | None
    tenant: str | None
    request_id: str
    path: str
    headers: Headers
    body: bytes
    model: str
    choice_count: int
    endpoint_headers: Callable[[], list[tuple[str, str]]]

    def stream_name(self) -> str:
        """Compute the name of the stream. The name is the same at all routers.

        The name depends on the caller, the request's id and the request itself. So a caller cannot get another caller's
        stream by repeating its id. A caller that uses an id for two different requests gets two streams.
        """
        named = blake2b(digest_size=16, person=b"stream")
        for part in (self.owner, self.tenant, self.request_id, self.path):
            encoded = b"" if part is None else b"=" + part.encode("utf-8", "surrogatepass")
            named.update(len(encoded).to_bytes(8, "big") + encoded)
        named.update(self.body)
        return named.hexdigest()


def reader_in(kept: str | None) -> int | None:
    """Parse the reader number from a response header.

    Args:
        kept: Value of the header KEPT_HEADER. None if the response has none.

    Returns:
        Number of this router's reader of the stream, or None if the stream is not kept.
    """
    match = None if kept is None else _READER.fullmatch(kept)
    return None if match is None else int(match[1])
