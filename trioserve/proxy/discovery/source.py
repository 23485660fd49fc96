"""Interface of sources of endpoints. A source repeatedly reports the full list of its endpoints to a fleet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from trioserve.contracts.errors import StartupError
from trioserve.proxy.fleet import EndpointSpec

__all__ = ["EndpointTemplate", "Source", "EndpointReceiver", "report_endpoints"]

logger = logging.getLogger(__name__)

EndpointTemplate = Callable[[str], EndpointSpec]
"""Makes the configuration of an endpoint, such as its API key, from a URL that a source found."""


class EndpointReceiver(Protocol):
    """Receiver of the reports of sources: a fleet, or a list of routers."""

    def set_all(self, specs: Iterable[EndpointSpec], *, source: str) -> None:
        """Replace all endpoints of one source.

        Args:
            specs: All endpoints that the source knows now.
            source: Name of the source.

        Raises:
            StartupError: The list is invalid. Nothing was changed.
        """

    def ids_of(self, source: str) -> Collection[str]:
        """Return the ids of the endpoints that a source has reported.

        Args:
            source: Name of the source.
        """


class Source(Protocol):
    """Source of endpoints, such as a file or DNS."""

    name: str
    """Name in logs and in the list of endpoints, unique in a fleet."""

    async def run(self, fleet: EndpointReceiver) -> None:
        """Report endpoints until cancelled.

        A source that fails logs the failure, keeps its last report and tries again.

        Args:
            fleet: Receiver of the reports.
        """


def report_endpoints(fleet: EndpointReceiver, source: str, specs: Sequence[EndpointSpec]) -> None:
    """Report all endpoints of a source. An invalid list is logged and changes nothing.

    Args:
        fleet: Receiver of the report.
        source: Name of the source.
        specs: All endpoints that the source knows now.
    """
    before = set(fleet.ids_of(source))
    try:
        fleet.set_all(specs, source=source)
    except StartupError as error:
        logger.warning("endpoints refused source=%s: %s", source, error)
        return
    after = set(fleet.ids_of(source))
    if before != after:
        logger.info("endpoints source=%s added=%s drained=%s", source, sorted(after - before), sorted(before - after))
