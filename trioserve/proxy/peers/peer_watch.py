"""The other routers in front of the same endpoints: the list of these routers, and regular checks of each router.

The list comes from the command line, a watched file or DNS. The checks decide this router's share of each endpoint's
leases. Each endpoint reports which routers request its load. router/peer_shares computes the shares.
"""

from __future__ import annotations

import logging
import random
import secrets
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import trio

from trioserve.admission.dispatch import Dispatch
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, StartupError
from trioserve.proxy.discovery.source import FileSource, Source, read_endpoints
from trioserve.proxy.fleet import EndpointSpec
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint
from trioserve.router.peer_shares import PeerShares

__all__ = ["PEERS_MAX", "PEER_PATH", "Greeting", "Peer", "PeerList", "PeerSettings", "PeerWatch", "parse_peers"]

PEERS_MAX = 64  # The number is limited, because every router checks every other router twice a second.


class Peer(msgspec.Struct, frozen=True):
    """A router.

    Attributes:
        name: Name, which is the same at all routers.
        url: Address of the router.
    """

    name: str
    url: str


class PeerList:
    """Routers that all sources have reported.

    Args:
        on_change: Called when the list changes.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.on_change = on_change
        self._by_source: dict[str, dict[str, Peer]] = {}

    @property
    def peers(self) -> dict[str, Peer]:
        return {name: peer for peers in self._by_source.values() for name, peer in peers.items()}

    def set_all(self, specs: Iterable[EndpointSpec], *, source: str) -> None:
        """Replace all routers of one source.

        Args:
            specs: All routers that the source knows now.
            source: Name of the source.

        Raises:
            StartupError: Two routers have one name, or there are more than PEERS_MAX routers.
        """
        reported: dict[str, Peer] = {}
        for spec in specs:
            peer = Peer(spec.endpoint_id, spec.url)
            if peer.name in reported:
                raise StartupError(f'there are two routers with the name "{peer.name}": give each its own')
            reported[peer.name] = peer
        others = sum(len(peers) for name, peers in self._by_source.items() if name != source)
        if len(reported) + others > PEERS_MAX:
            raise StartupError(f"{len(reported) + others} routers are named, at most {PEERS_MAX} may share endpoints")
        before = self.peers
        self._by_source[source] = reported
        if self.peers != before:
            self.on_change()

    def ids_of(self, source: str) -> frozenset[str]:
        """Return the names of the routers that a source has reported.

        Args:
            source: Name of the source.
        """
        return frozenset(self._by_source.get(source, ()))


def parse_peers(texts: Sequence[str]) -> tuple[list[EndpointSpec], list[Source]]:
    """Parse the values of --router-peers.

    Args:
        texts: Each is [NAME=]URL, file:PATH or dns:NAME[:PORT].

    Returns:
        Configured routers, and sources of further routers.

    Raises:
        StartupError: A value is invalid.
    """
    specs: list[EndpointSpec] = []
    sources: list[Source] = []
    for text in texts:
        kind, _, rest = text.partition(":")
        if kind == "file" and rest:
            read_endpoints(Path(rest))
            sources.append(FileSource(Path(rest)))
        elif kind == "dns" and rest:
            sources.append(_dns_source(text, rest))
        else:
            name, equals, url = text.partition("=")
            named = bool(equals) and "/" not in name
            spec = EndpointSpec(url=url, id=name) if named else EndpointSpec(url=text)
            EndpointAddress.parse(spec.url)
            specs.append(spec)
    return specs, sources


def _dns_source(text: str, rest: str) -> Source:
    name, colon, port = rest.partition(":")
    if not name or (colon and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise StartupError(f'--router-peers is "{text}", it must be dns:NAME or dns:NAME:PORT')
    # Importing the DNS source takes a third of a second, so it is imported only if needed.
    from trioserve.proxy.discovery.dns import DnsSource

    return DnsSource(name, port=int(port or 80), template=lambda url: EndpointSpec(url=url))


logger = logging.getLogger(__name__)

PEER_PATH = "/peer"
RESPONSE_BYTES_MAX = 4096
# A random fraction of the check interval, up to JITTER, prevents routers that started together from checking together.
JITTER = 0.25
SHARES_SECONDS = 0.5  # The shares are updated at this interval, because they also depend on time.
# For LOST_LATELY_SECONDS after a router's death, its clients may repeat their requests at this router.
LOST_LATELY_SECONDS = 15.0

Connect = Callable[[Peer], RemoteEndpoint]


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the checks.

    Attributes:
        check_seconds: Time between two checks.
        response_seconds_max: Time limit of a response.
        failures_max: Failures in a row after which a router counts as dead. With the defaults, this takes 2 to 5
            seconds.
    """

    check_seconds: float = 0.5
    response_seconds_max: float = 1.0
    failures_max: int = 3


class Greeting(msgspec.Struct):
    """Response of a router to a check.

    Attributes:
        name: Name of the router. None if it does not know its name yet.
        instance: Random id, new at each start.
    """

    name: str | None
    instance: str


