"""Other processes of one router, which listen at the same port, and the requests between them.

A client cannot choose which process gets its connection. So a request to the router itself, such as an abort by id, is
forwarded to all processes. Each process has an internal port for the others, on the loopback address. For shares of
endpoint leases, the processes are peers (see peer_watch). The processes share nothing else.

KeptObjects has the endpoint and the owner of each stored response, file and batch. If the router sends its own key to
an endpoint, the endpoint cannot distinguish callers. Then only the router knows the owners.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import trio

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost
from trioserve.http.exchange import Exchange, Handler
from trioserve.proxy.fleet import EndpointSpec
from trioserve.proxy.peers.retries import NoPeers
from trioserve.proxy.remote_endpoint import PATH_CHARACTERS, EndpointAddress, RemoteEndpoint

if TYPE_CHECKING:
    from trioserve.api.responder import Responder
    from trioserve.proxy.peers.peer_watch import Greeting, Peer, PeerWatch

__all__ = [
    "Answer",
    "KeptObject",
    "KeptObjects",
    "OneProcess",
    "OtherProcesses",
    "ProcessDoor",
    "ProcessPeers",
    "ProcessPlace",
    "RESPONSES_PATH",
    "may_be_id",
    "object_id_in",
]


logger = logging.getLogger(__name__)

PROCESS_HEADER = "x-trioserve-process"
"""Header with the secret of the processes. It marks a request of another process, which asks all others itself."""
DECIDE_HEADER = "x-trioserve-decide"
"""Header that asks the first process to make a change in all processes."""
KEPT_PATH = "/process/kept/"
ANSWER_SECONDS_MAX = 2.0
ANSWER_BYTES_MAX = 32 * 1024 * 1024  # The limit is enough for a metrics page of many endpoints.
FORWARDED_HEADERS = ("authorization", "x-api-key", "content-type")


class ProcessPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one process of a router.

    Attributes:
        number: Number of the process, from 1.
        doors: Internal ports of all processes, in order.
        run: Random id of the router, new at each start.
        secret: Secret that only these processes know.
    """

    number: int
    doors: tuple[int, ...]
    run: str
    secret: str

    @property
    def count(self) -> int:
        return len(self.doors)

    @property
    def name(self) -> str:
        """Name of this process as a peer. No other router in front of the same endpoints has it."""
        return self._name(self.number)

    def specs(self) -> list[EndpointSpec]:
        """Return all processes as peers."""
        return [
            EndpointSpec(url=f"http://127.0.0.1:{port}", id=self._name(number))
            for number, port in enumerate(self.doors, start=1)
        ]

    def connected(self, peer: Peer) -> RemoteEndpoint:
        return self.remote(peer.name, peer.url)

    def remote(self, name: str, url: str) -> RemoteEndpoint:
        return RemoteEndpoint(EndpointId(name), EndpointAddress.parse(url), headers=((PROCESS_HEADER, self.secret),))

    def _name(self, number: int) -> str:
        return f"{self.run}-{number}"


class Answer(msgspec.Struct, frozen=True):
    """Response of another process.

    Attributes:
        number: Number of the process.
        status: HTTP status.
        body: Bytes of the body.
    """

    number: int
    status: int
    body: bytes


class OneProcess:
    """Replaces OtherProcesses in a router that has only one process."""

    number = 1
    count = 1

    async def ask(self, context: Responder, body: bytes = b"") -> list[Answer]:
        """Forward a request to every other process, unless the request comes from another process.

        Args:
            context: Request of the router's API.
            body: Body of the request.

        Returns:
            Responses that arrived in time, in the order of the processes.
        """
        return []

    def is_asking(self, context: Responder) -> bool:
        """Return True if the request comes from another process. Then this process responds only for itself.

        Args:
            context: Request of the router's API.
        """
        return context.exchange.headers.get(PROCESS_HEADER) is not None

    async def change(self, context: Responder, body: bytes, apply: Callable[[], object]) -> Answer | None:
        """Make a change in all processes. Each process makes concurrent changes in the same order.

        Args:
            context: Request for the change.
            body: Body of the request.
            apply: Makes the change in this process, or raises an error if it is not possible.

        Returns:
            None if the caller has to respond. Otherwise the response of the process that decided.

        Raises:
            EndpointLost: The first process does not answer.
        """
        apply()
        return None

    async def find_kept(self, id: str) -> KeptObject | None:
        """Ask the other processes for a stored object that was created through them.

        Args:
            id: Id of the object.

        Returns:
            Location and owner, or None if no process knows the object.
        """
        return None

    def close(self) -> None:
        """Close the connections to the other processes."""


