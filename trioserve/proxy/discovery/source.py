"""Sources of endpoints: the interface, and the source that watches a file.

A source repeatedly reports the full list of its endpoints to a fleet.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio

from trioserve.contracts.errors import StartupError
from trioserve.proxy.fleet import EndpointSpec

__all__ = ["EndpointReceiver", "EndpointTemplate", "FileSource", "Source", "read_endpoints", "report_endpoints"]

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


LOOK_SECONDS = 1.0


class FileSource:
    """Source that watches a file.

    Args:
        path: Path of the file.
        api_key: Key for endpoints without a key in the file. None: no key.
    """

    def __init__(self, path: Path, *, api_key: str | None = None) -> None:
        self.name = f"file:{path}"
        self._path = path
        self._api_key = api_key

    async def run(self, fleet: EndpointReceiver) -> None:
        seen: object = None
        while True:
            stamp = await trio.to_thread.run_sync(_stamp, self._path)
            if stamp != seen:
                seen = stamp
                try:
                    specs = await trio.to_thread.run_sync(read_endpoints, self._path, self._api_key)
                except StartupError as error:
                    logger.warning("endpoints kept source=%s: %s", self.name, error)
                else:
                    report_endpoints(fleet, self.name, specs)
            await trio.sleep(LOOK_SECONDS)


def read_endpoints(path: Path, api_key: str | None = None) -> list[EndpointSpec]:
    """Read a file with a list `endpoints` of tables, which have the fields of EndpointSpec.

    Args:
        path: JSON if the name ends with .json, otherwise TOML.
        api_key: Key for endpoints without a key in the file. None: no key.

    Raises:
        StartupError: The file cannot be read or is invalid. The message names the file.
    """
    try:
        text = path.read_text()
        parsed: Any = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text)
        specs = msgspec.convert(parsed, _File).endpoints
    except OSError as error:
        raise StartupError(f"the endpoints in {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"the endpoints in {path} cannot be used: {error}") from None
    return [spec if spec.api_key else msgspec.structs.replace(spec, api_key=api_key) for spec in specs]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    endpoints: list[EndpointSpec]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
