"""From a connector's name to what makes it. Nothing of a connector is imported before it is asked for."""

from __future__ import annotations

import pkgutil
from importlib.metadata import entry_points

from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import ConnectorFactory

__all__ = ["CONNECTOR_ENTRY_POINTS", "OWN_CONNECTORS", "find_connector"]

CONNECTOR_ENTRY_POINTS = "trioserve.connectors"

OWN_CONNECTORS = {
    "loopback": "trioserve.connectors.loopback:make_connector",
    "tcp": "trioserve.connectors.tcp:make_connector",
    "nixl": "trioserve.connectors.nixl:make_connector",
    "host": "trioserve.connectors.host.transport:make_connector",
}
"""As in pyproject.toml; here besides, since a source tree that was never installed has no entry points. "none" is no
connector: without one the calls are saved, too."""

EXTRAS = {"nixl": "nixl"}
"""Connectors that need packages which a plain installation does not bring, and the extra that does."""


def find_connector(name: str) -> ConnectorFactory:
    """Raises StartupError for a name that nobody has registered, and for one whose packages are not installed."""
    places = {entry.name: entry.value for entry in entry_points(group=CONNECTOR_ENTRY_POINTS)} | OWN_CONNECTORS
    if name not in places:
        known = ", ".join(["none", *sorted(places)])
        raise StartupError(
            f'there is no connector "{name}"; there are: {known}. One of your own is an entry point in the group '
            f'"{CONNECTOR_ENTRY_POINTS}"'
        )
    try:
        factory: ConnectorFactory = pkgutil.resolve_name(places[name])
    except ImportError as error:
        if name in EXTRAS:
            raise StartupError(
                f'the connector "{name}" needs packages that are not installed ({error}): '
                f"pip install 'trioserve[{EXTRAS[name]}]'"
            ) from error
        raise StartupError(f'the connector "{name}" ({places[name]}) cannot be imported: {error}') from error
    except AttributeError as error:
        raise StartupError(f'the connector "{name}" is registered as {places[name]}, which is not there') from error
    return factory
