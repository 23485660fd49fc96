"""Where the server can be reached: listening sockets, and TLS with the protocols it offers."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import trio

from trioserve.contracts.errors import StartupError
from trioserve.http.limits import FrontendLimits

__all__ = [
    "ClientCertificates",
    "addresses",
    "inherited_listener",
    "open_listeners",
    "open_shared_listeners",
    "open_unix_listener",
    "tls_context",
]

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2. HTTP/2 forbids the others (RFC 9113, appendix A), and every client since 2015 has one of these."""
BACKLOG = 1024  # connections that the kernel holds for us; it lowers this to its own limit


async def open_listeners(
    host: str | None, port: int, *, limits: FrontendLimits | None = None, shares_port: bool = False
) -> list[trio.SocketListener]:
    """One listener for each address of `host`: "localhost" has two, for IPv4 and IPv6; None and "::" mean all
    interfaces of both.

    port 0 lets the kernel choose one, the same for every address. An address family that this machine does not have is
    passed over as long as another one remains. shares_port: others of this user that say so, too, may listen at the
    same port (SO_REUSEPORT), and the kernel gives each connection to one of them. Raises StartupError with one sentence
    when it cannot be done.
    """
    limits = limits or FrontendLimits()
    if not 0 <= port <= 65535:
        raise StartupError(f"port is {port}, allowed is 0 to 65535")
    if host is not None and host.startswith("[") and host.endswith("]"):
        host = host[1:-1]  # as an IPv6 address is written in a URL
    if host is not None and _is_any_ipv6(host):
        host = None  # other servers have one socket for both there
    try:
        found = await trio.socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
    except OSError as error:
        raise StartupError(f"the host {host!r} cannot be resolved ({error}): give an address of this machine") from None
    listeners: list[trio.SocketListener] = []
    missing: OSError | None = None
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listeners.append(_listen(family, (address[0], port, *address[2:]), limits, shares_port))
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                missing = error
            else:
                port = listeners[-1].socket.getsockname()[1]
        if not listeners:
            assert missing is not None
            raise missing
    except OSError as error:
        for listener in listeners:
            listener.socket.close()
        raise StartupError(_why_not(host, port, error)) from None
    return listeners


async def open_shared_listeners(
    host: str | None, port: int, count: int, *, limits: FrontendLimits | None = None
) -> list[list[trio.SocketListener]]:
    """The listeners of `count` processes, a list for each, all at the same port; port 0 is one that the kernel chooses.
    Raises StartupError as open_listeners does, also where another program of this user shares the port already."""
    # Who shares a port would be let in to those of another program that shares it; who does not is refused.
    alone = await open_listeners(host, port, limits=limits)
    port = alone[0].socket.getsockname()[1]
    for listener in alone:
        listener.socket.close()
    opened: list[list[trio.SocketListener]] = []
    try:
        for _ in range(count):
            opened.append(await open_listeners(host, port, limits=limits, shares_port=True))
    except BaseException:
        for listener in (listener for listeners in opened for listener in listeners):
            listener.socket.close()
        raise
    return opened


def _is_any_ipv6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).is_unspecified
    except ValueError:
        return False


def inherited_listener(file_descriptor: int) -> trio.SocketListener:
    """Of a listening socket that another process has opened and left to this one."""
    listening = socket.socket(fileno=file_descriptor)
    listening.set_inheritable(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listening))


def _listen(
    family: int, address: tuple[str | int, ...], limits: FrontendLimits, shares_port: bool
) -> trio.SocketListener:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.socket_buffer_bytes)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has its own listener
        listening.bind(address)
        listening.listen(BACKLOG)
        return trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    except BaseException:
        listening.close()
        raise


async def open_unix_listener(path: Path, *, limits: FrontendLimits | None = None) -> trio.SocketListener:
    """A Unix domain socket. A file that a dead server left there is replaced. Raises StartupError with one sentence."""
    limits = limits or FrontendLimits()
    await _make_room(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.socket_buffer_bytes)
        listening.bind(str(path))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise StartupError(
            f"the socket {path} cannot be listened on ({error.strerror or error}): name a new file in a directory that "
            "may be written"
        ) from None
    return trio.SocketListener(trio.socket.from_stdlib_socket(listening))


async def _make_room(path: Path) -> None:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            await asking.connect(str(path))
        except ConnectionRefusedError:  # also of what is no socket, which then cannot be bound either
            _remove_socket(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StartupError(f"the socket {path} cannot be tried ({error.strerror}): name another file") from None
        else:
            raise StartupError(f"the socket {path} is in use by another program: stop it, or name another file")


def _remove_socket(path: Path) -> None:
    if path.is_socket():
        path.unlink(missing_ok=True)


def _why_not(host: str | None, port: int, error: OSError) -> str:
    place = f"{host or 'all interfaces'} port {port}"
    if error.errno == errno.EADDRINUSE:
        return f"{place} is in use by another program: stop it, or choose another port"
    if error.errno == errno.EACCES:
        return f"{place} is not allowed for this user: choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{place} cannot be listened on: {host!r} is not an address of this machine"
    return f"{place} cannot be listened on: {error.strerror or error}"


def addresses(listeners: Sequence[trio.SocketListener]) -> list[str]:
    """host:port of each listener, IPv6 in brackets, as they go into a URL; of a Unix domain socket its path."""
    names = []
    for listener in listeners:
        if listener.socket.family == socket.AF_UNIX:
            names.append(str(listener.socket.getsockname()))
            continue
        host, port, *_ = listener.socket.getsockname()
        names.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return names


ClientCertificates = Literal["none", "optional", "required"]


def tls_context(
    certificate: Path,
    key: Path | None = None,
    *,
    key_password: str | None = None,
    ca_certificates: Path | None = None,
    client_certificates: ClientCertificates = "none",
) -> ssl.SSLContext:
    """TLS 1.2 or later, offering HTTP/2 and HTTP/1.1. Without `key`, the certificate's file holds it, too.

    client_certificates: whether clients have to show one, signed by one of `ca_certificates`; "optional" checks those
    that are shown. Raises StartupError when a file cannot be read, or they do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION  # HTTP/2 forbids it (RFC 9113, 9.2.1), and it costs us most
    context.set_alpn_protocols(["h2", "http/1.1"])
    if (ca_certificates is None) != (client_certificates == "none"):
        raise StartupError(
            "to check the certificates of clients, both are needed: a file of CA certificates, and whether client "
            "certificates are optional or required"
        )
    content = b""
    for path in (ca_certificates, key, certificate):
        if path is not None:
            content = _pem_content(path)
    if key is None and b"BEGIN CERTIFICATE" in content and b"PRIVATE KEY-----" not in content:
        raise StartupError(f"the TLS file {certificate} has a certificate and no key: name the key with --ssl-keyfile")
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password=key_password or "")
    except (OSError, ValueError) as error:
        raise StartupError(
            f"the TLS certificate {certificate} and its key {key or certificate} cannot be used: {error}"
        ) from None
    if ca_certificates is not None:
        try:
            context.load_verify_locations(ca_certificates)
        except OSError as error:
            raise StartupError(f"the CA certificates {ca_certificates} cannot be used: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED if client_certificates == "required" else ssl.CERT_OPTIONAL
    return context


def _pem_content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StartupError(f"the TLS file {path} does not exist: give a file in PEM format") from None
    except OSError as error:
        raise StartupError(
            f"the TLS file {path} cannot be read ({error.strerror or error}): give a file in PEM format that this user "
            "may read"
        ) from None
