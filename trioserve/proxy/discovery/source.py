"""What every source of endpoints is: something that tells a fleet, again and again, which endpoints there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from trioserve.contracts.errors import StartupError
from trioserve.proxy.fleet import EndpointSpec, Fleet

__all__ = ["EndpointTemplate", "Source", "tell"]

logger = logging.getLogger(__name__)

EndpointTemplate = Callable[[str], EndpointSpec]
"""From a URL that was found to all that is to be known of it: the key that is sent there, for one."""


class Source(Protocol):
    name: str
    """In logs and in the list of endpoints; unique in a fleet."""

    async def run(self, fleet: Fleet) -> None:
        """Until cancelled. What cannot be read is logged and asked for again: one that fails keeps what it told."""


def tell(fleet: Fleet, source: str, specs: Sequence[EndpointSpec]) -> None:
    """These are all of them. A list that cannot be is logged, and changes nothing."""
    before = fleet.ids_of(source)
    try:
        fleet.set_all(specs, source=source)
    except StartupError as error:
        logger.warning("endpoints refused source=%s: %s", source, error)
        return
    after = fleet.ids_of(source)
    if before != after:
        logger.info("endpoints source=%s added=%s drained=%s", source, sorted(after - before), sorted(before - after))
