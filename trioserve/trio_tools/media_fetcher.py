"""One file from the web, for a request that names it: from hosts that were allowed, within bounds, and from no machine
that only we can reach.

Whoever asks is a stranger, so an address is looked at before it is connected to, and that very address is connected to:
a name that leads somewhere else a moment later leads nowhere. A redirection is an error.
"""

from __future__ import annotations

import functools
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

import h11
import trio

from trioserve.contracts.errors import InvalidRequest

__all__ = ["Connect", "MediaFetcher", "public_addresses"]

FETCHES_MAX = 16  # at a time, of all requests; others wait
SECONDS_MAX = 10.0  # for each, the wait for a place left out
REDIRECTIONS = range(300, 400)
RECEIVE_BYTES = 65_536
URL_CHARACTERS_MAX = 2048
PORTS = {"http": 80, "https": 443}

Connect = Callable[[str, int, str | None], Awaitable[trio.abc.Stream]]
"""A connection to an address and a port, under TLS for this host name, or plain for None."""


class MediaFetcher:
    """domains: hosts, each with all that end in a dot and its name; an empty collection allows none. bytes_max: of a
    file. Raises nothing but InvalidRequest for whatever may happen out there."""

    def __init__(
        self,
        domains: Collection[str],
        bytes_max: int,
        *,
        connect: Connect | None = None,
        addresses_of: Callable[[str, int], Awaitable[list[str]]] | None = None,
    ) -> None:
        """connect, addresses_of: as in the system, where a test says nothing else."""
        self._domains = tuple(domain.lower().strip(".") for domain in domains)
        self._bytes_max = bytes_max
        self._connect = connect or _connect
        self._addresses_of = addresses_of or _addresses_of
        self._places = trio.CapacityLimiter(FETCHES_MAX)

    async def fetch(self, url: str, place: str) -> bytes:
        """The file's bytes. place: what it is called in an error. A cancelled caller leaves at once, and closes the
        connection."""
        scheme, host, port, target = self._checked(url, place)
        async with self._places:
            with trio.move_on_after(SECONDS_MAX):
                try:
                    return await self._fetched(scheme, host, port, target, place)
                except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError, ssl.SSLError) as error:
                    reason = str(error) or type(error).__name__
                    raise _refused(place, f"could not be fetched from {host} ({reason[:200]})") from error
        raise _refused(place, f"did not come from {host} within {SECONDS_MAX:g} s")

    def _checked(self, url: str, place: str) -> tuple[str, str, int, str]:
        """Scheme, host, port and target."""
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme.lower(), (parts.hostname or "").lower().rstrip("."), parts.port
        except ValueError as error:
            raise _refused(place, f"is no URL ({error})") from error
        if (
            len(url) > URL_CHARACTERS_MAX
            or scheme not in PORTS
            or not host
            or not url.isascii()
            or not url.isprintable()
        ):
            raise _refused(place, "is no URL of http or https that is fetched here")
        if " " in url or parts.username is not None:
            raise _refused(place, "has a name of a user, or blanks, in its URL")
        if not any(host == domain or host.endswith(f".{domain}") for domain in self._domains):
            raise _refused(place, f"is at {host[:100]}, which is not among --allowed-media-domains: send a data URL")
        target = parts.path or "/"
        return scheme, host, port or PORTS[scheme], f"{target}?{parts.query}" if parts.query else target

    async def _fetched(self, scheme: str, host: str, port: int, target: str, place: str) -> bytes:
        addresses = public_addresses(await self._addresses_of(host, port))
        if not addresses:
            raise _refused(place, f"is at {host}, which has no public address")
        stream = await self._connect(addresses[0], port, host if scheme == "https" else None)
        try:
            authority = host if port == PORTS[scheme] else f"{host}:{port}"
            return await self._read(stream, authority, target, place)
        finally:
            await trio.aclose_forcefully(stream)

    async def _read(self, stream: trio.abc.Stream, authority: str, target: str, place: str) -> bytes:
        parser = h11.Connection(h11.CLIENT)
        headers = [("host", authority), ("accept", "image/*"), ("accept-encoding", "identity"), ("connection", "close")]
        request = parser.send(h11.Request(method="GET", target=target, headers=headers))
        end = parser.send(h11.EndOfMessage())
        await stream.send_all((request or b"") + (end or b""))
        body = bytearray()
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(bytes(await stream.receive_some(RECEIVE_BYTES)))
            elif isinstance(event, h11.Response):
                self._check_head(event, place)
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._bytes_max:
                    raise _refused(place, f"has more than {self._bytes_max} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            elif not isinstance(event, h11.InformationalResponse):
                raise _refused(place, "broke off")

    def _check_head(self, head: h11.Response, place: str) -> None:
        if head.status_code in REDIRECTIONS:
            raise _refused(place, f"is redirected ({head.status_code}), which is not followed: send the last URL")
        if head.status_code != 200:
            raise _refused(place, f"could not be fetched: its server answered {head.status_code}")
        for name, value in head.headers:
            if name == b"content-length" and int(value) > self._bytes_max:
                raise _refused(place, f"has {int(value)} bytes, at most {self._bytes_max} are read")


def public_addresses(addresses: Collection[str]) -> list[str]:
    """Those that anybody can reach; none if one of them is not such, since then somebody has made up the name."""
    found = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses]
    inner = [getattr(address, "ipv4_mapped", None) or address for address in found]
    if not all(address.is_global and not address.is_multicast for address in inner):
        return []
    return [str(address) for address in found]


async def _addresses_of(host: str, port: int) -> list[str]:
    found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    return [str(place[0]) for _family, _type, _protocol, _name, place in found]


async def _connect(address: str, port: int, host: str | None) -> trio.abc.Stream:
    if host is None:
        return await trio.open_tcp_stream(address, port)
    trusted = await trio.to_thread.run_sync(_trusted_certificates)
    stream = await trio.open_tcp_stream(address, port)
    return trio.SSLStream(stream, trusted, server_hostname=host, https_compatible=True)


@functools.cache
def _trusted_certificates() -> ssl.SSLContext:
    """The system's; reads files."""
    return ssl.create_default_context()


def _refused(place: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{place} {reason}", param=place)