class PeerWatch:
    """Watches the other routers.

    Args:
        dispatch: Gets this router's share of each endpoint's leases.
        specs: Configured routers. The list may include this router.
        sources: Sources of further routers.
        own: Name of this router. None: the router recognizes itself by the instance in the response.
        settings: Settings of the checks. None: the default settings.
        ssl_context: TLS settings. None: the default settings.
        connect: Makes the client of a router, for tests.
        rng: Source of the random times. None: not seeded.

    Attributes:
        shares: Shares of all routers.
        instance: Random id of this router, new at each start.
        lost_total: Number of times that a router was found dead.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        specs: Sequence[EndpointSpec],
        sources: Sequence[Source] = (),
        *,
        own: str | None = None,
        settings: PeerSettings | None = None,
        ssl_context: ssl.SSLContext | None = None,
        connect: Connect | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.shares = PeerShares(own)
        self.instance = secrets.token_hex(8)
        self.lost_total = 0
        self._dispatch = dispatch
        self._settings = settings or PeerSettings()
        self._sources = sources
        self._ssl_context = ssl_context
        self._connect = connect or self._connected
        self._rng = rng or random.Random()
        self._lost_at: float | None = None
        self._well: dict[str, bool] = {}
        self._watches: dict[Peer, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None
        self._list = PeerList()
        self._list.set_all(specs, source="configured")
        self._list.on_change = self._note_list
        self._note_list()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the routers until cancelled.

        Args:
            task_status: Reports the start of the checks to the parent task.
        """
        async with trio.open_nursery() as self._nursery:
            try:
                self._note_list()
                for source in self._sources:
                    self._nursery.start_soon(source.run, self._list)
                task_status.started()
                while True:
                    self.share_out()
                    await trio.sleep(SHARES_SECONDS)
            finally:
                self._nursery = None

    # --- methods for requests of other routers ---

    def greeting(self) -> Greeting:
        return Greeting(self.shares.own, self.instance)

    def described(self) -> list[dict[str, object]]:
        """Return the state of every other router as JSON values, for operators."""
        return [
            {"name": peer.name, "object": "router", "url": peer.url, "well": self._well.get(peer.name)}
            for peer in self._list.peers.values()
            if peer.name != self.shares.own
        ]

    @property
    def peer_count(self) -> int:
        return sum(name != self.shares.own for name in self._list.peers)

    @property
    def well_count(self) -> int:
        return sum(is_well for name, is_well in self._well.items() if name != self.shares.own)

    def is_lost_lately(self) -> bool:
        """Return True if a router has failed lately, so that its clients may repeat their requests at this router."""
        lost_at = self._lost_at
        return lost_at is not None and trio.current_time() < lost_at + LOST_LATELY_SECONDS

    # --- methods for reports of endpoints ---

    @property
    def own_name(self) -> str | None:
        return self.shares.own

    def note_report(self, endpoint: EndpointId, heard: Mapping[str, float]) -> None:
        """Record the routers that an endpoint has reported with its load.

        Args:
            endpoint: Endpoint that reported.
            heard: Seconds since the last load request of each router, by router name.
        """
        now = trio.current_time()
        self.shares.note_report(endpoint, heard, now)
        self._divide_shares_at(endpoint, now)

    def share_out(self) -> None:
        now = trio.current_time()
        states = list(self._dispatch.endpoints)
        self.shares.forget(state.id for state in states)
        for state in states:
            self._divide_shares_at(state.id, now)

    # --- private methods ---

    def _divide_shares_at(self, id: EndpointId, now: float) -> None:
        state = self._dispatch.endpoint(id)
        if state is not None:
            self._dispatch.set_lease_share(id, self.shares.share(id, state.leases_max, now))

    def _note_list(self) -> None:
        peers = self._list.peers
        self.shares.set_peers(peers)
        for peer in [peer for peer in self._watches if peers.get(peer.name) != peer]:
            self._watches.pop(peer).cancel()
            self._well.pop(peer.name, None)
        if self._nursery is None:
            return
        for peer in peers.values():
            if peer not in self._watches and peer.name != self.shares.own:
                scope = self._watches[peer] = trio.CancelScope()
                self._nursery.start_soon(self._watch, peer, scope)

    async def _watch(self, peer: Peer, scope: trio.CancelScope) -> None:
        settings = self._settings
        remote = self._connect(peer)
        failures = 0
        try:
            with scope:
                while True:
                    greeting = await self._ask(remote)
                    if greeting is not None and greeting.instance == self.instance:
                        self._note_own(peer)
                        return
                    failures = 0 if greeting is not None else failures + 1
                    if failures and self._well.get(peer.name):
                        self._lost_at = trio.current_time()
                    if not 0 < failures < settings.failures_max:
                        self._note_well(peer, is_well=not failures)
                    spread = 1 + JITTER * (2 * self._rng.random() - 1)
                    await trio.sleep(settings.check_seconds * spread)
        finally:
            remote.close()

    async def _ask(self, remote: RemoteEndpoint) -> Greeting | None:
        """Check a router.

        Returns:
            The router's response, or None if no valid response arrived in time.
        """
        with trio.move_on_after(self._settings.response_seconds_max):
            try:
                async with remote.request("GET", PEER_PATH, [], b"") as response:
                    body = await response.whole(RESPONSE_BYTES_MAX)
                    return msgspec.json.decode(body or b"", type=Greeting) if response.status == 200 else None
            except (EndpointLost, msgspec.DecodeError):
                return None
        return None

    def _note_own(self, peer: Peer) -> None:
        if self.shares.own is None:
            logger.info("this router is peer=%s", peer.name)
            self.shares.own = peer.name
        self._well.pop(peer.name, None)
        self.shares.set_peers(self._list.peers)
        self.share_out()

    def _note_well(self, peer: Peer, *, is_well: bool) -> None:
        was_well = self._well.get(peer.name)
        if is_well == was_well:
            return
        logger.info("router %s peer=%s url=%s", "well" if is_well else "gone", peer.name, peer.url)
        self.lost_total += was_well is True and not is_well
        self._well[peer.name] = is_well
        self.shares.note_alive(peer.name, is_well)
        self.share_out()

    def _connected(self, peer: Peer) -> RemoteEndpoint:
        return RemoteEndpoint(EndpointId(peer.name), EndpointAddress.parse(peer.url), ssl_context=self._ssl_context)
