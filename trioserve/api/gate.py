"""Gate for servers without API keys: refuses requests that web pages of other sites send.

A browser sends any page's requests, also to 127.0.0.1. The headers Origin and Sec-Fetch-Site name the source of a
request, and no page can change them. The Host header has the name under which the browser knows the server. So a page
whose own name resolves to this server (DNS rebinding) is recognized by its name in the Host header. Other clients send
neither Origin nor Sec-Fetch-Site, and for them the gate only looks up three header fields.

If the server has API keys, a page can do nothing, because it knows no key and the server uses no cookies. Such a server
needs no gate.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trioserve.api.error_responses import Refusal, refusal
from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER
from trioserve.contracts.errors import StartupError

if TYPE_CHECKING:
    from trioserve.http.exchange import Exchange, Headers

__all__ = ["PageGate", "checked_host_names", "host_name", "is_loopback_host"]

# The cache is limited, because a client may invent hosts below localhost. Further hosts are checked each time.
HOSTS_REMEMBERED_MAX = 256
HOST_CHARACTERS_MAX = 262  # A host name has at most 253 characters, and a port at most five.
SHOWN_CHARACTERS_MAX = 100
OWN_SITES = frozenset({"same-origin", "none"})  # A browser sends "none" if a person has typed the address.
DEFAULT_PORTS = {"http": "80", "https": "443"}

_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{0,5}))?")
# These are numeric addresses as browsers read them. A host whose labels are all numbers is never looked up in DNS.
_NUMBERS = re.compile(r"(?:[0-9]+|0[xX][0-9a-fA-F]*)(?:\.(?:[0-9]+|0[xX][0-9a-fA-F]*)){0,3}")
_NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")
_NETWORK_SUFFIXES = (".home.arpa", ".internal", ".local")
"""Suffixes without names in the public DNS (RFC 8375, ICANN's private-use name, RFC 6762)."""


class PageGate:
    """Checks the headers of each request.

    Args:
        host_names: names that the Host header may have, besides addresses and localhost. "*.example.org" allows every
            name below example.org, and "*" every name. None: the Host header is not checked.
        origins: origins of web pages that may send requests, as in --cors-origin. "*" allows every page.
        has_network_names: True: the Host header may also have a name that only the local network can define. Such a
            name has no dot, like the name of a container or a Kubernetes Service, or ends with .local, .internal or
            .home.arpa. Nobody on the internet can give such a name to a page. Use it for servers that the local network
            reaches anyway.
    """

    def __init__(
        self, host_names: Iterable[str] | None, origins: Iterable[str] = (), *, has_network_names: bool = False
    ) -> None:
        names = None if host_names is None else frozenset(host_names)
        self._names = names
        self._suffixes = (".localhost", *(name[1:] for name in names or () if name.startswith("*.")))
        self._has_network_names = has_network_names
        self._checks_host = names is not None and "*" not in names
        self._origins = frozenset(origins)
        self._hosts: set[str] = set()

    def check(self, exchange: Exchange, *, is_open: bool, is_operators: bool) -> None:
        """Check a request.

        Args:
            exchange: the request.
            is_open: True if everyone may read this path, so a link on another site may lead to it.
            is_operators: True: the path operates the server. Among pages of other sites, only pages of explicitly named
                origins may use such a path. "*" does not count. The same applies to every websocket: a browser sends no
                preflight before it opens a websocket, and lets the page read all of its messages.

        Raises:
            Refusal: a web page sent the request, and may not (403).
        """
        headers = exchange.headers
        host = headers.get("host")
        if self._checks_host and host is not None and host not in self._hosts:
            self._check_host(host, headers)
        site = headers.get("sec-fetch-site")
        origin = headers.get("origin")
        if site is None and origin is None:
            return
        if origin is not None and origin in self._origins:
            return
        is_own = (site is None or site in OWN_SITES) and (origin is None or _is_of_host(origin, host))
        if is_own or ("*" in self._origins and not (is_operators or exchange.is_websocket)):
            return
        if not (is_open and origin is None and _is_opened_by_link(exchange)):
            raise _other_site(origin, site)

    def _check_host(self, host: str, headers: Headers) -> None:
        name = host_name(host)
        if name is None or not self._knows(name):
            if NOT_A_PAGE_HEADER in headers:
                return
            raise _unknown_host(host)
        if len(self._hosts) < HOSTS_REMEMBERED_MAX and len(host) <= HOST_CHARACTERS_MAX:
            self._hosts.add(host)

    def _knows(self, name: str) -> bool:
        assert self._names is not None
        return (
            not name  # HTTP/1.1 allows an empty Host, but browsers always send a name.
            or name == "localhost"
            or name in self._names
            or name.endswith(self._suffixes)
            or _is_address(name)
            or (self._has_network_names and _is_network_name(name))
        )


def host_name(host: str) -> str | None:
    """Extract the name from a Host header, in lower case, without port, brackets and a final dot.

    Args:
        host: value of the header.

    Returns:
        The name, or None if the header is malformed.
    """
    match = _AUTHORITY.fullmatch(host.strip())
    return None if match is None else match[1].strip("[]").lower().removesuffix(".")


def is_loopback_host(host: str) -> bool:
    """Return True if a server that listens at this host is reachable only from this machine.

    Args:
        host: name or address.
    """
    name = host.strip("[]").lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def checked_host_names(names: Iterable[str]) -> tuple[str, ...]:
    """Check the names of --allowed-host, and convert them to lower case.

    Args:
        names: values of the option.

    Raises:
        StartupError: a value is not a host name.
    """
    checked = []
    for given in names:
        name = given.strip().lower().removesuffix(".")
        if name != "*" and not _is_address(name.strip("[]")) and _NAME.fullmatch(name) is None:
            raise StartupError(
                f"--allowed-host is {given!r}, allowed is a name without scheme, port and path, such as "
                "llm.example.org, *.example.org for all names below it, or * for every name"
            )
        checked.append(name)
    return tuple(checked)


def _is_address(name: str) -> bool:
    if _NUMBERS.fullmatch(name) is not None:
        return True
    try:
        ipaddress.IPv6Address(name.replace("%25", "%", 1))
    except ValueError:
        return False
    return True


def _is_network_name(name: str) -> bool:
    return ("." not in name or name.endswith(_NETWORK_SUFFIXES)) and _NAME.fullmatch(name) is not None


def _is_of_host(origin: str, host: str | None) -> bool:
    """Return True if the page came from this server. Only host and port are compared, because a proxy may change the
    scheme.
    """
    scheme, separator, authority = origin.partition("://")
    port = DEFAULT_PORTS.get(scheme)
    if not separator or port is None or host is None:
        return False
    return _with_port(authority, port) == _with_port(host, port)


def _with_port(authority: str, default: str) -> tuple[str, str] | None:
    match = _AUTHORITY.fullmatch(authority)
    return None if match is None else (match[1].lower().removesuffix("."), match[2] or default)


def _is_opened_by_link(exchange: Exchange) -> bool:
    """Return True if a person followed a link. The browser shows the response, and the linking page cannot read it."""
    headers = exchange.headers
    return (
        exchange.method in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def _other_site(origin: str | None, site: str | None) -> Refusal:
    came = f"Origin {_shown(origin)}" if origin is not None else f"Sec-Fetch-Site {_shown(site or '')}"
    return refusal(
        "other_site",
        f"a web page of another site sent this request ({came}). Without API keys, only this server's own pages and "
        "those of --cors-origin may: add the page's origin there, or set --api-key",
    )


def _unknown_host(host: str) -> Refusal:
    name = host_name(host)
    flag = f"--allowed-host {name}" if name and _NAME.fullmatch(name) else "--allowed-host NAME"
    return refusal(
        "unknown_host",
        f"the Host header is {_shown(host)}, which is not a name of this server. Without API keys, the server accepts "
        f"only addresses, localhost, its --host, and names of --allowed-host, so that no web page can reach it by the "
        f"page's own name: to allow this name, add {flag}",
    )


def _shown(text: str) -> str:
    return repr(text[:SHOWN_CHARACTERS_MAX])
