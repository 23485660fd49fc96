"""Listening sockets, and the TLS context of a server."""

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
"""Ciphers of TLS 1.2. HTTP/2 forbids all other ciphers (RFC 9113, appendix A). All clients since 2015 support one of
the ciphers here.
"""
# At most this number of connections waits in the kernel to be accepted. The kernel may lower the number.
BACKLOG = 1024


async def open_listeners(
    host: str | None, port: int, *, limits: FrontendLimits | None = None, shares_port: bool = False
) -> list[trio.SocketListener]:
    """Open one listener for each address of a host. An address family that this machine lacks is skipped.

    Args:
        host: a name or an address. "localhost" has two addresses, for IPv4 and IPv6. None and "::" mean all interfaces
            of both families.
        port: 0 to 65535. If 0, the kernel chooses one port for all addresses.
        limits: contains the size of the send buffers. If None, the default limits.
        shares_port: True allows other processes of this user to listen at the same port, if they also set this option
            (SO_REUSEPORT). The kernel gives each connection to one of the processes.

    Raises:
        StartupError: the host is unknown, or no listener can be opened.
    """
    limits = limits or FrontendLimits()
    if not 0 <= port <= 65535:
        raise StartupError(f"port is {port}, allowed is 0 to 65535")
    if host is not None and host.startswith("[") and host.endswith("]"):
        host = host[1:-1]  # The brackets of an IPv6 address in a URL are removed.
    if host is not None and _is_any_ipv6(host):
        host = None  # On other servers, "::" also accepts IPv4. So this server listens for both families.
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
        raise StartupError(_listen_failure(host, port, error)) from None
    return listeners


async def open_shared_listeners(
    host: str | None, port: int, count: int, *, limits: FrontendLimits | None = None
) -> list[list[trio.SocketListener]]:
    """Open the listeners of several processes at one port.

    Args:
        host: see open_listeners.
        port: see open_listeners.
        count: number of processes.
        limits: see open_listeners.

    Returns:
        A list of listeners for each process.

    Raises:
        StartupError: as in open_listeners. It is also raised if another program of this user already shares the port.
    """
    # A listener with SO_REUSEPORT would silently share the port with another program. So a listener without this option
    # is opened first, which fails if the port is in use.
    probes = await open_listeners(host, port, limits=limits)
    port = probes[0].socket.getsockname()[1]
    for listener in probes:
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
    """Return the listener of a listening socket that another process opened for this process.

    Args:
        file_descriptor: file descriptor of the socket. The listener owns the socket from now on.
    """
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
        # Connections inherit the size of the send buffer.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.socket_buffer_bytes)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has its own listener.
        listening.bind(address)
        listening.listen(BACKLOG)
        return trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    except BaseException:
        listening.close()
        raise


async def open_unix_listener(path: Path, *, limits: FrontendLimits | None = None) -> trio.SocketListener:
    """Listen at a Unix domain socket.

    Args:
        path: file of the socket. The file is replaced if it is the socket of a server that has ended.
        limits: contains the size of the send buffers. If None, the default limits.

    Raises:
        StartupError: another program listens at `path`, or the file cannot be created.
    """
    limits = limits or FrontendLimits()
    await _remove_stale_socket(path)
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


async def _remove_stale_socket(path: Path) -> None:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            await probe.connect(str(path))
        # The error is also raised if the file is not a socket. Then the file is kept, and binding the new socket fails.
        except ConnectionRefusedError:
            _remove_socket(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StartupError(
                f"the socket {path} cannot be connected to ({error.strerror}): name another file"
            ) from None
        else:
            raise StartupError(f"the socket {path} is in use by another program: stop it, or name another file")


def _remove_socket(path: Path) -> None:
    if path.is_socket():
        path.unlink(missing_ok=True)


def _listen_failure(host: str | None, port: int, error: OSError) -> str:
    place = f"{host or 'all interfaces'} port {port}"
    if error.errno == errno.EADDRINUSE:
        return f"{place} is in use by another program: stop it, or choose another port"
    if error.errno == errno.EACCES:
        return f"{place} is not allowed for this user: choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{place} cannot be listened on: {host!r} is not an address of this machine"
    return f"{place} cannot be listened on: {error.strerror or error}"


def addresses(listeners: Sequence[trio.SocketListener]) -> list[str]:
    """Return the address of each listener as in a URL: host:port, with brackets for IPv6.

    Args:
        listeners: open listeners. The address of a Unix domain socket is its path.
    """
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
    """Create a TLS context for TLS 1.2 or later, which offers HTTP/2 and HTTP/1.1.

    Args:
        certificate: PEM file of the certificate chain.
        key: PEM file of the private key. If None, the file `certificate` also contains the key.
        key_password: password of the private key, or None if the key is not encrypted.
        ca_certificates: PEM file of the authorities that sign client certificates. Needed unless
            `client_certificates` is "none".
        client_certificates: "required" refuses clients without a certificate. "optional" checks a certificate if the
            client sends one.

    Raises:
        StartupError: a file cannot be read, or the files do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    # HTTP/2 forbids renegotiation (RFC 9113, 9.2.1), and most of the work of a renegotiation falls on the server.
    context.options |= ssl.OP_NO_RENEGOTIATION
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
        # Without this password, OpenSSL would ask for one on the terminal.
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
