"""List of the routers in front of the same endpoints, from the command line, a watched file or DNS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.proxy.discovery.file import FileSource, read_endpoints
from trioserve.proxy.discovery.source import Source
from trioserve.proxy.fleet import EndpointSpec
from trioserve.proxy.remote_endpoint import EndpointAddress

__all__ = ["PEERS_MAX", "Peer", "PeerList", "parse_peers"]

PEERS_MAX = 64  # every router checks every other router twice a second


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
        Configured routers, and sources of further ones.

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
    from trioserve.proxy.discovery.dns import DnsSource  # takes a third of a second to import

    return DnsSource(name, port=int(port or 80), template=lambda url: EndpointSpec(url=url))
