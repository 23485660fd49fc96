"""Connector and role of an engine, checked and merged from --kv-transfer-config and --role.

`find_connector` finds the factory of a connector by name. The module of a connector is imported when it is first
needed. `read_options` reads the options of the connectors `tcp` and `nixl` from kv_connector_extra_config, and checks
them at startup.
"""

from __future__ import annotations

import ipaddress
import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import Extra, install_command
from trioserve.contracts.kv_transfer import ConnectorFactory, EngineRole

__all__ = [
    "CONNECTOR_ENTRY_POINTS",
    "OWN_CONNECTORS",
    "ConnectorSettings",
    "StreamOptions",
    "connector_settings",
    "find_connector",
    "is_loopback",
    "read_options",
]


FLAG = "--kv-transfer-config"
EXAMPLE = '{"kv_connector": "tcp", "kv_role": "kv_producer"}'

VLLM_CLASSES = {"NixlConnector": "nixl"}
"""Connectors of this package by their class names in vLLM, so that configurations for vLLM work."""

VLLM_ROLES: dict[str, EngineRole] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}

VLLM_KEYS = frozenset(
    {
        "engine_id",  # Each start draws a new id, so that blocks of an old engine cannot be confused with new blocks.
        "kv_buffer_device",
        "kv_buffer_size",
        "kv_rank",
        "kv_parallel_size",
        "kv_ip",
        "kv_port",
        "enable_permute_local_kv",
    }
)
"""Keys of vLLM that are accepted and ignored."""

NOT_BETWEEN_ENGINES = frozenset({"none", "host"})
"""Connectors that move no KV between engines. A router cannot pair engines with these connectors."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine's connector.

    Attributes:
        connector: Name of the connector.
        role: Role of the engine: "prefill", "decode" or "both".
        load_failure_policy: "recompute" computes the KV in this engine after a failed load. "fail" fails the request.
        options: kv_connector_extra_config. The connector checks it.
        ignored: Keys of vLLM that have no effect in trioserve. The server logs them.
    """

    connector: str
    role: EngineRole
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def shown_role(self) -> EngineRole | None:
        """Role that routers see. None if the connector cannot pair engines."""
        return None if self.connector in NOT_BETWEEN_ENGINES else self.role


def connector_settings(given: str | Mapping[str, Any] | None, role: str) -> ConnectorSettings | None:
    """Check the configuration of the connector.

    Args:
        given: Value of --kv-transfer-config, as JSON text or as an object. None if the flag is not given.
        role: Value of --role. "both" is the default, so it also means that the flag is not given.

    Returns:
        The settings, or None if the engine has no connector.

    Raises:
        StartupError: a key is unknown, a value is not allowed, or the role contradicts another option.
    """
    if given is None:
        return None if role == "both" else ConnectorSettings(connector="tcp", role=_role(role))
    fields = _fields(given)
    connector = fields.pop("kv_connector", None)
    if not isinstance(connector, str) or not connector:
        raise StartupError(f'{FLAG} has no "kv_connector": name one, as in {EXAMPLE}')
    connector = VLLM_CLASSES.get(connector, connector)
    given_role = fields.pop("kv_role", None)
    if given_role is not None:
        if given_role not in VLLM_ROLES:
            raise StartupError(f"kv_role in {FLAG} is {given_role!r}, allowed is one of {', '.join(VLLM_ROLES)}")
        if role not in ("both", VLLM_ROLES[given_role]):
            raise StartupError(
                f'--role is {role}, but kv_role in {FLAG} is "{given_role}", which is {VLLM_ROLES[given_role]}: '
                "leave one of them out"
            )
        role = VLLM_ROLES[given_role]
    if role != "both" and connector in NOT_BETWEEN_ENGINES:
        raise StartupError(
            f'an engine with the role {role} needs another engine, but the connector "{connector}" moves no KV '
            "between engines: take tcp or nixl, or leave the role out"
        )
    policy = fields.pop("kv_load_failure_policy", "recompute")
    if policy not in ("recompute", "fail"):
        raise StartupError(f"kv_load_failure_policy in {FLAG} is {policy!r}, allowed is one of recompute, fail")
    options = fields.pop("kv_connector_extra_config", None) or {}
    if not isinstance(options, Mapping):
        raise StartupError(f"kv_connector_extra_config in {FLAG} is {options!r}, it must be an object")
    ignored = _ignored(fields)
    if connector == "none":
        if options:
            raise StartupError(f'the connector "none" takes no options, but {FLAG} has {", ".join(options)}')
        return None
    return ConnectorSettings(
        connector=connector, role=_role(role), load_failure_policy=policy, options=options, ignored=ignored
    )


