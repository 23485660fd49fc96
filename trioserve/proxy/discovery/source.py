"""What every source of endpoints is: something that tells a fleet, again and again, which endpoints there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from trioserve.contracts.errors import StartupError
from trioserve.proxy.fleet import EndpointSpec

__all__ = ["EndpointTemplate", "Source", "Told", "tell"]

logger = logging.getLogger(__name__)

EndpointTemplate = Callable[[str], EndpointSpec]
"""From a URL that was found to all that is to be known of it: the key that is sent there, for one."""


class Told(Protocol):
    """What a source tells: a fleet, or a list of routers."""

    def set_all(self, specs: Iterable[EndpointSpec], *, source: str) -> None:
        """These, and no others, are what the source knows. Raises StartupError, before anything is changed."""

    def ids_of(self, source: str) -> Collection[str]:
        """Those that this source has told."""


class Source(Protocol):
    name: str
    """In logs and in the list of endpoints; unique in a fleet."""

    async def run(self, fleet: Told) -> None:
        """Until cancelled. What cannot be read is logged and asked for again: one that fails keeps what it told."""


def tell(fleet: Told, source: str, specs: Sequence[EndpointSpec]) -> None:
    """These are all of them. A list that cannot be is logged, and changes nothing."""
    before = set(fleet.ids_of(source))
    try:
        fleet.set_all(specs, source=source)
    except StartupError as error:
        logger.warning("endpoints refused source=%s: %s", source, error)
        return
    after = set(fleet.ids_of(source))
    if before != after:
        logger.info("endpoints source=%s added=%s drained=%s", source, sorted(after - before), sorted(before - after))
