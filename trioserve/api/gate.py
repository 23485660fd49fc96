"""Which requests reach the server at all where no API key protects it: none that a web page of another site sends.

A browser sends what any page asks for, also to 127.0.0.1. It says where a request comes from, in the headers Origin and
Sec-Fetch-Site, which no page can change. And it says which host it believes to talk to: a page whose own name leads to
this server (DNS rebinding) is known by that name in the Host header. Clients that are no browsers send neither Origin
nor Sec-Fetch-Site, and cost three look-ups here.

With API keys a page cannot do anything, since it does not know one and there are no cookies. The gate is open then.
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
    from trioserve.http.exchange import Exchange
    from trioserve.http.headers import Headers

__all__ = ["PageGate", "checked_host_names", "host_name", "is_loopback_host"]

HOSTS_REMEMBERED_MAX = 256  # a client may invent addresses and names below localhost; each of them is checked then
HOST_CHARACTERS_MAX = 262  # a name has 253 at most, a port five
SHOWN_CHARACTERS_MAX = 100
OWN_SITES = frozenset({"same-origin", "none"})  # none: a person has typed the address
DEFAULT_PORTS = {"http": "80", "https": "443"}

_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]{0,5}))?")
# As browsers write or read them: a host whose parts are all numbers is an address and is never looked up.
_NUMBERS = re.compile(r"(?:[0-9]+|0[xX][0-9a-fA-F]*)(?:\.(?:[0-9]+|0[xX][0-9a-fA-F]*)){0,3}")
_NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")
_NETWORK_SUFFIXES = (".home.arpa", ".internal", ".local")
"""Below these the public DNS has no names (RFC 8375, ICANN's private-use name, RFC 6762)."""


class PageGate:
    """Checks the head of each request.

    Args:
        host_names: names that the Host header may have besides addresses and localhost; "*.example.org" means every
            name below example.org, and "*" every name. None: the Host header is not checked.
        origins: of web pages that may send requests, as in --cors-origin; "*" means every page.
        has_network_names: the Host header may also be a name that only the local network can define: one without a
            dot, as of a container or a Kubernetes Service, or one below .local, .internal or .home.arpa. Nobody on the
            internet can give such a name to a page. Meant for servers that the local network reaches anyway.
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
        """Raise Refusal (403) for a request of a web page that may not send it.

        Args:
            is_open: anybody may read what is there, so a link of another site may lead to it.
            is_operators: it operates the server. Of other sites only pages that are named may ask for that.
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
        if is_own or ("*" in self._origins and not is_operators):
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
            not name  # HTTP/1.1 has an empty Host where there is no name; browsers always have one
            or name == "localhost"
            or name in self._names
            or name.endswith(self._suffixes)
            or _is_address(name)
            or (self._has_network_names and _is_network_name(name))
        )


def host_name(host: str) -> str | None:
    """The name in a Host header, in lower case, without port, brackets and a dot at its end; None if it is none."""
    match = _AUTHORITY.fullmatch(host.strip())
    return None if match is None else match[1].strip("[]").lower().removesuffix(".")


def is_loopback_host(host: str) -> bool:
    """Whether only this machine reaches a server that listens at this host."""
    name = host.strip("[]").lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def checked_host_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names of --allowed-host in lower case. Raises StartupError for what is no name of a host."""
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
    """Whether a page of this origin came from this very server: host and port are the same, whatever the scheme, which
    a proxy in front may change."""
    scheme, separator, authority = origin.partition("://")
    port = DEFAULT_PORTS.get(scheme)
    if not separator or port is None or host is None:
        return False
    return _with_port(authority, port) == _with_port(host, port)


def _with_port(authority: str, default: str) -> tuple[str, str] | None:
    match = _AUTHORITY.fullmatch(authority)
    return None if match is None else (match[1].lower().removesuffix("."), match[2] or default)


def _is_opened_by_link(exchange: Exchange) -> bool:
    """Whether a person goes to another page: what comes is shown to that person, and the page before cannot read it."""
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
        f"a web page of another site sends this ({came}). Without API keys only this server's own pages and those of "
        "--cors-origin may: name the page's origin there, or set --api-key",
    )


def _unknown_host(host: str) -> Refusal:
    name = host_name(host)
    flag = f"--allowed-host {name}" if name and _NAME.fullmatch(name) else "--allowed-host NAME"
    return refusal(
        "unknown_host",
        f"the Host header is {_shown(host)}, which is no name of this server. Without API keys it answers to "
        f"addresses, localhost, its --host, and what {flag} adds: so no web page can reach it by a name of its own",
    )


def _shown(text: str) -> str:
    return repr(text[:SHOWN_CHARACTERS_MAX])