class OtherProcesses(OneProcess):
    """The other processes of a router that has several processes.

    Args:
        place: Identity of this process.
    """

    def __init__(self, place: ProcessPlace) -> None:
        self.number = place.number
        self.count = place.count
        self._others = [
            (number, place.remote(spec.endpoint_id, spec.url))
            for number, spec in enumerate(place.specs(), start=1)
            if number != place.number
        ]
        self._changing = trio.Lock()

    async def ask(self, context: Responder, body: bytes = b"") -> list[Answer]:
        if self.is_asking(context):
            return []
        return await self._ask_all(context.exchange.method, _target(context), _headers(context), body)

    async def change(self, context: Responder, body: bytes, apply: Callable[[], object]) -> Answer | None:
        method, target, headers = context.exchange.method, _target(context), _headers(context)
        decides = context.exchange.headers.get(DECIDE_HEADER) is not None
        if self.is_asking(context) and not decides:
            apply()
            return None
        if self.number > 1:
            number, first = self._others[0]
            async with first.request(method, target, [*headers, (DECIDE_HEADER, "1")], body) as response:
                return Answer(number, response.status, await response.whole(ANSWER_BYTES_MAX) or b"")
        async with self._changing:
            apply()
            # After this point, the change continues in the other processes even if the client leaves.
            with trio.move_on_after(2 * ANSWER_SECONDS_MAX, shield=True):
                for answer in await self._ask_all(method, target, headers, body):
                    if answer.status >= 400:
                        logger.error(
                            "another process refuses a change process=%d status=%d", answer.number, answer.status
                        )
        return None

    async def find_kept(self, id: str) -> KeptObject | None:
        if not may_be_id(id):
            return None
        for answer in await self._ask_all("GET", KEPT_PATH + id, [], b""):
            if answer.status == 200:
                return msgspec.json.decode(answer.body, type=KeptObject)
        return None

    def close(self) -> None:
        for _, remote in self._others:
            remote.close()

    async def _ask_all(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> list[Answer]:
        answers: dict[int, Answer] = {}

        async def ask(number: int, remote: RemoteEndpoint) -> None:
            try:
                with trio.fail_after(ANSWER_SECONDS_MAX):
                    async with remote.request(method, target, headers, body) as response:
                        said = await response.whole(ANSWER_BYTES_MAX)
                        answers[number] = Answer(number, response.status, said or b"")
            except (EndpointLost, trio.TooSlowError) as error:
                logger.warning("another process did not answer process=%d method=%s reason=%s", number, method, error)

        async with trio.open_nursery() as nursery:
            for number, remote in self._others:
                nursery.start_soon(ask, number, remote)
        return [answers[number] for number in sorted(answers)]


def _target(context: Responder) -> str:
    exchange = context.exchange
    return quote(exchange.path, safe=PATH_CHARACTERS) + (f"?{exchange.query}" if exchange.query else "")


def _headers(context: Responder) -> list[tuple[str, str]]:
    headers = context.exchange.headers
    forwarded = [(name, value) for name in FORWARDED_HEADERS if (value := headers.get(name)) is not None]
    return [*forwarded, ("x-request-id", context.request_id)]  # The shared id connects the log lines of all processes.


class ProcessPeers(NoPeers):
    """Peers of a process whose only peers are the processes of the same router.

    The processes do not resume each other's streams, because all of them end together.

    Args:
        watch: State of the other processes.
    """

    def __init__(self, watch: PeerWatch) -> None:
        self._watch = watch

    def greeting(self) -> Greeting:
        return self._watch.greeting()


class ProcessDoor:
    """HTTP handler of the internal port. It serves only the other processes.

    Args:
        app: Handler of the router.
        kept: Stored objects that were created through this process.
        secret: Secret of the processes.
    """

    def __init__(self, app: Handler, kept: KeptObjects, secret: str) -> None:
        self._app = app
        self._kept = kept
        self._secret = secret.encode()

    async def __call__(self, exchange: Exchange) -> None:
        shown = exchange.headers.get(PROCESS_HEADER) or ""
        if not hmac.compare_digest(shown.encode("utf-8", "surrogatepass"), self._secret):
            await exchange.respond(403, [("content-type", "text/plain")], b"only the router itself may use this port\n")
        elif exchange.path.startswith(KEPT_PATH):
            kept = self._kept.find(exchange.path.removeprefix(KEPT_PATH))
            status, body = (404, b"{}") if kept is None else (200, msgspec.json.encode(kept))
            await exchange.respond(status, [("content-type", "application/json")], body)
        else:
            await self._app(exchange)


OBJECTS_MAX = 100_000  # Each entry takes about 300 bytes. The router forgets the oldest objects, and so do endpoints.
RESPONSES_PATH = "/v1/responses"
SEARCHED_BYTES_MAX = 4096  # An object begins with its id, so the search can stop early.
_ID = re.compile(rb'"id"\s*:\s*"((?:resp|file|batch|msgbatch)[-_][\w-]{1,128})"')
_MAY_BE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class KeptObject(msgspec.Struct, frozen=True):
    """Location and owner of a stored object.

    Attributes:
        endpoint: Endpoint that stores the object.
        owner: Only caller who may use the object. None: all callers may.
        previous_response_id: Response that a response continues, if only a connection to this router had it. The
            endpoint got the items instead, and does not know the id.
    """

    endpoint: EndpointId
    owner: str | None
    previous_response_id: str | None = None


class KeptObjects:
    """Stored objects by id, as far as this router has seen their creation. The oldest are forgotten first."""

    def __init__(self) -> None:
        self._objects: OrderedDict[str, KeptObject] = OrderedDict()

    def remember(self, id: str, kept: KeptObject) -> None:
        self._objects[id] = kept
        self._objects.move_to_end(id)
        if len(self._objects) > OBJECTS_MAX:
            self._objects.popitem(last=False)

    def note_previous(self, id: str, previous: str) -> None:
        """Record which response a response continues.

        Args:
            id: Response that an endpoint may store.
            previous: Response that it continues. Only a connection to this router has it.
        """
        kept = self._objects.get(id)
        if kept is not None:
            self._objects[id] = msgspec.structs.replace(kept, previous_response_id=previous)

    def find(self, id: str) -> KeptObject | None:
        return self._objects.get(id)


def object_id_in(body: bytes) -> str | None:
    """Return the id of the stored object in a body, or None if there is none.

    Args:
        body: Response body, or the first event of a stream. It describes a response, file or batch.
    """
    found = _ID.search(body[:SEARCHED_BYTES_MAX])
    return None if found is None else found[1].decode()


def may_be_id(text: str) -> bool:
    """Return True if the text is a valid id. Any other text could change the path that contains it.

    Args:
        text: Text from a client.
    """
    return _MAY_BE_ID.fullmatch(text) is not None
