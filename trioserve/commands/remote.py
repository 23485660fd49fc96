"""A running server as a command sees it: one JSON call, or one stream of events. Blocking, for programs that do nothing
else meanwhile; Ctrl-C ends a call and closes its connection."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER
from trioserve.contracts.errors import TrioserveError

__all__ = ["DEFAULT_URL", "Event", "RemoteServer", "ServerFailed"]

DEFAULT_URL = "http://127.0.0.1:8000"
CALL_SECONDS_MAX = 30.0
SILENCE_SECONDS_MAX = 120.0  # of a stream; servers say something every 15
MESSAGE_CHARACTERS_MAX = 600
LOOPBACK = ("127.", "localhost", "::1")


class ServerFailed(TrioserveError):
    """It cannot be reached, or refuses: one sentence with what to do."""


class Event(NamedTuple):
    name: str
    data: str


class RemoteServer:
    """url: of the server, or of its /v1. api_key: None sends none; the environment's TRIOSERVE_API_KEY is the default
    of commands."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises ServerFailed for what is no URL."""
        url = url if "://" in url else f"http://{url}"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerFailed(f"{url!r} is no URL of a server: name one like {DEFAULT_URL}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", NOT_A_PAGE_HEADER: "trioserve"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        # A proxy that is meant for the outside does not know this machine.
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname.startswith(LOOPBACK) else []
        self._opener = urllib.request.build_opener(*proxies)

    @classmethod
    def from_arguments(cls, url: str | None, api_key: str | None) -> RemoteServer:
        """What is not given comes from TRIOSERVE_URL and TRIOSERVE_API_KEY."""
        keys = (api_key or os.environ.get("TRIOSERVE_API_KEY", "")).replace(",", " ").split()
        return cls(url or os.environ.get("TRIOSERVE_URL") or DEFAULT_URL, keys[0] if keys else None)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The JSON that comes back. Raises ServerFailed."""
        with closing(self._open(method, path, body, CALL_SECONDS_MAX)) as response:
            try:
                return msgspec.json.decode(response.read())
            except (msgspec.DecodeError, OSError, HTTPException) as error:
                raise ServerFailed(
                    f"{self.url}{path} answered with no JSON ({error}): is it the right server?"
                ) from None

    def events(self, method: str, path: str, body: object = None) -> Generator[Event, None, None]:
        """Events as they come, until the server ends them; closing the iterator hangs up. Raises ServerFailed."""
        with closing(self._open(method, path, body, SILENCE_SECONDS_MAX)) as response:
            name, lines = "message", []
            try:
                for raw in response:
                    line = raw.decode(errors="replace").rstrip("\r\n")
                    field, _colon, value = line.partition(":")
                    if field == "event":
                        name = value.strip()
                    elif field == "data":
                        lines.append(value.removeprefix(" "))
                    elif not line and lines:
                        yield Event(name, "\n".join(lines))
                        name, lines = "message", []
            except (OSError, HTTPException) as error:
                raise ServerFailed(f"the connection to {self.url} is lost ({error}): ask again") from None

    def _open(self, method: str, path: str, body: object, seconds_max: float) -> HTTPResponse:
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            response: HTTPResponse = self._opener.open(request, timeout=seconds_max)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerFailed(self._refusal(path, error)) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerFailed(
                f"no server answers at {self.url} ({reason}): start one with `trioserve serve`, or name another one"
            ) from None
        return response

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> str:
        try:
            told = msgspec.json.decode(error.read())["error"]
            message = str(told["message"] if isinstance(told, dict) else told)
        except (msgspec.DecodeError, OSError, HTTPException, KeyError, TypeError):
            message = f"there is no {path}" if error.code == 404 else str(error.reason)
        hint = ": give a key with --api-key or TRIOSERVE_API_KEY" if error.code in (401, 403) else ""
        return f"{self.url} says {error.code}, {message[:MESSAGE_CHARACTERS_MAX]}{hint}"
