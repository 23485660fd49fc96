"""Finds the factory of a connector by name. The module of a connector is imported when it is first needed."""

from __future__ import annotations

import pkgutil
from importlib.metadata import entry_points

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import Extra, install_command
from trioserve.contracts.kv_transfer import ConnectorFactory

__all__ = ["CONNECTOR_ENTRY_POINTS", "OWN_CONNECTORS", "find_connector"]

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
