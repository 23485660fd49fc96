"""Connector and role of an engine, checked and merged from --kv-transfer-config and --role.

`find_connector` finds the factory of a connector by name. The module of a connector is imported when it is first
needed.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Literal, cast, get_args

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import Extra, install_command
from trioserve.contracts.kv_transfer import ConnectorFactory, EngineRole

__all__ = ["CONNECTOR_ENTRY_POINTS", "OWN_CONNECTORS", "ConnectorSettings", "connector_settings", "find_connector"]


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
