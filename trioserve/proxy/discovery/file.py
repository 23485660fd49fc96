"""Endpoints from a JSON or TOML file. The file is read again when its time or size changes."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import trio

from trioserve.contracts.errors import StartupError
from trioserve.proxy.discovery.source import EndpointReceiver, report_endpoints
from trioserve.proxy.fleet import EndpointSpec

__all__ = ["FileSource", "read_endpoints"]

logger = logging.getLogger(__name__)

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
