"""Fetches one file from the web for a request that names its URL.

Only allowed hosts are contacted, within limits of size and time, and never at an address that is not public. Clients
are untrusted, so the address is checked before connecting, and the connection uses exactly the checked address. A
change of the DNS name after the check has no effect. Redirects are errors.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import ssl
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

import h11
import trio

from trioserve.contracts.errors import InvalidRequest
from trioserve.trio_tools.http_client import INTERIM_RESPONSES_MAX
from trioserve.trio_tools.tcp_stream import connect_tcp

__all__ = ["Connect", "MediaFetcher", "public_addresses"]

FETCHES_MAX = 16  # maximum number of fetches at the same time, for all requests together; further fetches wait
SECONDS_MAX = 10.0  # time limit of one fetch, without the wait for its start
REDIRECTIONS = range(300, 400)
RECEIVE_BYTES = 65_536
URL_CHARACTERS_MAX = 2048
PORTS = {"http": 80, "https": 443}
HOST_CHARACTERS_MAX = 253

_HOST = re.compile(r"(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")

# In IPv6, only global unicast is public. These parts of global unicast are not public: protocol assignments with Teredo
# (2001::/23), documentation, and 6to4, where a relay would reach the embedded IPv4 address.
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
# Python classifies these addresses as global, but they are not public: protocol assignments, 6to4 relays, and the host
# of an Azure virtual machine.
_NOT_PUBLIC_4 = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Public IPv4 addresses in networks without IPv4. 64:ff9b:1::/48 is not included: the operator decides where it
leads.
"""

FAULTS = (OSError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError)
"""Errors that a name, a network or a server may cause. An impossible host name raises ValueError."""

Connect = Callable[[str, int, str | None], Awaitable[trio.abc.Stream]]
"""Opens a connection to an address and a port. If a host name is given, the connection uses TLS for this name. If it is
None, plain TCP.
"""


class MediaFetcher:
    """Fetches files for requests. All failures of name resolution, networks and servers become InvalidRequest.

    Args:
        domains: Allowed hosts. Subdomains of an allowed host are also allowed. If empty, no host is allowed.
        bytes_max: Maximum size of a file in bytes.
        connect: Opens connections. If None, real TCP and TLS connections.
        addresses_of: Resolves names. If None, the system's resolver.
    """

    def __init__(
        self,
        domains: Collection[str],
        bytes_max: int,
        *,
        connect: Connect | None = None,
        addresses_of: Callable[[str, int], Awaitable[list[str]]] | None = None,
    ) -> None:
        self._domains = tuple(domain.lower().strip(".") for domain in domains)
        self._bytes_max = bytes_max
        self._connect = connect or _connect
        self._addresses_of = addresses_of or _addresses_of
        self._places = trio.CapacityLimiter(FETCHES_MAX)

    async def fetch(self, url: str, place: str) -> bytes:
        """Fetch a file. If the caller is cancelled, it closes the connection and returns at once.

        Args:
            url: URL of the file, http or https.
            place: Name of the file in error messages, such as messages[0].content[1].

        Returns:
            The bytes of the file.

        Raises:
            InvalidRequest: the URL is not allowed, or the file cannot be fetched within the limits.
        """
        scheme, host, port, target = self._checked(url, place)
        async with self._places:
            with trio.move_on_after(SECONDS_MAX):
                try:
                    return await self._fetched(scheme, host, port, target, place)
                except FAULTS as error:
                    reason = "it does not speak HTTP" if isinstance(error, h11.ProtocolError) else str(error)
                    reason = reason or type(error).__name__
                    raise _refused(place, f"could not be fetched from {host} ({reason[:200]})") from error
        raise _refused(place, f"did not come from {host} within {SECONDS_MAX:g} s")

    def _checked(self, url: str, place: str) -> tuple[str, str, int, str]:
        """Return scheme, host, port and target of an allowed URL."""
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme.lower(), (parts.hostname or "").lower().removesuffix("."), parts.port
        except ValueError as error:
            raise _refused(place, f"is not a URL ({error})") from error
        if (
            len(url) > URL_CHARACTERS_MAX
            or scheme not in PORTS
            or not host
            or not url.isascii()
            or not url.isprintable()
        ):
            raise _refused(
                place, f"is not an http or https URL of printable ASCII, at most {URL_CHARACTERS_MAX} characters long"
            )
        if " " in url or parts.username is not None:
            raise _refused(place, "has a user name or spaces in its URL")
        if len(host) > HOST_CHARACTERS_MAX or _HOST.fullmatch(host) is None:
            raise _refused(place, f"is at {host[:100]!r}, which is not a host name")
        if port == 0:
            raise _refused(place, "is at port 0, allowed are 1 to 65535")
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
        interim_count = 0
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
            elif isinstance(event, h11.InformationalResponse):
                interim_count += 1
                if interim_count > INTERIM_RESPONSES_MAX:
                    raise _refused(place, f"sent more than {INTERIM_RESPONSES_MAX} interim responses")
            else:
                raise _refused(place, "ended early")

    def _check_head(self, head: h11.Response, place: str) -> None:
        if head.status_code in REDIRECTIONS:
            raise _refused(
                place, f"is redirected ({head.status_code}), and redirects are not followed: send the last URL"
            )
        if head.status_code != 200:
            raise _refused(place, f"could not be fetched: its server answered {head.status_code}")
        for name, value in head.headers:
            if name == b"content-length" and int(value) > self._bytes_max:
                raise _refused(place, f"has {int(value)} bytes, at most {self._bytes_max} are read")


def public_addresses(addresses: Collection[str]) -> list[str]:
    """Return the addresses if all of them are public. If a name also has a private address, it may be an attack.

    Args:
        addresses: Resolved addresses of one name.

    Returns:
        The addresses, or an empty list if one address is not public.
    """
    found = [ipaddress.ip_address(address) for address in addresses]
    return [str(address) for address in found] if all(map(_is_public, found)) else []


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address in _NAT64:
            return _is_public(ipaddress.IPv4Address(address.packed[-4:]))
        if address.ipv4_mapped is not None:
            return _is_public(address.ipv4_mapped)
        if address not in _GLOBAL_UNICAST or any(address in network for network in _NOT_PUBLIC_6):
            return False
    elif any(address in network for network in _NOT_PUBLIC_4):
        return False
    return address.is_global and not address.is_multicast


async def _addresses_of(host: str, port: int) -> list[str]:
    found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    return [str(place[0]) for _family, _type, _protocol, _name, place in found]


async def _connect(address: str, port: int, host: str | None) -> trio.abc.Stream:
    if host is None:
        return await connect_tcp(address, port)
    trusted = await trio.to_thread.run_sync(_trusted_certificates)
    stream = await connect_tcp(address, port)
    return trio.SSLStream(stream, trusted, server_hostname=host, https_compatible=True)


@functools.cache
def _trusted_certificates() -> ssl.SSLContext:
    """Return a TLS context with the system's certificates. This reads files."""
    return ssl.create_default_context()


def _refused(place: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{place} {reason}", param=place)