def _fields(given: str | Mapping[str, Any]) -> dict[str, Any]:
    value: object = given
    if isinstance(given, str):
        try:
            value = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise StartupError(f"{FLAG} is no JSON ({error}): give an object, such as {EXAMPLE}") from None
    if not isinstance(value, Mapping):
        raise StartupError(f"{FLAG} is {value!r}, it must be an object like {EXAMPLE}")
    return dict(value)


def _ignored(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return those keys without an option that are accepted and ignored.

    Raises:
        StartupError: a key is unknown, or must not be ignored.
    """
    if fields.get("kv_connector_module_path") is not None:
        raise StartupError(
            f"kv_connector_module_path in {FLAG} names a class of vLLM: register your own connector as an entry point "
            'in the group "trioserve.connectors"'
        )
    unknown = fields.keys() - VLLM_KEYS - {"kv_connector_module_path"}
    if unknown:
        known = "kv_connector, kv_role, kv_load_failure_policy, kv_connector_extra_config"
        raise StartupError(f"{FLAG} has {min(unknown)!r}, which is no key of this option. Allowed keys: {known}")
    return tuple(name for name in fields if name in VLLM_KEYS)


def _role(name: str) -> EngineRole:
    assert name in get_args(EngineRole)
    return cast(EngineRole, name)


CONNECTOR_ENTRY_POINTS = "trioserve.connectors"

OWN_CONNECTORS = {
    "loopback": "trioserve.connectors.loopback:make_connector",
    "tcp": "trioserve.connectors.stream.transport:make_connector",
    "nixl": "trioserve.connectors.nixl:make_connector",
    "host": "trioserve.connectors.host.transport:make_connector",
}
"""Import paths of our connectors, by name.

pyproject.toml declares the same entry points. A source tree that was never installed has no entry points, so it needs
this copy. "none" is not in it: with "none", the engine has no connector and makes no calls.
"""

EXTRAS: dict[str, Extra] = {"nixl": "nixl"}
"""Extras of this package that install what a connector needs, by connector."""


def find_connector(name: str) -> ConnectorFactory:
    """Import the factory of a connector.

    Args:
        name: Name of the connector.

    Raises:
        StartupError: no connector has this name, or it cannot be imported.
    """
    places = {entry.name: entry.value for entry in entry_points(group=CONNECTOR_ENTRY_POINTS)} | OWN_CONNECTORS
    if name not in places:
        known = ", ".join(["none", *sorted(places)])
        raise StartupError(
            f'there is no connector "{name}"; there are: {known}. Register your own connector as an entry '
            f'point in the group "{CONNECTOR_ENTRY_POINTS}"'
        )
    try:
        factory: ConnectorFactory = pkgutil.resolve_name(places[name])
    except ImportError as error:
        if name in EXTRAS:
            raise StartupError(
                f'the connector "{name}" needs packages that are not installed ({error}): '
                + install_command(EXTRAS[name])
            ) from error
        raise StartupError(f'the connector "{name}" ({places[name]}) cannot be imported: {error}') from error
    except AttributeError as error:
        raise StartupError(f'the connector "{name}" is registered as {places[name]}, which does not exist') from error
    return factory


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
