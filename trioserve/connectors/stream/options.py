"""What `tcp` and its relatives can be told: kv_connector_extra_config, checked before anything listens."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["StreamOptions", "is_loopback", "read_options"]

KEY_BYTES_MIN = 16  # below that a key can be guessed from one overheard handshake
KEY_BYTES_MAX = 4096


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """host, port: where this engine listens for readers; port 0 takes a free one. advertised_host: what readers are
    told instead of host, for a host that means every interface or an address that is translated on the way.

    key, key_file: the secret that every engine of the group has; one of them, or neither for engines of one machine.
    certfile, keyfile, ca_certs: PEM files for TLS. With ca_certs both sides have to show a certificate signed by these;
    without, readers believe the certificates that the system believes, and show none.

    peers: hosts, addresses or networks ("10.0.0.0/8") that this engine may read from; "*" is every host. The address
    to read from comes with a request, so that without such a list whoever may send requests would choose where this
    server connects, behind whatever wall it stands. Not given, it reads from its own machine: loopback, and its own
    host.

    reads_max: transfers into this engine at a time; others wait. connections_max: of readers, at a time. chunk_bytes:
    how much is checked, and resumed, at a time.
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
    reads_max: int = 8  # more do not fill a network any better, and each may need a chunk of memory
    connections_max: int = 64  # 16 readers with four connections each
    chunk_bytes: int = 262_144  # a checksum over it takes a tenth of a millisecond, for which nothing else happens

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise StartupError(f"port is {self.port}, it must be 0 (a free one) to 65535")
        for name, low, high in (
            ("reads_max", 1, 1_000),
            ("connections_max", 1, 10_000),
            ("chunk_bytes", 1, 1_048_576),  # the other side refuses more
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise StartupError(f"{name} is {value}, it must be {low} to {high}")
        if self.key is not None and self.key_file is not None:
            raise StartupError("key and key_file are both given: say which one it is")
        if (self.certfile is None) != (self.keyfile is None):
            raise StartupError("TLS wants a certificate and its key: certfile and keyfile come together")
        if self.ca_certs is not None and self.certfile is None:
            raise StartupError("ca_certs is for TLS, which wants certfile and keyfile, too")
        for peer in self.peers or ():
            if "/" in peer:
                _network(peer)
        if not self.has_key and not is_loopback(self.host):
            raise StartupError(
                f'host is "{self.host}" and there is no key: whoever reaches it could read KV. Give every engine the '
                "same key (key_file), or listen on 127.0.0.1"
            )

    @property
    def has_key(self) -> bool:
        return self.key is not None or self.key_file is not None

    @property
    def advertised(self) -> str:
        return self.advertised_host or self.host

    def read_key(self) -> bytes:
        """The secret, without white space around it; empty if there is none. Raises StartupError if there should be one
        and it cannot be used."""
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
        """Why this engine may not read from a host that a request names; None: it may."""
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
    """Raises StartupError with a sentence for what is not known or cannot be."""
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
        raise StartupError(f'peers: "{peer}" is no network: {error}') from error


def _covers(peer: str, host: str) -> bool:
    if peer in ("*", host):
        return True
    if "/" not in peer:
        return False
    try:
        return ipaddress.ip_address(host) in _network(peer)
    except ValueError:  # a name: it would have to be resolved, and whoever resolves it would choose
        return False
