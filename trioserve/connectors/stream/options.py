"""Options of the connectors `tcp` and `nixl`, read from kv_connector_extra_config and checked at startup."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["StreamOptions", "is_loopback", "read_options"]

KEY_BYTES_MIN = 16  # an attacker who records one handshake can guess a shorter key
KEY_BYTES_MAX = 4096


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a connector that moves KV over TCP connections.

    Attributes:
        host: Address where this engine listens for readers.
        port: Port where this engine listens, 0 to 65535. 0 picks a free port.
        advertised_host: Address that readers get instead of `host`. Needed if `host` means every interface, or if the
            network translates addresses.
        key: Secret that all engines of the group share. Give `key` or `key_file`. Engines of one machine need neither.
        key_file: File that contains the secret.
        certfile: PEM file with the TLS certificate of this engine. Needs `keyfile`.
        keyfile: PEM file with the private key of `certfile`.
        ca_certs: PEM file with the authorities that sign the certificates. With it, reader and holder must both show a
            certificate. Without it, readers trust the authorities of the system, and show no certificate.
        peers: Hosts, addresses or networks ("10.0.0.0/8") that this engine may read from. "*" allows every host. The
            address to read from comes with a request. Without this list, a client could make the server connect to any
            host of the internal network. The default allows loopback addresses, `host` and `advertised_host`.
            Without a key, only loopback addresses are allowed.
        reads_max: Number of transfers into this engine at a time, 1 to 1000. Further transfers wait.
        connections_max: Number of connections from readers at a time, 1 to 10000.
        chunk_bytes: Size of a chunk, 1 to 1048576. Each chunk has a checksum, and a transfer resumes at a chunk.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertised_host: str | None = None
    key: str | None = None
    key_file: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None
    peers: tuple[str, ...] | None = None
    reads_max: int = 8  # More transfers do not raise the throughput of a network. Each may need memory for a chunk.
    connections_max: int = 64  # enough for 16 readers with four connections each
    chunk_bytes: int = 262_144  # The checksum of a chunk of this size blocks the Trio thread for 0.1 ms.

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise StartupError(f"port is {self.port}, it must be 1 to 65535, or 0 for a free port")
        for name, low, high in (
            ("reads_max", 1, 1_000),
            ("connections_max", 1, 10_000),
            ("chunk_bytes", 1, 1_048_576),  # A holder refuses larger chunks.
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise StartupError(f"{name} is {value}, it must be {low} to {high}")
        if self.key is not None and self.key_file is not None:
            raise StartupError("key and key_file are both given: leave one of them out")
        if (self.certfile is None) != (self.keyfile is None):
            raise StartupError("TLS needs a certificate and its key: give both certfile and keyfile, or neither")
        if self.ca_certs is not None and self.certfile is None:
            raise StartupError("ca_certs is given without certfile: give certfile and keyfile, too")
        for peer in self.peers or ():
            if "/" in peer:
                _network(peer)
        if not self.has_key and not is_loopback(self.host):
            raise StartupError(
                f'host is "{self.host}" and there is no key: any machine that reaches it could read KV. Give all '
                "engines the same key (key_file), or listen on 127.0.0.1"
            )

    @property
    def has_key(self) -> bool:
        return self.key is not None or self.key_file is not None

    @property
    def advertised(self) -> str:
        return self.advertised_host or self.host

    def read_key(self) -> bytes:
        """Read the secret from the options or from its file.

        Returns:
            The secret without surrounding white space. Empty if neither `key` nor `key_file` is given.

        Raises:
            StartupError: the file cannot be read, or the secret is too short or too long.
        """
        if not self.has_key:
            return b""
        if self.key_file is None:
            assert self.key is not None
            key, place = self.key.encode().strip(), "key"
        else:
            place = f"key_file {self.key_file}"
            try:
                key = Path(self.key_file).read_bytes().strip()
            except OSError as error:
                raise StartupError(f"{place} cannot be read: {error.strerror}") from error
        if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
            raise StartupError(f"{place} has {len(key)} bytes, a key has {KEY_BYTES_MIN} to {KEY_BYTES_MAX}")
        return key

    def objection_to(self, host: str) -> str | None:
        """Check that this engine may read from a host that a request names.

        Args:
            host: Host name or address from the request.

        Returns:
            A sentence with the reason why the engine must not read from the host, or None if it may.
        """
        if not self.has_key and not is_loopback(host):
            return f'without a key this engine reads from its own machine only, and not from "{host}"'
        if self.peers is None:
            if is_loopback(host) or host in (self.host, self.advertised):
                return None
        elif any(_covers(peer, host) for peer in self.peers):
            return None
        return f'"{host}" is not among the hosts that this engine may read from (option peers)'


Options = TypeVar("Options", bound=StreamOptions)


def read_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Convert kv_connector_extra_config to checked options.

    Args:
        kind: Options class of the connector.
        options: Content of kv_connector_extra_config.

    Raises:
        StartupError: an option is unknown, or its value is not allowed.
    """
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise StartupError(f"kv_connector_extra_config: {error}") from error


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _network(peer: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(peer, strict=False)
    except ValueError as error:
        raise StartupError(f'peers: "{peer}" is not a network: {error}') from error


def _covers(peer: str, host: str) -> bool:
    if peer in ("*", host):
        return True
    if "/" not in peer:
        return False
    try:
        return ipaddress.ip_address(host) in _network(peer)
    except ValueError:  # Never resolve a host name at this point, because its DNS server could return any address.
        return False
